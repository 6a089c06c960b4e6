"""Measure the complaint rates of texts: by node, template and version, of the last seven days and of the seven before.

Two weeks hold millions of delivered touches, too many to read every minute. Each hour is therefore counted once and
stays in Redis, for all processes: the touches delivered in it, and the complaints received in it. After a loss of Redis
the hours are counted again, about a second of work at a time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

from django.conf import settings
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduling import sql
from scheduling.db_timeouts import Deadline
from scheduling.experiments.rollout_stats import MAX_CLOCK_LAG
from scheduling.ids import first_id_at
from scheduling.models import Node, Template
from scheduling.monitoring.statistics import HOUR, HourlyCache
from scheduling.monitoring.worker_reports import connect_once
from scheduling.redis_client import Redis

WEEK = timedelta(days=7)
SECONDS = 3600  #: of an hour
HOURS = "at:complaints"  #: hash by hour, in seconds: counts of `_DELIVERED` and of `_COMPLAINED`
#: An hour is final then: no transaction that writes counted rows is open for longer, and no clock further behind.
CLOSED = HourlyCache.CLOSED + MAX_CLOCK_LAG
FILL_SECONDS = 1.0  #: of one call, for hours that are not counted yet
MOST_TEXTS = 200  #: texts that are reported: those with most touches
LEAST_TOUCHES = 200  #: a week with fewer touches shows no rate that can be compared
LEAST_RATE = 0.005  #: a lower rate is no alert
RISE = 2.0  #: times the earlier rate


@dataclass(frozen=True, slots=True)
class TextComplaints:
    """Complaints about a version of a template at a node."""

    node: str
    template: str
    version: int
    touches: int  #: delivered within the last seven days
    rate: float  #: share of them with a complaint
    #: Rate of the seven days before: of this text, or of its node if the text had fewer than `LEAST_TOUCHES`. None: the
    #: node had fewer too.
    before: float | None

    @property
    def is_rising(self) -> bool:
        limit = None if self.before is None else max(LEAST_RATE, RISE * self.before)
        return limit is not None and self.touches >= LEAST_TOUCHES and self.rate > limit


def read_complaint_rates(deadline: Deadline) -> list[TextComplaints] | None:
    """Return the rates of the texts with most touches, without the current hour; None while hours are left to count.

    Raises:
        RedisError: Redis does not answer.
        OperationalError: PostgreSQL does not answer in time.
    """
    server = connect_once(settings.REDIS_URL)
    stored: Any = server.hgetall(HOURS)
    counted: dict[int, Any] = {int(hour): json.loads(counts) for hour, counts in stored.items()}
    hours: list[int] = []
    try:
        with deadline.limit_queries(settings.TIMEOUTS.metrics_statement):
            until = int((sql.now() - CLOSED).timestamp()) // SECONDS * SECONDS
            hours = [until - SECONDS * number for number in range(1, 2 * WEEK // HOUR + 1)]
            if not _count_missing_hours(hours, counted):
                return None
            nodes = dict(Node.objects.values_list("pk", "key"))
            templates = dict(Template.objects.values_list("pk", "key"))
    finally:  # also if PostgreSQL did not answer in time: the next call continues
        if fresh := counted.keys() - set(map(int, stored)):
            _store_hours(server, {str(hour): counted[hour] for hour in fresh}, counted.keys() - set(hours))
    rates = _compute_rates({hour: counted[hour] for hour in hours}, until - int(WEEK.total_seconds()))
    return [
        TextComplaints(nodes[node], templates[template], version, touches, rate, before)
        for (node, template, version), touches, rate, before in rates
        if node in nodes and template in templates
    ][:MOST_TEXTS]


def _count_missing_hours(hours: list[int], counted: dict[int, Any]) -> bool:
    """Count the hours that `counted` lacks, latest first. Return False if the time was over before."""
    ends_at = monotonic() + FILL_SECONDS
    for hour in hours:
        if hour not in counted:
            if monotonic() > ends_at:
                return False
            since, until = (datetime.fromtimestamp(at, UTC) for at in (hour, hour + SECONDS))
            received = {"first": first_id_at(since), "next": first_id_at(until), "since": since - 2 * WEEK}
            counted[hour] = [
                sql.rows(_DELIVERED, {"since": since, "until": until}),
                sql.rows(_COMPLAINED, received, replan=True),
            ]
    return True


def _store_hours(server: Redis, fresh: dict[str, Any], over: set[int]) -> None:
    with server.pipeline(transaction=False) as pipe:
        for hour, counts in fresh.items():
            pipe.hset(HOURS, hour, json.dumps(counts))
        if over:
            pipe.hdel(HOURS, *map(str, over))
        pipe.expire(HOURS, 2 * WEEK)
        pipe.execute()


def _compute_rates(counted: dict[int, Any], recent: int) -> list[tuple[tuple[int, int, int], int, float, float | None]]:
    """Return text, touches, rate and earlier rate of each text of the hours from `recent` on, by most touches."""
    touches: Counter[tuple[bool, Any]] = Counter()  # by whether they are recent and by text; also by node
    complained: Counter[tuple[bool, Any]] = Counter()
    for hour, (delivered, complaints) in counted.items():
        for node, *text, count in delivered:
            touches[hour >= recent, (node, *text)] += count
            touches[hour >= recent, node] += count
        for touch_hour, node, *text, count in complaints:
            if touch_hour in counted:
                complained[touch_hour >= recent, (node, *text)] += count
                complained[touch_hour >= recent, node] += count
    rates = []
    for (is_recent, text), count in touches.most_common():
        if is_recent and isinstance(text, tuple):
            earlier = (False, text) if touches[False, text] >= LEAST_TOUCHES else (False, text[0])
            enough = touches[earlier] >= LEAST_TOUCHES
            before = complained[earlier] / touches[earlier] if enough else None
            rates.append((text, count, min(complained[True, text] / count, 1.0), before))
    return rates


class ComplaintCollector(Collector):
    asks_database = False  #: it bounds its own statements, because it also reads Redis

    def __init__(self) -> None:
        self.deadline: Deadline | None = None

    def collect(self) -> Iterator[Metric]:
        labels = ["node", "template", "version"]
        rate = GaugeMetricFamily(
            "aftertouch_complaint_rate", "Share of touches of the last seven days with a complaint.", labels=labels
        )
        before = GaugeMetricFamily(
            "aftertouch_complaint_rate_before",
            f"The same share of the seven days before: of the text, or of its node if the text had fewer than "
            f"{LEAST_TOUCHES} touches.",
            labels=labels,
        )
        touches = GaugeMetricFamily(
            "aftertouch_complaint_touches", "Delivered touches of the last seven days.", labels=labels
        )
        for each in read_complaint_rates(self.deadline or Deadline(settings.TIMEOUTS.metrics)) or ():
            text = [each.node, each.template, str(each.version)]
            rate.add_metric(text, each.rate)
            touches.add_metric(text, each.touches)
            if each.before is not None:
                before.add_metric(text, each.before)
        yield from (rate, before, touches)


_DELIVERED = """
SELECT node_id, template_id, template_version, count(*) FROM scheduling_touch_ended
WHERE settled_at >= %(since)s AND settled_at < %(until)s AND state = 'delivered' AND template_id IS NOT NULL
GROUP BY 1, 2, 3
"""

# The first complaint about each touch. Its event is stored with it, and the id of an event grows with time.
_COMPLAINED = """
SELECT extract(epoch FROM date_trunc('hour', t.settled_at, 'UTC'))::bigint,
       t.node_id, t.template_id, t.template_version, count(*)
FROM scheduling_complaint AS c JOIN scheduling_touch_ended AS t ON t.task_id = c.touch_id
WHERE c.event_id >= %(first)s AND c.event_id < %(next)s AND t.settled_at >= %(since)s
  AND t.state = 'delivered' AND t.template_id IS NOT NULL
  AND NOT EXISTS (
      SELECT FROM scheduling_complaint AS earlier WHERE earlier.touch_id = c.touch_id AND earlier.id < c.id
  )
GROUP BY 1, 2, 3, 4
"""
