"""Serve `/ws/v1/sessions/{session_id}?token=…&cursor=…`: a page or a gateway in one session.

A connection costs one task and no subscription of its own. It never waits for the store: incoming frames go to the
frame writer of the process, outgoing frames to a bounded queue. A slow database or a slow client therefore does not
delay other connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

import structlog
from channels.consumer import AsyncConsumer
from django.conf import settings

from scheduling import batching, metrics, sql
from scheduling.api.auth import in_database_thread
from scheduling.api.events import parse_event
from scheduling.configuration import snapshot
from scheduling.errors import ErrorCollector, InvalidInput
from scheduling.ids import new_id
from scheduling.planning.ingest import DatabaseUnavailable, IngestOverloaded, NewEvent, submit
from sessions import tokens
from sessions.detection.presence import SessionPresence
from sessions.detection.silence_events import SOURCE
from sessions.frames import USER
from sessions.rates import Bucket
from sessions.store import inbox, sessions
from sessions.store.client import StoreUnavailable
from sessions.store.inbox import Post
from sessions.store.sessions import COUNTED, DROPPED, REFUSED, FrameEffect
from sessions.tokens import Admission
from sessions.websocket import connection, hub
from sessions.websocket.connection import (
    EVENT,
    EVENT_COST,
    Close,
    FrameRefused,
    FrameRequest,
    Incoming,
    SendQueue,
    frame_writer,
)

log = structlog.get_logger(__name__)


# Validate events that arrive over a WebSocket.
#
# A customer can change the page that holds the token. The token therefore limits an event to its own customer and
# chat. The event's source contains session and side, so an event cannot collide with, or reveal, an event of another
# sender.
#
# Only registered types are accepted. A customer may send only types that are actions of a customer, and no complaint.
# Complaints require an API key, because they count against a text for all customers.


COMPLAINT = "complaint.received"


async def event_from_frame(given: Mapping[str, Any], admission: Admission) -> NewEvent:
    """Return the event of a frame.

    Raises:
        InvalidInput: the event exceeds the rights of the token.
        DatabaseUnavailable: the registered types cannot be read.
    """
    try:
        types = (await in_database_thread(snapshot.current)).activity_types
    except sql.UNAVAILABLE_ERRORS as error:
        raise DatabaseUnavailable from error
    source = f"{SOURCE}/{admission.session_id}/{admission.role}"
    data = given.get("data")
    if admission.chat_id and isinstance(data, dict | None):  # a missing chat is that of the token
        data = {**(data or {}), "chat_id": (data or {}).get("chat_id") or admission.chat_id}
    raw = {"subject": admission.user_id, **given, "source": source, "data": data}
    wrong = ErrorCollector()
    if raw["subject"] != admission.user_id:
        wrong.add(f"{EVENT}.subject", "must be the user of this session")
    if isinstance(raw["data"], dict) and (raw["data"].get("chat_id") or "") != admission.chat_id:
        wrong.add(f"{EVENT}.data.chat_id", "must be the chat that the token names")
    if isinstance(raw.get("type"), str) and (message := _type_problem(raw["type"], admission.role, types)):
        wrong.add(f"{EVENT}.type", message)
    wrong.raise_if_any()
    return parse_event(raw, prefix=EVENT)


def _type_problem(kind: str, role: str, types: Mapping[str, bool]) -> str:
    """`types`: the registered ones, and whether the customer is the actor."""
    if kind in SessionPresence.event_types:
        return "is found out here"
    if kind not in types:
        return "is not registered; new types need an API key"
    if role == USER and (kind == COMPLAINT or not types[kind]):
        return "cannot be sent by a customer"
    return ""


EVENT_WITHIN = 10.0  #: seconds
EVENTS_AT_ONCE = 8
CATCH_UP = 20  #: messages per read
MOST_WAITING = 100  #: frames of a connection that are not yet counted
UNAVAILABLE_TEXT = "the live sessions cannot be reached; send it again"
OTHER_USER_TEXT = "user_id: the session belongs to another user"
PONG = '{"type":"pong"}'


class SessionConsumer(AsyncConsumer):  # type: ignore[misc]  # channels is untyped
    admission: tokens.Admission
    side: str
    ticket: int  #: equal for connections with the same token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Replace the base class's channel and two tasks per connection; see `hub`."""
        self.scope = scope
        self.send_queue = SendQueue(send)
        self.allowance = Bucket(connection.RATE, connection.BURST)
        self.cursor: tuple[int, int] | None = None  #: of the last message the client has; None before the welcome frame
        self.newest_cursor = inbox.START  #: newest cursor that arrived before the welcome frame
        self.catching_up: asyncio.Task[None] | None = None
        self.more_arrived = False  #: a newer message arrived, or was lost, during a read or before the welcome frame
        self.events: set[asyncio.Task[None]] = set()
        self.joined = False
        self.spoken = False  #: the user has written, so a ping starts the timer again where Redis lost the session
        self.waiting = 0  #: frames that are not yet counted
        self.expiry: asyncio.TimerHandle | None = None
        try:
            while (message := await receive())["type"] != "websocket.disconnect":
                if message["type"] == "websocket.connect":
                    await self.websocket_connect(send)
                elif not self.send_queue.ended:
                    self.websocket_receive(message)
        finally:
            await self.websocket_disconnect()

    # --- connect and disconnect ---------------------------------------------------------------------------------

    async def websocket_connect(self, send: Any) -> None:
        """Accept every handshake and close with a reason, because browsers do not expose why a handshake failed."""
        await send({"type": "websocket.accept"})
        query = {name: values[-1] for name, values in parse_qs(self.scope["query_string"].decode("latin-1")).items()}
        may_connect = connection.is_origin_permitted(self.scope["headers"], settings.AFTERTOUCH_SOCKET_ORIGINS)
        # The headers are not used again and are a large part of the memory of an idle connection.
        self.scope = {"path": self.scope["path"], "url_route": self.scope["url_route"]}
        if not may_connect:
            self.send_queue.end(Close.BAD_ORIGIN, "origin: is not one of AFTERTOUCH_SOCKET_ORIGINS")
            return
        try:
            token = query.get("token", "")
            self.admission = tokens.verify_token(token, self.scope["url_route"]["kwargs"]["session_id"])
            self.side, self.ticket = self.admission.role, hash(token)
            await self._enter(query.get("cursor", ""))
        except tokens.BadToken as error:
            self.send_queue.end(Close.BAD_TOKEN, f"token: {error}")
        except hub.TooManyConnections as error:
            self.send_queue.end(Close.TOO_MANY, f"the {error} has too many connections")
        except ValueError:
            self.send_queue.end(Close.BAD_FRAME, "cursor: is not one that was given out")
        except Exception as error:
            log.warning("session_rejected", error=f"{type(error).__name__}: {error}")
            self.send_queue.end(Close.AWAY, UNAVAILABLE_TEXT)

    async def _enter(self, cursor: str) -> None:
        """Join the hub, then read the last cursor, the owner and revocations.

        A message that is stored after the read comes as a notification, and an interrupted subscription is announced.
        Redis sends both only after it has handled the SUBSCRIBE. Its answer is not awaited, and the read has another
        connection, so it may be earlier. A message in between comes with the next message or ping.
        """
        wanted = inbox.parse_cursor(cursor) if cursor else None
        session_id = self.admission.session_id
        async with asyncio.timeout(settings.TIMEOUTS.session_notify):
            await hub.hub().join(session_id, self)
            self.joined = True
            metrics.count(metrics.sockets, self.admission.role)
            last, owner = await asyncio.to_thread(sessions.live_store().read_cursor_and_owner, session_id)
            if self._is_of_other(owner):
                return
            me, server = self.admission, sessions.live_store().server
            if await asyncio.to_thread(tokens.is_revoked, server, session_id, me.role, me.issued_at):
                raise tokens.BadToken("revoked")
        left = max(0.0, self.admission.ends_at - time.time())
        self.expiry = asyncio.get_running_loop().call_later(
            left, self.send_queue.end, Close.BAD_TOKEN, "token: expired"
        )
        if wanted is not None and wanted > inbox.parse_cursor(last):
            wanted = inbox.parse_cursor(inbox.START)  # the cursor is of a lost inbox: see _catch_up
        self.cursor = wanted if wanted is not None else inbox.parse_cursor(last)
        self._push({"type": "welcome", "session_id": session_id, "role": self.admission.role, "cursor": last})
        if self.more_arrived:
            self._start_catch_up()
        else:
            self._read_up_to(max(last, self.newest_cursor, key=inbox.parse_cursor))

    def _is_of_other(self, owner: str) -> bool:
        """End the connection if the session belongs to another user. Return whether it does."""
        if owner in ("", self.admission.user_id):
            return False
        self.send_queue.end(Close.OTHER_USER, OTHER_USER_TEXT)
        return True

    async def websocket_disconnect(self) -> None:
        self.send_queue.drop()
        if self.expiry:
            self.expiry.cancel()
        if self.catching_up:
            self.catching_up.cancel()
        if self.joined:
            metrics.count(metrics.sockets, self.admission.role, by=-1)
            await hub.hub().leave(self.admission.session_id, self)

    # --- incoming frames ----------------------------------------------------------------------------------------

    def websocket_receive(self, message: Any) -> None:
        try:
            if not self.allowance.consume():
                # Renew the session for a frame above the rate: the customer is active, although the frame is not
                # stored.
                if self.admission.role == USER:
                    with contextlib.suppress(batching.BatcherOverloaded):
                        frame_writer().submit(FrameRequest(self.admission.frame("read")), lambda _: None)
                raise FrameRefused(Close.TOO_FAST, "more frames than a connection may send")
            self._handle_frame(connection.parse_frame(message.get("text"), self.admission.role))
        except FrameRefused as error:
            self.send_queue.end(error.code, error.reason)
        except InvalidInput as error:
            self._fail("invalid", error, connection.message_id_of(message["text"]))

    def _handle_frame(self, frame: Incoming) -> None:
        if frame.kind == "ping":
            self.send_queue.put(PONG)
        elif frame.kind == EVENT:
            self._start_event(frame)
        if self.waiting >= MOST_WAITING:
            raise FrameRefused(Close.TOO_FAST, f"more than {MOST_WAITING} frames wait to be noted")
        # The frame for the store. An event counts as reading by a user, and as a ping by an agent.
        kind = frame.kind
        if kind == EVENT:
            kind = "read" if self.admission.role == USER else "ping"
        seq, spoken = None if frame.kind == EVENT else frame.seq, frame.spoken or self.spoken
        me = self.admission
        post: Post | None = None
        if frame.kind == "message":
            named = f"{me.role}:{frame.id}" if frame.id else ""
            key = named or (f"{me.role}#{frame.epoch}#{seq}" if seq is not None else "")
            post = Post(me.session_id, frame.id or str(new_id()), me.role, frame.text, key=key, seq=seq)
        slip = FrameRequest(
            me.frame(kind, seq, epoch=frame.epoch, spoken=kind == "ping" and spoken),
            post,
            needs_cursor=frame.kind == "ping",
        )
        try:
            frame_writer().submit(slip, lambda noted: self._handle_result(frame, slip, noted))
        except batching.BatcherOverloaded:
            self._refuse(frame, "overloaded", "too much waits; send it again in a moment")
        else:
            self.waiting += 1

    def _handle_result(self, frame: Incoming, slip: FrameRequest, noted: FrameEffect | Exception) -> None:
        """Handle the result of the store, or its error."""
        self.waiting -= 1
        if isinstance(noted, Exception):
            if not isinstance(noted, StoreUnavailable):
                log.error("frame_not_stored", kind=frame.kind, exc_info=noted)
            self._refuse(frame, "unavailable", UNAVAILABLE_TEXT)
            return
        if noted.outcome == REFUSED:
            self.send_queue.end(Close.OTHER_USER, OTHER_USER_TEXT)
            return
        if frame.kind == "message" and noted.outcome in (COUNTED, DROPPED):
            self.spoken = self.admission.role == USER
        if noted.last_cursor:
            self._read_up_to(noted.last_cursor)
        if slip.post and (posted := noted.posted):
            if posted.outcome == "stored":
                hub.hub().notify(self.admission.session_id, hub.message_notification(slip.post, posted))
            if frame.id and posted.outcome == "replayed":
                self._refuse(frame, "replayed", "its seq is not above the last; it is not stored")
            elif frame.id:
                self._push({"type": "ack", "id": frame.id, "duplicate": posted.outcome == "duplicate"})
        elif frame.kind not in ("ping", EVENT) and noted.outcome != DROPPED:
            role = self.admission.role
            notification = (
                hub.closed_notification(role) if frame.kind == "close" else hub.signal_notification(role, frame.kind)
            )
            hub.hub().notify(self.admission.session_id, notification)

    # --- events go to ingest ------------------------------------------------------------------------------------

    def _start_event(self, frame: Incoming) -> None:
        if not self.allowance.consume(EVENT_COST - 1) or len(self.events) >= EVENTS_AT_ONCE:
            self._refuse(frame, "overloaded", "too many events at once; send it again in a moment")
            return
        task = asyncio.get_running_loop().create_task(self._record_event(frame))
        self.events.add(task)
        task.add_done_callback(self.events.discard)

    async def _record_event(self, frame: Incoming) -> None:
        try:
            async with asyncio.timeout(EVENT_WITHIN):
                event = await event_from_frame(frame.event, self.admission)
                (receipt,) = await submit([event])
        except InvalidInput as error:
            self._fail("invalid", error, frame.id)
        except (DatabaseUnavailable, IngestOverloaded, TimeoutError):
            self._refuse(frame, "unavailable", "the event may not be stored; send it again")
        except Exception:
            log.exception("event_not_recorded")
            self._refuse(frame, "internal", "something went wrong here; it has been logged")
        else:
            notification = {
                "source": event.source,
                "event_id": event.event_id,
                "touches": [*map(str, receipt.task_ids)],
            }
            self._push({"type": "ack", "id": frame.id, "duplicate": receipt.duplicate, **notification})

    # --- outgoing frames ----------------------------------------------------------------------------------------

    def on_notification(self, notification: dict[str, Any]) -> None:
        """Handle a notification of the hub about this session."""
        if notification["what"] == hub.LOST:
            self._start_catch_up()
        elif notification["what"] == hub.MESSAGE:
            if self._is_of_other(notification.get("owner", "")):
                return
            if self.cursor is None:
                self.newest_cursor = notification["cursor"]
            elif inbox.parse_cursor(notification["before"]) == self.cursor and not self.catching_up:
                self._push_entry(inbox.Entry(notification["cursor"], notification["body"]))
            else:
                self._read_up_to(notification["cursor"])
        elif notification["what"] == hub.REVOKED:
            if notification["side"] == self.admission.role and notification["at"] > self.admission.issued_at:
                self.send_queue.end(Close.BAD_TOKEN, "token: revoked")
        elif notification["what"] == hub.CLOSED:
            if notification["side"] in (self.admission.role, hub.API):
                self.send_queue.end(Close.DONE, "the session was closed")
            else:
                self._push({"type": "closed", "by": notification["side"]})
        elif notification["side"] != self.admission.role:
            self._push({"type": notification["kind"], "from": notification["side"]})

    def _read_up_to(self, last: str) -> None:
        """Read the messages between the connection's cursor and this one.

        A lower cursor is a message the client has, or belongs to a lost inbox that restarted with a slower clock.
        """
        if self.cursor is not None and inbox.parse_cursor(last) != self.cursor:
            self._start_catch_up()

    def _start_catch_up(self) -> None:
        self.more_arrived = True
        if self.cursor is not None and not self.catching_up and not self.send_queue.ended:
            self.catching_up = asyncio.get_running_loop().create_task(self._catch_up())

    async def _catch_up(self) -> None:
        """Read a few messages at a time, as fast as the client takes them, until no new one arrived during a read."""
        assert self.cursor is not None
        try:
            while not self.send_queue.ended:
                self.more_arrived = False  # a message that arrives from here on may be missing from the read
                after = "{}-{}".format(*self.cursor)
                read = sessions.live_store().messages_since
                missed = await asyncio.to_thread(read, self.admission.session_id, after, CATCH_UP)
                for entry in missed:
                    self._push_entry(entry)
                if not missed and not await self._inbox_restarted() and not self.more_arrived:
                    return
                await self.send_queue.emptied()
        except StoreUnavailable as error:
            log.info("catch_up_failed", error=str(error))  # the next ping reads again
        finally:
            self.catching_up = None

    async def _inbox_restarted(self) -> bool:
        """Return whether the inbox was lost and restarted below the connection's cursor. Then all its messages are
        new.

        Called only while no other code moves the cursor. Otherwise a cursor that is slightly behind would look like a
        restart.
        """
        (last,) = await asyncio.to_thread(sessions.live_store().last_cursors, [self.admission.session_id])
        if self.cursor is None or inbox.parse_cursor(last) >= self.cursor:
            return False
        self.cursor = inbox.parse_cursor(inbox.START)
        return True

    def _push_entry(self, entry: inbox.Entry) -> None:
        position = inbox.parse_cursor(entry.cursor)
        if self.cursor is None or position > self.cursor:
            self.cursor = position
            if not entry.is_of_other(self.admission.user_id):
                self.send_queue.put(entry.frame())

    def _push(self, frame: dict[str, Any]) -> None:
        self.send_queue.put(json.dumps(frame, ensure_ascii=False))

    def _refuse(self, frame: Incoming, reason: str, detail: str) -> None:
        """Send an error for the frame. A refused ping needs none, because the next ping replaces it."""
        if frame.kind != "ping":
            self._push({"type": "error", "id": frame.id, "reason": reason, "detail": detail, "errors": []})

    def _fail(self, reason: str, error: InvalidInput, id: str) -> None:
        errors = [{"field": each.field, "message": each.message} for each in error.errors]
        self._push({"type": "error", "id": id, "reason": reason, "detail": "The frame does not fit.", "errors": errors})
