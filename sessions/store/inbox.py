"""Store the latest messages of a session, so that a reconnecting page catches up.

At most 100 messages are kept for 24 hours. The keys of an inbox share the session's hash tag, so one script stores a
message of a side and counts its frame (`Store.note_activity`). `Inbox.put` stores those that are no frames: of touches
and bots. Raises `StoreUnavailable` like the store: the message may then be stored or not. A repeated `put` with a key
is safe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from sessions.frames import KINDS
from sessions.store import client
from sessions.store.client import Call, Server, inbox_keys, instant_of_ms, read_script, session_key, to_milliseconds

MESSAGE_LIFETIME = timedelta(hours=24)
MAX_MESSAGES = 100  #: messages
MOST_BYTES = 131_072  #: of long messages; `MAX_MESSAGES` short messages always fit
MOST_KEYS = 500  #: number of later keys after which a repeat is no longer detected
LIMITS = (to_milliseconds(MESSAGE_LIFETIME), MAX_MESSAGES, MOST_KEYS, MOST_BYTES)  #: arguments of the scripts
START = "0-0"  #: cursor before the first message

PUT = read_script("inbox_put")

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
    """`outcome`: stored, duplicate, replayed (its seq is not above the last), no_session or other_user."""

    outcome: str
    cursor: str  #: of the message; "" unless it was stored
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


class Inbox:
    def __init__(self, server: Server) -> None:
        self.server = server

    def put(self, posts: Sequence[Post]) -> list[Posted]:
        """Store messages, those of one session in their order. Idempotent for messages with a key."""
        return [each for each in self._put(posts, partly=False) if each]

    def put_available(self, posts: Sequence[Post]) -> list[Posted | None]:
        """Like `put`, with None for each message of a cluster's node that is unavailable, unless all are."""
        return self._put(posts, partly=True)

    def _put(self, posts: Sequence[Post], *, partly: bool) -> list[Posted | None]:
        if not posts:
            return []
        answers = self.server.run([build_put_call(post) for post in posts], partly=partly)
        return [answer and parse_posted(answer) for answer in answers]

    def since(self, session_id: str, cursor: str, most: int = MAX_MESSAGES) -> list[Entry]:
        """Return the messages after the cursor, oldest first. Messages above the limits are missing."""
        (found,) = self.server.ask(lambda pipe: [pipe.xrange(inbox_keys(session_id)[0], f"({cursor}", "+", count=most)])
        return [
            Entry(number.decode(), fields[b"m"].decode(), client.decode_text(fields.get(b"u", "")))
            for number, fields in found
        ]

    def last_cursors(self, session_ids: Sequence[str]) -> list[str]:
        """Return "" for each session of a cluster's node that is unavailable, unless all are."""
        if not session_ids:
            return []
        found = self.server.ask(
            lambda pipe: [pipe.xrevrange(inbox_keys(each)[0], count=1) for each in session_ids], partly=True
        )
        return ["" if entries is None else entries[0][0].decode() if entries else START for entries in found]

    def read_cursor_and_owner(self, session_id: str) -> tuple[str, str]:
        """Return the last cursor and the user who owns the session, "" without one."""
        name = session_key(session_id)
        entries, owner = self.server.ask(
            lambda pipe: [pipe.xrevrange(inbox_keys(session_id)[0], count=1), pipe.hget(name, "u")]
        )
        return entries[0][0].decode() if entries else START, client.decode_text(owner or "")

    def delete_messages(self, session_id: str) -> None:
        self.server.ask(lambda pipe: [pipe.delete(*inbox_keys(session_id))])

    def delete_messages_of(self, session_id: str, user_id: str) -> None:
        """Delete the messages from the time when this user had the session. Those of its next user stay."""
        cursors = [entry.cursor for entry in self.since(session_id, START) if entry.owner == user_id]
        if cursors:
            self.server.ask(lambda pipe: [pipe.xdel(inbox_keys(session_id)[0], *cursors)])


def live_inbox() -> Inbox:
    """Return the inboxes of this process, in the same Redis as the store."""
    from sessions.store.sessions import live_store  # which stores messages of sides itself

    return Inbox(live_store().server)


def parse_cursor(cursor: str) -> tuple[int, int]:
    """Return a cursor as a comparable pair. Raises `ValueError` for an invalid cursor."""
    found = _CURSOR.fullmatch("0-0" if cursor == "0" else cursor)
    if not found:
        raise ValueError("is not a cursor")
    return int(found[1]), int(found[2])


def stored_at(cursor: str) -> str:
    """Return the time at which the server stored the message, in ISO format."""
    return instant_of_ms(parse_cursor(cursor)[0]).isoformat(timespec="milliseconds")


def build_put_call(post: Post) -> Call:
    """Return the script call that stores a message."""
    names = [session_key(post.session_id), *inbox_keys(post.session_id)]
    return PUT, names, [*LIMITS, post.key, post.body(), post.user_id, int(post.sender not in KINDS)]


def parse_posted(answer: Sequence[bytes]) -> Posted:
    """Return the answer of a script about a message."""
    return Posted(*(word.decode() for word in answer))
