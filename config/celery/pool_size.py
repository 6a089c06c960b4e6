"""How many processes a worker should have, from what it sees itself. Grows fast, shrinks slowly."""

from __future__ import annotations

from dataclasses import dataclass

OLD = 1.5  #: seconds that the oldest message may wait for a process; the clock that stamped it may be a second behind
EACH = 50  #: messages that a process gets through in a second


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at a worker. All of it lies in its main process, so a broker that is slow or away costs nothing, and
    RabbitMQ, which shows nobody a waiting message, is judged like Redis."""

    processes: int
    busy: int  #: processes that have a task
    waiting: int  #: messages that are due and have none; what the broker still has is behind these
    oldest: float  #: seconds for which the oldest of them has waited since it was published, or since its eta
    soon: int  #: unacknowledged messages that fall due within a second


class Sizer:
    def __init__(self, shrink_after: float, now: float) -> None:
        self._shrink_after = shrink_after
        self._calm_since = now  #: since then there was a process to spare at every look

    def size(self, seen: Seen, *, least: int, most: int, now: float) -> int:
        """At most twice as many as before, at least one less."""
        is_short = (seen.waiting and seen.oldest >= OLD) or seen.soon > EACH * seen.processes
        if is_short or seen.busy + seen.waiting >= seen.processes:
            self._calm_since = now
        if is_short:
            return max(min(seen.processes + max(1, min(seen.waiting, seen.processes)), most), least)
        if now - self._calm_since >= self._shrink_after and seen.processes > least:
            self._calm_since = now - self._shrink_after * 3 / 4  # the next one soon, if nothing happens
            return seen.processes - 1
        return seen.processes
