"""Store the latest messages of a session, so that a reconnecting page catches up.

At most 100 messages are kept for 24 hours. An inbox does not influence silence detection. Its keys share the session's
hash tag, so the script that stores a message also checks the session. Raises `StoreUnavailable` like the store: the
message may then be stored or not. A repeated `put` with a key is safe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from sessions.frames import AGENT, USER
from sessions.store import client, sessions
from sessions.store.calls import order_of
from sessions.store.client import Call, Script, Server

MESSAGE_LIFETIME = timedelta(hours=24)
MAX_MESSAGES = 100  #: messages
MOST_BYTES = 131_072  #: of long messages; `MAX_MESSAGES` short messages always fit
MOST_KEYS = 500  #: number of later keys after which a repeat is no longer detected
OVERTAKEN = -1  #: replaces a seq: the message is not stored, but is still reported as duplicate or replayed
START = "0-0"  #: cursor before the first message

PUT = Script("inbox_put")

_CURSOR = re.compile(r"(\d{1,15})-(\d{1,10})", re.ASCII)
_SIDES = {USER: "u", AGENT: "a"}


@dataclass(frozen=True, slots=True)
class Post:
    """A message to store. `sender` is user, agent or system."""

    session_id: str
    id: str
    sender: str
    text: str
    key: str = ""  #: idempotency key; "": the message is never repeated
    seq: int | None = None
    epoch: str = ""  #: of the counter of `seq`
    user_id: str = ""  #: required owner of the session; "": not checked
    more: Mapping[str, str] = field(default_factory=dict)  #: further members for the page

    def body(self) -> str:
        entry: dict[str, Any] = {"id": self.id, "from": self.sender, "text": self.text}
        if self.seq is not None:
            entry["seq"] = self.seq
        return json.dumps(entry | dict(self.more), ensure_ascii=False)


class Posted(NamedTuple):
    """`outcome`: stored, duplicate, replayed (its seq is not above the last), no_session or other_user."""

    outcome: str
    cursor: str  #: of the message; "" unless it was stored
    before: str  #: cursor of the previous message


class Entry(NamedTuple):
    cursor: str
    body: str  #: JSON of id, from, text …

    def frame(self) -> str:
        """Return the frame that is pushed to a page, as JSON."""
        return json.dumps(
            {"type": "message", "cursor": self.cursor, "at": stored_at(self.cursor), **json.loads(self.body)}
        )


class Inbox:
    def __init__(self, server: Server) -> None:
        self.server = server

    def put(self, posts: Sequence[Post]) -> list[Posted]:
        """Store messages, those of one session in their order. Idempotent for messages with a key."""
        if not posts:
            return []
        answers = self.server.run([_put_call(post) for post in posts])
        return [Posted(*(word.decode() for word in answer)) for answer in answers]

    def since(self, session_id: str, cursor: str, most: int = MAX_MESSAGES) -> list[Entry]:
        """Return the messages after the cursor, oldest first. Messages above the limits are missing."""
        (found,) = self.server.ask(lambda pipe: [pipe.xrange(_stream_key(session_id), f"({cursor}", "+", count=most)])
        return [Entry(number.decode(), fields[b"m"].decode()) for number, fields in found]

    def last_cursors(self, session_ids: Sequence[str]) -> list[str]:
        if not session_ids:
            return []
        found = self.server.ask(lambda pipe: [pipe.xrevrange(_stream_key(each), count=1) for each in session_ids])
        return [entries[0][0].decode() if entries else START for entries in found]

    def delete_messages(self, session_id: str) -> None:
        self.server.ask(lambda pipe: [pipe.delete(_stream_key(session_id), _dedupe_key(session_id))])


def live_inbox() -> Inbox:
    """Return the inboxes of this process, in the same Redis as the store."""
    return Inbox(sessions.live_store().server)


def parse_cursor(cursor: str) -> tuple[int, int]:
    """Return a cursor as a comparable pair. Raises `ValueError` for an invalid cursor."""
    found = _CURSOR.fullmatch("0-0" if cursor == "0" else cursor)
    if not found:
        raise ValueError("is not a cursor")
    return int(found[1]), int(found[2])


def stored_at(cursor: str) -> str:
    """Return the time at which the server stored the message, in ISO format."""
    return sessions.instant_of_ms(parse_cursor(cursor)[0]).isoformat(timespec="milliseconds")


def _put_call(post: Post) -> Call:
    names = [client.SESSION[client.shard_of(post.session_id)] + post.session_id]
    names += [_stream_key(post.session_id), _dedupe_key(post.session_id)]
    words = [_KEPT_MS, MAX_MESSAGES, MOST_KEYS, post.key, post.body(), _SIDES.get(post.sender, "")]
    return PUT, names, [*words, order_of(post.seq, post.epoch), MOST_BYTES, post.user_id]


_KEPT_MS = MESSAGE_LIFETIME // timedelta(milliseconds=1)


def _stream_key(session_id: str) -> str:
    return f"{{at:s{client.shard_of(session_id):02}}}:in:{session_id}"


def _dedupe_key(session_id: str) -> str:
    return f"{{at:s{client.shard_of(session_id):02}}}:once:{session_id}"
