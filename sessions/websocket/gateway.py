"""Serve `/ws/v1/gateway`: one connection with the frames of many users, in numbered batches.

A batch is acknowledged after Redis has counted its frames, in the order of the batches. A gateway sends unacknowledged
batches again on its next connection. Frames with `seq` then count once. The process reads no further batch while too
many frames or batches wait, so TCP slows the gateway down. No frame is refused for the key's rate.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from channels.consumer import AsyncConsumer

from scheduling import metrics
from scheduling.api.auth import find_principal
from scheduling.batching import BatcherOverloaded
from scheduling.errors import FieldError, InvalidInput
from scheduling.models import ApiKey, Scope
from scheduling.strict_text import InvalidText, decode_json
from sessions.frames import ID_LENGTH, MAX_SEQ, OTHER_USER, USER, Frame
from sessions.store.client import StoreUnavailable
from sessions.store.sessions import OUTCOMES, REFUSED, FrameEffect
from sessions.websocket.connection import Close, FrameRefused, FrameRequest, SendQueue, frame_writer

log = structlog.get_logger(__name__)

MOST_FRAMES = 500  #: of a batch
MOST_COUNTING = 4_000  #: frames of a connection that are not yet counted; then it is not read
#: Batches of a connection without acknowledgement; then it is not read. Their acknowledgements are put into the send
#: queue at once, which holds `connection.MOST_WAITING`.
MOST_BATCHES = 64
MOST_STREAMS = 20  #: connections of a key in this process
KEY_CHECKED_EVERY = 5.0  #: seconds
RETRY_AFTER = 0.05  #: seconds until an overloaded frame writer gets a frame again
MEMBERS = frozenset(
    ("session_id", "user_id", "chat_id", "from", "kind", "seq", "epoch", "tag", "tags", "spoken")
)  # fmt: skip

_streams: Counter[int] = Counter()  #: connections by key


class GatewayConsumer(AsyncConsumer):  # type: ignore[misc]  # channels is untyped
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.send_queue = SendQueue(send)
        self.last = -1  #: number of the last batch
        self.counting = 0  #: frames that are not yet counted
        self.batches: deque[Batch] = deque()  #: not yet acknowledged
        self.room = asyncio.Event()
        headers = scope["headers"]
        given = next((value.decode("latin-1") for name, value in headers if name == b"authorization"), "")
        scheme, _, key = given.partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        await receive()
        await send({"type": "websocket.accept"})
        principal = await self._admit(key)
        if principal is None:
            while (await receive())["type"] != "websocket.disconnect":
                pass
            return
        _streams[principal.pk] += 1
        metrics.count(metrics.sockets, "gateway")
        checking = asyncio.get_running_loop().create_task(self._check_key(key))
        try:
            self._push({"type": "welcome", "most_frames": MOST_FRAMES})
            while (message := await receive())["type"] != "websocket.disconnect":
                if not self.send_queue.ended:
                    await self._receive_batch(message.get("text"))
        finally:
            checking.cancel()
            self.send_queue.drop()
            metrics.count(metrics.sockets, "gateway", by=-1)
            _streams[principal.pk] -= 1

    # --- admission ------------------------------------------------------------------------------------------------

    async def _admit(self, key: str) -> ApiKey | None:
        try:
            principal = await _find_principal(key)
        except Exception as error:
            log.warning("gateway_rejected", error=f"{type(error).__name__}: {error}")
            self.send_queue.end(Close.AWAY, "the key cannot be checked; connect again")
            return None
        if principal is None:
            self.send_queue.end(Close.BAD_TOKEN, "authorization: needs an API key with the scope sessions")
        elif _streams[principal.pk] >= MOST_STREAMS:
            self.send_queue.end(Close.TOO_MANY, f"the key has {MOST_STREAMS} connections in this process")
            return None
        return principal

    async def _check_key(self, key: str) -> None:
        """Close the connection soon after its key was revoked. Without the database it continues."""
        while not self.send_queue.ended:
            await asyncio.sleep(KEY_CHECKED_EVERY)
            try:
                if await _find_principal(key) is None:
                    self.send_queue.end(Close.BAD_TOKEN, "authorization: the API key is revoked or expired")
            except Exception as error:
                log.info("key_unchecked", error=f"{type(error).__name__}: {error}")

    # --- batches --------------------------------------------------------------------------------------------------

    async def _receive_batch(self, text: str | None) -> None:
        try:
            batch = parse_batch(text, self.last)
        except FrameRefused as error:
            self.send_queue.end(error.code, error.reason)
            return
        self.last = batch.number
        self.batches.append(batch)
        for frame in batch.frames:
            await self._submit(FrameRequest(frame), batch)
        self._acknowledge()
        if not batch.frames:
            # No result will come later, so nothing else lets the acknowledgement leave the send queue.
            await asyncio.sleep(0)
        while (self.counting >= MOST_COUNTING or len(self.batches) >= MOST_BATCHES) and not self.send_queue.ended:
            self.room.clear()
            await self.room.wait()

    async def _submit(self, request: FrameRequest, batch: Batch) -> None:
        while not self.send_queue.ended:
            try:
                frame_writer().submit(request, lambda result: self._handle_result(batch, result))
            except BatcherOverloaded:
                await asyncio.sleep(RETRY_AFTER)
            else:
                self.counting += 1
                return

    def _handle_result(self, batch: Batch, result: FrameEffect | Exception) -> None:
        """Count a result. Results arrive in the order of the frames."""
        self.counting -= 1
        self.room.set()
        if isinstance(result, Exception):
            if not isinstance(result, StoreUnavailable):
                log.error("batch_not_stored", exc_info=result)
            self.send_queue.end(Close.AWAY, "the live sessions cannot be reached; send unacknowledged batches again")
            return
        batch.take(result)
        if batch.is_done:
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Acknowledge the batches before the first one that is not done."""
        while self.batches and self.batches[0].is_done:
            self._push(self.batches.popleft().acknowledgement())

    def _push(self, frame: Mapping[str, Any]) -> None:
        self.send_queue.put(json.dumps(frame))  # in ASCII: a refusal may name a lone surrogate


class Batch:
    """A batch of frames, and what became of them."""

    def __init__(self, number: int, given: Sequence[Any]) -> None:
        self.number = number
        self.frames: list[Frame] = []
        self._places: list[int] = []  #: of the frames in the batch
        self._taken = 0
        self._outcomes = dict.fromkeys(OUTCOMES.values(), 0)
        self._refused: list[dict[str, Any]] = []
        for place, each in enumerate(given):
            try:
                self.frames.append(build_frame(each))
                self._places.append(place)
            except InvalidInput as error:
                self._refuse(place, error)

    @property
    def is_done(self) -> bool:
        return self._taken == len(self.frames)

    def take(self, result: FrameEffect) -> None:
        """Count the result of the next frame."""
        place = self._places[self._taken]
        self._taken += 1
        if result.outcome == REFUSED:
            self._refuse(place, InvalidInput.of("user_id", OTHER_USER))
        else:
            self._outcomes[OUTCOMES[result.outcome]] += 1

    def acknowledgement(self) -> dict[str, Any]:
        return {"type": "ack", "n": self.number, **self._outcomes, "refused": self._refused}

    def _refuse(self, place: int, error: InvalidInput) -> None:
        within = f"frames.{place}."
        errors = [{"field": each.field.removeprefix(within), "message": each.message} for each in error.errors]
        self._refused.append({"place": place, "errors": errors})


def parse_batch(text: str | None, last: int) -> Batch:
    """Parse `{"n": 7, "frames": [...]}`. Invalid frames are refused one by one.

    Raises:
        FrameRefused: the connection must close.
    """
    try:
        found = decode_json((text or "").encode(), array="frames", errors_in_place=True)
    except InvalidText as error:
        raise FrameRefused(Close.BAD_FRAME, "not JSON") from error
    except InvalidInput as error:
        raise FrameRefused(Close.BAD_FRAME, "a value that cannot be stored") from error
    number, given = (found.get("n"), found.get("frames")) if isinstance(found, dict) else (None, None)
    if type(number) is not int or not last < number <= MAX_SEQ:
        raise FrameRefused(Close.BAD_FRAME, "n: must be a whole number above that of the last batch")
    if not isinstance(given, list) or len(given) > MOST_FRAMES:
        raise FrameRefused(Close.BAD_FRAME, f"frames: must be a list of at most {MOST_FRAMES} frames")
    return Batch(number, given)


def build_frame(given: Any) -> Frame:
    """Build one frame with the members of the HTTP API. Raises `InvalidInput`, also that which `decode_json` gives."""
    if isinstance(given, InvalidInput):
        raise given
    if not isinstance(given, dict):
        raise InvalidInput.of("frame", "must be an object")
    if unknown := given.keys() - MEMBERS:
        raise InvalidInput(*(FieldError(name[:ID_LENGTH], "is not a member of a frame") for name in sorted(unknown)))
    get = given.get
    sender, kind, epoch, spoken = get("from", USER), get("kind", "message"), get("epoch", ""), get("spoken", False)
    for name, value, kinds, words in (
        ("from", sender, str, "must be text"), ("kind", kind, str, "must be text"),
        ("spoken", spoken, bool, "must be true or false"),
    ):  # fmt: skip
        if type(value) is not kinds:
            raise InvalidInput.of(name, words)
    return Frame(
        get("session_id", ""), get("user_id", ""), get("chat_id", ""), sender, kind, get("seq"), get("tag", ""),
        str(epoch) if type(epoch) is int else epoch, spoken, False, get("tags", ()),
    )  # fmt: skip


async def _find_principal(key: str) -> ApiKey | None:
    """Return the key's row if it is valid and has the scope. Raises what the database raises."""
    principal = await find_principal(key)
    return principal if principal and Scope.SESSIONS in principal.granted_scopes else None
