"""Load or remove sample customers, events and touches: `manage.py sample_data load|remove`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from scheduling.errors import Conflict
from scheduling.operations.sample_data import load_samples, remove_samples


class Command(BaseCommand):
    help = "Load or remove sample customers with events and touches. Idempotent."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("action", choices=["load", "remove"])
        parser.add_argument("--send", action="store_true", help="load although enabled nodes reach receivers")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            if options["action"] == "load":
                self.stdout.write(f"Planned touches: {load_samples(send=options['send'])}")
            else:
                removed = remove_samples()
                self.stdout.write("Removed " + ", ".join(f"{name}: {count}" for name, count in removed.items()))
        except Conflict as error:
            raise CommandError(str(error)) from error
