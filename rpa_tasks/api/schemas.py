"""JSON schemas of the RPA API."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from ninja import Field, Schema
from pydantic import AfterValidator

from rpa_tasks.jobs.publish import MAX_DELAY
from rpa_tasks.models import JobState, LoginState
from scheduling.api.schemas import ActionIn, Instant, Page, Request, Text, check_storable
from scheduling.operations.bulk_actions import FASTEST, SLOWEST

ShortText = Annotated[str, Field(max_length=200), AfterValidator(check_storable)]
PriorityName = Literal["high", "normal", "low"]


class JobIn(Request):
    platform: Text
    shop_id: Text
    task_type: Text
    payload: dict[str, Any] = {}
    priority: PriorityName = "normal"
    delay_seconds: Annotated[float, Field(ge=0, le=MAX_DELAY.total_seconds())] = 0
    #: The business key within shop and task type: while a job of it waits, another request merges into that one.
    #: Absent: the flow chooses (`dedupe_by`). Empty: the request merges with nothing.
    dedupe_key: ShortText | None = None
    #: The earliest start, beside `delay_seconds`. The past means at once.
    not_before: Instant | None = None
    #: When the job is to be done. It starts as soon as it can; a job that is not done by then is late.
    due_at: Instant | None = None


MOST_AT_ONCE = 500


class JobsIn(Request):
    jobs: Annotated[list[JobIn], Field(min_length=1, max_length=MOST_AT_ONCE)]


class ReceiptOut(Schema):
    """`because` of a duplicate: its job waits, runs, or the window of the flow has not ended."""

    task_id: UUID
    duplicate: bool
    state: str
    because: Literal["waiting", "running", "window"] | None
    window_ends_at: datetime | None


class FieldErrorOut(Schema):
    field: str
    message: str


class JobResultOut(Schema):
    """The answer to one job of a batch: the status that it would have alone, and a receipt or errors."""

    status: int
    task_id: UUID | None = None
    duplicate: bool | None = None
    state: str | None = None
    because: Literal["waiting", "running", "window"] | None = None
    window_ends_at: datetime | None = None
    errors: list[FieldErrorOut] = []


class JobResultsOut(Schema):
    results: list[JobResultOut]


class JobFilters(Page):
    platform: Text = ""
    shop: Text = ""
    task_type: Text = ""
    state: JobState | None = None


class MatchingJobsIn(Request):
    """A missing filter matches any value. `payload` are words of the payload."""

    platform: Text = ""
    shop: Text = ""
    task_type: Text = ""
    state: JobState | None = None
    reason: Text = ""
    priority: PriorityName | None = None
    status: Literal["due", "late", ""] = ""
    q: Text = ""
    payload: Text = ""


class GivenIn(Request):
    priority: PriorityName | None = None
    node: Text | None = None


class BulkJobsIn(ActionIn):
    action: Literal["cancel", "run_again", "priority", "move"]
    filter: MatchingJobsIn
    given: GivenIn = GivenIn()
    per_second: Annotated[float, Field(ge=SLOWEST, le=FASTEST)] | None = None


class EvidenceOut(Schema):
    kind: str
    url: str
    created_at: datetime


class RunOut(Schema):
    number: int
    lease_no: int
    node: str
    started_at: datetime
    ended_at: datetime | None
    pool_wait_seconds: float | None
    outcome: str
    reason: str
    exit_code: int | None
    detail: str
    evidence: list[EvidenceOut]


class JobBriefOut(Schema):
    task_id: UUID
    delivery_key: UUID
    retry_of: UUID | None
    retried_as: UUID | None
    platform: str
    shop_id: str
    task_type: str
    state: str
    reason: str
    paused_by: str
    priority: str
    dedupe_key: str
    requests: int
    source: str
    touch: UUID | None
    due_at: datetime
    planned_at: datetime
    deadline: datetime | None
    created_at: datetime
    settled_at: datetime | None
    attempt: int
    failures: int
    node: str
    progress: float | None
    progress_message: str
    cancel_requested_at: datetime | None


class JobOut(JobBriefOut):
    payload: Any
    result: Any
    runs: list[RunOut]


class JobsOut(Schema):
    items: list[JobBriefOut]
    next: str | None


class ShopFilters(Page):
    platform: Text = ""
    login: LoginState | None = None


class ShopOut(Schema):
    platform: str
    shop_id: str
    name: str
    login: str
    login_lost_at: datetime | None
    paused: bool
    platform_paused: bool
    breaker_open_until: datetime | None
    dedicated_queue: bool
    waiting: int
    running: UUID | None
    last_served_at: datetime | None
    last_success_at: datetime | None


class ShopsOut(Schema):
    items: list[ShopOut]
    next: str | None


class RebalanceIn(Request):
    """Filters of shops that leave their preferred node. All given ones must match; `platform` or `node` is required."""

    platform: Text = ""
    shop_ids: Annotated[list[Text], Field(max_length=5_000)] = []
    node: Text = ""


class RebalancedOut(Schema):
    released: int
    running: int
