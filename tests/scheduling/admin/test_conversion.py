"""The page of conversions after touches."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.test import Client

from scheduling.policy.rollout import Lift, Share
from tests.scheduling.core.conftest import deliver, pass_time
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)

Url = Callable[..., str]


def test_effect_shows_goal_beside_control_group(
    matrix: MatrixBuilder, record_event: RecordEvent, viewer: Client, admin_url: Url
) -> None:
    node = matrix.node(holdout_percent=50, goal_event="order.paid", goal_within=timedelta(days=1))
    for number in range(8):
        deliver(record_event(user=f"user{number}").task_ids)
        record_event("order.paid", f"user{number}")
    pass_time(days=2)
    page = viewer.get(admin_url("node_conversion"))
    (told,) = page.context["nodes"]
    assert told["treated"]["of"] + told["control"]["of"] == 8
    assert (told["treated"]["percent"], told["control"]["percent"]) == ("100.0 %", "100.0 %")
    assert told["difference"].startswith("+0.0 points (−")
    assert told["verdict"] == ("wait", "May be chance: zero lies inside the interval.")
    said = page.content.decode()
    assert "Got guide, version 1" in said
    assert admin_url("node_change", node.pk) in said


def test_effect_without_goal_or_control_shows_advice(matrix: MatrixBuilder, viewer: Client, admin_url: Url) -> None:
    page = viewer.get(admin_url("node_conversion")).content.decode()
    assert "No node has a goal yet." in page
    assert "also set a hold-out" in page
    assert all(f'href="{admin_url(each)}"' in page for each in ("node_changelist", "holdout_changelist"))
    node = matrix.node(goal_event="order.paid", goal_within=timedelta(days=1))
    assert "No control group" in viewer.get(admin_url("node_conversion"), {"days": "30"}).content.decode()
    node.holdout_percent = 1
    node.save()
    assert "No customer of the control group counts yet." in viewer.get(admin_url("node_conversion")).content.decode()


@each_row(
    "lift, tone",
    [
        (Lift(Share(90, 100), Share(50, 100)), "good"),
        (Lift(Share(50, 100), Share(90, 100)), "bad"),
        (Lift(Share(0, 0), Share(1, 2)), ""),
    ],
)
def test_effect_verdict_follows_the_interval(lift: Lift, tone: str) -> None:
    from scheduling.admin.experiments import judge_lift

    assert judge_lift(lift, has_holdout=True)[0] == tone
