"""Measure the complaint rates of texts: by node, template and version, of the last seven days and of the seven before.

Two weeks hold millions of delivered touches, too many to read every minute. Each hour is therefore counted once and
stays in Redis, for all processes: the touches delivered in it, and the complaints received in it. After a loss of Redis
the hours are counted again, about a second of work at a time.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

from django.conf import settings

from scheduling import sql
from scheduling.db_timeouts import Deadline
from scheduling.ids import MAX_CLOCK_LAG, first_id_at
from scheduling.models import Node, Template
from scheduling.monitoring.statistics import HOUR, HourlyCache
from scheduling.redis_client import Redis, connect_once

WEEK = timedelta(days=7)
HOURS = "at:complaints"  #: hash by the hour's start in seconds: counts of `_DELIVERED` and of `_COMPLAINED`
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


def is_rising(touches: int, rate: float, before: float | None) -> bool:
    """Return whether a rate of `TextComplaints` is far above the one before."""
    return before is not None and touches >= LEAST_TOUCHES and rate > max(LEAST_RATE, RISE * before)


def read_complaint_rates(deadline: Deadline) -> list[TextComplaints] | None:
    """Return the rates of the texts with most touches, without the current hour; None while hours are left to count.

    Raises:
        RedisError: Redis does not answer.
        OperationalError: PostgreSQL does not answer in time.
    """
    server = connect_once(settings.REDIS_URL)
    found: Any = server.hgetall(HOURS)
    stored = {datetime.fromtimestamp(int(at), UTC): json.loads(counts) for at, counts in found.items()}
    counted, hours = dict(stored), list[datetime]()
    try:
        with deadline.limit_queries(settings.TIMEOUTS.metrics_statement):
            until = (sql.now() - CLOSED).astimezone(UTC).replace(minute=0, second=0, microsecond=0)
            hours = [until - HOUR * number for number in range(1, 2 * WEEK // HOUR + 1)]
            if not _count_missing_hours(hours, counted):
                return None
            nodes = dict(Node.objects.values_list("pk", "key"))
            templates = dict(Template.objects.values_list("pk", "key"))
    finally:  # also if PostgreSQL did not answer in time: the next call continues
        if fresh := counted.keys() - stored.keys():
            _store_hours(server, {hour: counted[hour] for hour in fresh}, counted.keys() - set(hours))
    week, earlier = _sum_weeks({hour: counted[hour] for hour in hours}, until - WEEK)
    texts = []
    for text, touches in week.by_text.most_common():
        node, template, version = text
        if node in nodes and template in templates:
            rate = min(week.complaints_by_text[text] / touches, 1.0)
            texts.append(
                TextComplaints(nodes[node], templates[template], version, touches, rate, earlier.rate_before(text))
            )
    return texts[:MOST_TEXTS]


def _count_missing_hours(hours: list[datetime], counted: dict[datetime, Any]) -> bool:
    """Count the hours that `counted` lacks, latest first. Return False if the time was over before."""
    ends_at = monotonic() + FILL_SECONDS
    for hour in hours:
        if hour not in counted:
            if monotonic() > ends_at:
                return False
            until = hour + HOUR
            received = {"first": first_id_at(hour), "next": first_id_at(until), "since": hour - 2 * WEEK}
            counted[hour] = [
                sql.rows(_DELIVERED, {"since": hour, "until": until}),
                sql.rows(_COMPLAINED, received, replan=True),
            ]
    return True


def _store_hours(server: Redis, fresh: dict[datetime, Any], over: set[datetime]) -> None:
    with server.pipeline(transaction=False) as pipe:
        for hour, counts in fresh.items():
            pipe.hset(HOURS, _field(hour), json.dumps(counts))
        if over:
            pipe.hdel(HOURS, *map(_field, over))
        pipe.expire(HOURS, 2 * WEEK)
        pipe.execute()


def _field(hour: datetime) -> str:
    return str(int(hour.timestamp()))


Text = tuple[int, int, int]  #: ids of a node and of its template, and the version


@dataclass(frozen=True, slots=True)
class WeekCounts:
    """Delivered touches of a week and complaints about them."""

    by_text: Counter[Text] = field(default_factory=Counter)
    by_node: Counter[int] = field(default_factory=Counter)
    complaints_by_text: Counter[Text] = field(default_factory=Counter)
    complaints_by_node: Counter[int] = field(default_factory=Counter)

    def rate_before(self, text: Text) -> float | None:
        """Return the rate that a later one of `text` is compared with (see `TextComplaints.before`)."""
        node = text[0]
        if self.by_text[text] >= LEAST_TOUCHES:
            return self.complaints_by_text[text] / self.by_text[text]
        return self.complaints_by_node[node] / self.by_node[node] if self.by_node[node] >= LEAST_TOUCHES else None


def _sum_weeks(counted: dict[datetime, Any], recent: datetime) -> tuple[WeekCounts, WeekCounts]:
    """Return the counts of the hours from `recent` on, and of those before."""
    week, earlier = WeekCounts(), WeekCounts()
    for hour, (delivered, complaints) in counted.items():
        counts = week if hour >= recent else earlier
        for node, template, version, count in delivered:
            counts.by_text[node, template, version] += count
            counts.by_node[node] += count
        for touch_at, node, template, version, count in complaints:
            touch_hour = datetime.fromtimestamp(touch_at, UTC)
            if touch_hour in counted:
                counts = week if touch_hour >= recent else earlier
                counts.complaints_by_text[node, template, version] += count
                counts.complaints_by_node[node] += count
    return week, earlier


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
