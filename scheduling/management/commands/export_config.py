"""Export the configuration: `manage.py export_config [FILE]`."""

from __future__ import annotations

import os
import sys
import tempfile
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from scheduling.configuration.file.apply import export_document
from scheduling.models.encrypted import Unreadable
from scheduling.strict_text import write_yaml


class Command(BaseCommand):
    help = "Export the configuration as a YAML file for apply_config."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", nargs="?", default="-", help="file; standard output by default or with -")
        parser.add_argument(
            "--with-secrets", action="store_true", help='write secrets too, instead of "(kept)", which keeps the stored'
        )

    def handle(self, *, file: str, with_secrets: bool, **options: Any) -> None:
        try:
            text = write_yaml(export_document(with_secrets=with_secrets))
        except Unreadable as error:
            raise CommandError(f"{error}; nothing was written") from error
        if file == "-":
            if isinstance(sys.stdout, TextIOWrapper):
                sys.stdout.reconfigure(encoding="utf-8")  # the file's encoding, whatever the terminal's is
            self.stdout.write(text, ending="")
            return
        try:
            replace_file(Path(file), text, private=with_secrets)
        except OSError as error:
            raise CommandError(f"{file}: {error.strerror}") from error


def replace_file(file: Path, text: str, *, private: bool) -> None:
    """Replace a file by a whole new one. The old file stays if anything fails."""
    handle, name = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        if not private:  # only the owner may read a temporary file
            Path(name).chmod(0o644)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
