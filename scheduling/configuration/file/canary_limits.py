"""Read and write `canary.guard` of a node: the plan of an automatic roll-out, which a person starts."""

from __future__ import annotations

from typing import Any

from scheduling.configuration.file.guard_rules import Group
from scheduling.configuration.file.schema import NUMBER, Field, ListOf, Plain, Seconds, Whole
from scheduling.policy.rollout import PLAN_DEFAULTS, RATES, Limit


class CanaryLimit(Plain):
    """A limit such as `"+0.5"` or `x2`. A bare number counts as `"+…"`; `""` is no limit."""

    def read(self, given: Any) -> str:
        if given == "":
            return ""
        if not isinstance(given, (str, int, float)) or isinstance(given, bool):
            raise ValueError("must be like +0.5 (percentage points above the stable version) or x2 (times)")
        return str(Limit.read(given))


class CanaryGuard(Group):
    """The plan of a roll-out. Every key has a default, so `{}` is the default plan."""

    otherwise = "must be a mapping"
    fields = (
        Field("steps", ListOf(NUMBER), default=PLAN_DEFAULTS["steps"]),
        Field("time", Seconds(), default=PLAN_DEFAULTS["time"]),
        Field("touches", Whole(), default=PLAN_DEFAULTS["touches"]),
        Field("judged_from", Whole(), default=PLAN_DEFAULTS["judged_from"]),
        *(Field(rate, CanaryLimit(), default=PLAN_DEFAULTS[rate]) for rate in RATES),
    )


CANARY_GUARD = CanaryGuard()
