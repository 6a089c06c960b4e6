"""JSON schemas of the API, pages of lists, and problem documents (RFC 9457, `application/problem+json`).

Requests refuse unknown members, so that a typing error is not ignored. Lists are paged by key instead of counting rows,
so that page 1000 costs as much as page 1. Every exception becomes a problem document that names the wrong fields.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Literal
from uuid import UUID

import structlog
from django.conf import settings
from django.core.exceptions import TooManyFieldsSent
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from ninja import Field, NinjaAPI, Schema
from ninja.errors import HttpError, ValidationError
from psycopg.errors import QueryCanceled
from pydantic import AfterValidator, BeforeValidator, ConfigDict

from scheduling import sql
from scheduling.errors import AftertouchError, Conflict, FieldError, InvalidInput, NotFound, describe_model_error
from scheduling.models import FailedTask
from scheduling.operations.preview import PreviewedTouch
from scheduling.strict_text import ERRORS_SHOWN, PATH_SHOWN, InvalidText, find_unstorable_text

log = structlog.get_logger(__name__)


def check_storable(text: str) -> str:
    """Refuse text that PostgreSQL cannot store. Raises `ValueError`."""
    if problem := find_unstorable_text(text):
        raise ValueError(problem)
    return text


def check_not_blank(text: str) -> str:
    """Refuse spaces alone in a filter, which the search takes as no filter. Raises `ValueError`."""
    if text and not text.strip():
        raise ValueError("must not be spaces only; leave it out for any value")
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
Words = Annotated[Text, AfterValidator(check_not_blank)]
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
    id: str = Field(alias="event_id")
    type: str
    trace_id: str = Field(alias="trace.hex")


class PreviewVerdictOut(Schema):
    decision: str
    rule: str
    rule_version: int | None
    observed: str
    limit: str
    next_eligible_at: datetime | None


class VerdictOut(PreviewVerdictOut):
    at: datetime


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
    delivery_key: UUID = Field(alias="root_id")
    retry_of: UUID | None
    retried_as: UUID | None
    event: EventRefOut
    node: str = Field(alias="node.key")
    user_id: str = Field(alias="customer.user_id")
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


class PreviewStepOut(Schema):
    step: str  #: `delay`, `at`, `not_before`, `send_window` or `spread`
    at: datetime


class PreviewFollowerOut(Schema):
    node: str = Field(alias="key")
    trigger: str


class PreviewTouchOut(Schema):
    node: str = Field(alias="node.key")
    planned: bool  #: false if the node's condition plans no touch
    channel: str = Field(alias="node.channel.key")
    template: str = Field(alias="template.key")
    template_version: int = Field(alias="template.version")
    content_type: str = Field(alias="template.content_type")
    due_at: datetime
    steps: list[PreviewStepOut]
    expires_at: datetime
    verdict: PreviewVerdictOut
    subject: str
    body: str
    locale: str
    problem: str
    followed_by: list[PreviewFollowerOut] = Field(alias="followers")

    @staticmethod
    def resolve_steps(preview: PreviewedTouch) -> list[dict[str, Any]]:
        return [{"step": step, "at": at} for step, at in preview.steps]


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
    author: str = Field(alias="author_name")
    text: str
    commented_at: datetime


class DifferenceOut(Schema):
    before: Any
    after: Any


class FailedTaskOut(Schema):
    id: UUID
    origin: str
    task_id: UUID | None
    delivery_key: UUID | None = Field(alias="root_id")
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
    actor: str = Field(alias="actor_name")
    action_reason: str
    retried_as: UUID | None
    difference: DifferenceOut | None
    assignee: str | None
    comments: list[CommentOut]

    @staticmethod
    def resolve_assignee(row: FailedTask) -> str | None:
        return row.assignee.username if row.assignee else None


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


# --- problem documents ------------------------------------------------------------------------------------------------


MEDIA_TYPE = "application/problem+json"
RETRY_AFTER = 2  #: seconds of `Retry-After` while the database is unavailable or the queue is full


class Problem(AftertouchError):
    """The request cannot be answered."""

    def __init__(
        self,
        status: int,
        detail: str,
        *errors: FieldError,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.errors: Sequence[FieldError] = errors
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, round(retry_after + 0.5)))

    def response(self) -> HttpResponse:
        """Return the problem document, with at most `ERRORS_SHOWN` field errors."""
        title = HTTPStatus(self.status).phrase
        body = {
            "type": f"urn:aftertouch:problem:{title.lower().replace(' ', '-')}",
            "title": title,
            "status": self.status,
            "detail": str(self),
            "errors": [{"field": each.field, "message": each.message} for each in self.errors[:ERRORS_SHOWN]],
        }
        # ASCII, so that a lone surrogate in the request can be named in the response.
        return HttpResponse(json.dumps(body), content_type=MEDIA_TYPE, status=self.status, headers=self.headers)


def build_unavailable_problem(
    detail: str = "The database cannot be reached. Nothing is lost by sending it again.",
) -> Problem:
    """Return a 503 problem with `Retry-After`."""
    return Problem(503, detail, retry_after=RETRY_AFTER)


def register_problem_handlers(api: NinjaAPI) -> None:
    """Register the problem response for every exception of `api`."""
    api.add_exception_handler(Exception, _handle_exception)
    for known in (AftertouchError, ValidationError, HttpError, Http404):
        api.add_exception_handler(known, _handle_exception)


def _handle_exception(request: HttpRequest, error: Exception | type[Exception]) -> HttpResponse:
    problem = _convert_exception(error) if isinstance(error, Exception) else None
    if problem is None:
        log.exception("request_failed", path=request.path, exc_info=error)
        problem = Problem(500, "Something went wrong here. It has been logged.")
    return problem.response()


def _convert_exception(error: BaseException) -> Problem | None:  # noqa: C901, PLR0911 (a case for each)
    match error:
        case Problem():
            return error
        case InvalidInput():
            return Problem(422, "The input does not fit.", *error.errors)
        case NotFound():
            return Problem(404, str(error))
        case InvalidText():
            return Problem(400, f"The body is not JSON: {error}.")
        case Conflict():
            return Problem(409, str(error))
        case ValidationError():
            # Field names omit the view's argument, which clients do not know.
            return Problem(422, "The input does not fit.", *(_convert_field_error(each) for each in error.errors))
        case HttpError() if error.__cause__ is not None and (cause := _convert_exception(error.__cause__)):
            return cause  # ninja wraps what the parser raised
        case HttpError():
            return Problem(error.status_code, str(error))
        case TooManyFieldsSent():
            return Problem(400, "The query has too many parameters.")
        case Http404():
            return Problem(404, "There is no such thing.")
        case OperationalError() if sql.is_lock_timeout(error):
            log.warning("row_locked", error=str(error))
            return Problem(503, "Another transaction holds this row. Nothing is changed; send it again.", retry_after=0)
        case OperationalError() | InterfaceError():
            log.warning("database_unavailable", error=str(error))
            return build_unavailable_problem()
    return None


def _convert_field_error(raw: Mapping[str, Any]) -> FieldError:
    source, *location = raw.get("loc") or ("",)
    # The first part may be the view's argument, which is internal. For an array it names the content:
    # `sessions.1.user_id`. Ninja leaves it out of a single query parameter.
    if len(location) > 1:
        location = location if isinstance(location[1], int) else location[1:]
    elif source == "body":
        location = []
    return FieldError(".".join(map(str, location))[:PATH_SHOWN], describe_model_error(raw))


# --- pages ------------------------------------------------------------------------------------------------------------


LIST_RETRY_AFTER = 30  #: seconds of `Retry-After` for a list that took too long
LONG_LIST = "This list takes too long to read. Ask for less: a user, an event, one more filter."


@contextmanager
def limit_list_time(seconds: float | None = None, detail: str = LONG_LIST) -> Iterator[None]:
    """Limit the time of a list's statements, by default to `TIMEOUTS.list_page`. `detail` explains the 503.

    A filter that matches few rows reads the whole table, which may take minutes. Repeated requests would occupy all
    threads.

    Raises:
        Problem: 503 if a statement exceeds its limit.
    """
    try:
        with sql.limit_statement_time(seconds or settings.TIMEOUTS.list_page):
            yield
    except OperationalError as error:
        if not isinstance(error.__cause__, QueryCanceled):
            raise
        raise Problem(503, detail, retry_after=LIST_RETRY_AFTER) from error


class Page(Schema):
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Text = ""

    def before(self) -> UUID | None:
        """Return the id after which the page starts.

        Raises:
            InvalidInput: the cursor is not the `next` value of a page.
        """
        if not self.cursor:
            return None
        try:
            return UUID(bytes=base64.b64decode(self.cursor + "==", altchars=b"-_", validate=True))
        except (ValueError, binascii.Error) as error:
            raise InvalidInput.of("cursor", "is not one that a list has given out") from error


def build_page(items: Sequence[Any], ids: Sequence[UUID], limit: int, last: UUID | None = None) -> dict[str, Any]:
    """Build a page from up to `limit` + 1 items.

    There is a next page if there is one item more than `limit`, or if `last` is set. `last` is the id up to which a
    bounded search has read.
    """
    if len(items) > limit:
        last = ids[limit - 1]
    return {
        "items": list(items[:limit]),
        "next": base64.urlsafe_b64encode(last.bytes).decode().rstrip("=") if last else None,
    }
