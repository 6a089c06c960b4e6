"""How long a touch waits, and which touches an event plans: the article's figures."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from scheduling.policy.matrix import delay_for, plan_touches
from scheduling.policy.specs import CustomerSpec, DelayRulesSpec
from tests.scheduling.core.sample_data import ARTICLE, DAY, HOUR, NOON, ann, event, node
from tests.support.tables import each_row

DYNAMIC = node(dynamic=True)


def seconds(customer: CustomerSpec, subject: Any = DYNAMIC, **scale: float) -> float:
    return delay_for(subject, customer, ARTICLE, occurred_at=NOON, **scale).total_seconds()


@each_row(
    "level, quiet, active",
    [("vip", 3600, 2160), ("normal", 7200, 4320), ("gold", 86400, 51840), ("", 86400, 51840)],
)
def test_dynamic_delay_depends_on_level_and_activity(level: str, quiet: int, active: int) -> None:
    assert seconds(ann(level=level)) == quiet
    assert seconds(ann(level=level, last_active_at=NOON - HOUR)) == active


def test_activity_counts_within_exactly_one_day() -> None:
    assert seconds(ann(level="vip", last_active_at=NOON - DAY)) == 2160
    assert seconds(ann(level="vip", last_active_at=NOON - DAY - timedelta(microseconds=1))) == 3600


def test_fixed_delay_ignores_the_customer() -> None:
    assert seconds(ann(level="vip", last_active_at=NOON), node(delay=7 * DAY)) == 7 * 86400


def test_node_delay_rules_override_the_default() -> None:
    own = DelayRulesSpec({"vip": timedelta(seconds=10)}, timedelta(seconds=40), HOUR, 0.5)
    subject = node(dynamic=True, delay_rules=own)

    assert seconds(ann(level="vip"), subject) == 10
    assert seconds(ann(level="normal"), subject) == 40
    assert seconds(ann(level="vip", last_active_at=NOON - HOUR), subject) == 5
    assert seconds(ann(level="vip", last_active_at=NOON - 2 * HOUR), subject) == 10


@each_row("subject", [node(delay=timedelta(seconds=3600)), DYNAMIC])
def test_time_scale_divides_all_delays(subject: Any) -> None:
    assert seconds(ann(level="vip"), subject, time_scale=3600) == 1


def test_event_plans_touch_per_enabled_triggered_node() -> None:
    nodes = [
        node("first", delay=HOUR, expires_after=DAY),
        node("second", delay=2 * HOUR),
        node("other", trigger="order.paid"),
        node("off", enabled=False),
    ]

    planned = plan_touches(event(), ann(), nodes, ARTICLE)

    assert [(each.node.key, each.due_at) for each in planned] == [("first", NOON + HOUR), ("second", NOON + 2 * HOUR)]
    assert planned[0].expires_at == NOON + HOUR + DAY, "its life begins when it is due"


def test_planning_applies_no_guard() -> None:
    hopeless = replace(node(holdout_percent=100, rollout_percent=0), guard_cap="apply")
    assert len(plan_touches(event(), ann(opted_out=True, conversation_at=NOON + HOUR), [hopeless], ARTICLE)) == 1


def test_time_scale_keeps_the_expiry_span() -> None:
    (planned,) = plan_touches(event(), ann(), [node(delay=HOUR, expires_after=DAY)], ARTICLE, time_scale=60)
    assert (planned.due_at, planned.expires_at) == (NOON + timedelta(minutes=1), NOON + timedelta(minutes=1) + DAY)
