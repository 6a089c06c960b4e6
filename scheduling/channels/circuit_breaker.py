"""Keeps one dead endpoint from holding the worker: after a row of failures its touches wait instead of timing out.

What waits comes back with every rest, is judged again and leaves a verdict. So rests grow while probes fail: 30 s,
1 min, 2 min … 10 min, which is also how late it may be noticed that the receiver is back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from scheduling.channels.base import Outcome, Transient, Unknown

DEAD = frozenset({"dns", "connect", "connect_timeout", "tls", "timeout"})


def is_dead(outcome: Outcome) -> bool:
    """Whether an outcome says that nobody is there. An answer, however unkind, shows life."""
    return isinstance(outcome, (Transient, Unknown)) and outcome.reason in DEAD


@dataclass(slots=True)
class _Row:
    rest: float  #: seconds after the next failure
    failures: int = 0  #: in a row
    shut_until: float = 0.0  #: seconds on the caller's clock
    probing: bool = False


class Breaker:
    """One for each process, PURE: `now` is monotonic seconds. Not for several threads at once.

    An attempt that was admitted and never recorded costs the first, short rest, no more: a probe is admitted by moving
    the next one that far away. It outlasts any call, so a probe that fails has said so by then.
    """

    def __init__(self, failures: int = 5, rest: float = 30.0, longest: float = 600.0, remember: int = 10_000) -> None:
        self._limit = failures
        self._rest = rest
        self._longest = longest  # alerts look as far ahead for what waits
        self._remember = remember  # targets; the one that failed longest ago is forgotten first
        self._rows: OrderedDict[str, _Row] = OrderedDict()

    def admit(self, target_key: str, now: float) -> float:
        """0 where an attempt may begin now, else the seconds to wait. The first asked after a rest is the probe."""
        row = self._rows.get(target_key)
        if row is None or row.failures < self._limit:
            return 0.0
        if now < row.shut_until:
            return row.shut_until - now
        row.shut_until = now + self._rest
        row.probing = True
        return 0.0

    def record(self, target_key: str, outcome: Outcome, now: float) -> None:
        """Count a failure or, on any sign of life, forget the target's failures."""
        if not is_dead(outcome):
            self._rows.pop(target_key, None)
            return
        row = self._rows.setdefault(target_key, _Row(self._rest))
        self._rows.move_to_end(target_key)
        row.failures += 1
        if row.probing:  # what failed beside others that were under way says nothing new
            row.rest, row.probing = min(row.rest * 2, self._longest), False
        row.shut_until = now + row.rest
        if len(self._rows) > self._remember:
            self._rows.popitem(last=False)

    def shut(self, now: float) -> dict[str, float]:
        """The targets that are resting, with the seconds they still will (for metrics and the dashboard)."""
        return {
            key: row.shut_until - now
            for key, row in self._rows.items()
            if row.failures >= self._limit and row.shut_until > now
        }
