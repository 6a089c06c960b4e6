"""Take screenshots of pages for the documentation.

`AFTERTOUCH_SCREENSHOTS=1` replaces those in `docs/screenshots`; the name of a folder collects all of them there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from config.environment import ROOT

SHOWN = ROOT / "docs" / "screenshots"


def save_screenshot(page: Any, name: str, **options: Any) -> None:
    """Save a page or an element, if requested."""
    wanted = os.environ.get("AFTERTOUCH_SCREENSHOTS")
    path = (SHOWN if wanted == "1" else Path(wanted or ".")) / f"{name}.png"
    if wanted and (wanted != "1" or path.exists()):
        path.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=path, **options)
