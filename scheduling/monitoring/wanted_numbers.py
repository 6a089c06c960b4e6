"""Answer how many workers, execution nodes and watchers are wanted, for `/metrics` and `GET /api/v1/scaling`.

The memory of each kind is one key in Redis: the last answer, and the needs of the last minutes. All processes give the
same answer for `ANSWER_KEPT` seconds. Other apps measure their kinds through `settings.SCALING`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import structlog
from django.conf import settings
from django.utils.module_loading import import_string
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduling import sql
from scheduling.db_timeouts import Deadline
from scheduling.monitoring.worker_reports import list_worker_reports
from scheduling.policy.scaling import DueWork, Limits, Need, Scale, WorkerDemand, compute_needed_workers, settle_wanted
from scheduling.queue_names import TOUCH_QUEUES
from scheduling.redis_client import connect_once

log = structlog.get_logger(__name__)

ANSWER_KEPT = 5.0  #: seconds, by the database's clock
MEMORY_KEPT_MS = 86_400_000  #: the longest hold
MOST_DUE = 100_000  #: due touches that are counted of each priority in the table, and of all at the broker
RATE_SPAN = 10.0  #: seconds over which settled touches are counted

#: Store the new memory if the old one is still there. Returns the memory that holds: of two processes one wins.
_SWAP = """
local held = redis.call('GET', KEYS[1]) or ''
if held ~= ARGV[1] then return held end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return ARGV[2]
"""

Measure = Callable[[Deadline], tuple[int, Need]]  #: returns the running number and the need


def read_scaling(deadline: Deadline) -> dict[str, Scale]:
    """Return the answer for each kind. A kind whose source does not answer has no wanted number.

    Raises:
        OperationalError: PostgreSQL does not answer.
    """
    with deadline.limit_queries(settings.TIMEOUTS.metrics_statement):
        now = sql.now().timestamp()
    keys = [f"at:scaling:{kind}" for kind in settings.SCALING]
    try:
        found: list[Any] = connect_once(settings.REDIS_URL).mget(keys)
    except Exception as error:
        log.warning("scaling_unanswered", error=str(error))
        return {kind: _answer_without_source(kind) for kind in settings.SCALING}
    held = [text.decode() if text else "" for text in found]
    return {kind: _answer_kind(kind, text, now, deadline) for kind, text in zip(settings.SCALING, held, strict=True)}


def _answer_kind(kind: str, held: str, now: float, deadline: Deadline) -> Scale:
    limits = _get_limits(kind)
    known: dict[str, Any] = json.loads(held) if held else {"at": 0.0, "needs": []}
    if 0 <= now - known["at"] < ANSWER_KEPT:
        return Scale(**known["answer"])
    try:
        running, need = import_string(settings.SCALING[kind])(deadline)
        answer, needs = settle_wanted(need, running, known["needs"], limits, now)
        text = json.dumps({"at": now, "needs": needs, "answer": asdict(answer)})
        kept: Any = connect_once(settings.REDIS_URL).eval(_SWAP, 1, f"at:scaling:{kind}", held, text, MEMORY_KEPT_MS)
    except Exception as error:
        log.warning("scaling_unanswered", kind=kind, error=str(error))
        return _answer_without_source(kind)
    return answer if kept == text.encode() else Scale(**json.loads(kept or text)["answer"])


def _answer_without_source(kind: str) -> Scale:
    limits = _get_limits(kind)
    return Scale(None, None, limits.minimum, limits.maximum, "no_answer", "a source did not answer: keep what runs")


def _get_limits(kind: str) -> Limits:
    least, most = settings.SCALING_LIMITS[kind]
    return Limits(least, most, settings.AFTERTOUCH_SCALE_DOWN_AFTER.total_seconds())


class ScalingCollector(Collector):
    asks_database = False  #: it bounds its own statements, because it also reads Redis

    def __init__(self) -> None:
        self.deadline: Deadline | None = None

    def collect(self) -> Iterator[Metric]:
        answers = read_scaling(self.deadline or Deadline(settings.TIMEOUTS.metrics))
        for kind, answer in answers.items():
            if answer.wanted is not None:
                label = kind.replace("_", " ")
                yield GaugeMetricFamily(
                    f"aftertouch_{kind}_wanted", f"Number of {label} that the load needs.", value=answer.wanted
                )


# --- workers ------------------------------------------------------------------------------------------------------


def measure_workers(deadline: Deadline) -> tuple[int, Need]:
    """Return the running workers that send touches and the need for them. One statement, two partial indexes.

    Raises:
        RedisError: Redis does not answer.
        OperationalError: PostgreSQL does not answer.
    """
    reports = [each for each in list_worker_reports() if set(each.queues) & set(TOUCH_QUEUES.values())]
    with deadline.limit_queries(settings.TIMEOUTS.metrics_statement):
        found = sql.rows(_DUE_TOUCHES, {"most": MOST_DUE})
        ((settled,),) = sql.rows(_SETTLED, {"span": RATE_SPAN, "most": MOST_DUE})
    due = {priority: DueWork(count, oldest) for priority, count, oldest in found}
    processes = sum(report.processes for report in reports)
    busy = sum(report.processes * report.busy for report in reports) / processes if processes else 0.0
    need = compute_needed_workers(
        WorkerDemand(len(reports), busy, settled / RATE_SPAN, [due.get(priority, DueWork()) for priority in range(3)])
    )
    return len(reports), need


_DUE_TOUCHES = """
SELECT priority, count(*), GREATEST(0, extract(epoch FROM statement_timestamp() - min(due_at)))::float8
FROM (
    (SELECT level AS priority, touch.due_at FROM unnest(ARRAY[0, 1, 2]) AS level CROSS JOIN LATERAL (
         SELECT due_at FROM scheduling_touch_live
         WHERE state = 'scheduled' AND paused_by = '' AND priority = level AND due_at <= statement_timestamp()
         ORDER BY due_at LIMIT %(most)s) AS touch)
    UNION ALL
    (SELECT priority, due_at FROM (
        SELECT priority, due_at, state FROM scheduling_touch_live
        WHERE state IN ('queued', 'running') ORDER BY lease_until LIMIT %(most)s
     ) AS leased WHERE state = 'queued' AND due_at <= statement_timestamp())
) AS due GROUP BY 1
"""

_SETTLED = """
SELECT count(*) FROM (
    SELECT FROM scheduling_touch_ended
    WHERE settled_at > statement_timestamp() - make_interval(secs => %(span)s) LIMIT %(most)s
) AS settled
"""
