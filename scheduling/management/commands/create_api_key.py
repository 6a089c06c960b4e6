"""Create an API key: `manage.py create_api_key NAME --scope events --scope touches`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_naive, make_aware

from scheduling.errors import InvalidInput
from scheduling.models import Scope
from scheduling.operations import commands


class Command(BaseCommand):
    help = "Create an API key and print it. It cannot be displayed later."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")
        parser.add_argument(
            "--scope", action="append", required=True, choices=Scope.values, dest="scopes", help="may be repeated"
        )
        parser.add_argument("--rate-per-minute", type=int, help="requests per minute; by default the setting")
        parser.add_argument("--expires-at", type=_parse_expiry, help="for example 2027-01-31T00:00:00+08:00")

    def handle(self, *args: Any, **options: Any) -> None:
        rate = options["rate_per_minute"]
        if rate is not None and rate < 1:
            raise CommandError("rate-per-minute: must be at least 1")
        try:
            key = commands.create_api_key(
                options["name"], options["scopes"], rate_per_minute=rate, expires_at=options["expires_at"]
            )
        except InvalidInput as error:
            raise CommandError(str(error)) from error
        self.stdout.write(key)


def _parse_expiry(text: str) -> datetime:
    at = parse_datetime(text)
    if at is None:
        raise ValueError(text)
    return make_aware(at) if is_naive(at) else at
