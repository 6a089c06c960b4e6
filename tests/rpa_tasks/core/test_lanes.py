"""Which job starts next, and that no shop ever runs two."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils.timezone import now

from rpa_tasks.jobs import wakeups
from rpa_tasks.jobs.pick import LANES, TIERS, jobs
from rpa_tasks.models import Breaker, ExecutionNode, Job, Lane, LoginState, Platform, Shop
from scheduling import sql
from scheduling.ledger.transitions import Settlement, WakeUp
from scheduling.models import Pause
from tests.rpa_tasks.guard.house import eventually


@pytest.fixture(autouse=True)
def flow(market: Any) -> None:
    market.flow()


def end(pick: Any, state: str = "succeeded") -> None:
    assert jobs.settle({pick.claim: Settlement(state)})


def picked(market: Any, *queues: str, **options: Any) -> str | None:
    pick = market.pick(*queues, **options)
    return Shop.objects.get(pk=pick.shop_id).shop_id if pick else None


def test_one_job_of_a_shop_at_a_time_and_the_next_when_it_ends(market: Any) -> None:
    market.shop()
    market.publish(dedupe_key="a")
    market.publish(dedupe_key="b")

    first = market.pick()
    assert market.pick() is None
    end(first)
    second = market.pick()

    assert second.claim.task_id != first.claim.task_id
    assert second.claim.lease_no > first.claim.lease_no


def test_the_database_itself_refuses_a_second_run_of_a_shop(market: Any) -> None:
    market.shop()
    market.publish(dedupe_key="a")
    market.publish(dedupe_key="b")

    with pytest.raises(IntegrityError, match="rpa_one_run_a_shop"):
        Job.objects.update(state="running")


def test_urgent_before_normal_before_low(market: Any) -> None:
    for name, priority in [("low", 2), ("normal", 1), ("high", 0)]:
        market.shop(name)
        market.publish(name, priority=priority)

    assert [picked(market) for _ in range(3)] == ["high", "normal", "low"]


def test_a_thousand_low_ones_do_not_keep_a_high_one_waiting(market: Any) -> None:
    for number in range(20):
        market.shop(f"s{number}", backlog_limit=1000)
        for key in range(50):
            market.publish(f"s{number}", priority=2, dedupe_key=str(key))
    market.shop("urgent")
    market.publish("urgent", priority=0)

    assert picked(market) == "urgent"


def test_who_has_waited_long_moves_up_beside_the_urgent(market: Any) -> None:
    market.shop("old")
    market.shop("new")
    market.publish("old", priority=2)
    Job.objects.update(due_at=now() - timedelta(minutes=21))
    Lane.objects.filter(shop__shop_id="new").update(last_served_at=now())
    market.publish("new", priority=0)

    assert picked(market) == "old"
    assert picked(market) == "new"


def test_pick_job_of_any_age_shares_turns_with_the_urgent_and_passes_none(market: Any) -> None:
    market.shop("old")
    market.shop("urgent")
    market.publish("old", priority=2)
    Job.objects.update(due_at=now() - timedelta(days=1))
    market.publish("urgent", priority=0)
    Lane.objects.filter(shop__shop_id="old").update(last_served_at=now())
    Lane.objects.filter(shop__shop_id="urgent").update(last_served_at=now() - timedelta(hours=1))

    assert picked(market) == "urgent"
    assert picked(market) == "old"


def test_low_still_moves_while_high_never_ends(market: Any) -> None:
    """A high one always waits; the low one is served once it is as old as two levels."""
    for name in ("a", "b", "low"):
        market.shop(name)
    market.publish("low", priority=2)
    served = []
    for minute in range(0, 30, 5):
        for name in ("a", "b"):
            market.publish(name, priority=0)
        Job.objects.filter(shop__shop_id="low").update(due_at=now() - timedelta(minutes=minute))
        pick = market.pick()
        served.append(Shop.objects.get(pk=pick.shop_id).shop_id)
        end(pick)

    assert "low" in served
    assert set(served[:4]) == {"a", "b"}


def test_shops_take_turns(market: Any) -> None:
    for name in ("a", "b"):
        market.shop(name)
        for key in range(3):
            market.publish(name, dedupe_key=str(key))
    order = []
    for _ in range(6):
        pick = market.pick()
        order.append(Shop.objects.get(pk=pick.shop_id).shop_id)
        end(pick)

    assert order in (list("ababab"), list("bababa"))


@pytest.mark.parametrize(
    "closed",
    [
        lambda shop: Shop.objects.filter(pk=shop.pk).update(paused=True),
        lambda shop: Shop.objects.filter(pk=shop.pk).update(login_state=LoginState.NEEDED),
        lambda shop: Shop.objects.filter(pk=shop.pk).update(retired_at=now()),
        lambda shop: Platform.objects.filter(pk=shop.platform_id).update(paused=True),
        lambda shop: Breaker.objects.filter(pk=shop.platform_id).update(open_until=now() + timedelta(minutes=5)),
        lambda shop: Job.objects.filter(shop=shop).update(due_at=now() + timedelta(hours=1)),
        lambda shop: Job.objects.filter(shop=shop).update(parked="shop:x"),
    ],
)
def test_what_cannot_start_keeps_nobody_else_waiting(market: Any, closed: Any) -> None:
    market.flow(platform="temu")
    shop = market.shop("closed", "temu")
    market.publish("closed", platform="temu", priority=0)
    closed(shop)
    market.shop("open")
    market.publish("open", priority=2)

    assert picked(market) == "open"
    assert market.pick() is None


def test_a_job_for_later_does_not_block_its_own_lane(market: Any) -> None:
    market.shop()
    market.publish(dedupe_key="later", priority=0, delay=timedelta(hours=1))
    now_due = market.publish(dedupe_key="now", priority=2)

    assert market.pick().claim.task_id == now_due.task_id


def test_a_pause_of_everything_stops_the_lanes(market: Any) -> None:
    market.shop()
    market.publish()
    Pause.objects.create(scope="all")

    assert market.pick() is None


def test_a_node_takes_only_what_its_queues_carry(market: Any) -> None:
    market.shop("common")
    market.shop("big", dedicated_queue=True)
    market.platform("temu", dedicated_queue=True)
    market.flow(platform="temu")
    market.shop("far", "temu")
    market.publish("common", priority=2)
    market.publish("big", priority=0)
    market.publish("far", platform="temu", priority=0)

    assert picked(market, "high", "normal") is None
    assert picked(market, "p.temu.high") == "far"
    assert picked(market, "s.pdd.big") == "big"
    assert picked(market, "high", "normal", "low") == "common"


def test_one_run_tries_whether_a_platform_is_back(market: Any) -> None:
    for name in ("a", "b"):
        market.shop(name)
        market.publish(name)
    Breaker.objects.update(open_until=now() - timedelta(seconds=1))

    probe = market.pick()

    assert probe.probes
    assert Breaker.objects.get().probe == probe.claim.task_id
    assert market.pick() is None


@pytest.mark.django_db(transaction=True)
def test_pick_of_shops_that_race_for_the_trial_gets_one(market: Any, race: Any) -> None:
    """Both have looked before either has said that it tries: a lock on the breaker stops them in between."""
    for name in ("a", "b"):
        market.shop(name)
        market.publish(name)
    Breaker.objects.update(open_until=now() - timedelta(seconds=1))
    waiting = """
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%%rpa_tasks_breaker SET probe%%'
    """

    locked = threading.Event()

    def both_wait() -> bool:
        sql.rows("SELECT pg_stat_clear_snapshot()", {})
        return sql.rows(waiting, {}) == [(2,)]

    def act(number: int) -> Any:
        if number:
            assert locked.wait(20)
            return market.pick()
        with transaction.atomic():
            Breaker.objects.select_for_update().get()
            locked.set()
            eventually(both_wait)
        return None

    picks = [pick for pick in race(3, act) if pick]

    assert len(picks) == 1
    assert Breaker.objects.get().probe == picks[0].claim.task_id
    assert Job.objects.filter(state="running").count() == Lane.objects.exclude(task_id=None).count() == 1


@pytest.fixture
def home(market: Any) -> ExecutionNode:
    """A node that has the shop's profile, and carries what is urgent. Another one carries everything."""
    market.flow("browse", needs_browser=True)
    market.shop()
    node: ExecutionNode = ExecutionNode.objects.create(
        name="n1", seen_at=now(), started_at=now(), slots=5, queues=["high", "n.n1.high"]
    )
    ExecutionNode.objects.create(
        name="n2", seen_at=now(), started_at=now(), slots=5, queues=[*TIERS.values(), "n.n2.high"]
    )
    market.publish(task_type="browse", priority=0)
    pick = market.pick(node="n1")
    jobs.pin_to_node(pick, node="n1")
    end(pick)
    return node


def startable() -> dict[str, int]:
    return jobs.startable(ageing=timedelta(minutes=10))


def test_pick_browser_job_waits_for_the_preferred_node_as_long_as_that_lives(market: Any, home: Any) -> None:
    market.publish(task_type="browse", priority=0)

    assert market.pick(node="n2") is None
    assert startable() == {"n.n1.high": 1}
    ExecutionNode.objects.update(seen_at=now() - timedelta(minutes=3))
    assert market.pick(node="n2")


def test_pick_silent_preferred_node_keeps_its_shops_for_the_lease(market: Any, home: Any, settings: Any) -> None:
    settings.AFTERTOUCH_RPA_HOME_LEASE = timedelta(hours=1)
    market.publish(task_type="browse", priority=0)
    ExecutionNode.objects.filter(name="n1").update(seen_at=now() - timedelta(minutes=50))

    assert market.pick(node="n2") is None
    ExecutionNode.objects.filter(name="n1").update(seen_at=now() - timedelta(minutes=70))
    assert market.pick(node="n2")


def test_pick_job_without_browser_starts_on_any_node(market: Any, home: Any) -> None:
    """The preferred node is busy; a browser job of the same tier waits for it and does not block the other."""
    market.publish(task_type="browse", priority=0)
    free = market.publish(priority=0)

    assert startable() == {"n.n1.high": 1, "high": 1}
    pick = market.pick(node="n2")
    assert pick.claim.task_id == free.task_id
    end(pick)
    assert market.pick(node="n2") is None
    assert market.pick(node="n1")


def test_pick_head_with_and_without_browser_due_at_one_instant_takes_the_one_that_may_start(
    market: Any, home: Any
) -> None:
    market.publish(task_type="browse", priority=0)
    free = market.publish(priority=0)
    Job.objects.filter(state="queued").update(due_at=now() - timedelta(seconds=1))

    assert market.pick(node="n2").claim.task_id == free.task_id


def test_pick_platform_that_does_not_wait_takes_the_first_node(market: Any, home: Any) -> None:
    Platform.objects.update(waits_for_home=False)
    market.publish(task_type="browse", priority=0)

    assert startable() == {"high": 1}
    pick = market.pick(node="n2")
    jobs.pin_to_node(pick, node="n2")
    assert Lane.objects.get().home == "n2"


def test_pick_preferred_node_keeps_nothing_that_it_does_not_carry(market: Any, home: Any) -> None:
    market.publish(task_type="browse", priority=2)

    assert market.pick("high", node="n1") is None
    assert startable() == {"low": 1}
    assert market.pick(node="n2")


def queues_of_tokens(monkeypatch: pytest.MonkeyPatch, *receipts: Any, priority: int = 0) -> list[str]:
    published: list[str] = []
    monkeypatch.setattr(
        wakeups, "publish_within_capacity", lambda found, nodes: published.extend(each.queue for each in found)
    )
    shop = Lane.objects.get().shop_id
    wakeups.publish_wakeups([WakeUp(each.task_id, now(), priority, shop) for each in receipts])
    return published


def test_announce_sends_browser_jobs_to_the_preferred_node_that_carries_them(
    market: Any, home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser, free = market.publish(task_type="browse", priority=0), market.publish(priority=0)

    assert queues_of_tokens(monkeypatch, browser, free) == ["n.n1.high", "high"]
    assert queues_of_tokens(monkeypatch, browser, priority=2) == ["low"]
    assert set(wakeups.list_extra_queues()) == {"n.n1.high", "n.n2.high"}


def test_announce_platform_that_does_not_wait_prefers_its_node_while_that_has_room(
    market: Any, home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Platform.objects.update(waits_for_home=False)
    browser = market.publish(task_type="browse", priority=0)

    assert queues_of_tokens(monkeypatch, browser) == ["n.n1.high"]
    ExecutionNode.objects.filter(name="n1").update(slots=0)
    assert queues_of_tokens(monkeypatch, browser) == ["high"]


def test_only_who_holds_the_lane_says_where_the_profile_is(market: Any) -> None:
    market.shop()
    market.publish()
    stale = market.pick(node="n1")
    end(stale)
    market.publish()
    market.pick(node="n2")
    jobs.pin_to_node(stale, node="n1")

    assert Lane.objects.get().home == ""


def test_what_was_put_off_since_the_look_is_not_early(market: Any, race: Any) -> None:
    """Between its look and its lock another node ran the job and put it off: the pick then finds it, but not due."""
    market.shop()
    receipt = market.publish()
    pick = market.pick()
    assert jobs.settle({pick.claim: Settlement("scheduled", due_at=now() + timedelta(minutes=2))})

    assert market.pick() is None
    assert Job.objects.get(pk=receipt.task_id).state == "scheduled"


def test_which_queues_somebody_should_look_at(market: Any) -> None:
    market.shop("a")
    market.shop("b")
    market.shop("big", dedicated_queue=True)
    for name in ("a", "b", "big"):
        market.publish(name)

    assert jobs.startable(ageing=timedelta(minutes=10)) == {"normal": 2, "s.pdd.big": 1}
    market.pick("normal")
    assert jobs.startable(ageing=timedelta(minutes=10)) == {"normal": 1, "s.pdd.big": 1}


@pytest.mark.django_db(transaction=True)
def test_eight_who_pick_at_once_get_eight_shops(market: Any, race: Any) -> None:
    for number in range(8):
        market.shop(f"s{number}")
        market.publish(f"s{number}", dedupe_key="a")
        market.publish(f"s{number}", dedupe_key="b")

    picks = [pick for pick in race(8, lambda _: market.pick()) if pick]

    assert len({pick.shop_id for pick in picks}) == len(picks)
    assert Lane.objects.exclude(task_id=None).count() == len(picks) == Job.objects.filter(state="running").count()
    assert len(picks) == 8


@pytest.mark.django_db(transaction=True)
def test_a_lane_that_frees_while_another_looks_is_taken_once(market: Any, race: Any) -> None:
    market.shop(backlog_limit=1000)
    for key in range(40):
        market.publish(dedupe_key=str(key))

    def work(_: int) -> int:
        done = 0
        while Job.objects.filter(state__in=["queued", "running"]).exists():
            if pick := market.pick():
                end(pick)
                done += 1
        return done

    assert sum(race(6, work)) == 40
    assert Lane.objects.get().lease_no >= 40


def test_a_late_end_is_refused_and_leaves_the_lane_to_its_holder(market: Any) -> None:
    market.shop()
    market.publish()
    stale = market.pick()
    with transaction.atomic():
        Job.objects.update(lease_until=now() - timedelta(seconds=1))
        ((claim, sent),) = jobs.expired_runs()
        jobs.settle({claim: Settlement("scheduled", due_at=now())})
    assert not sent
    holder = market.pick()

    assert not jobs.settle({stale.claim: Settlement("succeeded")})
    assert Lane.objects.get().task_id == holder.claim.task_id


def test_the_pick_reads_heads_by_their_index(market: Any) -> None:
    market.shop()
    market.publish()
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off; SET LOCAL enable_bitmapscan = off")
        plan = sql.rows(
            f"EXPLAIN {LANES}",
            {"queues": ["high"], "node": "n1", "ageing": 600.0, "home_lease": timedelta(minutes=2)},
        )

    assert "rpa_job_heads" in "\n".join(row[0] for row in plan)
