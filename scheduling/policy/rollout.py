"""Whether a canary may grow, stays where it is, or goes back. Pure: plan + figures of both versions + time → judgement.

Each of three rates of the canary is compared with the stable version's, counted over the same time in the communities
that have not got the canary. A limit says how much worse it may be: `+0.5` is half a percentage point above the stable
rate, `x2` is twice the stable rate. Both are one question, whether p - factor·q - points > 0.

The bound. A limit has been passed when even the lower bound of that difference lies above zero. It is found from
Wilson's bounds of the two shares by their squares (MOVER: Zou and Donner, Statistics in Medicine 27, 2008; with
factor 1 it is Newcombe's method 10, ibid. 17, 1998, by which the effect of a node is told as well). Wilson's bounds are
sane for few and for none: a stable rate of zero is no certainty that the true one is, so the first complaint about a
canary stops nothing.

The confidence. It is looked at every minute, and whoever looks often enough sees what chance does. `Z` is therefore
strict: 3.09, one side, 1 in 1,000 for a single look. Since a limit leaves room (points above 0, times above 1), figures
of two equal versions move away from it as they grow, and looking does not add up: `docs/decisions` has what was
measured.

What is not certain and looks worse than the limit all the same holds the canary where it is, until more is known.
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
from scheduling.errors import Findings, is_number

Z_BOTH_SIDES = 1.96  #: 95 %, of both sides


@dataclass(frozen=True, slots=True)
class Share:
    """So many of so many, with Wilson's interval: it is sane for few and for none."""

    hits: int
    of: int

    @property
    def rate(self) -> float:
        return self.hits / self.of if self.of else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        return self.bounds(Z_BOTH_SIDES)

    def bounds(self, z: float) -> tuple[float, float]:
        """Wilson's interval, `z` standard errors to each side."""
        if not self.of:
            return 0.0, 1.0
        n, p = self.of, self.rate
        middle, spread = p + z * z / (2 * n), z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max((middle - spread) / (1 + z * z / n), 0.0), min((middle + spread) / (1 + z * z / n), 1.0)


@dataclass(frozen=True, slots=True)
class Lift:
    """The difference of two shares, with Newcombe's interval (his method 10)."""

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
        """Whether chance alone is an unlikely cause: zero lies outside of the interval."""
        low, high = self.interval
        return bool(self.treated.of and self.control.of) and (low > 0 or high < 0)


Z_ONE_SIDE = 3.09  #: 99.9 %, of one side
RATES = ("complaints", "failures", "opt_outs")
WAIT, GROW, PAUSE = "wait", "grow", "pause"
_LIMIT = re.compile(r"([+x×]?)\s*([0-9]{1,3}(?:\.[0-9]{1,4})?)")


@dataclass(frozen=True, slots=True)
class Limit:
    """How much worse than the stable version's a rate may be: so many points above it, or so many times it."""

    points: float = 0.0
    factor: float = 1.0

    @classmethod
    def read(cls, given: Any) -> Limit:
        """`+0.5`, `0.5` or `x2`. Raises `ValueError` for anything else, and where it leaves no room for chance."""
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
class Plan:
    """The steps of a canary, and what it must not exceed on the way."""

    steps: tuple[float, ...]  #: percent of communities
    time: timedelta  #: at least so long at each step
    touches: int  #: of the canary that ended, at least so many at each step
    judged_from: int  #: a rate is compared once both versions have so many
    limits: Mapping[str, Limit]  #: by rate; one that is not named is not judged


@dataclass(frozen=True, slots=True)
class Tally:
    """What came of one version: touches that ended, those complained about, customers who opted out after one."""

    ended: int = 0
    failed: int = 0
    complained: int = 0
    opted_out: int = 0

    def share(self, rate: str) -> Share:
        """Failures are of all that ended; complaints and opt-outs of what was delivered."""
        delivered = self.ended - self.failed
        match rate:
            case "failures":
                return Share(self.failed, self.ended)
            case "complaints":
                return Share(self.complained, delivered)
            case _:
                return Share(self.opted_out, delivered)


@dataclass(frozen=True, slots=True)
class Finding:
    """One rate of both versions under its limit."""

    rate: str
    limit: Limit
    canary: Share
    stable: Share

    @property
    def excess(self) -> float:
        """How far the canary lies beyond its limit, as counted; negative inside of it."""
        return self.canary.rate - self.limit.factor * self.stable.rate - self.limit.points / 100

    @property
    def at_least(self) -> float:
        """The same, as far as it is certain."""
        return self.bound(Z_ONE_SIDE)

    def bound(self, z: float) -> float:
        low, high = self.canary.bounds(z)[0], self.stable.bounds(z)[1]
        spread = self.limit.factor * (high - self.stable.rate)
        return self.excess - sqrt((self.canary.rate - low) ** 2 + spread**2)


@dataclass(frozen=True, slots=True)
class Judgement:
    """`reason` is `limit:<rate>` where a limit was passed; else what it waits for: `time`, `canary` or `stable` (more
    of their touches), `doubt:<rate>`."""

    decision: str
    reason: str = ""


def judge(plan: Plan, canary: Tally, stable: Tally, since: timedelta) -> Judgement:
    """Of the step that began `since` ago. A limit that was passed counts at once; to grow, time, touches and figures
    must all allow it."""
    found = [Finding(rate, limit, canary.share(rate), stable.share(rate)) for rate, limit in plan.limits.items()]
    judged = [each for each in found if min(each.canary.of, each.stable.of) >= plan.judged_from]
    passed = max(judged, key=lambda each: each.at_least, default=None)
    if passed is not None and passed.at_least > 0:
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

#: Where nobody said otherwise.
USUAL: Mapping[str, Any] = {
    "steps": [5, 20, 50, 100], "time": 86400, "touches": 200, "judged_from": 50,
    "complaints": "+0.5", "failures": "+2", "opt_outs": "+1",
}  # fmt: skip
MOST_STEPS = 20
MOST_TOUCHES = 1_000_000


def read_plan(stored: Mapping[str, Any]) -> Plan:
    """Raises `InvalidInput`, by key, for what cannot be meant. An empty limit is none."""
    found = Findings()
    for key in stored.keys() - USUAL.keys():
        found.add(key, f"is not known here; known are {', '.join(sorted(USUAL))}")
    given = {**USUAL, **stored}
    _check_steps(given["steps"], found)
    found.seconds(given, "time")
    for key in ("touches", "judged_from"):
        if type(given[key]) is not int:
            found.add(key, "must be a whole number")
        else:
            found.number(given, key, 1, MOST_TOUCHES)
    limits = _read_limits(given, found)
    found.settle()
    return Plan(
        tuple(given["steps"]), from_seconds(given["time"]), given["touches"], given["judged_from"], limits
    )  # fmt: skip


def _check_steps(steps: Any, found: Findings) -> None:
    if not isinstance(steps, list) or not 0 < len(steps) <= MOST_STEPS or not all(is_number(each) for each in steps):
        found.add("steps", f"must be a list of 1 to {MOST_STEPS} percentages")
    elif not all(low < high for low, high in pairwise([0, *steps])) or steps[-1] > 100:
        found.add("steps", "must grow from above 0 to at most 100")
    elif steps[0] == 100:
        found.add("steps", "must begin below 100: there would be nobody left to compare with")


def _read_limits(given: Mapping[str, Any], found: Findings) -> dict[str, Limit]:
    limits = {}
    for rate in RATES:
        if given[rate] in ("", None):
            continue
        try:
            limits[rate] = Limit.read(given[rate])
        except ValueError as error:
            found.add(rate, str(error))
    if not limits and not found.errors:
        found.add(RATES[0], "must be there unless another limit is: nothing would be guarded")
    return limits
