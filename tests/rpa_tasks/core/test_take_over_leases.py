"""Who gets a shop: operators and jobs at once, and what becomes of a take-over whose node is lost."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.utils.timezone import now

from rpa_tasks.jobs import shops
from rpa_tasks.models import ExecutionNode, Job, Lane, Shop, TakeOver, TakeOverEnd
from rpa_tasks.takeover import leases
from rpa_tasks.takeover.leases import CannotTakeOver
from scheduling.models import AuditEntry
from tests.rpa_tasks.core.conftest import Market
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db


@pytest.fixture
def shop(market):
    market.flow()
    market.node()
    return market.shop()


def start(shop, name="ann"):
    user, _ = User.objects.get_or_create(username=name)
    return leases.start_take_over(shop.pk, user=user, address="203.0.113.7")


def start_or_refuse(shop, name="ann"):
    try:
        return start(shop, name)
    except CannotTakeOver as error:
        return error.reason


def expire(row):
    past = now() - timedelta(seconds=1)
    TakeOver.objects.filter(pk=row.pk).update(lease_until=past)
    Lane.objects.filter(shop=row.shop).update(held_until=past)


@pytest.mark.django_db(transaction=True)
def test_concurrent_starts_give_one_operator_the_shop(shop, race):
    users = [User.objects.create(username=f"u{number}").username for number in range(6)]
    found = race(6, lambda number: start_or_refuse(shop, users[number]))
    assert [each for each in found if each != "taken"] == list(TakeOver.objects.all())
    assert TakeOver.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_start_races_with_pick_never_holds_a_running_shop(market, shop, race):
    won = {"operator": 0, "job": 0}
    for number in range(12):
        market.publish(payload={"number": number})
        row, pick = race(2, lambda place: start(shop) if place else market.pick())[::-1]
        if pick is None:
            won["operator"] += 1
            assert row.task_id is None
            assert market.pick() is None
        else:
            won["job"] += 1
            assert row.task_id == pick.claim.task_id, "it holds a shop whose job runs"
        leases.end_take_over(row, TakeOverEnd.ENDED)
        Job.objects.filter(state="running").update(state="cancelled", lease_until=None, settled_at=now())
        Lane.objects.update(task_id=None)
        Job.objects.filter(state="scheduled").delete()
    assert sum(won.values()) == 12


def test_held_shop_starts_no_job_until_the_end(market, shop):
    row = start(shop)
    market.publish()
    assert market.pick() is None
    assert leases.open_take_over(shop.pk) == row
    assert not shops.unpin_shops([shop.pk], by="ann").released
    assert leases.end_take_over(row, TakeOverEnd.ENDED)
    assert market.pick() is not None
    row.refresh_from_db()
    assert (row.end, row.key, row.username, row.address) == ("ended", None, "ann", "203.0.113.7")


def test_lost_node_frees_shop_and_fences_the_old_take_over(market, shop):
    row = start(shop)
    assert leases.renew_take_over(row)
    expire(row)
    assert not leases.renew_take_over(row)
    market.publish()
    pick = market.pick()
    assert pick is not None
    assert pick.claim.lease_no > row.lease_no
    other = start(shop, "ben")  # shares the run
    assert other.task_id == pick.claim.task_id
    row.refresh_from_db()
    assert row.end == TakeOverEnd.NODE_LOST
    ends = AuditEntry.objects.filter(object_id=str(row.pk), action="ended").values_list("actor", "reason")
    assert list(ends) == [("ann", "node_lost")]
    assert not leases.end_take_over(row, TakeOverEnd.ENDED)
    assert Lane.objects.get(shop=shop).task_id == pick.claim.task_id


def test_end_lost_take_overs_keeps_those_with_a_lease(shop, market):
    kept, lost = start(shop), start(market.shop("s2"), "ben")
    expire(lost)
    assert leases.end_lost_take_overs() == 1
    assert TakeOver.objects.get(ended_at=None) == kept


@each_row("changes", [{"draining_at": now()}, {"seen_at": now() - timedelta(hours=1)}])
def test_browser_elsewhere_is_taken_over_through_another_node(shop, changes):
    """Its login is not on the preferred node."""
    Shop.objects.filter(pk=shop.pk).update(browser={"cdp_url": "http://10.0.0.5:9222"})
    Lane.objects.filter(shop=shop).update(home="n1")
    Market().node("n2")
    row = start(shop)
    assert row.node == "n1"
    leases.end_take_over(row, TakeOverEnd.ENDED)
    ExecutionNode.objects.filter(name="n1").update(**changes)
    row = start(shop)
    assert row.node == "n2"


def test_start_for_unpinned_shop_prefers_node_that_serves_its_queue(shop):
    """The login stays on the node of the take-over, and the jobs of the shop must run there."""
    Shop.objects.filter(pk=shop.pk).update(dedicated_queue=True)
    Market().node("n2", "s.pdd.s1", "n.n2.s.pdd.s1")
    row = start(shop)
    assert row.node == "n2"


@each_row(
    "change, reason",
    [
        (lambda: Lane.objects.update(home="n9"), "node_lost"),
        (lambda: Shop.objects.update(retired_at=now()), "retired"),
        (lambda: ExecutionNode.objects.update(seen_at=now() - timedelta(hours=1)), "no_node"),
    ],
)
def test_start_without_node_or_shop_is_refused(shop, change, reason):
    change()
    assert start_or_refuse(shop) == reason
    assert not TakeOver.objects.exists()
    assert Lane.objects.get(shop=shop).held_until is None
