"""Unlock a login after wrong passwords: `manage.py unlock_login NAME`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from scheduling.web import login_lockout


class Command(BaseCommand):
    help = "Unlock a login after too many wrong passwords."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")

    def handle(self, *args: Any, **options: Any) -> None:
        count = login_lockout.unlock_login(options["name"])
        self.stdout.write(f"{options['name']}: unlocked for {count} addresses" if count else "nothing was counted")
