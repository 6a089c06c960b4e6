"""Bound the touches that intake dispatches before they are due. Workers hold such messages in memory."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime

from django.conf import settings


@dataclass(slots=True)
class _Ahead:
    """The dispatched touches of a priority by second of their due time, as far as they are not due."""

    counts: Counter[int] = field(default_factory=Counter)
    total: int = 0
    since: int = 0  #: seconds before this one are forgotten

    def forget_before(self, second: int) -> None:
        for passed in [each for each in self.counts if each < second]:
            self.total -= self.counts.pop(passed)
        self.since = second


class EarlyDispatch:
    """What this process dispatched ahead, by priority. Thread-safe."""

    def __init__(self) -> None:
        self._ahead: defaultdict[int, _Ahead] = defaultdict(_Ahead)
        self._lock = threading.Lock()

    def admit(self, priority: int, due_at: datetime, *, at: datetime) -> bool:
        """Return whether intake dispatches a touch at once, and count it if it is not due.

        Touches that are due always are. Of later ones within the horizon, up to `AFTERTOUCH_DISPATCH_WINDOW` of a
        priority are. A transaction that is rolled back gives its places back when their touches would be due.
        """
        if due_at <= at:
            return True
        if due_at > at + settings.AFTERTOUCH_HORIZON:
            return False
        second, now = int(due_at.timestamp()), int(at.timestamp())
        with self._lock:
            ahead = self._ahead[priority]
            if now > ahead.since:
                ahead.forget_before(now)
            if ahead.total >= settings.AFTERTOUCH_DISPATCH_WINDOW:
                return False
            ahead.counts[second] += 1
            ahead.total += 1
            return True


early_dispatch = EarlyDispatch()
