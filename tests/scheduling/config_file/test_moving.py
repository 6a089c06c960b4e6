"""An edited delay and the touches that wait already."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pytest_django import DjangoAssertNumQueries, Settings

from scheduling.models import Customer, EventType, Node, Touch
from scheduling.planning import rescheduling

Apply = Callable[..., str]
HOUR = timedelta(hours=1)


@pytest.fixture
def started(apply: Apply, house: str, happen: Callable[..., Any]) -> Callable[..., Touch]:
    """The house is there with a delay of 2 h; call it for a touch whose event happened so long ago."""
    EventType.objects.create(key="material.downloaded")
    apply(house.replace("15m", "2h"))

    def touch(user: str, ago: timedelta, **changes: Any) -> Touch:
        receipt = happen(user=user, occurred_at=datetime.now(UTC) - ago, **changes)
        return Touch.objects.get(pk=receipt.task_ids[0])

    return touch


def placed(touch: Touch) -> timedelta:
    """How long after its event a touch is due."""
    touch.refresh_from_db()
    return touch.due_at - touch.event.occurred_at


def test_without_being_asked_nothing_that_waits_moves(apply: Apply, house: str, started: Callable[..., Touch]) -> None:
    young, old = started("ann", HOUR / 4), started("ben", HOUR)
    said = apply(house.replace("15m", "30m"))
    assert (
        "node presale-download (changed): 2 waiting touches; with --move-waiting 2 would move, 1 of them overdue then\n"
        in said
    )
    assert (placed(young), placed(old)) == (2 * HOUR, 2 * HOUR)


def test_waiting_touches_move_and_what_becomes_overdue_is_spread(
    apply: Apply, house: str, started: Callable[..., Touch]
) -> None:
    young = started("ann", HOUR / 4)
    old = [started(f"user-{number}", HOUR) for number in range(20)]
    said = apply(house.replace("15m", "30m"), "--move-waiting")
    now = datetime.now(UTC)
    assert said.endswith("applied\n21 waiting touches moved, 20 overdue ones spread over 10m\n")
    assert placed(young) == HOUR / 2
    assert young.expires_at - young.due_at == timedelta(days=3)
    for touch in old:
        touch.refresh_from_db()
    assert all(now - timedelta(seconds=30) <= touch.due_at <= now + rescheduling.SPREAD for touch in old)
    assert max(touch.due_at for touch in old) - min(touch.due_at for touch in old) > rescheduling.SPREAD / 3
    assert all(touch.expires_at - touch.due_at == timedelta(days=3) for touch in old)
    assert {touch.state for touch in old} == {"scheduled"}


def test_a_move_that_was_cut_short_is_finished_by_applying_the_file_again(
    apply: Apply, house: str, started: Callable[..., Touch]
) -> None:
    touch, overdue = started("ann", HOUR / 4), started("ben", HOUR)
    apply(house.replace("15m", "30m"))
    assert apply(house.replace("15m", "30m"), "--move-waiting") == (
        "no changes\n2 waiting touches moved, 1 overdue ones spread over 10m\n"
    )
    assert placed(touch) == HOUR / 2
    spread = placed(overdue)
    assert apply(house.replace("15m", "30m"), "--move-waiting") == "no changes\n0 waiting touches moved\n"
    assert placed(overdue) == spread


def test_a_dry_run_moves_nothing(apply: Apply, house: str, started: Callable[..., Touch]) -> None:
    touch = started("ann", HOUR / 4)
    assert "1 would move" in apply(house.replace("15m", "30m"), "--move-waiting", "--dry-run")
    assert placed(touch) == 2 * HOUR


def test_what_runs_ended_was_tried_or_was_published_again_stays(
    apply: Apply, house: str, started: Callable[..., Touch]
) -> None:
    running, ended, tried, again = (started(name, HOUR / 4) for name in ("ann", "ben", "eve", "dan"))
    Touch.objects.filter(pk=running.pk).update(state="running", lease_no=1, lease_until=datetime.now(UTC) + HOUR)
    Touch.objects.filter(pk=ended.pk).update(state="delivered", settled_at=datetime.now(UTC))
    Touch.objects.filter(pk=tried.pk).update(attempt=1)
    Touch.objects.filter(pk=again.pk).update(retry_of=ended.pk)
    assert apply(house.replace("15m", "30m"), "--move-waiting").endswith("\n0 waiting touches moved\n")
    assert {placed(each) for each in (running, ended, tried, again)} == {2 * HOUR}


def test_a_touch_that_a_guard_holds_may_wait_longer_but_not_less(
    apply: Apply, house: str, started: Callable[..., Touch]
) -> None:
    held = started("ann", HOUR)
    Touch.objects.filter(pk=held.pk).update(due_at=held.due_at + HOUR)
    apply(house.replace("15m", "30m"), "--move-waiting")
    assert placed(held) == 3 * HOUR
    apply(house.replace("15m", "5h"), "--move-waiting")
    assert placed(held) == 5 * HOUR


def test_batches_leave_nobody_out(
    apply: Apply, house: str, started: Callable[..., Touch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescheduling, "BATCH", 3)
    touches = [started(f"user-{number}", HOUR / 4) for number in range(10)]
    assert apply(house.replace("15m", "1h"), "--move-waiting").endswith("\n10 waiting touches moved\n")
    assert {placed(touch) for touch in touches} == {HOUR}


def test_the_time_scale_divides_the_new_delay_too(
    apply: Apply, house: str, started: Callable[..., Touch], settings: Settings
) -> None:
    touch = started("ann", timedelta(minutes=1))
    settings.AFTERTOUCH_TIME_SCALE = 2
    apply(house.replace("15m", "1h"), "--move-waiting")
    assert placed(touch) == HOUR / 2


DYNAMIC = "delay_rules: {by_level: {vip: 2h}, default: 10h, active_within: 24h, active_factor: 0.5}\n"


def test_a_dynamic_delay_is_reckoned_from_the_activity_before_the_event(
    apply: Apply, house: str, happen: Callable[..., Any]
) -> None:
    EventType.objects.create(key="material.downloaded")
    house = house.replace("delay: 15m", "dynamic: true")
    apply(house + DYNAMIC)
    Customer.objects.create(user_id="vip", level="vip")
    now = datetime.now(UTC)
    happen("order.paid", "active", occurred_at=now - 3 * HOUR)
    touches = {}
    for user in ("vip", "active", "stranger"):
        receipt = happen(user=user, occurred_at=now - HOUR / 2)
        touches[user] = Touch.objects.get(pk=receipt.task_ids[0])
    assert [placed(touches[user]) for user in touches] == [2 * HOUR, 5 * HOUR, 10 * HOUR]
    said = apply(DYNAMIC.replace("2h", "4h").replace("10h", "20h"), "--move-waiting")
    assert (
        "node presale-download (changed): 3 waiting touches; with --move-waiting 3 would move, 0 of them overdue"
        in said
    )
    assert [placed(touches[user]) for user in touches] == [4 * HOUR, 10 * HOUR, 20 * HOUR]


def test_a_rule_edit_leaves_nodes_with_rules_of_their_own_alone(
    apply: Apply, house: str, happen: Callable[..., Any]
) -> None:
    EventType.objects.create(key="material.downloaded")
    house = house.replace("delay: 15m", "dynamic: true, delay_rules: {default: 3h}")
    apply(house + DYNAMIC)
    touch = Touch.objects.get(pk=happen().task_ids[0])
    said = apply(house + DYNAMIC.replace("10h", "20h"), "--move-waiting")
    assert "node presale-download" not in said
    assert placed(touch) == 3 * HOUR
    assert apply(house.replace("3h", "4h"), "--move-waiting").endswith("\n1 waiting touch moved\n")
    assert placed(touch) == 4 * HOUR


def test_a_retired_node_tells_how_many_wait_for_it(apply: Apply, started: Callable[..., Touch]) -> None:
    started("ann", HOUR)
    assert "node presale-download (retired): 1 waiting touch\n" in apply("nodes: []")


def test_the_impact_of_many_nodes_is_counted_in_one_query(
    apply: Apply, house: str, started: Callable[..., Touch], django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    started("ann", HOUR)
    stage, template, channel = (getattr(Node.objects.get(), name) for name in ("stage", "template", "channel"))
    Node.objects.bulk_create(
        Node(key=f"n-{number}", stage=stage, template=template, channel=channel, trigger="order.paid")
        for number in range(50)
    )
    with django_assert_max_num_queries(40):
        apply("nodes: []", "--dry-run")
