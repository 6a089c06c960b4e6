"""Publish, read and cancel jobs."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

from django.db.models import OuterRef, Prefetch, Q, QuerySet, Subquery
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.timezone import now
from ninja import Field, Query, Router, Schema
from ninja.responses import Status
from pydantic import AfterValidator

from rpa_tasks.jobs import queries
from rpa_tasks.jobs.publish import (
    MAX_DELAY,
    BacklogFull,
    PublishRequest,
    PublishResult,
    Receipt,
    publish_job,
    publish_many,
    request_cancel,
)
from rpa_tasks.jobs.queries import LEAVES_FAILED_TASKS
from rpa_tasks.models import Evidence, Job, JobState, Platform, Run, Shop
from rpa_tasks.worker.runner import unpack_text
from scheduling import sql
from scheduling.api.auth import ApiKeyAuth, build_api_key_actor, charge_in_thread, get_principal, require_scope
from scheduling.api.bulk_actions import BulkActionOut
from scheduling.api.schemas import (
    ActionIn,
    FieldErrorOut,
    Instant,
    Page,
    Problem,
    ProblemOut,
    Request,
    Text,
    Words,
    build_page,
    check_storable,
    limit_list_time,
)
from scheduling.error_text import ErrorText as _
from scheduling.errors import InvalidInput, NotFound
from scheduling.models import Priority, Scope
from scheduling.operations import bulk_actions
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
    state: Annotated[JobState, Field(strict=False)] | None = None
    reason: Text = ""
    priority: PriorityName | None = None
    status: Literal["due", "late", ""] = ""
    q: Words = ""
    payload: Words = ""


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

    @staticmethod
    def resolve_url(row: Evidence) -> str:
        return reverse("api:rpa_evidence", args=[row.run.job_id, row.pk])


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

    @staticmethod
    def resolve_pool_wait_seconds(row: Run) -> float | None:
        return row.pool_wait.total_seconds() if row.pool_wait is not None else None


class JobBriefOut(Schema):
    task_id: UUID
    delivery_key: UUID = Field(alias="root_id")
    retry_of: UUID | None
    retried_as: UUID | None
    platform: str = Field(alias="shop.platform.key")
    shop_id: str = Field(alias="shop.shop_id")
    task_type: str = Field(alias="flow.task_type")
    state: str
    reason: str
    priority: str
    dedupe_key: str
    requests: int
    source: str
    touch: UUID | None = Field(alias="touch_key")
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

    @staticmethod
    def resolve_priority(row: Job) -> str:
        return Priority(row.priority).name.lower()


class JobOut(JobBriefOut):
    payload: Any
    result: Any
    runs: list[RunOut] = Field(alias="shown_runs")


class JobsOut(Schema):
    items: list[JobBriefOut]
    next: str | None


PUBLISH, READ, OPERATE = ApiKeyAuth("rpa.publish"), ApiKeyAuth("rpa.read"), ApiKeyAuth("rpa.operate")
router = Router(tags=["RPA"], auth=READ)
PROBLEMS = (400, 401, 403, 404, 409, 413, 422, 429, 503)


@router.post("/rpa/jobs", auth=PUBLISH, response={(200, 202): ReceiptOut, PROBLEMS: ProblemOut})
def publish(request: HttpRequest, wish: JobIn) -> Status[dict[str, Any]]:
    """Publish a job for a shop. While a job of the same shop, task type and `dedupe_key` waits (also for a retry), the
    request merges into it: latest payload, highest priority, earliest time. A flow with a window starts no second job
    in that time. In both cases the status is 200, and the response has `duplicate`, the job and `because`. Without a
    `dedupe_key` the flow decides which requests are of the same kind. A request with an empty one always starts a job.
    """
    try:
        with sql.brief_lock_waits():
            receipt = publish_job(_build_publish_request(wish, build_api_key_actor(request).name))
    except BacklogFull as refused:
        raise Problem(429, str(refused), retry_after=refused.retry_after) from refused
    return Status(200 if receipt.duplicate else 202, _serialize_receipt(receipt))


@router.post("/rpa/jobs/batch", auth=PUBLISH, response={200: JobResultsOut, PROBLEMS: ProblemOut})
def publish_batch(request: HttpRequest, wish: JobsIn) -> dict[str, Any]:
    """Publish 1 to 500 jobs, each on its own. `results` has one entry for each job, in the same order, with the
    `status` that it would have alone: 202, 200 (`duplicate`), 422 (`errors`), 429 (a backlog is full), 503 (busy:
    repeat). A request that is no valid batch stores nothing, nor does one above the rate of the key (429). To repeat a
    batch is safe for jobs that merge."""
    charge_in_thread(get_principal(request), "jobs", len(wish.jobs))
    actor = build_api_key_actor(request).name
    results = publish_many([_build_publish_request(each, actor) for each in wish.jobs])
    return {"results": [_serialize_result(each) for each in results]}


def _serialize_result(result: PublishResult) -> dict[str, Any]:
    if isinstance(result, Receipt):
        return {"status": 200 if result.duplicate else 202} | _serialize_receipt(result)
    if isinstance(result, InvalidInput):
        return {"status": 422, "errors": [{"field": each.field, "message": each.message} for each in result.errors]}
    if isinstance(result, BacklogFull):
        return {"status": 429, "errors": [{"field": "shop_id", "message": str(result)}]}
    return {"status": 503, "errors": [{"field": "", "message": "the database is busy; repeat this job"}]}


def _build_publish_request(wish: JobIn, source: str) -> PublishRequest:
    return PublishRequest(
        platform=wish.platform,
        shop_id=wish.shop_id,
        task_type=wish.task_type,
        payload=wish.payload,
        priority=Priority[wish.priority.upper()],
        delay=timedelta(seconds=wish.delay_seconds),
        not_before=wish.not_before,
        deadline=wish.due_at,
        dedupe_key=wish.dedupe_key,
        source=source,
    )


def _serialize_receipt(receipt: Receipt) -> dict[str, Any]:
    return asdict(receipt) | {"because": receipt.because or None}


@router.post("/rpa/jobs/bulk", auth=OPERATE, response={202: BulkActionOut, PROBLEMS: ProblemOut})
def act_on_matching(request: HttpRequest, wish: BulkJobsIn) -> Status[Any]:
    """Apply an action to all jobs that match now, at `per_second`. `priority` and `move` need their value in `given`.
    The filter `payload` needs the scope `rpa.read`, the action `run_again` needs `rpa.publish`. With the scope
    `failed-tasks` it retries the open failed task of a job, without it leaves that open (`leaves_failed_tasks`).
    `GET /bulk-actions/{id}` returns the progress."""
    if wish.filter.payload:
        require_scope(request, Scope.RPA_READ.value)
    given = wish.given.model_dump(exclude_none=True)
    if wish.action == "run_again":
        require_scope(request, Scope.RPA_PUBLISH.value)
        if Scope.FAILED_TASKS.value not in get_principal(request).granted_scopes:
            given |= LEAVES_FAILED_TASKS
    with limit_list_time():
        rows = Job.objects.filter(_filter_matching_jobs(wish.filter))
    chosen = {name: str(value) for name, value in wish.filter.model_dump().items() if value}
    actor = build_api_key_actor(request, wish.reason)
    return Status(202, bulk_actions.start_bulk_action(
        f"job.{wish.action}", rows, actor, chosen=chosen, per_second=wish.per_second, given=given,
    ))  # fmt: skip


def _filter_matching_jobs(wish: MatchingJobsIn) -> Q:
    if wish.platform and not Platform.objects.filter(key=wish.platform).exists():
        raise InvalidInput.of("filter.platform", _("there is no platform “%(name)s”", name=wish.platform))
    if wish.shop:
        of_platform = {"platform__key": wish.platform} if wish.platform else {}
        found = Shop.objects.filter(shop_id=wish.shop, **of_platform).count()
        if found != 1:
            problem = (
                "names shops of several platforms; add the platform"
                if found
                else _("there is no shop “%(name)s”", name=wish.shop)
            )
            raise InvalidInput.of("filter.shop", problem)
    wanted = queries.filter_jobs(
        wish.platform, wish.shop, wish.task_type, state=wish.state, reason=wish.reason,
        priority=Priority[wish.priority.upper()] if wish.priority else None,
    )  # fmt: skip
    wanted &= queries.filter_job_status(wish.status, now()) & queries.filter_jobs_by_key(wish.q)
    return wanted & queries.filter_jobs_by_words(wish.payload)


@router.get("/rpa/jobs", response={200: JobsOut, PROBLEMS: ProblemOut})
def list_jobs(request: HttpRequest, filters: Query[JobFilters]) -> dict[str, Any]:
    """List jobs, newest first. `shop` is a shop id; `platform` makes it unique. A list that takes too long returns
    503: filter by a shop then."""
    with limit_list_time():
        found = select_jobs().defer("payload", "result")  # each may be as long as a page
        found = found.filter(
            queries.filter_jobs(filters.platform, filters.shop, filters.task_type, state=filters.state)
        )
        if before := filters.before():
            found = found.filter(pk__lt=before)
        rows = list(found.order_by("-pk")[: filters.limit + 1])
        return build_page(rows, [row.task_id for row in rows], filters.limit)


@router.get("/rpa/jobs/{task_id}", response={200: JobOut, PROBLEMS: ProblemOut})
def get_job(request: HttpRequest, task_id: UUID) -> Any:
    """Return one job with all runs and their evidence."""
    return _find_job(task_id)


@router.post("/rpa/jobs/{task_id}/cancel", auth=OPERATE, response={200: JobOut, PROBLEMS: ProblemOut})
def cancel_job(request: HttpRequest, task_id: UUID) -> Any:
    """Cancel a job. A waiting job ends at once. A running job gets `cancel_requested_at`, and its node ends it within
    seconds. 409 if the job has ended. A key without `rpa.read` gets no payload, result or runs."""
    with sql.brief_lock_waits():
        request_cancel(task_id, by=build_api_key_actor(request).name)
    row = _find_job(task_id)
    if Scope.RPA_READ.value not in get_principal(request).granted_scopes:
        row.payload = row.result = None
        row.shown_runs = []
    return row


def _find_job(task_id: UUID) -> Any:
    """Return a job with its retry, runs and evidence."""
    evidence = Prefetch("runs__evidence", Evidence.objects.defer("content").order_by("pk"))
    row = select_jobs().prefetch_related(evidence).filter(pk=task_id).first()
    if row is None:
        raise NotFound(f"There is no job {task_id}.")
    row.shown_runs = row.runs.all()
    return row


def select_jobs() -> QuerySet[Any]:
    """Return jobs, each with the one that was published as its retry."""
    again = Job.objects.filter(retry_of=OuterRef("pk")).values("pk")
    return Job.objects.select_related("shop__platform", "flow").annotate(retried_as=Subquery(again))


@router.get("/rpa/jobs/{task_id}/evidence/{evidence_id}", url_name="rpa_evidence", response={PROBLEMS: ProblemOut})
def get_evidence(request: HttpRequest, task_id: UUID, evidence_id: int) -> HttpResponse:
    """Download evidence of a failed run: a screenshot, the page's HTML, or its log."""
    row = Evidence.objects.filter(pk=evidence_id, run__job_id=task_id).first()
    if row is None:
        raise NotFound(f"There is no such evidence of job {task_id}.")
    return serve_evidence(row, task_id, "attachment")


PICTURES = {b"\x89PNG\r\n\x1a\n": ("image/png", "png"), b"\xff\xd8\xff": ("image/jpeg", "jpg")}


def serve_evidence(row: Evidence, task_id: UUID, disposition: str) -> HttpResponse:
    """Serve a piece of evidence of this job so that none of it can act in a browser.

    HTML of another site is text, and what should be a picture but is none is a file. The response has a separate origin
    and may load nothing.
    """
    content = bytes(row.content)
    kind, ending = next((named for start, named in PICTURES.items() if content.startswith(start)), ("", "bin"))
    if row.kind != Evidence.Kind.SCREENSHOT:
        content, kind, ending = unpack_text(content), "text/plain; charset=utf-8", "txt"
    response = HttpResponse(content, content_type=kind or "application/octet-stream")
    name = f"{task_id}-{row.run_id}-{row.kind}.{ending}"
    response["Content-Disposition"] = f'{disposition if kind else "attachment"}; filename="{name}"'
    response["Content-Security-Policy"] = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
    response["X-Content-Type-Options"] = "nosniff"
    return response
