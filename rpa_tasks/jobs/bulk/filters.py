"""Filter the list of jobs, for its page and for bulk actions."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from django.db.models import Q, TextField
from django.db.models.functions import Cast
from django.utils.timezone import now

from rpa_tasks.models import Flow, Job, Shop
from scheduling.models import WAITING
from scheduling.operations.bulk_actions import FilteredList, compare_number, compare_value

UNFINISHED = (*WAITING, "running")
SEARCHED = 20_000  #: latest jobs whose payloads a search reads


def filter_job_status(value: str, as_of: datetime | None = None) -> Q:
    """Filter jobs that could start if a slot were free, or whose due date has passed: at `as_of`, or now.

    Raises:
        ValueError: the value is unknown.
    """
    at = as_of or now()
    meant = {
        "": Q(),
        "due": Q(state="scheduled", paused_by="", due_at__lte=at) | Q(state="queued"),
        "late": Q(state__in=UNFINISHED, deadline__lt=at),
    }
    if value not in meant:
        raise ValueError(value)
    return meant[value]


def filter_jobs_of_platform(value: str) -> Q:
    """Filter by the ids of the platform's shops, which use an index."""
    if not value:
        return Q()
    return Q(shop_id__in=list(Shop.objects.filter(platform=int(value)).values_list("pk", flat=True)))


def filter_jobs_of_task_type(value: str) -> Q:
    if not value:
        return Q()
    return Q(flow_id__in=list(Flow.objects.filter(task_type=value).values_list("pk", flat=True)))


def filter_jobs_by_key(value: str) -> Q:
    """Find complete ids and keys only."""
    term = value.strip()
    if not term:
        return Q()
    try:
        uuid = UUID(term)
    except ValueError:
        return Q(shop__shop_id=term) | Q(dedupe_key=term)
    return Q(pk=uuid) | Q(root_id=uuid) | Q(touch_key=uuid)


def filter_jobs_by_words(value: str, as_of: datetime | None = None) -> Q:
    """Find complete ids and keys, or words of the payloads of the latest `SEARCHED` jobs before `as_of`.

    For requesters who may read payloads: with it another one could find a hidden value letter by letter.
    """
    term = value.strip()
    if not term:
        return Q()
    latest = Job.objects.filter(created_at__lte=as_of) if as_of else Job.objects.all()
    read = Job.objects.filter(pk__in=latest.order_by("-pk").values("pk")[:SEARCHED])
    with_words = read.annotate(text=Cast("payload", TextField())).filter(text__icontains=term)
    return filter_jobs_by_key(term) | Q(pk__in=with_words.values("pk"))


JOB_ROWS = FilteredList(
    Job,
    "created_at",
    {
        "state__exact": compare_value("state"), "platform": filter_jobs_of_platform,
        "shop__id__exact": compare_number("shop_id"), "task_type": filter_jobs_of_task_type,
        "reason": compare_value("reason"), "priority__exact": compare_number("priority"), "q": filter_jobs_by_key,
    },
    ("created_at",),
    {},
    {"status": filter_job_status, "payload": filter_jobs_by_words},
)  # fmt: skip
