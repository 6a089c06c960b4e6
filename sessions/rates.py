"""Limit rates and schedule retries by the monotonic clock of this process. No I/O."""

from __future__ import annotations

import random
import time
from collections import deque


class Every:
    """Due at the first call, then once per period."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = float("-inf")

    def is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


class Bucket:
    """Token bucket. Without `burst` it holds the tokens of a quarter of a second, at least one."""

    __slots__ = ("_level", "_most", "_rate", "_seen_at")  # each connection has one

    def __init__(self, rate: float, burst: float | None = None) -> None:
        self._rate = rate
        self._level = self._most = max(rate / 4, 1.0) if burst is None else burst
        self._seen_at = time.monotonic()

    def left(self, most: int) -> int:
        """Return how many tokens are available, at most `most`."""
        now = time.monotonic()
        self._level = min(self._level + (now - self._seen_at) * self._rate, self._most)
        self._seen_at = now
        return min(most, int(self._level))

    def spend(self, count: int) -> None:
        self._level -= count

    def consume(self, count: int = 1) -> bool:
        """Spend the tokens if so many are available."""
        if self.left(count) < count:
            return False
        self.spend(count)
        return True


class Recent:
    """Count of the last minute, in one-second steps."""

    SECONDS = 60

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque()  #: second, count

    def add(self, count: int) -> None:
        self._counts.append((int(time.monotonic()), count))
        self._drop_old()

    def total(self) -> int:
        self._drop_old()
        return sum(count for _, count in self._counts)

    def _drop_old(self) -> None:
        now = int(time.monotonic())
        while self._counts and self._counts[0][0] <= now - self.SECONDS:
            self._counts.popleft()


class Backoff:
    """Exponential backoff with jitter, so that clients do not reconnect at the same moment."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._failures: int = 0

    def next(self) -> float:
        """Return the seconds until the next try."""
        span = min(self._first * 2.0**self._failures, self._longest)
        self._failures = min(self._failures + 1, 16)
        return span * random.uniform(0.5, 1.0)  # noqa: S311  no secret

    def reset(self) -> None:
        self._failures = 0
