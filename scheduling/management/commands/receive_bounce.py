"""Read one bounce mail from standard input, as a mail server pipes it, and record its receipt."""

from __future__ import annotations

import os
import sys
from typing import Any

from django.core.management.base import BaseCommand
from django.db import Error

from scheduling.receipts import LARGEST_MAIL, record_bounce


class Command(BaseCommand):
    help = "Record the bounce mail on standard input. A mail that reports nothing is ignored."

    def handle(self, **options: Any) -> None:
        """Record the mail. Exit with 75 (EX_TEMPFAIL) if PostgreSQL is unavailable: the mail server tries again."""
        try:
            result = record_bounce(sys.stdin.buffer.read(LARGEST_MAIL))
        except ValueError as error:
            self.stdout.write(f"ignored: {error}")  # with an error the mail server would answer a bounce with a bounce
            return
        except Error as error:
            self.stderr.write(str(error))
            sys.exit(os.EX_TEMPFAIL)
        self.stdout.write("recorded" if result.accepted else "unknown" if result.refused else "known")
