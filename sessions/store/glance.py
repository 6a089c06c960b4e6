"""What the store holds about one session, for a person or a gateway that asks. Decides nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from sessions.policy import DEFAULT_TAG
from sessions.store import keys
from sessions.store.client import text
from sessions.store.sessions import Store, instant

#: Reasons for which the silence of a session is not waited for (a typing agent only postpones its deadline).
_PAUSING = ("tool", "transfer", "queue")
_FIELDS = ("u", "c", "a", "d", "j", "t", "p", "x", "f", "v", "n", "y")  #: as in the header of `lua/note_activity.lua`


@dataclass(frozen=True, slots=True)
class Glance:
    now: datetime  #: the server's
    user_id: str
    chat_id: str
    armed_at: int  #: µs; 0 for a session that is not known
    deadline: datetime | None  #: None while it is not armed
    nudges: int  #: guide messages that went out since the user's last word
    tag: str
    policy: str  #: the tag whose policy holds
    pause: str  #: why it is paused, "" where it is not
    closed: bool
    silent: bool  #: noticed, and nobody has spoken since
    last_user_at: datetime | None  #: pings do not count
    last_agent_at: datetime | None

    @property
    def state(self) -> str:
        """`closed`, `paused`, `silent`, `armed`, or `idle`: its user has not written yet."""
        if self.closed:
            return "closed"
        if self.pause in _PAUSING:
            return "paused"
        if self.silent:
            return "silent"
        return "armed" if self.deadline else "idle"


def at(store: Store, session_id: str) -> Glance:
    """Raises `StoreAway`."""
    shard = keys.shard_of(session_id)
    time, held, body = store.server.ask(
        lambda pipe: [
            pipe.time(),
            pipe.hmget(keys.SESSION[shard] + session_id, *_FIELDS),
            pipe.hget(keys.POLICIES[shard], "body"),
        ]
    )
    user_id, chat_id, armed_at, deadline, nudges, tag, pause, closed, user_at, agent_at, rung, claimed = (
        text(each) if each else "" for each in held
    )
    due = int(deadline or 0)
    known = json.loads(body)["tags"] if body else {}
    return Glance(
        now=instant(time[0] * 1000 + time[1] // 1000),
        user_id=user_id,
        chat_id=chat_id,
        armed_at=int(armed_at or 0),
        deadline=instant(due) if due else None,
        nudges=int(nudges or 0),
        tag=tag,
        policy=tag if tag in known else DEFAULT_TAG,
        pause=pause,
        closed=bool(closed),
        silent=bool(claimed) or (not due and int(rung or 0) > 0),
        last_user_at=instant(int(user_at)) if user_at else None,
        last_agent_at=instant(int(agent_at)) if agent_at else None,
    )
