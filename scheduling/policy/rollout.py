"""Judge whether a canary grows, waits or is paused. Pure: plan, statistics of both versions and time.

Three rates of the canary are compared with those of the stable version. Both are counted over the same time, the stable
version in communities without the canary. A limit is the accepted excess: `+0.5` is half a percentage point above the
stable rate, `x2` is twice that rate. Both forms test whether p - factor·q - points > 0.

The bound. A limit is exceeded if the lower bound of that difference is above zero. It combines Wilson's bounds of both
shares by their squares (MOVER: Zou and Donner, Statistics in Medicine 27, 2008). With factor 1 it is Newcombe's method
10 (ibid. 17, 1998), which the effect of a node uses too. Wilson's bounds are valid for small counts and for zero. A
stable rate of zero does not prove a true rate of zero, so the first complaint stops nothing.

The confidence. The statistics are judged every minute, and frequent tests find differences by chance. `Z_ONE_SIDE` is
therefore strict: 3.09, one-sided, 1 in 1,000 for a single test. A limit leaves room (points above 0, factor above 1).
The statistics of two equal versions move further from it as counts grow. Repeated tests therefore do not add up:
`docs/decisions` has the measurements.

A rate beyond its limit that is not certain keeps the canary at its step until more is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from math import sqrt
from typing import Any

from scheduling.durations import from_seconds
from scheduling.errors import ErrorCollector, is_number

Z_BOTH_SIDES = 1.96  #: 95 %, two-sided


@dataclass(frozen=True, slots=True)
class Share:
    """`hits` of `of`, with Wilson's interval, which is valid for small counts and for zero."""

    hits: int
    of: int

    @property
    def rate(self) -> float:
        return self.hits / self.of if self.of else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        return self.bounds(Z_BOTH_SIDES)

    def bounds(self, z: float) -> tuple[float, float]:
        """Return Wilson's interval, `z` standard errors to each side."""
        if not self.of:
            return 0.0, 1.0
        n, p = self.of, self.rate
        middle, spread = p + z * z / (2 * n), z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max((middle - spread) / (1 + z * z / n), 0.0), min((middle + spread) / (1 + z * z / n), 1.0)


@dataclass(frozen=True, slots=True)
class Lift:
    """The difference of two shares, with Newcombe's interval (method 10)."""

    treated: Share
    control: Share

    @property
    def difference(self) -> float:
        return self.treated.rate - self.control.rate

    @property
    def interval(self) -> tuple[float, float]:
        (low, high), (control_low, control_high) = self.treated.interval, self.control.interval
        p, q = self.treated.rate, self.control.rate
        return (
            self.difference - sqrt((p - low) ** 2 + (control_high - q) ** 2),
            self.difference + sqrt((high - p) ** 2 + (q - control_low) ** 2),
        )

    @property
    def certain(self) -> bool:
        """Return whether zero lies outside the interval, so that chance is an unlikely cause."""
        low, high = self.interval
        return bool(self.treated.of and self.control.of) and (low > 0 or high < 0)


Z_ONE_SIDE = 3.09  #: 99.9 %, one-sided
RATES = ("complaints", "failures", "opt_outs")
WAIT, GROW, PAUSE = "wait", "grow", "pause"
_LIMIT = re.compile(r"([+x×]?)\s*([0-9]{1,3}(?:\.[0-9]{1,4})?)")


@dataclass(frozen=True, slots=True)
class Limit:
    """The accepted excess of a rate: `points` percentage points above the stable rate, or `factor` times it."""

    points: float = 0.0
    factor: float = 1.0

    @classmethod
    def read(cls, given: Any) -> Limit:
        """Parse `+0.5`, `0.5` or `x2`. Raises `ValueError` for other text, or if it leaves no room for chance."""
        found = _LIMIT.fullmatch(str(given).strip())
        if found is None:
            raise ValueError("must be like +0.5 (percentage points above the stable version) or x2 (times)")
        number = float(found[2])
        if found[1] in ("x", "×"):
            if number <= 1:
                raise ValueError("must be above x1: two equal versions differ by chance")
            return cls(factor=number)
        if not 0 < number <= 100:
            raise ValueError("must be above 0 and at most 100 points: two equal versions differ by chance")
        return cls(points=number)

    def __str__(self) -> str:
        return f"x{self.factor:g}" if self.factor != 1 else f"+{self.points:g}"


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """The steps of a canary and its limits."""

    steps: tuple[float, ...]  #: percent of communities
    time: timedelta  #: minimum at each step
    touches: int  #: ended touches of the canary, minimum at each step
    judged_from: int  #: minimum count of both versions before a rate is compared
    limits: Mapping[str, Limit]  #: by rate; a rate without a limit is not judged


@dataclass(frozen=True, slots=True)
class VersionCounts:
    """Counts of one version: ended, failed and complained touches, customers who opted out after a touch."""

    ended: int = 0
    failed: int = 0
    complained: int = 0
    opted_out: int = 0

    def share(self, rate: str) -> Share:
        """Return failures as a share of ended touches, complaints and opt-outs as a share of delivered ones."""
        delivered = self.ended - self.failed
        match rate:
            case "failures":
                return Share(self.failed, self.ended)
            case "complaints":
                return Share(self.complained, delivered)
            case _:
                return Share(self.opted_out, delivered)


@dataclass(frozen=True, slots=True)
class RateComparison:
    """One rate of both versions with its limit."""

    rate: str
    limit: Limit
    canary: Share
    stable: Share

    @property
    def excess(self) -> float:
        """Return the counted excess over the limit; negative within it."""
        return self.canary.rate - self.limit.factor * self.stable.rate - self.limit.points / 100

    @property
    def excess_lower_bound(self) -> float:
        """Return the lower bound of the excess, one-sided at 99.9 %."""
        return self.bound(Z_ONE_SIDE)

    def bound(self, z: float) -> float:
        low, high = self.canary.bounds(z)[0], self.stable.bounds(z)[1]
        spread = self.limit.factor * (high - self.stable.rate)
        return self.excess - sqrt((self.canary.rate - low) ** 2 + spread**2)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A decision and its reason.

    `limit:<rate>` is an exceeded limit. Other reasons name what the roll-out waits for: `time`, `canary` or `stable`
    (more touches), `doubt:<rate>`.
    """

    decision: str
    reason: str = ""


def judge_step(plan: RolloutPlan, canary: VersionCounts, stable: VersionCounts, since: timedelta) -> Judgement:
    """Judge a step that started `since` ago.

    An exceeded limit pauses at once. Growth needs the time, the touches and rates within their limits.
    """
    found = [RateComparison(rate, limit, canary.share(rate), stable.share(rate)) for rate, limit in plan.limits.items()]
    judged = [each for each in found if min(each.canary.of, each.stable.of) >= plan.judged_from]
    passed = max(judged, key=lambda each: each.excess_lower_bound, default=None)
    if passed is not None and passed.excess_lower_bound > 0:
        return Judgement(PAUSE, f"limit:{passed.rate}")
    if since < plan.time:
        return Judgement(WAIT, "time")
    if canary.ended < plan.touches or any(each.canary.of < plan.judged_from for each in found):
        return Judgement(WAIT, "canary")
    if len(judged) < len(found):
        return Judgement(WAIT, "stable")
    doubtful = max(judged, key=lambda each: each.excess, default=None)
    if doubtful is not None and doubtful.excess > 0:
        return Judgement(WAIT, f"doubt:{doubtful.rate}")
    return Judgement(GROW)


# --- as it is stored ------------------------------------------------------------------------------------------------

#: defaults of a plan
PLAN_DEFAULTS: Mapping[str, Any] = {
    "steps": [5, 20, 50, 100], "time": 86400, "touches": 200, "judged_from": 50,
    "complaints": "+0.5", "failures": "+2", "opt_outs": "+1",
}  # fmt: skip
MOST_STEPS = 20
MOST_TOUCHES = 1_000_000


def read_plan(stored: Mapping[str, Any]) -> RolloutPlan:
    """Parse a stored plan; absent keys get defaults and an empty limit is none.

    Raises:
        InvalidInput: by key, with all errors.
    """
    found = ErrorCollector()
    for key in stored.keys() - PLAN_DEFAULTS.keys():
        found.add(key, f"is not known here; known are {', '.join(sorted(PLAN_DEFAULTS))}")
    given = {**PLAN_DEFAULTS, **stored}
    _check_steps(given["steps"], found)
    found.seconds(given, "time")
    for key in ("touches", "judged_from"):
        if type(given[key]) is not int:
            found.add(key, "must be a whole number")
        else:
            found.number(given, key, 1, MOST_TOUCHES)
    limits = _read_limits(given, found)
    found.raise_if_any()
    return RolloutPlan(
        tuple(given["steps"]), from_seconds(given["time"]), given["touches"], given["judged_from"], limits
    )  # fmt: skip


def _check_steps(steps: Any, found: ErrorCollector) -> None:
    if not isinstance(steps, list) or not 0 < len(steps) <= MOST_STEPS or not all(is_number(each) for each in steps):
        found.add("steps", f"must be a list of 1 to {MOST_STEPS} percentages")
    elif not all(low < high for low, high in pairwise([0, *steps])) or steps[-1] > 100:
        found.add("steps", "must grow from above 0 to at most 100")
    elif steps[0] == 100:
        found.add("steps", "must start below 100, so that communities are left to compare with")


def _read_limits(given: Mapping[str, Any], found: ErrorCollector) -> dict[str, Limit]:
    limits = {}
    for rate in RATES:
        if given[rate] in ("", None):
            continue
        try:
            limits[rate] = Limit.read(given[rate])
        except ValueError as error:
            found.add(rate, str(error))
    if not limits and not found.errors:
        found.add(RATES[0], "is required when no other limit is set")
    return limits
