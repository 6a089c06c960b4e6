"""Pictures of pages, for the documentation and for whoever wants to look.

With `AFTERTOUCH_SCREENSHOTS=1` those that `docs` shows are taken anew, with the name of a folder all of them go there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from config.environment import ROOT

SHOWN = ROOT / "docs" / "screenshots"


def save_screenshot(page: Any, name: str, **options: Any) -> None:
    """Of a page or of a part of it."""
    wanted = os.environ.get("AFTERTOUCH_SCREENSHOTS")
    path = (SHOWN if wanted == "1" else Path(wanted or ".")) / f"{name}.png"
    if wanted and (wanted != "1" or path.exists()):
        path.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=path, **options)
