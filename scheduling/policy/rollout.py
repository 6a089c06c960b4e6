"""Judge whether a canary grows, waits or is withdrawn. Pure: plan, counts of the canary and time.

A limit is exceeded if the lower end of Wilson's interval of the rate is above it. From `JUDGED_FROM` touches on the
first complaint stops nothing. The counts are judged every minute, and frequent tests find excesses by chance.
`Z_ONE_SIDE` is therefore strict: 3.09, one-sided, 1 in 1,000 for a single test.

A rate above its limit that is not certain keeps the canary at its step until more is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from math import sqrt
from typing import Any

from scheduling.durations import from_seconds
from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector, check_number, check_seconds, is_number

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
JUDGED_FROM = 50  #: ended touches of a step; fewer if the plan asks for fewer
WAIT, GROW, WITHDRAW = "wait", "grow", "withdraw"


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """The steps of a canary and its limits in percent. 100 is no limit."""

    steps: tuple[float, ...]  #: percent of communities
    time: timedelta  #: minimum at each step
    touches: int  #: ended touches of the canary, minimum at each step
    complaints: float  #: of delivered touches
    failures: float  #: of ended touches


@dataclass(frozen=True, slots=True)
class CanaryCounts:
    """Counts of the canary's touches at one step."""

    ended: int = 0
    failed: int = 0  #: included in `ended`
    complained: int = 0

    @property
    def shares(self) -> dict[str, Share]:
        """Return complaints as a share of delivered touches and failures as a share of ended ones."""
        return {
            "complaints": Share(self.complained, self.ended - self.failed), "failures": Share(self.failed, self.ended),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Judgement:
    """A decision and its reason: a rate above its limit, or what the canary waits for (`time`, `touches`)."""

    decision: str
    reason: str = ""


def judge_canary(plan: RolloutPlan, counts: CanaryCounts, since: timedelta) -> Judgement:
    """Judge a step that started `since` ago. An exceeded limit withdraws at once."""
    above = [rate for rate, share in counts.shares.items() if share.rate > getattr(plan, rate) / 100]
    is_judged = counts.ended >= min(JUDGED_FROM, plan.touches)
    for rate in above if is_judged else ():
        if counts.shares[rate].bounds(Z_ONE_SIDE)[0] > getattr(plan, rate) / 100:
            return Judgement(WITHDRAW, rate)
    if since < plan.time:
        return Judgement(WAIT, "time")
    if counts.ended < plan.touches:
        return Judgement(WAIT, "touches")
    return Judgement(WAIT, above[0]) if above else Judgement(GROW)


# --- as it is stored ------------------------------------------------------------------------------------------------

#: defaults of a plan
PLAN_DEFAULTS: Mapping[str, Any] = {
    "steps": [5, 20, 50, 100], "time": 86400, "touches": 200, "complaints": 0.5, "failures": 5,
}  # fmt: skip
RATES = ("complaints", "failures")
MOST_STEPS = 20
MOST_TOUCHES = 1_000_000


def read_plan(stored: Mapping[str, Any]) -> RolloutPlan:
    """Parse a stored plan; absent keys get defaults.

    Raises:
        InvalidInput: by key, with all errors.
    """
    found = ErrorCollector()
    for key in stored.keys() - PLAN_DEFAULTS.keys():
        found.add(key, _("is not known here; known are %(known)s", known=", ".join(sorted(PLAN_DEFAULTS))))
    given = {**PLAN_DEFAULTS, **stored}
    steps = given["steps"]
    if not isinstance(steps, list) or not 0 < len(steps) <= MOST_STEPS or not all(is_number(each) for each in steps):
        found.add("steps", _("must be a list of 1 to %(most)s percentages", most=MOST_STEPS))
    elif not all(low < high for low, high in pairwise([0, *steps])) or steps[-1] > 100:
        found.add("steps", _("must grow from above 0 to at most 100"))
    with found.within("time"):
        check_seconds(given["time"])
    if type(given["touches"]) is not int:
        found.add("touches", _("must be a whole number"))
    else:
        with found.within("touches"):
            check_number(given["touches"], 1, MOST_TOUCHES)
    for rate in RATES:
        with found.within(rate):
            check_number(given[rate], 0, 100)
    found.raise_if_any()
    return RolloutPlan(
        tuple(given["steps"]), from_seconds(given["time"]), given["touches"], given["complaints"], given["failures"]
    )  # fmt: skip
