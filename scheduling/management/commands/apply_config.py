"""Apply a configuration file: `manage.py apply_config FILE`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from scheduling.configuration.file import apply, document
from scheduling.configuration.file.base import Stamp
from scheduling.errors import AftertouchError
from scheduling.management import config_report
from scheduling.planning import rescheduling


class Command(BaseCommand):
    help = "Apply a YAML configuration file, completely or not at all."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", help="configuration file; - reads standard input")
        parser.add_argument("--dry-run", action="store_true", help="print the difference and its impact, write nothing")
        parser.add_argument(
            "--move-waiting",
            action="store_true",
            help="apply edited delays to waiting touches; overdue ones are spread over time",
        )

    def handle(self, *, file: str, dry_run: bool, move_waiting: bool, **options: Any) -> None:
        given = self._load(file)
        try:
            planned = apply.plan_changes(given)
            for line in config_report.format_plan(planned, rescheduling.list_impacts(planned)):
                self.stdout.write(line)
            if dry_run:
                self.stdout.write("dry run: nothing was stored")
                return
            if planned.changes:
                apply.store_plan(given, planned, Stamp(f"apply_config {Path(file).name}"))
                self.stdout.write("applied")
        except apply.InvalidConfiguration as error:
            raise CommandError(f"{error}\nnothing was stored") from error
        except AftertouchError as error:
            raise CommandError(str(error)) from error
        if move_waiting:
            self.stdout.write(config_report.format_moved_touches(rescheduling.move_after_plan(planned)))

    def _load(self, file: str) -> dict[str, Any]:
        enough = document.MAX_SIZE + 1  # one byte more than allowed shows that it is too large
        try:
            if file == "-":
                return document.parse_document(sys.stdin.buffer.read(enough))
            with Path(file).open("rb") as stream:
                return document.parse_document(stream.read(enough))
        except OSError as error:
            raise CommandError(f"{file}: {error.strerror}") from error
        except document.InvalidDocument as error:
            raise CommandError(f"{file}: {error}\nnothing was stored") from error
