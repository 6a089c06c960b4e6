"""The page of the queues, and of the workers that handle them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import structlog
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext, gettext_lazy

from scheduling.admin.navigation import may_open_flower
from scheduling.admin.page_reads import count_within
from scheduling.app_integrations import integrations
from scheduling.db_timeouts import Deadline
from scheduling.monitoring.duration_text import describe_duration
from scheduling.monitoring.queues import QueueStats, WorkerReport, list_worker_reports, read_broker
from scheduling.monitoring.wanted_numbers import read_scaling
from scheduling.queue_names import CORE_QUEUES, RPA_QUEUES, TOUCH_QUEUES
from scheduling.redis_client import RedisError

log = structlog.get_logger(__name__)


KINDS = {
    "workers": gettext_lazy("Core workers"), "execution_nodes": gettext_lazy("Execution nodes"),
    "watchers": gettext_lazy("Watchers"),
}  # fmt: skip
#: A report is late after this time.
LATE_REPORT = timedelta(seconds=15)


def _list_workers() -> tuple[list[WorkerReport], bool]:
    """Return the reports of core workers and those of other apps, and whether Redis and PostgreSQL answered."""
    found, has_answer = [], True
    try:
        # The nodes of execution workers follow below; their own reports are for unacknowledged messages.
        found += [report for report in list_worker_reports() if not set(report.queues).isdisjoint(CORE_QUEUES)]
    except RedisError as error:
        log.warning("worker_reports_unavailable", error=str(error))
        has_answer = False
    for app in integrations():
        for lister in app.worker_lists:
            others = count_within(lister, settings.TIMEOUTS.dashboard)
            found += others or []
            has_answer = has_answer and others is not None
    return found, has_answer


def _describe_worker(worker: WorkerReport) -> dict[str, Any]:
    name, _at, host = worker.name.partition("@")
    age = timedelta(seconds=round(worker.age))
    return {
        "name": name if host else gettext("execution node"), "host": host or name, "queues": worker.queues,
        "processes": worker.processes, "running": worker.running, "is_late": age > LATE_REPORT,
        "seen": gettext("%(span)s ago") % {"span": describe_duration(age)} if age else gettext("now"),
    }  # fmt: skip


def _describe_broker(workers: Iterable[WorkerReport]) -> dict[str, Any]:
    consumers = Counter(queue for worker in workers for queue in worker.queues)
    broker = read_broker()
    if broker is None:
        return {"queues": None}
    known = {each.name for each in broker.queues}
    order = {name: place for place, name in enumerate([*CORE_QUEUES, *RPA_QUEUES])}
    rows = sorted(broker.queues, key=lambda each: (order.get(each.name, len(order)), each.name))
    rows += [QueueStats(name, 0, 0.0, None) for name in sorted(set(consumers) - known)]
    return {"queues": [_describe_queue(each, consumers) for each in rows], "refuses": broker.accepts_messages is False}


def _describe_queue(queue: QueueStats, consumers: Counter[str]) -> dict[str, Any]:
    priority = next((key for key, name in TOUCH_QUEUES.items() if name == queue.name), None)
    touches = reverse("admin:scheduling_touch_changelist")
    age = timedelta(seconds=round(queue.oldest_age or 0))
    return {
        "name": queue.name, "length": queue.length, "unacked": queue.unacked, "consumers": consumers[queue.name],
        "link": "" if priority is None else f"{touches}?state__exact=queued&priority__exact={priority}",
        "oldest": describe_duration(age) if queue.length and age else "",
        "is_unattended": bool(queue.length and not consumers[queue.name]),
    }  # fmt: skip


def workers_page(touches_admin: Any, request: HttpRequest) -> HttpResponse:
    workers, has_answer = _list_workers()
    wanted = [
        {
            "kind": KINDS.get(kind, kind), "running": scale.running, "wanted": scale.wanted,
            "is_short": scale.wanted is not None and scale.running is not None and scale.wanted > scale.running,
        }
        for kind, scale in read_scaling(Deadline(settings.TIMEOUTS.metrics)).items()
    ]  # fmt: skip
    return touches_admin.page(  # type: ignore[no-any-return]
        request,
        "ops/workers.html",
        gettext("Queues and workers"),
        read_at=now(),
        **_describe_broker(workers),
        workers=[_describe_worker(each) for each in workers],
        reports_missing=not has_answer,
        wanted=wanted,
        flower=reverse("flower") if may_open_flower(request.user) else "",
    )
