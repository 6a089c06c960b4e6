"""Which shops used a browser last, so that theirs are kept warm."""

from __future__ import annotations

import json
import os
import time
from typing import NamedTuple

from rpa_tasks.pool import places

KEPT = 64


class Use(NamedTuple):
    profile: str
    shop: str
    at: float  #: seconds since the epoch


def remember(profile: str, shop: str) -> None:
    """Two at once may lose one of them; its next use puts it back."""
    uses = [use for use in last_uses() if use.profile != profile]
    path = places.browsers() / "recent.json"
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        draft.write_text(json.dumps([Use(profile, shop, time.time()), *uses][:KEPT]))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def last_uses() -> list[Use]:
    """The latest first."""
    try:
        return [Use(*use) for use in json.loads((places.browsers() / "recent.json").read_bytes())]
    except (OSError, ValueError, TypeError):
        return []
