"""What was written in a session lately, so that a page that was away catches up. At most 100 messages, for a day.

Beside the store and not in it, because nothing here decides about silence, and a chat without messages has no inbox.
Its keys share the session's hash tag: whether the session is there is asked in the script that stores the message.
Raises `StoreAway` like the store; then nobody knows what has been stored, and to put it again is safe where it has a
key.
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

KEPT = timedelta(hours=24)
MOST = 100  #: messages
MOST_BYTES = 131_072  #: of messages, beside the short ones: those of which `MOST` fit into it
MOST_KEYS = 500  #: a repeat is known as one until so many others came
OVERTAKEN = -1  #: in place of a seq: stored by no means, but told apart from a repeat of what is there
START = "0-0"  #: the cursor before the first message

PUT = Script("inbox_put")

_CURSOR = re.compile(r"(\d{1,15})-(\d{1,10})", re.ASCII)
_SIDES = {USER: "u", AGENT: "a"}


@dataclass(frozen=True, slots=True)
class Post:
    """A message on its way into an inbox. `sender` is user, agent or system."""

    session_id: str
    id: str
    sender: str
    text: str
    key: str = ""  #: a second post with it is the same message; "": nobody repeats it
    seq: int | None = None
    epoch: str = ""  #: of the counter of `seq`
    user_id: str = ""  #: whose session it has to be; "": the writer does not say
    more: Mapping[str, str] = field(default_factory=dict)  #: what else a page may know of it

    def body(self) -> str:
        said: dict[str, Any] = {"id": self.id, "from": self.sender, "text": self.text}
        if self.seq is not None:
            said["seq"] = self.seq
        return json.dumps(said | dict(self.more), ensure_ascii=False)


class Posted(NamedTuple):
    """`outcome`: stored, duplicate, replayed (its seq is not above the last), no_session or other_user."""

    outcome: str
    cursor: str  #: of the message, "" unless it was stored
    before: str  #: the cursor of the message before it


class Entry(NamedTuple):
    cursor: str
    body: str  #: JSON of id, from, text …

    def frame(self) -> str:
        """As it is pushed to a page."""
        return json.dumps({"type": "message", "cursor": self.cursor, "at": at(self.cursor), **json.loads(self.body)})


class Inbox:
    def __init__(self, server: Server) -> None:
        self.server = server

    def put(self, posts: Sequence[Post]) -> list[Posted]:
        """Those of one session in their order."""
        if not posts:
            return []
        answers = self.server.run([_put(post) for post in posts])
        return [Posted(*(word.decode() for word in answer)) for answer in answers]

    def since(self, session_id: str, cursor: str, most: int = MOST) -> list[Entry]:
        """What came after the cursor, oldest first, as far as it is still there."""
        (found,) = self.server.ask(lambda pipe: [pipe.xrange(_stream(session_id), f"({cursor}", "+", count=most)])
        return [Entry(number.decode(), fields[b"m"].decode()) for number, fields in found]

    def last_cursors(self, session_ids: Sequence[str]) -> list[str]:
        if not session_ids:
            return []
        found = self.server.ask(lambda pipe: [pipe.xrevrange(_stream(each), count=1) for each in session_ids])
        return [entries[0][0].decode() if entries else START for entries in found]

    def forget(self, session_id: str) -> None:
        self.server.ask(lambda pipe: [pipe.delete(_stream(session_id), _once(session_id))])


def live() -> Inbox:
    """The inboxes beside the store of this process."""
    return Inbox(sessions.live().server)


def position(cursor: str) -> tuple[int, int]:
    """What cursors are compared by. Raises `ValueError` for what is none."""
    found = _CURSOR.fullmatch("0-0" if cursor == "0" else cursor)
    if not found:
        raise ValueError("is not a cursor")
    return int(found[1]), int(found[2])


def at(cursor: str) -> str:
    """When the server stored it."""
    return sessions.instant(position(cursor)[0]).isoformat(timespec="milliseconds")


def _put(post: Post) -> Call:
    names = [client.SESSION[client.shard_of(post.session_id)] + post.session_id]
    names += [_stream(post.session_id), _once(post.session_id)]
    words = [_KEPT_MS, MOST, MOST_KEYS, post.key, post.body(), _SIDES.get(post.sender, "")]
    return PUT, names, [*words, order_of(post.seq, post.epoch), MOST_BYTES, post.user_id]


_KEPT_MS = KEPT // timedelta(milliseconds=1)


def _stream(session_id: str) -> str:
    return f"{{at:s{client.shard_of(session_id):02}}}:in:{session_id}"


def _once(session_id: str) -> str:
    return f"{{at:s{client.shard_of(session_id):02}}}:once:{session_id}"
