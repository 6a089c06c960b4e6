"""Whether a canary may grow: counts in, one judgement out."""

import random
from datetime import timedelta

import pytest

from scheduling.errors import InvalidInput
from scheduling.policy.rollout import (
    GROW,
    PLAN_DEFAULTS,
    WAIT,
    WITHDRAW,
    CanaryCounts,
    Judgement,
    judge_canary,
    read_plan,
)
from tests.support.tables import each_row

DAY = timedelta(days=1)
PLAN = read_plan(PLAN_DEFAULTS)


@each_row(
    "counts, since, judgement",
    [
        (CanaryCounts(199), DAY, Judgement(WAIT, "touches")),
        (CanaryCounts(4000, 40, 12), DAY - timedelta(seconds=1), Judgement(WAIT, "time")),
        (CanaryCounts(4000, 40, 12), DAY, Judgement(GROW)),
        (CanaryCounts(200), DAY, Judgement(GROW)),
        (CanaryCounts(300, 0, 2), DAY, Judgement(WAIT, "complaints")),  # 0.67 %, possibly by chance
        (CanaryCounts(500, 5, 25), timedelta(0), Judgement(WITHDRAW, "complaints")),
        (CanaryCounts(500, 100, 0), timedelta(0), Judgement(WITHDRAW, "failures")),
        (CanaryCounts(50, 50), timedelta(0), Judgement(WITHDRAW, "failures")),
        (CanaryCounts(50, 0, 1), timedelta(0), Judgement(WAIT, "time")),
        (CanaryCounts(49, 49, 0), timedelta(0), Judgement(WAIT, "time")),  # so few prove nothing
    ],
)
def test_counts_are_judged_by_time_touches_and_limits(counts, since, judgement):
    assert judge_canary(PLAN, counts, since) == judgement


def test_limit_of_100_is_none():
    plan = read_plan({"complaints": 100, "failures": 100})
    assert judge_canary(plan, CanaryCounts(1000, 500, 500), DAY) == Judgement(GROW)


def test_canary_at_its_limit_is_rarely_withdrawn_by_chance():
    """Judged after each of 60 parts of 1,500 touches, at the limit itself."""
    dice = random.Random(1)
    withdrawn = 0
    for _ in range(200):
        complained = 0
        for part in range(1, 61):
            complained += sum(dice.random() < 0.005 for _ in range(25))
            if judge_canary(PLAN, CanaryCounts(25 * part, 0, complained), timedelta(0)).decision == WITHDRAW:
                withdrawn += 1
                break
    assert withdrawn <= 20


@each_row(
    "stored, field",
    [
        ({"steps": []}, "steps"),
        ({"steps": [50, 10]}, "steps"),
        ({"time": -1}, "time"),
        ({"touches": 0}, "touches"),
        ({"complaints": "x2"}, "complaints"),
        ({"failures": 101}, "failures"),
        ({"opt_outs": 1}, "opt_outs"),
    ],
)
def test_plan_errors_name_the_key(stored, field):
    with pytest.raises(InvalidInput) as refused:
        read_plan(stored)
    assert [each.field for each in refused.value.errors] == [field]
