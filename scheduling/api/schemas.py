"""What the API's JSON looks like. Requests refuse members they do not know: a typo must not be taken for a wish."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from ninja import Schema
from pydantic import ConfigDict


class Request(Schema):
    model_config = ConfigDict(extra="forbid", strict=True)


class FieldErrorOut(Schema):
    field: str
    message: str


class ProblemOut(Schema):
    type: str
    title: str
    status: int
    detail: str
    errors: list[FieldErrorOut]


class EventReceiptOut(Schema):
    source: str
    id: str
    duplicate: bool
    touches: list[UUID]


class EventsOut(Schema):
    accepted: int
    duplicates: int
    touches: list[UUID]
    events: list[EventReceiptOut]


class EventIn(Schema):
    """CloudEvents 1.0. `subject` is the user id. Extension attributes are accepted and not kept."""

    specversion: str
    id: str
    source: str
    type: str
    subject: str
    time: datetime | None = None
    datacontenttype: str | None = None
    data: dict[str, Any] | None = None
