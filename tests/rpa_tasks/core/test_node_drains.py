"""A drained node ends what runs and starts nothing new; which shops wait for it."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.db import transaction
from django.utils import translation
from django.utils.timezone import now

from rpa_tasks.admin.job import explain_waiting
from rpa_tasks.jobs import shops, wakeups
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.jobs.nodes import NodeLoad, drain_node, measure_loads, resume_node
from rpa_tasks.maintainer import cleaning, housekeeping
from rpa_tasks.maintainer.housekeeping import Housekeeping
from rpa_tasks.metrics import measure_execution_nodes
from rpa_tasks.models import ExecutionNode, Job, Lane, Platform
from rpa_tasks.takeover import leases
from rpa_tasks.takeover.leases import CannotTakeOver
from scheduling.db_timeouts import Deadline
from scheduling.ledger.transitions import Settlement, WakeUp
from tests.rpa_tasks.core.conftest import EVERY

pytestmark = pytest.mark.usefixtures("nodes")


@pytest.fixture
def nodes(market):
    market.flow(needs_browser=True)
    for name in ("n1", "n2"):
        market.node(name, *EVERY, *(f"n.{name}.{queue}" for queue in EVERY))


def pin(shop_id, node):
    Lane.objects.filter(shop__shop_id=shop_id).update(home=node)


def explain():
    """Return why the waiting job waits, with the link."""
    rows = Job.objects.select_related("shop__platform__breaker", "shop__lane", "flow")
    with translation.override("en"):
        return explain_waiting(rows.get(state__in=("scheduled", "queued")))


def test_drained_node_picks_nothing_and_ends_what_runs(market):
    market.shop("s1")
    market.shop("s2")
    market.publish("s1")
    running = market.pick(node="n1")
    assert drain_node("n1", by="ann")
    assert not drain_node("n1", by="bob")
    market.publish("s2")
    assert market.pick(node="n1") is None
    assert job_ledger.settle(running.claim, Settlement("succeeded"))
    assert market.pick(node="n2") is not None
    row = ExecutionNode.objects.get(name="n1")
    assert (row.drained_by, row.draining_at is not None) == ("ann", True)


def test_shop_of_drained_node_waits_with_that_reason_until_released(market):
    shop = market.shop("s1")
    pin("s1", "n1")
    drain_node("n1", by="ann")
    market.publish("s1")
    assert market.pick(node="n2") is None
    words, link = explain()
    assert words == "Its node n1 is drained"
    assert link.endswith("/n1/change/")
    assert shops.unpin_matching_shops(by="ann", node="n1").released == 1
    assert market.pick(node="n2").shop_id == shop.pk


def test_drained_home_does_not_bind_shop_of_platform_that_does_not_wait(market):
    market.shop("s1")
    Platform.objects.update(waits_for_home=False)
    pin("s1", "n1")
    drain_node("n1", by="ann")
    market.publish("s1")
    assert explain()[0] == "Waits for a free node"
    assert market.pick(node="n2") is not None


def test_no_message_goes_to_the_queue_of_a_drained_node(market, monkeypatch):
    shop = market.shop("s1")
    pin("s1", "n1")
    receipt = market.publish("s1")
    sent = []
    monkeypatch.setattr(wakeups, "send_wakeup_message", lambda token, producer: sent.append(token.queue))
    monkeypatch.setattr(wakeups, "count_queue_messages", lambda producer, queue: 0)
    wakeup = WakeUp(receipt.task_id, now(), 1, shop.pk)
    wakeups.publish_wakeups([wakeup])
    assert sent == ["n.n1.normal"]
    assert job_ledger.startable() == {"n.n1.normal": 1}
    drain_node("n1", by="ann")
    wakeups.publish_wakeups([wakeup])
    assert sent == ["n.n1.normal"]
    assert job_ledger.startable() == {}
    found = wakeups.node_capacities()
    assert [wakeups.queue_capacity(queue, found) for queue in ("n.n1.normal", "normal")] == [0, 2]


@pytest.mark.django_db(transaction=True)
def test_resume_wakes_pinned_shops(market, sent_wakeups):
    shop = market.shop("s1")
    market.shop("s2")
    pin("s1", "n1")
    drain_node("n1", by="ann")
    market.publish("s1")
    market.publish("s2")
    sent_wakeups.clear()
    assert resume_node("n1", by="ann")
    assert not resume_node("n1", by="ann")
    assert [each.owner for each in sent_wakeups] == [shop.pk]
    assert market.pick("n.n1.normal", "normal", node="n1") is not None


def test_drained_node_and_its_jobs_count_for_no_scaling(market):
    market.shop("s1")
    market.publish("s1")
    market.pick(node="n1")
    drain_node("n1", by="ann")
    ExecutionNode.objects.update(slots=1)
    assert measure_execution_nodes(Deadline(4.0)) == (1, 1), "two are needed for a running job in one slot"


def test_take_over_opens_on_no_drained_node(market):
    shop, other = market.shop("s1"), market.shop("s2")
    pin("s1", "n1")
    drain_node("n1", by="ann")
    ann = User.objects.create(username="ann")
    with pytest.raises(CannotTakeOver, match="node_drained"):
        leases.start_take_over(shop.pk, user=ann, address="")
    assert leases.start_take_over(other.pk, user=ann, address="").node == "n2"
    Platform.objects.update(waits_for_home=False)
    assert leases.start_take_over(shop.pk, user=ann, address="").node == "n2"
    assert measure_loads(["n1", "n2"]) == {"n1": NodeLoad(pinned=1), "n2": NodeLoad(take_overs=2)}


def test_report_and_tidying_keep_the_drain(settings, monkeypatch):
    settings.AFTERTOUCH_NODE = "n1"
    monkeypatch.setattr(housekeeping.upkeep, "describe_slots", list)
    keeper = Housekeeping(["high"])
    keeper.prewarmer.wanted = ["a shop"]
    drain_node("n1", by="ann")
    keeper.report()
    keeper.choose_next_shops()
    assert ExecutionNode.objects.get(name="n1").draining_at is not None
    assert keeper.prewarmer.wanted == []
    ExecutionNode.objects.update(seen_at=now() - timedelta(days=400))
    cleaning.delete_old_nodes()
    assert list(ExecutionNode.objects.values_list("name", flat=True)) == ["n1"]


@pytest.mark.django_db(transaction=True)
def test_job_picked_before_the_drain_is_committed_ends(market, second_connection):
    """A pick takes no lock of the node, so a drain waits for no pick and no pick for a drain."""
    market.shop("s1")
    market.shop("s2")
    market.publish("s1")
    market.publish("s2")
    with transaction.atomic():
        drain_node("n1", by="ann")
        first = second_connection(lambda: market.pick(node="n1"))
    assert first is not None
    assert market.pick(node="n1") is None
    assert job_ledger.settle(first.claim, Settlement("succeeded"))


@pytest.mark.django_db(transaction=True)
def test_racing_drains_and_picks_leave_no_job_without_lane(market, race):
    for number in range(6):
        market.shop(f"s{number}")
        market.publish(f"s{number}")
    acts = [lambda: drain_node("n1", by="ann"), lambda: drain_node("n1", by="bob")]
    acts += [lambda: market.pick(node="n1")] * 4
    found = race(6, lambda number: acts[number]())
    assert sorted(found[:2]) == [False, True]
    picks = [each.claim.task_id for each in found[2:] if each]
    assert set(Job.objects.filter(state="running").values_list("pk", flat=True)) == set(picks)
    assert market.pick(node="n1") is None
    assert market.pick(node="n2") is not None
