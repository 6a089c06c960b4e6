"""Frames of a WebSocket: parse them strictly, write them in small batches, send them through a bounded queue."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

from scheduling import metrics
from scheduling.batching import MicroBatcher
from scheduling.errors import ErrorCollector
from scheduling.strict_text import InvalidText, decode_json, find_unstorable_text
from sessions.event_loops import once_per_loop
from sessions.frames import EPOCH_LENGTH, KINDS, MAX_SEQ, Frame, has_control_characters
from sessions.store.client import StoreUnavailable
from sessions.store.inbox import Post
from sessions.store.sessions import DROPPED, UNAVAILABLE, FrameEffect, Store, live_store

# Parse frames of a WebSocket strictly, and define its close codes. No I/O.
#
# Unknown members are ignored, client timestamps included: the server's clock decides.


MAX_FRAME_BYTES = 16_384  #: bytes of a frame
ID_LENGTH = 64
EVENT = "event"


class Close(IntEnum):
    """Reasons for which the server closes a connection. The close frame carries a text as well."""

    DONE = 1000  #: the session was closed
    OVERSIZED = 1009  #: a frame is longer than 16 KB
    AWAY = 1013  #: the live sessions are unavailable; reconnect
    BAD_FRAME = 4400  #: binary, not JSON, not an object, or of an unknown type
    BAD_TOKEN = 4401  #: missing, bad, expired, revoked, or for another session
    OTHER_USER = 4403  #: the session belongs to a user other than the token's
    BAD_ORIGIN = 4406  #: a page of this origin may not connect
    TOO_SLOW = 4408  #: the client does not read
    TOO_MANY = 4409  #: more connections than a session or a token may have
    TOO_FAST = 4429  #: more frames than a connection may send or have waiting


class FrameRefused(Exception):
    """A frame that closes the connection."""

    def __init__(self, code: Close, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Incoming:
    """A frame of a client. `id` is the client's name of a message and identifies repeats."""

    kind: str
    seq: int | None = None
    text: str = ""
    id: str = ""
    event: Any = None
    epoch: str = ""
    spoken: bool = False  #: of a ping: the user has already written in this session


def is_origin_permitted(headers: Iterable[tuple[bytes, bytes]], permitted: Collection[str]) -> bool:
    """Return whether a page of this origin may connect. Clients that are no browser send no origin; they may."""
    origin = next((value for name, value in headers if name == b"origin"), None)
    return origin is None or not permitted or origin.decode("latin-1").lower() in permitted


def parse_frame(text: str | None, role: str) -> Incoming:
    """Parse a frame.

    Raises:
        FrameRefused: the connection must close.
        InvalidInput: the frame is invalid; the connection continues.
    """
    if text is None:
        raise FrameRefused(Close.BAD_FRAME, "binary")
    if len(text) > MAX_FRAME_BYTES or len(raw := text.encode()) > MAX_FRAME_BYTES:
        raise FrameRefused(Close.OVERSIZED, f"longer than {MAX_FRAME_BYTES} bytes")
    try:
        found = decode_json(raw)
    except InvalidText as error:
        raise FrameRefused(Close.BAD_FRAME, "not JSON") from error
    if not isinstance(found, dict):
        raise FrameRefused(Close.BAD_FRAME, "not an object")
    kind = found.get("type")
    if not isinstance(kind, str) or kind not in KINDS[role] | {EVENT}:
        raise FrameRefused(Close.BAD_FRAME, "unknown type")
    return _check_frame(kind, found)


def message_id_of(text: str) -> str:
    """Return the id of an invalid frame, of any length, for the error message; "" if it cannot be read."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    name = found.get("id") if isinstance(found, dict) else ""
    return name if isinstance(name, str) and not find_unstorable_text(name) else ""


def _check_frame(kind: str, found: dict[str, Any]) -> Incoming:
    wrong = ErrorCollector()
    seq, text, name = found.get("seq"), found.get("text", ""), found.get("id", "")
    if seq is not None and (type(seq) is not int or not 0 <= seq <= MAX_SEQ):
        wrong.add("seq", f"must be a whole number between 0 and {MAX_SEQ}")
    if kind == "message" and (not isinstance(text, str) or not text.strip()):
        wrong.add("text", "must be text, and not empty")
    if not isinstance(name, str) or len(name) > ID_LENGTH:
        wrong.add("id", f"must be text of at most {ID_LENGTH} characters")
    if kind == EVENT and not isinstance(found.get(EVENT), dict):
        wrong.add(EVENT, "must be an object")
    epoch = found.get("epoch", "")
    epoch = str(epoch) if type(epoch) is int else epoch
    if not isinstance(epoch, str) or len(epoch) > EPOCH_LENGTH or has_control_characters(epoch):
        wrong.add("epoch", f"must be a whole number, or text of at most {EPOCH_LENGTH} characters")
    wrong.raise_if_any()
    return Incoming(
        kind, seq, text if kind == "message" else "", name, found.get(EVENT), epoch, found.get("spoken") is True
    )


MOST_WAITING = 128  #: frames that may wait for a slow client
END_WITHIN = 10.0  #: seconds until the close frame must be sent
RATE, BURST = 20.0, 60.0  #: incoming frames: per second, and in one burst
EVENT_COST = 4  #: in frames; an event costs a transaction

Send = Callable[[Any], Awaitable[None]]


class SendQueue:
    """The outgoing queue of one connection. `put` never blocks.

    A task exists only while frames wait, because most connections are idle.
    """

    __slots__ = ("__weakref__", "_ending", "_send", "_sending", "_waiting")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: deque[str] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        return self._ending is not None

    def put(self, frame: str) -> None:
        if self.ended:
            return
        if len(self._waiting) >= MOST_WAITING:
            self.end(Close.TOO_SLOW, "too slow: it does not read what is sent to it")
            return
        self._waiting.append(frame)
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._empty())

    def end(self, code: Close, reason: str) -> None:
        """Close the connection and drop waiting frames. A reconnecting page catches up by its cursor."""
        if self.ended:
            return
        self._waiting.clear()
        if self._sending:
            self._sending.cancel()  # no frame may follow the close frame
        self._ending = asyncio.get_running_loop().create_task(self._close(code, reason))

    async def emptied(self) -> None:
        """Wait until the waiting frames are sent."""
        if self._sending:
            await asyncio.wait([self._sending])

    def drop(self) -> None:
        """Cancel all sending after the client disconnected."""
        self._waiting.clear()
        for task in (self._sending, self._ending):
            if task:
                task.cancel()

    async def _empty(self) -> None:
        try:
            while self._waiting and not self.ended:
                await self._send({"type": "websocket.send", "text": self._waiting.popleft()})
        except OSError:
            self._waiting.clear()  # the client is gone; the consumer receives the disconnect
        finally:
            self._sending = None

    async def _close(self, code: Close, reason: str) -> None:
        try:
            async with asyncio.timeout(END_WITHIN):
                await self._send({"type": "websocket.close", "code": int(code), "reason": reason})
        except (TimeoutError, OSError):
            # The client does not even read the close frame. ASGI has no operation that aborts the transport. A plain
            # return makes uvicorn wait until its buffer is empty, which such a client can delay without limit.
            transport = getattr(getattr(self._send, "__self__", None), "transport", None)
            if transport is not None:
                transport.abort()


BATCH_WINDOW = 0.02  #: seconds
STALE_SEQ = "stale_seq"  #: reason of a dropped frame: its seq is not above the last of its side


@dataclass(frozen=True, slots=True)
class FrameRequest:
    """A frame with its message, if it carries one. `needs_cursor` requests the last cursor of the inbox."""

    frame: Frame
    post: Post | None = None
    needs_cursor: bool = False


def write_frames(store: Store, requests: Sequence[FrameRequest]) -> list[FrameEffect | Exception]:
    """Write frames with their messages. Runs in a thread.

    A frame of a cluster's node that is unavailable gets `StoreUnavailable` as its result; the others of the batch are
    written. The client repeats it: a message that was stored is then a duplicate.
    """
    posts = {number: request.post for number, request in enumerate(requests) if request.post}
    noted = store.note_activity([request.frame for request in requests], posts, partly=True)
    stale = sum(
        each.outcome == DROPPED and request.frame.seq is not None for request, each in zip(requests, noted, strict=True)
    )
    if stale:
        metrics.count(metrics.frames_dropped, STALE_SEQ, by=stale)
    results: list[FrameEffect | Exception] = [
        StoreUnavailable("the node does not answer") if each.outcome == UNAVAILABLE else each for each in noted
    ]
    asked = [at for at, request in enumerate(requests) if request.needs_cursor and noted[at].outcome != UNAVAILABLE]
    cursors = store.last_cursors([requests[at].frame.session_id for at in asked])
    for at, cursor in zip(asked, cursors, strict=True):
        results[at] = noted[at]._replace(last_cursor=cursor) if cursor else StoreUnavailable("the node is gone")
    return results


@once_per_loop
def frame_writer() -> MicroBatcher[FrameRequest, FrameEffect]:
    return MicroBatcher(partial(write_frames, live_store()), moment=BATCH_WINDOW, name="sessions-desk")
