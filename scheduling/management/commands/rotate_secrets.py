"""Encrypt all secrets with the first key of `AFTERTOUCH_SECRETS_KEYS`: `manage.py rotate_secrets`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from scheduling.models.encrypted import Unreadable, reencrypt_secrets


class Command(BaseCommand):
    help = "Encrypt all stored secrets with the first key of AFTERTOUCH_SECRETS_KEYS. Other keys can be removed then."

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            for name, count in reencrypt_secrets():
                self.stdout.write(f"{name}: {count}")
        except Unreadable as error:
            raise CommandError(str(error)) from error
