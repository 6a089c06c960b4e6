"""Events that come over a WebSocket. Its token is in a page, which its customer can rewrite: what an event reaches is
the token's, not the page's. It is about the token's customer, in the token's chat, and is known among those of its own
session and side, so nobody takes the place of another one's event, or learns what that one led to.

Only types that are registered come this way. A customer tells of what a customer does (as the type says), not of a
complaint: complaints count against a text for everybody, so they come with an API key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from weakref import WeakKeyDictionary

from scheduling import sql
from scheduling.api.cloudevents import parse_event
from scheduling.batching import Gathering
from scheduling.configuration import snapshot
from scheduling.errors import Findings
from scheduling.planning.group_commit import DatabaseUnavailable
from scheduling.planning.ingest import NewEvent
from sessions.detection.presence import SILENT
from sessions.detection.silence_events import SOURCE
from sessions.frames import USER
from sessions.websocket.protocol import EVENT
from sessions.websocket.tokens import Admission

COMPLAINT = "complaint.received"

Types = Mapping[str, bool]  #: those that are registered, and whether it is the customer who does it


async def event_of(told: Mapping[str, Any], admission: Admission) -> NewEvent:
    """What a side tells, as far as it may. Raises `InvalidInput`, and `DatabaseUnavailable` or `Overloaded` where
    nobody knows yet which types there are."""
    types = await _asking().ask(None)
    source = f"{SOURCE}/{admission.session_id}/{admission.role}"
    raw = {"subject": admission.user_id, **told, "source": source, "data": _data(told, admission)}
    _check(raw, admission, types)
    return parse_event(raw, datetime.now(UTC), prefix=EVENT)


def _data(told: Mapping[str, Any], admission: Admission) -> Any:
    """Where it names no chat, it is the token's."""
    data = told.get("data")
    if not admission.chat_id or not isinstance(data, dict | None):
        return data
    return {**(data or {}), "chat_id": (data or {}).get("chat_id") or admission.chat_id}


def _check(raw: Mapping[str, Any], admission: Admission, types: Types) -> None:
    wrong = Findings()
    if raw["subject"] != admission.user_id:
        wrong.add(f"{EVENT}.subject", "must be the user of this session")
    if isinstance(raw["data"], dict) and (raw["data"].get("chat_id") or "") != admission.chat_id:
        wrong.add(f"{EVENT}.data.chat_id", "must be the chat that the token names")
    if isinstance(raw.get("type"), str) and (message := _objection(raw["type"], admission.role, types)):
        wrong.add(f"{EVENT}.type", message)
    wrong.settle()


def _objection(kind: str, role: str, types: Types) -> str:
    if kind == SILENT:
        return "is found out here"
    if kind not in types:
        return "is not registered; only who has an API key tells of a new type"
    if role == USER and (kind == COMPLAINT or not types[kind]):
        return "is nothing that a customer tells of"
    return ""


def _types(askers: Sequence[None]) -> list[Types]:
    """In a thread, once for all who ask at this moment."""
    try:
        return [snapshot.current().activity_types] * len(askers)
    except sql.AWAY as error:
        raise DatabaseUnavailable from error


_askings: WeakKeyDictionary[asyncio.AbstractEventLoop, Gathering[None, Types]] = WeakKeyDictionary()


def _asking() -> Gathering[None, Types]:
    """The one of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _askings:
        _askings[loop] = Gathering(_types, moment=0, name="event-types")
    return _askings[loop]
