"""JSON schemas of the API. Requests refuse unknown members, so that a typing error is not ignored."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

from ninja import Field, Schema
from pydantic import AfterValidator, BeforeValidator, ConfigDict

from scheduling.error_text import ErrorText as _
from scheduling.policy.profile import UNSTORABLE
from scheduling.strict_text import find_unstorable_text


def check_storable(text: str) -> str:
    """Refuse text that PostgreSQL cannot store. Raises `ValueError`."""
    if problem := find_unstorable_text(text):
        raise ValueError(problem)
    return text


def check_characters(text: str) -> str:
    """Refuse control characters, surrogates and noncharacters. Raises `ValueError`."""
    if not text.isprintable() and (found := UNSTORABLE.search(text)):  # the first question is cheap
        raise ValueError(_("contains %(character)s", character=f"U+{ord(found[0]):04X}"))
    return text


EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
LATEST = timedelta(minutes=5)
_RFC3339 = re.compile(r"\d{4}-\d{2}-\d{2}[Tt]\d{2}:\d{2}:\d{2}(\.\d{1,18})?([Zz]|[+-]\d{2}:\d{2})\Z", re.ASCII)


def parse_instant(value: Any) -> datetime:
    """Return an instant in UTC. Raises `ValueError` for what is no text of RFC 3339 with its offset."""
    try:
        if not isinstance(value, str) or not _RFC3339.match(value):
            raise ValueError
        return datetime.fromisoformat(value.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError("must be an RFC 3339 time with its offset, such as 2026-01-31T08:00:00+08:00") from None


def check_past(at: datetime) -> datetime:
    """Return an instant of the past. Clocks of clients may be 5 minutes ahead. Raises `ValueError`."""
    if at > datetime.now(UTC) + LATEST:
        raise ValueError("is more than 5 minutes ahead")
    if at < EARLIEST:
        raise ValueError("is before 1970")
    return at


Instant = Annotated[datetime, BeforeValidator(parse_instant)]
PastInstant = Annotated[Instant, AfterValidator(check_past)]
Text = Annotated[str, Field(max_length=255), AfterValidator(check_storable)]
Reason = Annotated[str, Field(max_length=500), AfterValidator(check_storable)]


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


class EventResultOut(Schema):
    index: int
    status: Literal["accepted", "duplicate", "refused"]
    touches: list[UUID]
    errors: list[FieldErrorOut]


class PartialOut(Schema):
    """The answer with `partial=true`: a result for each event, in their order."""

    results: list[EventResultOut]


class EventRefOut(Schema):
    source: str
    id: str
    type: str
    trace_id: str


class VerdictOut(Schema):
    at: datetime
    decision: str
    rule: str
    rule_version: int | None
    observed: str
    limit: str
    next_eligible_at: datetime | None


class AttemptOut(Schema):
    number: int
    started_at: datetime
    ended_at: datetime | None
    outcome: str
    reason: str
    detail: str
    status: int | None
    subject: str
    body: str


class ReceiptOut(Schema):
    type: str
    time: datetime
    received_at: datetime
    detail: str


class TouchOut(Schema):
    task_id: UUID
    delivery_key: UUID
    retry_of: UUID | None
    retried_as: UUID | None
    event: EventRefOut
    node: str
    user_id: str
    chat_id: str
    state: str
    reason: str
    paused_by: str
    priority: int
    due_at: datetime
    planned_at: datetime
    expires_at: datetime
    created_at: datetime
    settled_at: datetime | None
    attempt: int
    content_type: str
    verdicts: list[VerdictOut]
    attempts: list[AttemptOut]
    receipts: list[ReceiptOut]


class TouchesOut(Schema):
    items: list[TouchOut]
    next: str | None


class PreviewVerdictOut(Schema):
    decision: str
    rule: str
    rule_version: int | None
    observed: str
    limit: str
    next_eligible_at: datetime | None


class PreviewStepOut(Schema):
    step: str  #: `delay`, `at`, `not_before`, `send_window` or `spread`
    at: datetime


class PreviewFollowerOut(Schema):
    node: str
    trigger: str


class PreviewTouchOut(Schema):
    node: str
    planned: bool  #: false if the node's condition plans no touch
    channel: str
    template: str
    template_version: int
    content_type: str
    due_at: datetime
    steps: list[PreviewStepOut]
    expires_at: datetime
    verdict: PreviewVerdictOut
    subject: str
    body: str
    locale: str
    problem: str
    followed_by: list[PreviewFollowerOut]


class PreviewOut(Schema):
    items: list[PreviewTouchOut]


class PauseIn(Request):
    scope: Text
    reason: Annotated[str, Field(max_length=200), AfterValidator(check_storable)] = ""


class PauseOut(Schema):
    scope: str
    reason: str
    paused_at: datetime


class ResumeIn(Request):
    scope: Text
    reason: Reason = ""


class ResumeOut(Schema):
    scope: str
    resumed: bool


class CommentOut(Schema):
    author: str
    text: str
    commented_at: datetime


class DifferenceOut(Schema):
    before: Any
    after: Any


class FailedTaskOut(Schema):
    id: UUID
    origin: str
    task_id: UUID | None
    delivery_key: UUID | None
    failure: str
    reason: str
    detail: str
    channel: str
    fingerprint: str
    state: str
    failed_at: datetime
    payload: Any
    attempts: Any
    acted_at: datetime | None
    actor: str
    action_reason: str
    retried_as: UUID | None
    difference: DifferenceOut | None
    assignee: str | None
    comments: list[CommentOut]


class FailedTasksOut(Schema):
    items: list[FailedTaskOut]
    next: str | None


class ActionIn(Request):
    reason: Reason = ""


class RetryIn(ActionIn):
    as_new: bool = False
    confirm: bool = False
    payload: dict[str, Any] | None = None


class CommentIn(Request):
    text: Annotated[str, Field(min_length=1, max_length=2_000), AfterValidator(check_storable)]


class AssignIn(Request):
    user: Text | None


class ResolveIn(ActionIn):
    delivered: bool
