"""Which shops used a browser last, so that theirs are kept warm."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from rpa_tasks.pool import places
from rpa_tasks.pool.lock import Lock

KEPT = 64


class Use(NamedTuple):
    profile: str
    shop: str
    at: float  #: seconds since the epoch


def remember(profile: str, shop: str) -> None:
    """Nobody waits for this: where somebody else is just writing, it is left out, and the next use puts it in."""
    lock = Lock(places.browsers() / "recent.lock")
    if not lock.take():
        return
    try:
        uses = [use for use in last_uses() if use.profile != profile]
        path = places.browsers() / "recent.json"
        path.with_suffix(".tmp").write_text(json.dumps([Use(profile, shop, time.time()), *uses][:KEPT]))
        path.with_suffix(".tmp").replace(path)
    finally:
        lock.release()


def last_uses() -> list[Use]:
    """The latest first."""
    try:
        return [Use(*use) for use in json.loads((places.browsers() / "recent.json").read_bytes())]
    except (OSError, ValueError, TypeError):
        return []
