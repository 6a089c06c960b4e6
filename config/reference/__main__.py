"""Write the tables of the reference: `python -m config.reference`.

`--check` only reports outdated pages.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from config.environment import ROOT

FOLDER = ROOT / "docs" / "reference"


def build_pages() -> dict[Path, str]:
    """Return each page with current tables. Needs Django."""
    from config.reference import api, config_file, settings
    from config.reference.tables import rewrite_tables

    sources = {
        "settings.md": settings.setting_tables,
        "config-file.md": config_file.section_tables,
        "api.md": api.api_tables,
    }
    return {
        FOLDER / name: rewrite_tables((FOLDER / name).read_text("utf-8"), tables()) for name, tables in sources.items()
    }


def main(words: list[str]) -> int:
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.local")
    django.setup()
    stale = {path: text for path, text in build_pages().items() if path.read_text("utf-8") != text}
    for path, text in stale.items():
        sys.stdout.write(f"{path.relative_to(ROOT)} is out of date\n")
        if "--check" not in words:
            path.write_text(text, "utf-8")
    return int(bool(stale)) if "--check" in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
