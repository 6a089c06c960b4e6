"""What the store holds about one session, for a page that a person looks at. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sessions import keys
from sessions.store import Store, instant


@dataclass(frozen=True, slots=True)
class Glance:
    """`fields` as in the header of `lua/note_activity.lua`."""

    now: datetime  #: the server's
    armed_at: int  #: µs; 0 for a session that is not known
    deadline: datetime | None  #: None while it is not armed
    nudges: int
    tag: str
    pause: str  #: why it is paused, "" where it is not
    closed: bool


def at(store: Store, session_id: str) -> Glance:
    """Raises `StoreAway`."""
    key = keys.SESSION[keys.shard_of(session_id)] + session_id
    time, held = store.server.ask(lambda pipe: [pipe.time(), pipe.hmget(key, "a", "d", "n", "t", "p", "x")])
    armed_at, deadline, nudges, tag, pause, closed = (each.decode() if each else "" for each in held)
    return Glance(
        now=instant(time[0] * 1000 + time[1] // 1000),
        armed_at=int(armed_at or 0),
        deadline=instant(int(deadline)) if int(deadline or 0) else None,
        nudges=int(nudges or 0),
        tag=tag,
        pause=pause,
        closed=bool(closed),
    )
