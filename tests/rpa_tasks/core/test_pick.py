"""Which job starts next, and that no shop ever runs two."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import IntegrityError, transaction
from django.utils.timezone import now

from rpa_tasks.jobs import wakeups
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.models import Breaker, ExecutionNode, Job, Lane, LoginState, Platform, Shop
from scheduling import sql
from scheduling.ledger.transitions import Settlement, WakeUp
from scheduling.models import Pause, Priority
from tests.rpa_tasks.core.conftest import EVERY
from tests.support.second_connection import (
    act_and_close,
    act_behind_locks,
    await_lock_waits,
)
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT


@pytest.fixture(autouse=True)
def flow(market):
    market.flow()


def end_run(pick, state="succeeded"):
    assert job_ledger.settle(pick.claim, Settlement(state))


def pick_shop_id(market, *queues, **options):
    pick = market.pick(*queues, **options)
    return Shop.objects.get(pk=pick.shop_id).shop_id if pick else None


def test_pick_returns_one_job_per_shop(market):
    market.shop()
    market.publish(dedupe_key="a")
    market.publish(dedupe_key="b")

    first = market.pick()
    assert market.pick() is None
    end_run(first)
    second = market.pick()

    assert second.claim.task_id != first.claim.task_id
    assert second.claim.lease_no > first.claim.lease_no
    with pytest.raises(IntegrityError, match="rpa_one_run_a_shop"):
        Job.objects.update(state="running", lease_until=now())


def test_pick_orders_jobs_of_its_queues_by_priority(market):
    for name, priority in [("low", 2), ("lower", 2), ("normal", 1), ("high", 0)]:
        market.shop(name)
        for key in range(3):
            market.publish(name, priority=priority, dedupe_key=str(key))

    assert job_ledger.startable() == {"high": 1, "normal": 1, "low": 2}
    first = pick_shop_id(market, "low")
    assert job_ledger.startable() == {"high": 1, "normal": 1, "low": 1}
    assert [pick_shop_id(market) for _ in range(3)] == ["high", "normal", *({"low", "lower"} - {first})]


def test_pick_raises_aged_low_job_to_high(market):
    market.shop("old")
    market.shop("new")
    market.publish("old", priority=2)
    Job.objects.update(due_at=now() - timedelta(minutes=21))
    Lane.objects.filter(shop__shop_id="new").update(last_served_at=now())
    market.publish("new", priority=0)

    assert pick_shop_id(market) == "old"
    assert pick_shop_id(market) == "new"


def test_pick_alternates_aged_and_high_jobs(market):
    market.shop("old")
    market.shop("urgent")
    market.publish("old", priority=2)
    Job.objects.update(due_at=now() - timedelta(days=1))
    market.publish("urgent", priority=0)
    Lane.objects.filter(shop__shop_id="old").update(last_served_at=now())
    Lane.objects.filter(shop__shop_id="urgent").update(last_served_at=now() - timedelta(hours=1))

    assert pick_shop_id(market) == "urgent"
    assert pick_shop_id(market) == "old"


def test_pick_alternates_between_shops(market):
    for name in ("a", "b"):
        market.shop(name)
        for key in range(3):
            market.publish(name, dedupe_key=str(key))
    order = []
    for _ in range(6):
        pick = market.pick()
        order.append(Shop.objects.get(pk=pick.shop_id).shop_id)
        end_run(pick)

    assert order in (list("ababab"), list("bababa"))


@each_row(
    "closed",
    [
        lambda shop: Shop.objects.filter(pk=shop.pk).update(paused=True),
        lambda shop: Shop.objects.filter(pk=shop.pk).update(login_state=LoginState.NEEDED),
        lambda shop: Shop.objects.filter(pk=shop.pk).update(retired_at=now()),
        lambda shop: Platform.objects.filter(pk=shop.platform_id).update(paused=True),
        lambda shop: Breaker.objects.filter(pk=shop.platform_id).update(open_until=now() + timedelta(minutes=5)),
        lambda shop: Job.objects.filter(shop=shop).update(due_at=now() + timedelta(hours=1)),
    ],
)
def test_pick_skips_shop_that_cannot_start(market, closed):
    market.flow(platform="temu")
    shop = market.shop("closed", "temu")
    market.publish("closed", platform="temu", priority=0)
    closed(shop)
    market.shop("open")
    market.publish("open", priority=2)

    assert pick_shop_id(market) == "open"
    assert market.pick() is None


def test_pick_ignores_later_job_of_same_shop(market):
    market.shop()
    market.publish(dedupe_key="later", priority=0, delay=timedelta(hours=1))
    now_due = market.publish(dedupe_key="now", priority=2)

    assert market.pick().claim.task_id == now_due.task_id


def test_pick_during_global_pause_returns_none(market):
    market.shop()
    market.publish()
    Pause.objects.create(scope="all")

    assert market.pick() is None


def test_ids_with_dots_share_no_queue(market):
    """SQL and Python name the same queue, and no other shop, platform or node has it."""
    own = {"dedicated_queue": True}
    shops = [
        market.shop("c", "a.b", **own), market.shop("b.c", "a", **own), market.shop("b-c", "a", **own),
        market.shop("high", "p.d"), market.shop("d.high", "p"),
    ]  # fmt: skip
    Platform.objects.filter(key__in=["p", "p.d"]).update(**own)
    for platform in ("a.b", "a", "p.d", "p"):
        market.flow(platform=platform)
    named = {}
    for shop in Shop.objects.filter(pk__in=[each.pk for each in shops]).select_related("platform"):
        market.publish(shop.shop_id, platform=shop.platform.key, priority=0)
        named[wakeups.queue_of(shop, 0)] = shop.shop_id
    assert sorted(named) == ["p.p.high", "p.p:d.high", "s.a.b-c", "s.a.b:c", "s.a:b.c"]

    assert set(job_ledger.startable()) == set(named) == {
        name for name in wakeups.list_extra_queues() if not name.endswith((".normal", ".low"))
    }  # fmt: skip
    assert {queue: pick_shop_id(market, queue) for queue in named} == named
    assert wakeups.node_queue("n1.p.a", "high") != wakeups.node_queue("n1", "p.a.high")


@pytest.mark.django_db(transaction=True)
def test_concurrent_picks_start_one_probe(market):
    """Both read before either writes its trial: a lock on the breaker stops them in between."""
    for name in ("a", "b"):
        market.shop(name)
        market.publish(name)
    Breaker.objects.update(open_until=now() - timedelta(seconds=1))
    picks = [
        pick for pick in act_behind_locks(Breaker.objects.select_for_update().get, market.pick, market.pick) if pick
    ]

    assert len(picks) == 1
    assert Breaker.objects.get().probe == picks[0].claim.task_id
    assert Job.objects.filter(state="running").count() == Lane.objects.exclude(task_id=None).count() == 1


@pytest.fixture
def preferred_node(market):
    """A node that has the shop's profile, and carries what is urgent. Another one carries everything."""
    market.flow("browse", needs_browser=True)
    market.shop()
    node = market.node("n1", "high", "n.n1.high")
    market.node("n2", *EVERY, "n.n2.high")
    market.publish(task_type="browse", priority=0)
    pick = market.pick(node="n1")
    job_ledger.pin_to_node(pick, node="n1")
    end_run(pick)
    return node


def test_silent_preferred_node_keeps_shops_for_home_lease(market, preferred_node, settings):
    settings.AFTERTOUCH_RPA_HOME_LEASE = timedelta(hours=1)
    market.publish(task_type="browse", priority=0)
    assert job_ledger.startable() == {"n.n1.high": 1}
    ExecutionNode.objects.filter(name="n1").update(seen_at=now() - timedelta(minutes=50))

    assert market.pick(node="n2") is None
    ExecutionNode.objects.filter(name="n1").update(seen_at=now() - timedelta(minutes=70))
    assert market.pick(node="n2")


def test_plain_job_starts_on_any_node(market, preferred_node):
    """The preferred node is busy; a browser job of the same tier waits for it and does not block the other."""
    market.publish(task_type="browse", priority=0)
    free = market.publish(priority=0)

    assert job_ledger.startable() == {"n.n1.high": 1, "high": 1}
    pick = market.pick(node="n2")
    assert pick.claim.task_id == free.task_id
    end_run(pick)
    assert market.pick(node="n2") is None
    assert market.pick(node="n1")


def test_pick_of_jobs_due_together_takes_startable_one(market, preferred_node):
    market.publish(task_type="browse", priority=0)
    free = market.publish(priority=0)
    Job.objects.filter(state="queued").update(due_at=now() - timedelta(seconds=1))

    assert market.pick(node="n2").claim.task_id == free.task_id


def test_browser_job_without_wait_starts_on_first_node(market, preferred_node):
    Platform.objects.update(waits_for_home=False)
    market.publish(task_type="browse", priority=0)

    assert job_ledger.startable() == {"high": 1}
    pick = market.pick(node="n2")
    job_ledger.pin_to_node(pick, node="n2")
    assert Lane.objects.get().home == "n2"


def test_preferred_node_keeps_only_jobs_of_its_queues(market, preferred_node):
    market.publish(task_type="browse", priority=2)

    assert market.pick("high", node="n1") is None
    assert job_ledger.startable() == {"low": 1}
    assert market.pick(node="n2")


def list_wakeup_queues(monkeypatch, *receipts, priority=0):
    published = []
    monkeypatch.setattr(
        wakeups, "publish_within_capacity", lambda found, nodes: published.extend(each.queue for each in found)
    )
    shop = Lane.objects.get().shop_id
    wakeups.publish_wakeups([WakeUp(each.task_id, now(), priority, shop) for each in receipts])
    return published


def test_wakeup_of_browser_job_goes_to_preferred_node(market, preferred_node, monkeypatch):
    browser, free = market.publish(task_type="browse", priority=0), market.publish(priority=0)

    assert list_wakeup_queues(monkeypatch, browser, free) == ["n.n1.high", "high"]
    assert list_wakeup_queues(monkeypatch, browser, priority=2) == ["low"]
    assert set(wakeups.list_extra_queues()) == {"n.n1.high", "n.n2.high"}


def test_wakeup_without_wait_prefers_node_with_free_slot(market, preferred_node, monkeypatch):
    Platform.objects.update(waits_for_home=False)
    browser = market.publish(task_type="browse", priority=0)

    assert list_wakeup_queues(monkeypatch, browser) == ["n.n1.high"]
    ExecutionNode.objects.filter(name="n1").update(slots=0)
    assert list_wakeup_queues(monkeypatch, browser) == ["high"]


def test_pin_to_node_by_stale_claim_changes_nothing(market):
    market.shop()
    market.publish()
    stale = market.pick(node="n1")
    end_run(stale)
    market.publish()
    market.pick(node="n2")
    job_ledger.pin_to_node(stale, node="n1")

    assert Lane.objects.get().home == ""


def test_pick_rechecks_due_time_after_lock(market):
    """Between its look and its lock another node ran the job and put it off: the pick then finds it, but not due."""
    market.shop()
    receipt = market.publish()
    pick = market.pick()
    assert job_ledger.settle(pick.claim, Settlement("scheduled", due_at=now() + timedelta(minutes=2)))

    assert market.pick() is None
    assert Job.objects.get(pk=receipt.task_id).state == "scheduled"


@pytest.mark.django_db(transaction=True)
def test_pick_that_waits_for_a_job_holds_no_lane(market, second_connection):
    """The other transaction may wait for a run, and the end of that run for a lane that the pick has looked at."""
    market.shop()
    market.publish()
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            Job.objects.select_for_update(no_key=True).get()
            picking = pool.submit(act_and_close, market.pick)
            await_lock_waits()
            assert second_connection(lock_lane)
        assert picking.result(WAIT_LIMIT)


@transaction.atomic
def lock_lane():
    """Return whether the only lane can be locked at once."""
    return Lane.objects.select_for_update(skip_locked=True).exists()


@pytest.mark.django_db(transaction=True)
def test_pick_keeps_no_job_that_it_could_not_claim(market):
    """A batch that merges locks several jobs. A pick that keeps one of them, and waits for another, is a deadlock."""
    market.shop("s1")
    market.shop("s2")
    first = Job.objects.filter(task_id=market.publish("s1", priority=Priority.HIGH).task_id)
    second = Job.objects.filter(task_id=market.publish("s2").task_id)

    def merge_into_both():
        with transaction.atomic():
            second.update(requests=2)
            await_lock_waits()  # of the pick, for the first job
            first.update(requests=2)

    def put_off_first():
        first.update(due_at=now() + timedelta(hours=1))

    pick, _ = act_behind_locks(put_off_first, market.pick, merge_into_both)

    assert pick is not None
    assert pick.claim.task_id == second.get().task_id
    assert first.get().requests == 2


@pytest.mark.django_db(transaction=True)
def test_concurrent_picks_differ_in_shop(market, race):
    for number in range(8):
        market.shop(f"s{number}")
        market.publish(f"s{number}", dedupe_key="a")
        market.publish(f"s{number}", dedupe_key="b")

    picks = [pick for pick in race(8, lambda _: market.pick()) if pick]

    assert len({pick.shop_id for pick in picks}) == len(picks)
    assert Lane.objects.exclude(task_id=None).count() == len(picks) == Job.objects.filter(state="running").count()
    assert len(picks) == 8


@pytest.mark.django_db(transaction=True)
def test_concurrent_workers_run_each_job_of_lane_once(market, race):
    market.shop(backlog_limit=1000)
    for key in range(40):
        market.publish(dedupe_key=str(key))

    def work(_):
        done = 0
        while Job.objects.filter(state__in=["queued", "running"]).exists():
            if pick := market.pick():
                end_run(pick)
                done += 1
        return done

    assert sum(race(6, work)) == 40
    assert Lane.objects.get().lease_no >= 40


@pytest.mark.django_db(transaction=True)
def test_dispatch_skips_locked_job(market, second_connection):
    """Dispatch never waits for the transaction of another; what it skips falls to the next pass."""
    market.shop()
    locked, free = (market.publish(dedupe_key=key, delay=timedelta(days=1)).task_id for key in ("locked", "free"))
    Job.objects.update(due_at=now())

    def dispatch():
        with sql.limit_statement_time(5):
            return [wakeup.task_id for wakeup in job_ledger.dispatch_due(horizon=timedelta(seconds=30))]

    with transaction.atomic():
        Job.objects.select_for_update().get(pk=locked)
        assert second_connection(dispatch) == [free]
    assert dispatch() == [locked]
