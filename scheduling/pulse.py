"""How the house is doing: what waits, what is late, what ended and how. Every statement reads an index and no further
than what it shows; whoever asks bounds its time as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from threading import Lock

from scheduling import sql

MOST = 10_000  #: shown as "10000+": nobody needs the exact figure beyond
LATE = timedelta(seconds=5)  #: from here on a touch that has not begun is overdue
LATEST = 10_000  #: deliveries whose lateness is looked at
HOUR = timedelta(hours=1)
RATE_WINDOW = timedelta(minutes=5)


# --- what waits ---------------------------------------------------------------------------------------------------


def due_within(span: timedelta) -> int:
    """How many fall due in this time, those that are late included; at most `MOST` + 1."""
    return int(sql.rows(_DUE_WITHIN, {"span": span, "most": MOST + 1})[0][0])


@dataclass(frozen=True, slots=True)
class Overdue:
    count: int  #: at most about twice `MOST`
    oldest: timedelta | None


def overdue() -> Overdue:
    """What should have begun and has not: waiting in the table or at the broker."""
    return Overdue(*sql.rows(_OVERDUE, {"late": LATE, "most": MOST + 1})[0])


_DUE_WITHIN = """
SELECT count(*) FROM (
    SELECT FROM scheduling_touch
    WHERE state = 'scheduled' AND parked = '' AND due_at <= statement_timestamp() + %(span)s LIMIT %(most)s
) AS due
"""

_OVERDUE = """
SELECT count(*), statement_timestamp() - min(due_at) FROM (
    (SELECT due_at FROM scheduling_touch
     WHERE state = 'scheduled' AND parked = '' AND due_at < statement_timestamp() - %(late)s
     ORDER BY due_at LIMIT %(most)s)
    UNION ALL
    (SELECT due_at FROM scheduling_touch
     WHERE state IN ('queued', 'running') AND state = 'queued' AND due_at < statement_timestamp() - %(late)s
     LIMIT %(most)s)
) AS late
"""


# --- how fast -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lateness:
    """From the moment at which a touch was due to the one at which its channel was called, in seconds."""

    p50: float | None
    p99: float | None
    count: int  #: deliveries that were looked at


def lateness() -> Lateness:
    """Of the latest deliveries of the last hour."""
    ((quantiles, count),) = sql.rows(_LATENESS, {"window": HOUR, "latest": LATEST})
    p50, p99 = quantiles or (None, None)
    return Lateness(p50, p99, count)


@dataclass(frozen=True, slots=True)
class Rates:
    """A minute, over the last five."""

    handed_over: float
    ended: float


def rates() -> Rates:
    minutes = RATE_WINDOW / timedelta(minutes=1)
    ((handed_over, ended),) = sql.rows(_RATES, {"window": RATE_WINDOW})
    return Rates(handed_over / minutes, ended / minutes)


_LATENESS = """
SELECT percentile_cont(ARRAY[0.5, 0.99]::float8[]) WITHIN GROUP (ORDER BY late), count(*) FROM (
    SELECT GREATEST(extract(epoch FROM sending_at - due_at), 0)::float8 AS late FROM scheduling_touch
    WHERE settled_at > statement_timestamp() - %(window)s AND state = 'delivered' AND sending_at IS NOT NULL
    ORDER BY settled_at DESC LIMIT %(latest)s
) AS latest
"""

# What was handed over in the last minutes has ended since, or still has a lease (or was put off, and is left out).
_RATES = """
SELECT (SELECT count(*) FROM scheduling_touch
        WHERE settled_at > statement_timestamp() - %(window)s AND queued_at > statement_timestamp() - %(window)s)
     + (SELECT count(*) FROM scheduling_touch
        WHERE state IN ('queued', 'running') AND queued_at > statement_timestamp() - %(window)s),
       (SELECT count(*) FROM scheduling_touch WHERE settled_at > statement_timestamp() - %(window)s)
"""


# --- what ended ---------------------------------------------------------------------------------------------------

Tally = Counter[tuple[str, str, int]]  #: how many by state, reason and node
Patiently = Callable[[Callable[[], "dict[datetime, Tally]"]], "dict[datetime, Tally] | None"]


def ended(since: datetime, until: datetime) -> dict[datetime, Tally]:
    """By the hour in which they ended, counted from `since`."""
    found = {since + HOUR * number: Tally() for number in range(-((since - until) // HOUR))}
    for hour, state, reason, node, count in sql.rows(_ENDED, {"since": since, "until": until}):
        found[hour][state, reason, node] += count
    return found


_ENDED = """
SELECT date_bin('1 hour', settled_at, %(since)s), state, reason, node_id, count(*) FROM scheduling_touch
WHERE settled_at >= %(since)s AND settled_at < %(until)s GROUP BY 1, 2, 3, 4
"""


class Past:
    """Remembers hours that are over, so that a page that asks every few seconds reads only the present one.

    A person may still resolve what ended long ago, so nothing is remembered for long.
    """

    BLOCK = 6  #: hours that are read at once
    CLOSED = timedelta(minutes=2)  #: no transaction that settles touches is open for longer
    KEPT = timedelta(minutes=15)

    def __init__(self) -> None:
        self._lock = Lock()
        self._hours: dict[datetime, tuple[datetime, Tally]] = {}

    def hours(self, wanted: Iterable[datetime], now: datetime, patiently: Patiently) -> dict[datetime, Tally | None]:
        """The latest first. None where `patiently` gave up: the next call goes on from there."""
        found: dict[datetime, Tally | None] = {}
        missing = []
        for hour in sorted(wanted, reverse=True):
            found[hour] = self._remembered(hour, now)
            if found[hour] is None:
                missing.append(hour)
        for block in _blocks(missing, self.BLOCK):
            counted = patiently(lambda block=block: ended(block[-1], block[0] + HOUR))  # type: ignore[misc]
            if counted is None:
                break
            found.update(counted)
            self._remember(counted, now)
        return found

    def forget(self) -> None:
        with self._lock:
            self._hours.clear()

    def _remembered(self, hour: datetime, now: datetime) -> Tally | None:
        read_at, tally = self._hours.get(hour, (now, None))
        return tally if now - read_at < self.KEPT else None

    def _remember(self, counted: dict[datetime, Tally], now: datetime) -> None:
        with self._lock:
            self._hours |= {hour: (now, tally) for hour, tally in counted.items() if hour + HOUR + self.CLOSED < now}
            for hour in [hour for hour, (read_at, _) in self._hours.items() if now - read_at >= self.KEPT]:
                del self._hours[hour]


def _blocks(hours: list[datetime], size: int) -> Iterable[list[datetime]]:
    """Neighbours together, the latest first."""
    block: list[datetime] = []
    for hour in hours:
        if block and (block[-1] - hour != HOUR or len(block) == size):
            yield block
            block = []
        block.append(hour)
    if block:
        yield block


past = Past()


# --- complaints ---------------------------------------------------------------------------------------------------


def complained(since: datetime) -> dict[int, int]:
    """By node, how many of the touches that were delivered since then were complained about."""
    return dict(sql.rows(_COMPLAINED, {"since": since}))


_COMPLAINED = """
SELECT t.node_id, count(DISTINCT t.task_id)
FROM scheduling_complaint AS c JOIN scheduling_touch AS t ON t.task_id = c.touch_id
WHERE c.complained_at >= %(since)s AND t.settled_at >= %(since)s AND t.state = 'delivered' GROUP BY 1
"""
