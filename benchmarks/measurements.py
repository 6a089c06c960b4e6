"""Read the lateness of calls, at a receiver or from the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from django.db import connection

from benchmarks.results import percentile


@dataclass(frozen=True)
class Reading:
    """Calls of one contestant. The rate is that from the first due time to the end."""

    lateness: list[float]  #: seconds from the due time to the first byte at the receiver, for each received call
    missing: int  #: calls that the receiver did not get
    repeated: int  #: requests beyond the first one of each call, or without a call
    per_second: float
    cpu: Mapping[str, float]  #: processor seconds by program, without the receiver
    receiver_load: float  #: share of one core that the receiver used, in percent
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


def read_lateness() -> list[float]:
    """Return the seconds from the planned time of each touch to its first attempt, by the database's clock."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT extract(epoch FROM a.started_at - t.planned_at)::float8"
            " FROM scheduling_touch AS t CROSS JOIN LATERAL touch_attempts(t.attempts) AS a WHERE a.number = 1"
        )
        return [row[0] for row in cursor.fetchall()]


def settled_per_second() -> float:
    """Return the judged touches per second, from the first planned time to the last settled or judged one."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) / extract(epoch FROM greatest(max(v.at), max(t.settled_at)) - min(t.planned_at))::float8"
            " FROM scheduling_touch AS t CROSS JOIN LATERAL touch_verdicts(t.verdicts) AS v"
        )
        return float(cursor.fetchone()[0])


def customers_with_more_than(limit: int) -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM (SELECT FROM scheduling_touch WHERE state = 'delivered'"
            " GROUP BY customer_id HAVING count(*) > %s) AS overrun",
            [limit],
        )
        return int(cursor.fetchone()[0])
