"""How often and how fast. All by the monotonic clock of this process, which nobody sets. Pure."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable

Clock = Callable[[], float]


class Every:
    """Due once in so many seconds, and at first."""

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._next = float("-inf")

    def is_due(self) -> bool:
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


class Bucket:
    """So many a second, and after a pause no more at once than a quarter of a second's worth."""

    BURST = 0.25

    def __init__(self, rate: float, clock: Clock = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._level = self._most = max(rate * self.BURST, 1.0)
        self._seen_at = clock()

    def left(self, most: int) -> int:
        """How many may be had now, at most `most`."""
        now = self._clock()
        self._level = min(self._level + (now - self._seen_at) * self._rate, self._most)
        self._seen_at = now
        return min(most, int(self._level))

    def spend(self, count: int) -> None:
        self._level -= count


class Recent:
    """How many there were in the last minute, to the second."""

    SECONDS = 60

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._counts: deque[tuple[int, int]] = deque()  #: a second, and how many

    def add(self, count: int) -> None:
        self._counts.append((int(self._clock()), count))
        self._forget()

    def total(self) -> int:
        self._forget()
        return sum(count for _, count in self._counts)

    def _forget(self) -> None:
        now = int(self._clock())
        while self._counts and self._counts[0][0] <= now - self.SECONDS:
            self._counts.popleft()


class Backoff:
    """Longer and longer, with some chance in it so that not everybody comes back at once."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._failures: int = 0

    def next(self) -> float:
        """Seconds until the next try."""
        span = min(self._first * 2.0**self._failures, self._longest)
        self._failures = min(self._failures + 1, 16)
        return span * random.uniform(0.5, 1.0)  # noqa: S311  no secret

    def reset(self) -> None:
        self._failures = 0
