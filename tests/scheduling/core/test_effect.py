"""The goal among those a node reached, beside its control group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from django.utils.timezone import now
from pytest_django import Settings

from scheduling.delivery import presence
from scheduling.experiments.conversion import NodeEffect, compute_effects
from scheduling.policy.rollout import Lift, Share
from scheduling.policy.specs import hash_to_percent
from tests.scheduling.core.conftest import deliver, fall_due, pass_time

DAY = timedelta(days=1)


def test_an_interval_is_sane_for_few_and_for_none() -> None:
    assert Share(0, 0).interval == (0.0, 1.0)
    low, high = Share(0, 10).interval
    assert (round(low, 3), round(high, 3)) == (0.0, 0.278)
    assert [round(each, 4) for each in Share(81, 263).interval] == [0.2553, 0.3662]  # Newcombe 1998, method 3


def test_a_difference_is_certain_only_beyond_chance() -> None:
    lift = Lift(Share(56, 70), Share(48, 80))  # Newcombe 1998, method 10
    assert [round(each, 4) for each in lift.interval] == [0.0524, 0.3339]
    assert lift.certain
    assert not Lift(Share(5, 10), Share(4, 10)).certain
    assert not Lift(Share(5, 10), Share(0, 0)).certain


def drawn(node: Any, count: int, *, held_out: bool) -> list[str]:
    """Customers of the control group, or others."""
    names = (f"user{number}" for number in range(10_000))
    chosen = [
        name for name in names if (hash_to_percent(f"holdout:{node.key}", name) < node.holdout_percent) == held_out
    ]
    return chosen[:count]


def effect() -> NodeEffect:
    (found,) = compute_effects(now() - 30 * DAY, now())
    return found


@pytest.fixture
def node(matrix: Any) -> Any:
    return matrix.node(holdout_percent=50, goal_event="order.paid", goal_within=2 * DAY)


@pytest.fixture
def reach(happen: Callable[..., Any]) -> Callable[..., None]:
    def reach(*users: str) -> None:
        for user in users:
            ids = happen(user=user).task_ids
            fall_due(*ids)
            deliver(ids)

    return reach


@pytest.mark.django_db
def test_the_goal_is_counted_for_both_groups(node: Any, reach: Any, happen: Callable[..., Any]) -> None:
    treated, control = drawn(node, 4, held_out=False), drawn(node, 3, held_out=True)
    reach(*treated, *control)
    pass_time(hours=3)
    for user in (*treated[:3], control[0]):
        happen("order.paid", user)
    happen("order.paid", treated[0])  # twice is no second customer
    assert effect().lift == Lift(Share(0, 0), Share(0, 0))  # their time is not over
    pass_time(days=3)
    happen("order.paid", control[1])  # too late
    assert effect().lift == Lift(Share(3, 4), Share(1, 3))
    assert [(each.template, each.number, each.share) for each in effect().versions] == [("guide", 1, Share(3, 4))]


@pytest.mark.django_db
def test_what_happened_before_is_no_effect_and_each_counts_once(
    node: Any, reach: Any, happen: Callable[..., Any]
) -> None:
    (user,) = drawn(node, 1, held_out=False)
    happen("order.paid", user)
    pass_time(hours=1)
    reach(user, user)  # the second one is suppressed: the same content
    pass_time(days=3)
    assert effect().lift == Lift(Share(0, 1), Share(0, 0))


@pytest.mark.django_db
def test_who_is_stopped_after_the_draw_stays_in_the_comparison(node: Any, reach: Any) -> None:
    """And who is stopped before it does not: the control group knows no such customers."""
    from scheduling.models import Customer

    one, other = drawn(node, 2, held_out=False)
    Customer.objects.create(user_id=other, opted_out=True)
    node.rollout_percent = 0
    node.save()
    reach(one, other)
    pass_time(days=3)
    assert (effect().lift.treated, effect().versions) == (Share(0, 1), [])


class Stale:
    """A Presence provider for whom every moment is long gone: a code that only its app knows."""

    event_types: ClassVar[frozenset[str]] = frozenset()

    def presence_blocks(self, questions: Any) -> list[str]:
        return ["stale"] * len(questions)

    def note_sending(self, questions: Any, sent: Any) -> None:
        """Count nothing."""


@pytest.fixture
def too_late(settings: Settings) -> Iterator[None]:
    settings.PRESENCE = ["tests.scheduling.core.test_effect.Stale"]
    presence.presence_providers.cache_clear()
    yield
    presence.presence_providers.cache_clear()


@pytest.mark.django_db
def test_what_presence_objects_to_was_never_drawn_whatever_it_calls_it(node: Any, reach: Any, too_late: None) -> None:
    """Customers of the control group would be counted among those who were to get it."""
    reach(*drawn(node, 1, held_out=False), *drawn(node, 2, held_out=True))
    pass_time(days=3)
    assert effect().lift == Lift(Share(0, 0), Share(0, 0))


@pytest.mark.django_db
def test_versions_of_the_content_are_told_apart(node: Any, matrix: Any, reach: Any, happen: Callable[..., Any]) -> None:
    one, other = drawn(node, 2, held_out=False)
    reach(one)
    text = node.template.texts.get()
    text.body = "another"
    text.save()
    reach(other)
    pass_time(hours=1)
    happen("order.paid", other)
    pass_time(days=3)
    assert [(each.number, each.share) for each in effect().versions] == [(1, Share(0, 1)), (2, Share(1, 1))]


@pytest.mark.django_db
def test_a_node_without_a_goal_is_not_asked(matrix: Any) -> None:
    matrix.node()
    assert compute_effects(now() - DAY, now()) == []


@pytest.mark.django_db
def test_who_pays_while_the_touch_is_held_counts_on_both_sides(
    node: Any, reach: Any, happen: Callable[..., Any]
) -> None:
    """Seen from the delivery on, they would be missing among those who were to get it, and only there."""
    from scheduling.models import HarassmentRule, Touch

    node.cancel_on = ["order.paid"]
    node.save()
    hour = timedelta(hours=1)
    quiet = HarassmentRule.objects.create(
        kind="quiet_hours", quiet_from=(now() - hour).time(), quiet_to=(now() + hour).time(), timezone="UTC"
    )
    treated, control = drawn(node, 3, held_out=False), drawn(node, 1, held_out=True)
    happen(user=treated[2])  # called off before anybody was drawn
    happen("order.paid", treated[2])
    reach(*treated[:2], *control)
    pass_time(hours=1)
    for user in (treated[0], *control):
        happen("order.paid", user)
    quiet.enabled = False
    quiet.save()
    pass_time(days=3)
    deliver(list(Touch.objects.filter(state="scheduled").values_list("task_id", flat=True)))
    assert not Touch.objects.filter(settled_at=None).exists()
    assert effect().lift == Lift(Share(1, 2), Share(1, 1))
