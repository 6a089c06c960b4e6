"""JSON schemas of the RPA API."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from ninja import Field, Schema
from pydantic import AfterValidator

from rpa_tasks.jobs.publish import MAX_DELAY
from rpa_tasks.models import JobState, LoginState
from scheduling.api.pagination import Page
from scheduling.api.schemas import Request, Text
from scheduling.api.strict_json import find_unstorable_text


def _require_storable(text: str) -> str:
    if odd := find_unstorable_text(text):
        raise ValueError(odd)
    return text


ShortText = Annotated[str, Field(max_length=200), AfterValidator(_require_storable)]
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


class ReceiptOut(Schema):
    task_id: UUID
    duplicate: bool
    state: str


class JobFilters(Page):
    platform: Text = ""
    shop: Text = ""
    task_type: Text = ""
    state: JobState | None = None


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
    parked: str
    priority: str
    dedupe_key: str
    requests: int
    source: str
    touch: UUID | None
    due_at: datetime
    planned_at: datetime
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
