"""Compute operational statistics of touches and events: the backlog, and results, lateness and events by hour.

Every statement reads an index and no more rows than it needs. Callers bound its time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from threading import Lock
from typing import Any

from scheduling import sql
from scheduling.ids import first_id_at
from scheduling.policy.specs import OVERDUE_AFTER

HOUR = timedelta(hours=1)


class HourlyCache:
    """Cache the hourly counts of a statement.

    Its rows are the start of an hour, a key, and a count; a key of several columns becomes a tuple. Its parameters are
    `since` and `until`, and `hours` with `firsts` and `nexts`: the first possible id of each hour and of the next.
    Counts expire after `KEPT`, because an operator may still resolve touches that ended long ago.
    """

    BLOCK = 6  #: hours read by one statement
    #: an hour is final after this time: no transaction that writes counted rows is open for longer
    CLOSED = timedelta(minutes=2)
    KEPT = timedelta(minutes=15)

    _all: list[HourlyCache] = []

    def __init__(self, statement: str) -> None:
        self._statement = statement
        self._lock = Lock()
        self._hours: dict[datetime, tuple[datetime, Counter[Any]]] = {}
        self._all.append(self)

    def read(self, since: datetime, until: datetime) -> dict[datetime, Counter[Any]]:
        """Count by key for each hour, counted from `since`."""
        hours = hours_between(since, until)
        bounds = [*map(first_id_at, hours), first_id_at(until)]
        ids = {"hours": hours, "firsts": bounds[:-1], "nexts": bounds[1:]}
        counts: dict[datetime, Counter[Any]] = {hour: Counter() for hour in hours}
        for hour, *key, count in sql.rows(self._statement, {"since": since, "until": until, **ids}):
            counts[hour][tuple(key) if len(key) > 1 else key[0]] += count
        return counts

    def hours(
        self,
        wanted: Iterable[datetime],
        now: datetime,
        count_within: Callable[[Callable[[], dict[datetime, Counter[Any]]]], dict[datetime, Counter[Any]] | None],
    ) -> dict[datetime, Counter[Any] | None]:
        """Return counts by hour, latest first.

        A value is None if `count_within` returned None. The next call continues with those hours.
        """
        found: dict[datetime, Counter[Any] | None] = {}
        missing = []
        for hour in sorted(wanted, reverse=True):
            read_at, tally = self._hours.get(hour, (now, None))
            found[hour] = tally if now - read_at < self.KEPT else None
            if found[hour] is None:
                missing.append(hour)
        for block in _group_hours(missing, self.BLOCK):
            counted = count_within(lambda block=block: self.read(block[-1], block[0] + HOUR))  # type: ignore[misc]
            if counted is None:
                break
            found.update(counted)
            with self._lock:
                kept = {hour: (now, tally) for hour, tally in counted.items() if hour + HOUR + self.CLOSED < now}
                self._hours |= kept
                for hour in [hour for hour, (read_at, _) in self._hours.items() if now - read_at >= self.KEPT]:
                    del self._hours[hour]
        return found

    @classmethod
    def clear_all(cls) -> None:
        """Clear the caches of this process for all kinds of counts."""
        for each in cls._all:
            with each._lock:
                each._hours.clear()


def hours_between(since: datetime, until: datetime) -> list[datetime]:
    """Return the start of each hour, counted from `since`."""
    return [since + HOUR * number for number in range(-((since - until) // HOUR))]


def _group_hours(hours: list[datetime], size: int) -> Iterable[list[datetime]]:
    """Group consecutive hours into blocks of at most `size`, latest first."""
    block: list[datetime] = []
    for hour in hours:
        if block and (block[-1] - hour != HOUR or len(block) == size):
            yield block
            block = []
        block.append(hour)
    if block:
        yield block


MOST = 10_000  #: a larger count is shown as "10000+"


# --- backlog ------------------------------------------------------------------------------------------------------


def count_due_within(span: timedelta) -> int:
    """Count the touches that fall due within `span`, overdue ones included; at most `MOST` + 1."""
    return int(sql.rows(_DUE_WITHIN, {"span": span, "most": MOST + 1})[0][0])


@dataclass(frozen=True, slots=True)
class Overdue:
    count: int  #: at most about twice `MOST`
    oldest: timedelta | None


def count_overdue() -> Overdue:
    """Count the touches that should have started and still wait in the table or at the broker."""
    found = count_late(OVERDUE_AFTER, MOST + 1)
    return Overdue(sum(count for _, count, _ in found), max((age for _, _, age in found), default=None))


def count_late(late: timedelta, most: int) -> list[tuple[int, int, timedelta]]:
    """Count the touches that have been due for `late` and that no worker has started, by priority, with the oldest age.

    At most `most` of each priority in the table, and `most` at the broker.
    """
    return [(row[0], row[1], row[2]) for row in sql.rows(_LATE_WAITING, {"late": late, "most": most})]


_DUE_WITHIN = """
SELECT count(*) FROM (
    SELECT FROM scheduling_touch_live
    WHERE state = 'scheduled' AND paused_by = '' AND priority IN (0, 1, 2)
      AND due_at <= statement_timestamp() + %(span)s
    LIMIT %(most)s
) AS due
"""

_LATE_WAITING = """
SELECT priority, count(*), statement_timestamp() - min(due_at) FROM (
    (SELECT level AS priority, touch.due_at FROM unnest(ARRAY[0, 1, 2]) AS level CROSS JOIN LATERAL (
         SELECT due_at FROM scheduling_touch_live
         WHERE state = 'scheduled' AND paused_by = '' AND priority = level
           AND due_at <= statement_timestamp() - %(late)s
         ORDER BY due_at LIMIT %(most)s) AS touch)
    UNION ALL
    (SELECT priority, due_at FROM scheduling_touch_live
     WHERE state IN ('queued', 'running') AND state = 'queued' AND due_at <= statement_timestamp() - %(late)s
     LIMIT %(most)s)
) AS late GROUP BY 1
"""


# --- results ------------------------------------------------------------------------------------------------------

#: number by state, reason and node
ended_cache = HourlyCache("""
SELECT date_bin('1 hour', settled_at, %(since)s), state, reason, node_id, count(*) FROM scheduling_touch_ended
WHERE settled_at >= %(since)s AND settled_at < %(until)s GROUP BY 1, 2, 3, 4
""")


# --- lateness and events by hour ----------------------------------------------------------------------------------

LatenessCounts = Counter[int]  #: number of deliveries by step of lateness
STEP = 1.05  #: ratio of a step to the one before: quantiles are exact to 3 %
LEAST = 0.001  #: seconds; lower bound of the first step. Counts by step can be added up, quantiles cannot
GOAL = timedelta(seconds=3)  #: 99 % of touches are sent within this time; the alert rules warn beyond it


def compute_lateness_quantile(late: LatenessCounts, part: float) -> timedelta | None:
    """Return the lateness that the share `part` of deliveries does not exceed; None without deliveries."""
    left = part * late.total()
    for step in sorted(late):
        left -= late[step]
        if left <= 0:
            return timedelta(seconds=STEP**step)
    return None


lateness_cache = HourlyCache(f"""
SELECT date_bin('1 hour', settled_at, %(since)s),
       round(ln(GREATEST(extract(epoch FROM sending_at - due_at)::float8, {LEAST})) / {math.log(STEP)})::int, count(*)
FROM scheduling_touch_ended
WHERE settled_at >= %(since)s AND settled_at < %(until)s AND state = 'delivered' AND sending_at IS NOT NULL
GROUP BY 1, 2
""")  # noqa: S608 (made of constants)

# Event ids grow with time. The hours are therefore ranges of the primary key, and events need no further index.
event_cache = HourlyCache("""
SELECT hour.at, taken.type, taken.count
FROM unnest(%(hours)s::timestamptz[], %(firsts)s::uuid[], %(nexts)s::uuid[]) AS hour (at, first, next)
CROSS JOIN LATERAL (
    SELECT type, count(*) FROM scheduling_event WHERE id >= hour.first AND id < hour.next GROUP BY type
) AS taken
""")
