"""How long a touch waits, and which touches an event plans: the article's figures."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from scheduling.policy.matrix import delay_for, plan_touches
from scheduling.policy.specs import CustomerSpec, DelayRulesSpec
from tests.scheduling.core.cast import ARTICLE, DAY, HOUR, NOON, ann, event, node

DYNAMIC = node(dynamic=True)


def seconds(customer: CustomerSpec, subject: Any = DYNAMIC, **scale: float) -> float:
    return delay_for(subject, customer, ARTICLE, occurred_at=NOON, **scale).total_seconds()


@pytest.mark.parametrize(
    ("level", "quiet", "active"),
    [("vip", 3600, 2160), ("normal", 7200, 4320), ("gold", 86400, 51840), ("", 86400, 51840)],
)
def test_the_level_sets_the_wait_and_who_was_active_waits_less(level: str, quiet: int, active: int) -> None:
    assert seconds(ann(level=level)) == quiet
    assert seconds(ann(level=level, last_active_at=NOON - HOUR)) == active


def test_active_means_within_the_last_day_to_the_instant() -> None:
    assert seconds(ann(level="vip", last_active_at=NOON - DAY)) == 2160
    assert seconds(ann(level="vip", last_active_at=NOON - DAY - timedelta(microseconds=1))) == 3600


def test_a_node_with_a_fixed_delay_asks_nobody() -> None:
    assert seconds(ann(level="vip", last_active_at=NOON), node(delay=7 * DAY)) == 7 * 86400


def test_a_node_may_have_rules_of_its_own() -> None:
    own = DelayRulesSpec({"vip": timedelta(seconds=10)}, timedelta(seconds=40), HOUR, 0.5)
    subject = node(dynamic=True, delay_rules=own)

    assert seconds(ann(level="vip"), subject) == 10
    assert seconds(ann(level="normal"), subject) == 40
    assert seconds(ann(level="vip", last_active_at=NOON - HOUR), subject) == 5
    assert seconds(ann(level="vip", last_active_at=NOON - 2 * HOUR), subject) == 10


@pytest.mark.parametrize("subject", [node(delay=timedelta(seconds=3600)), DYNAMIC])
def test_the_time_scale_divides_fixed_and_dynamic_delays(subject: Any) -> None:
    assert seconds(ann(level="vip"), subject, time_scale=3600) == 1


def test_an_event_plans_a_touch_for_each_enabled_node_that_it_triggers() -> None:
    nodes = [
        node("first", delay=HOUR, expires_after=DAY),
        node("second", delay=2 * HOUR),
        node("other", trigger="order.paid"),
        node("off", enabled=False),
    ]

    planned = plan_touches(event(), ann(), nodes, ARTICLE)

    assert [(each.node.key, each.due_at) for each in planned] == [("first", NOON + HOUR), ("second", NOON + 2 * HOUR)]
    assert planned[0].expires_at == NOON + HOUR + DAY, "its life begins when it is due"


def test_nothing_is_judged_when_it_is_planned() -> None:
    hopeless = replace(node(holdout_percent=100, rollout_percent=0), guard_cap="apply")
    assert len(plan_touches(event(), ann(opted_out=True, conversation_at=NOON + HOUR), [hopeless], ARTICLE)) == 1


def test_the_time_scale_leaves_the_life_of_a_touch_alone() -> None:
    (planned,) = plan_touches(event(), ann(), [node(delay=HOUR, expires_after=DAY)], ARTICLE, time_scale=60)
    assert (planned.due_at, planned.expires_at) == (NOON + timedelta(minutes=1), NOON + timedelta(minutes=1) + DAY)
