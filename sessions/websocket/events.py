"""Validate events that arrive over a WebSocket.

A customer can change the page that holds the token. The token therefore limits an event to its own customer and chat.
The event's source contains session and side, so an event cannot collide with, or reveal, an event of another sender.

Only registered types are accepted. A customer may send only types that are actions of a customer, and no complaint.
Complaints require an API key, because they count against a text for all customers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from scheduling import sql
from scheduling.api.events import parse_event
from scheduling.batching import MicroBatcher
from scheduling.configuration import snapshot
from scheduling.errors import ErrorCollector
from scheduling.planning.ingest import DatabaseUnavailable, NewEvent
from sessions.detection.presence import SessionPresence
from sessions.detection.silence_events import SOURCE
from sessions.frames import USER
from sessions.websocket.protocol import EVENT
from sessions.websocket.tokens import Admission

COMPLAINT = "complaint.received"

EventTypes = Mapping[str, bool]  #: registered types; whether the customer is the actor


async def event_from_frame(given: Mapping[str, Any], admission: Admission) -> NewEvent:
    """Return the event of a frame.

    Raises:
        InvalidInput: the event exceeds the rights of the token.
        DatabaseUnavailable, Overloaded: the registered types cannot be read.
    """
    types = await _type_batcher().submit_and_wait(None)
    source = f"{SOURCE}/{admission.session_id}/{admission.role}"
    raw = {"subject": admission.user_id, **given, "source": source, "data": _event_data(given, admission)}
    _check_event(raw, admission, types)
    return parse_event(raw, prefix=EVENT)


def _event_data(given: Mapping[str, Any], admission: Admission) -> Any:
    """Return the data of the event. A missing chat is filled from the token."""
    data = given.get("data")
    if not admission.chat_id or not isinstance(data, dict | None):
        return data
    return {**(data or {}), "chat_id": (data or {}).get("chat_id") or admission.chat_id}


def _check_event(raw: Mapping[str, Any], admission: Admission, types: EventTypes) -> None:
    wrong = ErrorCollector()
    if raw["subject"] != admission.user_id:
        wrong.add(f"{EVENT}.subject", "must be the user of this session")
    if isinstance(raw["data"], dict) and (raw["data"].get("chat_id") or "") != admission.chat_id:
        wrong.add(f"{EVENT}.data.chat_id", "must be the chat that the token names")
    if isinstance(raw.get("type"), str) and (message := _type_problem(raw["type"], admission.role, types)):
        wrong.add(f"{EVENT}.type", message)
    wrong.raise_if_any()


def _type_problem(kind: str, role: str, types: EventTypes) -> str:
    if kind in SessionPresence.event_types:
        return "is found out here"
    if kind not in types:
        return "is not registered; new types need an API key"
    if role == USER and (kind == COMPLAINT or not types[kind]):
        return "cannot be sent by a customer"
    return ""


def _read_types(askers: Sequence[None]) -> list[EventTypes]:
    """Read the types in a thread, once for all concurrent callers."""
    try:
        return [snapshot.current().activity_types] * len(askers)
    except sql.UNAVAILABLE_ERRORS as error:
        raise DatabaseUnavailable from error


_type_batchers: WeakKeyDictionary[asyncio.AbstractEventLoop, MicroBatcher[None, EventTypes]] = WeakKeyDictionary()


def _type_batcher() -> MicroBatcher[None, EventTypes]:
    """Return the batch reader of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _type_batchers:
        _type_batchers[loop] = MicroBatcher(_read_types, moment=0, name="event-types")
    return _type_batchers[loop]
