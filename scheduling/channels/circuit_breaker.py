"""Stop calling a dead endpoint: after several failures in a row its touches wait instead of timing out.

Waiting touches are deferred again at each rest, and each deferral writes their row. Rests therefore grow while trials
fail: 30 s, 1 min, 2 min … 10 min. A recovered receiver is noticed after at most that time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from scheduling.channels.base import Outcome, Transient, Unknown

DEAD_REASONS = frozenset({"dns", "connect", "connect_timeout", "proxy", "tls", "timeout"})


def is_receiver_dead(outcome: Outcome) -> bool:
    """Return whether an outcome indicates that no receiver answers.

    Any answer, also an error, shows a live receiver.
    """
    return isinstance(outcome, (Transient, Unknown)) and outcome.reason in DEAD_REASONS


@dataclass(slots=True)
class _TargetState:
    rest: float  #: seconds after the next failure
    failures: int = 0  #: in a row
    shut_until: float = 0.0  #: seconds on the caller's clock
    on_trial: bool = False


class Breaker:
    """The circuit breakers of one process, by target. `now` is monotonic seconds. Not thread-safe.

    An admitted attempt without a recorded outcome costs only the first, short rest. A half-open trial delays the next
    trial by that rest. The rest is longer than any call, so a failed trial is recorded before it ends.
    """

    def __init__(self, failures: int = 5, rest: float = 30.0, longest: float = 600.0, remember: int = 10_000) -> None:
        self._limit = failures
        self._rest = rest
        self._longest = longest
        self._remember = remember  # targets; the one with the oldest last failure is dropped first
        self._rows: OrderedDict[str, _TargetState] = OrderedDict()

    def admit(self, target_key: str, now: float) -> float:
        """Return 0 if an attempt may start now, else the seconds to wait.

        The first attempt after a rest is the trial.
        """
        row = self._rows.get(target_key)
        if row is None or row.failures < self._limit:
            return 0.0
        if now < row.shut_until:
            return row.shut_until - now
        row.shut_until = now + self._rest
        row.on_trial = True
        return 0.0

    def remaining_rest(self, target_key: str, now: float, *, trials: int) -> float:
        """Return 0 if an attempt could start now, else the seconds to wait. Changes nothing.

        After a rest only one attempt can start: none if the caller already has `trials`.
        """
        row = self._rows.get(target_key)
        if row is None or row.failures < self._limit:
            return 0.0
        return max(row.shut_until - now, self._rest if trials else 0.0)

    def record(self, target_key: str, outcome: Outcome, now: float) -> None:
        """Count a failure, or reset the target's failures after any answer."""
        if not is_receiver_dead(outcome):
            self._rows.pop(target_key, None)
            return
        row = self._rows.setdefault(target_key, _TargetState(self._rest))
        self._rows.move_to_end(target_key)
        row.failures += 1
        if row.on_trial:  # failures of calls that were already in flight add no information
            row.rest, row.on_trial = min(row.rest * 2, self._longest), False
        row.shut_until = now + row.rest
        if len(self._rows) > self._remember:
            self._rows.popitem(last=False)

    def resting_targets(self, now: float) -> dict[str, float]:
        """Return the resting targets with their remaining seconds, for metrics and the dashboard."""
        return {
            key: row.shut_until - now
            for key, row in self._rows.items()
            if row.failures >= self._limit and row.shut_until > now
        }
