#!/usr/bin/env python
from __future__ import annotations

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.local")
    from django.core.management import execute_from_command_line

    import config.celery.application  # noqa: F401  (before anything publishes)

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
