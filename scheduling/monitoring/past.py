"""Hours that are over are read once and remembered, so that a page that asks every few seconds reads only the present
one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from threading import Lock
from typing import Any, Generic, TypeVar

HOUR = timedelta(hours=1)

T = TypeVar("T", bound="Counter[Any]")


class Past(Generic[T]):
    """What `read(since, until)` counts by the hour.

    A person may still resolve what ended long ago, so nothing is remembered for long.
    """

    BLOCK = 6  #: hours that are read at once
    CLOSED = timedelta(minutes=2)  #: no transaction that writes what is counted is open for longer
    KEPT = timedelta(minutes=15)

    _all: list[Past[Any]] = []

    def __init__(self, read: Callable[[datetime, datetime], dict[datetime, T]]) -> None:
        self._read = read
        self._lock = Lock()
        self._hours: dict[datetime, tuple[datetime, T]] = {}
        self._all.append(self)

    def hours(
        self,
        wanted: Iterable[datetime],
        now: datetime,
        patiently: Callable[[Callable[[], dict[datetime, T]]], dict[datetime, T] | None],
    ) -> dict[datetime, T | None]:
        """The latest first. None where `patiently` gave up: the next call goes on from there."""
        found: dict[datetime, T | None] = {}
        missing = []
        for hour in sorted(wanted, reverse=True):
            found[hour] = self._remembered(hour, now)
            if found[hour] is None:
                missing.append(hour)
        for block in _blocks(missing, self.BLOCK):
            counted = patiently(lambda block=block: self._read(block[-1], block[0] + HOUR))  # type: ignore[misc]
            if counted is None:
                break
            found.update(counted)
            self._remember(counted, now)
        return found

    @classmethod
    def forget(cls) -> None:
        """Everything that this process remembers, whatever was counted."""
        for each in cls._all:
            with each._lock:
                each._hours.clear()

    def _remembered(self, hour: datetime, now: datetime) -> T | None:
        read_at, tally = self._hours.get(hour, (now, None))
        return tally if now - read_at < self.KEPT else None

    def _remember(self, counted: dict[datetime, T], now: datetime) -> None:
        with self._lock:
            self._hours |= {hour: (now, tally) for hour, tally in counted.items() if hour + HOUR + self.CLOSED < now}
            for hour in [hour for hour, (read_at, _) in self._hours.items() if now - read_at >= self.KEPT]:
                del self._hours[hour]


def hours_between(since: datetime, until: datetime) -> list[datetime]:
    """Where each begins, counted from `since`."""
    return [since + HOUR * number for number in range(-((since - until) // HOUR))]


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
