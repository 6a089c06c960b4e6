"""The goal among those a node reached, beside its control group."""

from datetime import timedelta

import pytest
from django.utils.timezone import now

from scheduling.experiments.conversion import compute_effects
from scheduling.models import Customer, Holdout, Touch
from scheduling.policy.rollout import Lift, Share
from scheduling.policy.specs import HoldoutSpec, hash_to_percent
from tests.scheduling.core.conftest import deliver, fall_due, make_quiet_now, pass_time
from tests.scheduling.core.fake_channels import FakePresence

pytestmark = pytest.mark.django_db(transaction=True)
DAY = timedelta(days=1)


def test_interval_is_valid_for_few_and_none():
    assert Share(0, 0).interval == (0.0, 1.0)
    low, high = Share(0, 10).interval
    assert (round(low, 3), round(high, 3)) == (0.0, 0.278)
    assert [round(each, 4) for each in Share(81, 263).interval] == [0.2553, 0.3662]  # Newcombe 1998, method 3


def test_lift_is_certain_only_beyond_chance():
    lift = Lift(Share(56, 70), Share(48, 80))  # Newcombe 1998, method 10
    assert [round(each, 4) for each in lift.interval] == [0.0524, 0.3339]
    assert lift.certain
    assert not Lift(Share(5, 10), Share(4, 10)).certain
    assert not Lift(Share(5, 10), Share(0, 0)).certain


def choose_customers(node, count, *, held_out):
    """Customers of the control group, or others."""
    names = (f"user{number}" for number in range(10_000))
    chosen = [
        name for name in names if (hash_to_percent(f"holdout:{node.key}", name) < node.holdout_percent) == held_out
    ]
    return chosen[:count]


def effect():
    (found,) = compute_effects(now() - 30 * DAY, now())
    return found


@pytest.fixture
def node(matrix):
    return matrix.node(holdout_percent=50, goal_event="order.paid", goal_within=2 * DAY)


@pytest.fixture
def deliver_to_users(record_event):
    def deliver_to_users(*users):
        for user in users:
            ids = record_event(user=user).task_ids
            fall_due(*ids)
            deliver(ids)

    return deliver_to_users


def test_effect_counts_the_goal_in_both_groups(node, matrix, deliver_to_users, record_event):
    """Once a customer, where it came after the touch and in time. A repeat of the content is suppressed."""
    matrix.node("without a goal", trigger="order.paid")
    treated, control = choose_customers(node, 5, held_out=False), choose_customers(node, 3, held_out=True)
    record_event("order.paid", treated[4])  # too early
    pass_time(hours=1)
    deliver_to_users(*treated, *control, treated[4])
    pass_time(hours=3)
    for user in (*treated[:3], control[0]):
        record_event("order.paid", user)
    record_event("order.paid", treated[0])  # twice is no second customer
    assert effect().lift == Lift(Share(0, 0), Share(0, 0))  # their time is not over
    pass_time(days=3)
    record_event("order.paid", control[1])  # too late
    assert effect().lift == Lift(Share(3, 5), Share(1, 3))
    assert [(each.template, each.number, each.share) for each in effect().versions] == [("guide", 1, Share(3, 5))]


def test_effect_keeps_the_global_holdout_apart(node, deliver_to_users, record_event):
    Holdout.objects.create(pk=1, percent=50)
    everywhere = [f"user{number}" for number in range(50) if HoldoutSpec(50).includes(f"user{number}")][:3]
    treated = [user for user in choose_customers(node, 50, held_out=False) if not HoldoutSpec(50).includes(user)][:4]
    control = [user for user in choose_customers(node, 50, held_out=True) if not HoldoutSpec(50).includes(user)][:2]
    deliver_to_users(*treated, *control, *everywhere)
    pass_time(hours=3)
    for user in (*treated[:3], everywhere[0]):
        record_event("order.paid", user)
    pass_time(days=3)
    assert effect().lift == Lift(Share(3, 4), Share(0, 2))
    assert effect().overall == Lift(Share(3, 4), Share(1, 3))


def test_effect_keeps_customers_suppressed_after_draw(node, deliver_to_users):
    """And who is stopped before it does not: the control group knows no such customers."""
    one, other = choose_customers(node, 2, held_out=False)
    Customer.objects.create(user_id=other, opted_out=True)
    node.rollout_percent = 0
    node.save()
    deliver_to_users(one, other)
    pass_time(days=3)
    assert (effect().lift.treated, effect().versions) == (Share(0, 1), [])


def test_effect_ignores_customers_blocked_by_presence(node, deliver_to_users, integrate):
    """Customers of the control group would be counted among those who were to get it."""
    integrate(presence=(FakePresence("stale"),))
    deliver_to_users(*choose_customers(node, 1, held_out=False), *choose_customers(node, 2, held_out=True))
    pass_time(days=3)
    assert effect().lift == Lift(Share(0, 0), Share(0, 0))


def test_effect_separates_template_versions(node, shop, deliver_to_users):
    one, other = choose_customers(node, 2, held_out=False)
    deliver_to_users(one)
    text = node.template.texts.get()
    text.body = "another"
    text.save()
    deliver_to_users(other)
    pass_time(hours=1)
    shop.record_event("order.paid", other)
    pass_time(days=3)
    assert [(each.number, each.share) for each in effect().versions] == [(1, Share(0, 1)), (2, Share(1, 1))]


def test_effect_counts_goal_during_deferral_in_both_groups(node, deliver_to_users, record_event):
    """Seen from the delivery on, they would be missing among those who were to get it, and only there."""
    node.cancel_on = ["order.paid"]
    node.save()
    quiet = make_quiet_now()
    treated, control = choose_customers(node, 3, held_out=False), choose_customers(node, 1, held_out=True)
    record_event(user=treated[2])  # cancelled before the hold-out was drawn
    record_event("order.paid", treated[2])
    deliver_to_users(*treated[:2], *control)
    pass_time(hours=1)
    for user in (treated[0], *control):
        record_event("order.paid", user)
    quiet.enabled = False
    quiet.save()
    pass_time(days=3)
    deliver(list(Touch.objects.filter(state="scheduled").values_list("task_id", flat=True)))
    assert not Touch.objects.filter(settled_at=None).exists()
    assert effect().lift == Lift(Share(1, 2), Share(1, 1))
