"""What the store's keys are called. A hash tag keeps what one script touches in one slot, so it runs on a cluster."""

from __future__ import annotations

from binascii import crc32

SHARDS = 16


def shard_of(text: str) -> int:
    return crc32(text.encode()) % SHARDS


def _names(suffix: str, kind: str = "s", colon: str = ":") -> tuple[str, ...]:
    return tuple(f"{{at:{kind}{shard:02}}}{colon}{suffix}" for shard in range(SHARDS))


DUE = _names("due")
INFLIGHT = _names("inflight")
POLICIES = _names("policies")
ACTIVE = _names("active")
PAUSED = _names("paused")
COUNTS = _names("counts")
SIGNS = _names("signs")
SESSION = _names("s:")  #: and the session's id
PRESENCE = _names("", "u")  #: and the user's id: the session of their last frame
WROTE = _names("", "u", "w:")  #: and the user's id: when they last wrote a message, ms
WATCHERS = "{at:watch}"  #: a hash: what each watcher says of itself
SILENCES = "{at:watch}:silences"  #: a hash: how many silences of each tag were handed in
