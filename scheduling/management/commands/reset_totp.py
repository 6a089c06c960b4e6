"""Remove the second factor of a user: `manage.py reset_totp NAME`."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction
from django.utils.translation import gettext

from scheduling.audit import record_action
from scheduling.identity import totp


class Command(BaseCommand):
    help = "Remove the authenticator app and the recovery codes of a user. The password stays."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")

    def handle(self, *args: Any, **options: Any) -> None:
        user = User.objects.filter(username=options["name"]).first()
        if user is None:
            raise CommandError(f"NAME: no user {options['name']}")
        with transaction.atomic():
            done = totp.reset_totp(user)
            if done:
                reason = gettext("Reset the second factor.")
                record_action("acted", user, label=user.get_username(), actor="", reason=reason)
        self.stdout.write(f"{options['name']}: removed" if done else f"{options['name']}: had none")
