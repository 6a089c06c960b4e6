"""Unlock a login after wrong passwords: `manage.py unlock_login NAME`."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandParser
from django.db import transaction
from django.utils.translation import gettext

from scheduling.audit import record_action
from scheduling.web import login_lockout


class Command(BaseCommand):
    help = "Unlock a login after too many wrong passwords."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")

    def handle(self, *args: Any, **options: Any) -> None:
        with transaction.atomic():
            count = login_lockout.unlock_login(options["name"])
            user = User.objects.filter(username=options["name"]).first()
            if count and user:
                reason = gettext("Unlocked the login.")
                record_action("acted", user, label=user.get_username(), actor="", reason=reason)
        self.stdout.write(f"{options['name']}: unlocked for {count} addresses" if count else "nothing was counted")
