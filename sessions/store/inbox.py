"""Describe the messages of a session's inbox, from which a reconnecting page catches up.

At most 100 messages are kept for 24 hours. The keys of an inbox share the session's hash tag, so one script stores a
message of a side and counts its frame (`Store.note_activity`). `Store.put_messages` stores those that are no frames: of
touches and bots.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from sessions.store.client import instant_of_ms, to_milliseconds

MESSAGE_LIFETIME = timedelta(hours=24)
MAX_MESSAGES = 100  #: messages
MOST_BYTES = 131_072  #: of long messages; `MAX_MESSAGES` short messages always fit
MOST_KEYS = 500  #: number of later keys after which a repeat is no longer detected
LIMITS = (to_milliseconds(MESSAGE_LIFETIME), MAX_MESSAGES, MOST_KEYS, MOST_BYTES)  #: arguments of the scripts
START = "0-0"  #: cursor before the first message

_CURSOR = re.compile(r"(\d{1,15})-(\d{1,10})", re.ASCII)
SYSTEM = "system"  #: writer of messages of touches


@dataclass(frozen=True, slots=True)
class Post:
    """A message to store. `sender` is user, agent or system."""

    session_id: str
    id: str
    sender: str
    text: str
    key: str = ""  #: idempotency key; "": the message is never repeated
    seq: int | None = None
    user_id: str = ""  #: required owner of the session of a message that is no frame; "": not checked
    more: Mapping[str, str] = field(default_factory=dict)  #: further members for the page

    def body(self) -> str:
        entry: dict[str, Any] = {"id": self.id, "from": self.sender, "text": self.text}
        if self.seq is not None:
            entry["seq"] = self.seq
        return json.dumps(entry | dict(self.more), ensure_ascii=False)


class Posted(NamedTuple):
    """`outcome`: stored, duplicate, replayed (its seq is not above the last), no_session, other_user or unavailable
    (its node of a cluster does not answer).
    """

    outcome: str
    cursor: str = ""  #: of the message; "" unless it was stored
    before: str = ""  #: cursor of the message before a stored one
    owner: str = ""  #: of the session of a stored message; "" if unknown


class Entry(NamedTuple):
    cursor: str
    body: str  #: JSON of id, from, text …
    owner: str = ""  #: user of the session when the message was stored; "" if unknown

    def is_of_other(self, user_id: str) -> bool:
        """Return whether the session belonged to another user then. After a close, an id can be used again."""
        return self.owner not in ("", user_id)

    def frame(self) -> str:
        """Return the frame that is pushed to a page, as JSON."""
        return json.dumps(
            {"type": "message", "cursor": self.cursor, "at": stored_at(self.cursor), **json.loads(self.body)}
        )


def parse_cursor(cursor: str) -> tuple[int, int]:
    """Return a cursor as a comparable pair. Raises `ValueError` for an invalid cursor."""
    found = _CURSOR.fullmatch("0-0" if cursor == "0" else cursor)
    if not found:
        raise ValueError("is not a cursor")
    return int(found[1]), int(found[2])


def stored_at(cursor: str) -> str:
    """Return the time at which the server stored the message, in ISO format."""
    return instant_of_ms(parse_cursor(cursor)[0]).isoformat(timespec="milliseconds")
