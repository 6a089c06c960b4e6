"""Read the lateness of calls from the database or from a peer's handler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db import connection

from benchmarks.results import percentile


@dataclass(frozen=True)
class Reading:
    """Lateness of each call in seconds, and calls per second from the first due time to the end."""

    lateness: list[float]
    per_second: float
    cpu: Mapping[str, float] = field(default_factory=dict)  #: processor seconds by program
    worker_mb: float = 0.0
    broker_mb: float = 0.0

    @property
    def early(self) -> int:
        return sum(each < 0 for each in self.lateness)

    @property
    def cpu_each(self) -> float:
        """Return microseconds of processor time per call, the figure that other load on the machine disturbs least."""
        return sum(map(self.cpu_of, self.cpu))

    def cpu_of(self, program: str) -> float:
        return self.cpu[program] / len(self.lateness) * 1e6 if self.lateness else float("nan")

    def milliseconds(self, percent: float) -> float:
        return percentile(self.lateness, percent) * 1000


def read_touches(begins_at: float = 0.0, ended_at: float | None = None, **others: Any) -> Reading:
    """Read the touches planned for `begins_at` or later.

    Lateness ends when the channel receives the touch. The rate ends at `ended_at`, or at the last `settled_at`, which
    is written before the commit.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT extract(epoch FROM a.started_at - t.planned_at)::float8"
            " FROM scheduling_touch AS t CROSS JOIN LATERAL touch_attempts(t.attempts) AS a WHERE a.number = 1"
            " AND t.planned_at >= to_timestamp(%s) - interval '1 ms'",
            [begins_at],
        )
        lateness = [row[0] for row in cursor.fetchall()]
        cursor.execute(
            "SELECT count(*), extract(epoch FROM greatest(max(v.at), max(t.settled_at)))::float8,"
            " extract(epoch FROM min(t.planned_at))::float8"
            " FROM scheduling_touch AS t CROSS JOIN LATERAL touch_verdicts(t.verdicts) AS v"
            " WHERE t.planned_at >= to_timestamp(%s) - interval '1 ms'",
            [begins_at],
        )
        judged, settled_at, planned_at = cursor.fetchone()
    return Reading(lateness, judged / ((ended_at or settled_at) - planned_at), **others)


def customers_with_more_than(limit: int) -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM (SELECT FROM scheduling_touch WHERE state = 'delivered'"
            " GROUP BY customer_id HAVING count(*) > %s) AS overrun",
            [limit],
        )
        return int(cursor.fetchone()[0])
