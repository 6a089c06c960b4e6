"""Which shops used a browser last, so that theirs are kept warm."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import NamedTuple

from rpa_tasks.browsers import places
from rpa_tasks.browsers.lock import Lock

KEPT = 64


class Use(NamedTuple):
    profile: str
    shop: str
    at: float  #: seconds since the epoch


def remember(profile: str, shop: str) -> None:
    _write(lambda uses: [Use(profile, shop, time.time()), *(use for use in uses if use.profile != profile)])


def forget_recent(folder: str) -> None:
    """The profile of this name, as `places.directory_name` tells it."""
    _write(lambda uses: [use for use in uses if places.directory_name(use.profile) != folder])


def _write(change: Callable[[list[Use]], list[Use]]) -> None:
    """Nobody waits for this: where somebody else is just writing, it is left out, and the next use puts it in."""
    lock = Lock(places.browsers() / "recent.lock")
    if not lock.take():
        return
    try:
        path = places.browsers() / "recent.json"
        path.with_suffix(".tmp").write_text(json.dumps(change(last_uses())[:KEPT]))
        path.with_suffix(".tmp").replace(path)
    finally:
        lock.release()


def last_uses() -> list[Use]:
    """The latest first."""
    try:
        return [Use(*use) for use in json.loads((places.browsers() / "recent.json").read_bytes())]
    except (OSError, ValueError, TypeError):
        return []
