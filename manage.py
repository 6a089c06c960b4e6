#!/usr/bin/env python
from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from pathlib import Path

from config.local.endpoints import adopt_stack_settings

ROOT = Path(__file__).resolve().parent


def main() -> None:
    # Beside `make run`, use its settings. A deployment has no such file.
    adopt_stack_settings(Path(os.environ.get("AFTERTOUCH_STATE_DIR") or ROOT / ".state"), os.environ)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.local")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # no command ends at a character that the terminal lacks
    from django.core.management import execute_from_command_line

    import config.celery.application  # noqa: F401  (before anything publishes)

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
