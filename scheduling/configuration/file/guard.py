"""`canary.guard` of a node: how a guarded roll-out of its canary goes, once a person starts it."""

from __future__ import annotations

from typing import Any

from scheduling.configuration.file.rules import Group
from scheduling.configuration.file.schema import NUMBER, Field, ListOf, Plain, Seconds, Whole
from scheduling.policy.rollout import RATES, USUAL, Limit


class CanaryLimit(Plain):
    """`"+0.5"` (a bare number is the same), or `x2`; `""` for none."""

    def read(self, given: Any) -> str:
        if given == "":
            return ""
        if not isinstance(given, (str, int, float)) or isinstance(given, bool):
            raise ValueError("must be like +0.5 (percentage points above the stable version) or x2 (times)")
        return str(Limit.read(given))


class CanaryGuard(Group):
    """All keys have a default, so `{}` is the usual plan."""

    otherwise = "must be a mapping"
    fields = (
        Field("steps", ListOf(NUMBER), default=USUAL["steps"]),
        Field("time", Seconds(), default=USUAL["time"]),
        Field("touches", Whole(), default=USUAL["touches"]),
        Field("judged_from", Whole(), default=USUAL["judged_from"]),
        *(Field(rate, CanaryLimit(), default=USUAL[rate]) for rate in RATES),
    )


CANARY_GUARD = CanaryGuard()
