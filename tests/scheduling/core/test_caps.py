"""I6: the guards are atomic for each customer. However many deliver at once, a cap of three lets three through."""

from collections import Counter
from datetime import timedelta

import pytest
from django.db import transaction
from django.utils.timezone import now

from scheduling import dispatch
from scheduling.channels.base import Delivered, Permanent, Transient, Unknown
from scheduling.delivery import pipeline
from scheduling.delivery.outgoing import LEASE
from scheduling.delivery.sender import sender
from scheduling.ledger.touches import touch_ledger
from scheduling.ledger.transitions import Claim, Content, Settlement
from scheduling.models import Customer, FailedTask, HarassmentRule, Holdout, Pause, Touch
from scheduling.operations import commands, failed_tasks
from scheduling.policy.guards import GuardVerdict
from tests.scheduling.core.conftest import (
    deliver,
    deliver_when_due,
    expire_lease,
    fall_due,
    rows,
    sendings,
)
from tests.support.touch_logs import list_verdicts
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
MANY, FEW = 64, 16


@pytest.fixture
def waiting(matrix, record_event):
    """Touches of Ann that differ in nothing but their event, all due."""
    matrix.node(guard_dedupe="ignore")

    def waiting(count, **changes):
        task_ids = [record_event(**changes).task_ids[0] for _ in range(count)]
        fall_due()
        return task_ids

    return waiting


def count_by_state():
    states = list(Touch.objects.values_list("state", flat=True))
    return {state: states.count(state) for state in set(states)}


def cap(limit, scope="user"):
    HarassmentRule.objects.filter(kind="cap").update(limit=limit, scope=scope)


@pytest.mark.parametrize("batch", [1, 8])
def test_cap_of_three_holds_for_64_racing_touches(waiting, race, batch):
    """I6: alone, and split over batches."""
    task_ids = waiting(MANY)
    batches = [task_ids[start : start + batch] for start in range(0, MANY, batch)]

    race(len(batches), lambda number: pipeline.deliver_touches(batches[number]))
    assert sender().drain(WAIT_LIMIT)

    assert Touch.objects.exclude(reserved_at=None).count() == 3
    assert count_by_state()["delivered"] == 3
    assert set(count_by_state()) <= {"delivered", "scheduled", "suppressed"}
    held = [row.pk for row in Touch.objects.filter(state="scheduled")]
    assert {row.reason for row in Touch.objects.filter(pk__in=held)} <= {"cap"}

    deliver_when_due(*task_ids)

    assert count_by_state() == {"delivered": 3, "suppressed": MANY - 3}
    assert set(Touch.objects.filter(state="suppressed").values_list("reason", flat=True)) == {"cap"}
    assert not Touch.objects.filter(state="suppressed").exclude(reserved_at=None).exists(), "they hold no slots"


def test_community_cap_holds_across_members(matrix, record_event, race):
    """I6: customers first, then communities, and the count in a statement after both locks."""
    matrix.node(guard_dedupe="ignore")
    cap(3, "community")
    task_ids = [record_event(user=f"user-{number}", chat_id="c1").task_ids[0] for number in range(FEW)]
    others = [record_event(user=f"user-{number}", chat_id="").task_ids[0] for number in range(5)]
    fall_due()

    race(FEW, lambda number: pipeline.deliver_touches([task_ids[number]]))
    deliver_when_due(*task_ids, *others)

    assert Touch.objects.filter(chat_id="c1", state="delivered").count() == 3
    assert Touch.objects.filter(chat_id="c1", state="suppressed", reason="community_cap").count() == FEW - 3
    assert Touch.objects.filter(chat_id="", state="delivered").count() == 5


def test_community_dedupe_holds_across_members(matrix, record_event, race):
    """I6: 24 members download at once; the group gets the text once, and each member without a group gets it."""
    HarassmentRule.objects.create(kind="dedupe", scope="community", window=timedelta(hours=72))
    matrix.node()
    task_ids = [record_event(user=f"user-{number}", chat_id="c1").task_ids[0] for number in range(FEW)]
    others = [record_event(user=f"other-{number}", chat_id="").task_ids[0] for number in range(3)]
    fall_due()

    race(FEW, lambda number: pipeline.deliver_touches([task_ids[number]]))
    deliver_when_due(*task_ids, *others)

    ends = Touch.objects.filter(chat_id="c1").values_list("state", "reason")
    assert sorted(set(ends)) == [("delivered", ""), ("suppressed", "community_dedupe")]
    assert Touch.objects.filter(state="delivered").count() == 1 + len(others)
    assert not Touch.objects.filter(state="suppressed").exclude(reserved_at=None).exists()


PARTS = {
    "channel": {"channel": "sms", "limit": 2},
    "kind": {"channel": "fake", "limit": 2},
    "category": {"category": "marketing", "limit": 2},
    "tag": {"tag": "sale", "limit": 2},
    "level": {"tag": "sale", "limit": 1, "limits": {"vip": 2, "normal": 5}},
    "community": {"tag": "sale", "limit": 2, "scope": "community"},
}


@pytest.mark.parametrize("part", PARTS)
def test_cap_of_a_part_holds_for_racing_touches(shop, race, part):
    """I6: half of the touches count, half do not. Two of the first are sent, and all of the second."""
    HarassmentRule.objects.filter(kind="cap").update(limit=1000)
    HarassmentRule.objects.create(kind="cap", window=timedelta(hours=24), **PARTS[part])
    Customer.objects.create(user_id="ann", level="vip")
    offer = shop.template("offer", category="marketing")
    parcel = shop.template("parcel", category="service")
    shop.node("offer", "a", template=offer, channel=shop.create_channel("sms"), tags=["sale"], guard_dedupe="ignore")
    shop.node("parcel", "b", template=parcel, tags=["order"], guard_dedupe="ignore")
    task_ids = [shop.record_event("ab"[number % 2], chat_id="c1").task_ids[0] for number in range(FEW)]
    fall_due()

    race(FEW, lambda number: pipeline.deliver_touches([task_ids[number]]))
    deliver(task_ids)
    deliver_when_due(*task_ids)

    reason = "community_cap" if part == "community" else "cap"
    ends = Counter(Touch.objects.values_list("node__key", "state", "reason"))
    assert ends == {
        ("offer", "delivered", ""): 2,
        ("offer", "suppressed", reason): FEW // 2 - 2,
        ("parcel", "delivered", ""): FEW // 2,
    }
    assert {each.limit.partition(" of ")[0] for each in list_verdicts() if each.rule == reason} == {"2 in 1d"}


def test_global_holdout_is_stored_and_left_out_by_a_node(matrix, record_event):
    Holdout.objects.create(pk=1, percent=100)
    matrix.node()
    matrix.node("receipt", trigger="order.paid", guard_holdout="ignore")

    (held,) = deliver_when_due(*record_event().task_ids)
    (sent,) = deliver_when_due(*record_event("order.paid").task_ids)

    assert (held.state, held.reason, held.reserved_at, sent.state) == ("suppressed", "holdout", None, "delivered")
    verdict = held.verdicts[-1]
    assert (verdict.rule, verdict.rule_version, verdict.observed, verdict.limit) == ("holdout", 1, "all nodes", "100 %")


def test_cap_defers_while_slots_are_unsettled(shop):
    shop.node(channel=shop.create_channel(), guard_dedupe="ignore")
    task_ids = [shop.record_event().task_ids[0] for _ in range(6)]
    fall_due()
    shop.fake_channel.blocks = True

    pipeline.deliver_touches(task_ids)

    leases = Touch.objects.filter(state="running").values_list("lease_until", flat=True)
    held = Touch.objects.filter(state="scheduled")
    assert (len(leases), held.count()) == (3, 3)
    assert {row.reason for row in held} == {"cap"}
    for verdict in (each for each in list_verdicts() if each.decision == "hold"):
        assert abs(verdict.next_eligible_at - min(leases)) < timedelta(seconds=1), "until the first lease"

    shop.fake_channel.release_calls.set()
    deliver(task_ids)
    deliver_when_due(*task_ids)
    assert count_by_state() == {"delivered": 3, "suppressed": 3}


def test_slot_of_a_paused_touch_defers_others_by_a_minute(shop):
    """They were judged again every second while the pause lasted: its touch may have been sent, and keeps its slot."""
    cap(1)
    shop.node(channel=shop.create_channel(idempotent=True))
    shop.node("other", "order.paid")
    shop.answer(Unknown("timeout"))
    (first,) = shop.record_event().task_ids
    deliver_when_due(first)
    Pause.objects.create(scope="channel:fake")
    assert deliver_when_due(first)[0].paused_by == "channel:fake"

    (held,) = deliver_when_due(*shop.record_event("order.paid").task_ids)

    assert (held.state, held.reason) == ("scheduled", "cap")
    (verdict,) = held.verdicts
    assert verdict.next_eligible_at - verdict.at >= timedelta(minutes=1)


def test_cap_slot_is_freed_by_definite_refusal_only(shop):
    cap(1)
    shop.node(channel=shop.create_channel(idempotent=False), guard_dedupe="ignore")
    shop.answer(Permanent("http_400"), Unknown("timeout"), Delivered())

    refused, unknown, last = (shop.record_event().task_ids[0] for _ in range(3))
    for task_id in (refused, unknown, last):
        deliver_when_due(task_id)

    ends = [(row.state, row.reason, row.reserved_at is None) for row in rows([refused, unknown, last])]
    assert ends == [("failed", "http_400", True), ("unknown", "timeout", False), ("suppressed", "cap", True)]


def test_cap_retry_keeps_its_slot(shop):
    cap(1)
    shop.node(channel=shop.create_channel(), guard_dedupe="ignore")
    shop.answer(Transient("http_503"), Transient("http_503"), Delivered())
    first, second = shop.record_event().task_ids[0], shop.record_event().task_ids[0]

    (row,) = deliver_when_due(first)
    taken_at = row.reserved_at
    (other,) = deliver_when_due(second)
    verdict = other.verdicts[-1]
    assert (other.state, other.reason, verdict.next_eligible_at) == ("scheduled", "cap", row.due_at)

    deliver_when_due(first)
    (row,) = deliver_when_due(first)
    assert (row.state, row.attempt, row.reserved_at) == ("delivered", 3, taken_at)
    assert deliver_when_due(second)[0].state == "suppressed"


def test_cap_last_slot_waits_for_higher_priority(matrix, record_event):
    cap(1)
    matrix.node("offer", trigger="a", priority=2)
    matrix.node("parcel", trigger="b", priority=0, delay=timedelta(seconds=40))
    (low,), (high,) = record_event("a").task_ids, record_event("b").task_ids

    deliver([low])
    (held,) = rows([low])
    (important,) = rows([high])
    assert (held.state, held.reason, held.due_at) == ("scheduled", "slot_hold", important.due_at + timedelta(seconds=2))

    assert deliver_when_due(high)[0].state == "delivered"
    (row,) = deliver_when_due(low)
    assert (row.state, row.reason) == ("suppressed", "cap")


def test_cap_slot_in_batch_goes_to_higher_priority(matrix, record_event):
    cap(1)
    matrix.node("low", priority=2)
    matrix.node("high", trigger="other", priority=0)
    (low,), (high,) = record_event().task_ids, record_event("other").task_ids
    Touch.objects.filter(pk=low).update(due_at=now() - timedelta(minutes=1))

    deliver_when_due(low, high)
    found = deliver_when_due(low, high)

    assert [(row.state, row.reason) for row in found] == [("suppressed", "cap"), ("delivered", "")]


def test_cap_same_batch_priority_is_not_waited_for(matrix, record_event):
    """It is judged before and has its slot: of two slots one is left."""
    cap(2)
    matrix.node("offer", trigger="a", priority=2)
    matrix.node("parcel", trigger="b", priority=0)

    found = deliver_when_due(*record_event("a").task_ids, *record_event("b").task_ids)

    assert [row.state for row in found] == ["delivered", "delivered"]


def test_cap_waits_for_no_irrelevant_touch(matrix, record_event):
    cap(1)
    matrix.node("offer", trigger="low", priority=1)
    matrix.node("parcel", trigger="high", priority=0)
    matrix.node("other", trigger="less important", priority=2)
    matrix.node("free", trigger="ignores the cap", priority=0, guard_cap="ignore")
    low = [record_event("low", user).task_ids[0] for user in ("far", "alone", "paused", "less", "ignores")]
    soon = now() + timedelta(seconds=40)
    others = [
        ("high", "far", {"due_at": now() + timedelta(seconds=90)}),
        ("high", "another customer", {"due_at": soon}),
        ("high", "paused", {"due_at": soon, "paused_by": "all"}),
        ("less important", "less", {"due_at": soon}),
        ("ignores the cap", "ignores", {"due_at": soon}),
    ]
    for type, user, changes in others:
        Touch.objects.filter(pk__in=record_event(type, user).task_ids).update(**changes)

    deliver(low)

    assert {row.customer.user_id: row.state for row in rows(low)} == dict.fromkeys(
        ("far", "alone", "paused", "less", "ignores"), "delivered"
    )


def test_cap_priority_retry_with_slot_is_not_waited_for(shop):
    """Its slot is counted already. To leave room for it as well would keep a free slot empty."""
    cap(2)
    shop.node("offer", trigger="a", priority=2)
    shop.node("parcel", trigger="b", priority=0, channel=shop.create_channel())
    shop.answer(Transient("http_503"))
    (high,) = deliver_when_due(*shop.record_event("b").task_ids)
    assert (high.state, high.reserved_at is None) == ("scheduled", False)
    assert high.due_at < now() + timedelta(seconds=60)

    (low,) = deliver_when_due(*shop.record_event("a").task_ids)

    assert (low.state, low.reason) == ("delivered", "")


def test_cap_count_only_touch_uses_a_slot(matrix, record_event):
    cap(1)
    matrix.node("silent", trigger="s", guard_cap="count_only", guard_dedupe="ignore")
    matrix.node("free", trigger="f", guard_cap="ignore", guard_dedupe="ignore")
    matrix.node("guide", trigger="g")
    free, silent, more, guide, again = (deliver_when_due(*record_event(type).task_ids)[0] for type in "fssgf")
    assert [row.state for row in (free, silent, more, guide, again)] == [*["delivered"] * 3, "suppressed", "delivered"]
    assert [row.counts_toward_cap for row in (free, silent)] == [False, True]


# --- slots of cancelled touches, and of those with an unknown outcome -----------------------------------------------


@pytest.mark.parametrize(
    ("answer", "state"), [(Transient("http_503"), "delivered"), (Unknown("timeout"), "suppressed")]
)
def test_cap_cancelled_retry_frees_its_slot_unless_it_may_have_arrived(shop, answer, state):
    cap(1)
    shop.node(channel=shop.create_channel(), guard_dedupe="ignore", cancel_on=["order.paid"])
    shop.answer(answer, Delivered())
    (first,) = shop.record_event().task_ids
    deliver_when_due(first)

    shop.record_event("order.paid")
    (second,) = shop.record_event().task_ids

    assert rows([first])[0].state == "cancelled"
    assert deliver_when_due(second)[0].state == state


@pytest.mark.parametrize("how", ["cancelled", "broke"])
def test_cap_unsent_retry_of_unknown_keeps_its_slot(shop, monkeypatch, how):
    """The slot moved to it from the touch that may have arrived, and so did the uncertainty."""
    cap(1)
    shop.node(channel=shop.create_channel(idempotent=False), guard_dedupe="ignore", cancel_on=["order.paid"])
    shop.answer(Unknown("timeout"))
    (first,) = shop.record_event().task_ids
    deliver_when_due(first)
    again = failed_tasks.retry_failed_task(FailedTask.objects.get().pk, failed_tasks.Actor("ann"))

    if how == "cancelled":
        shop.record_event("order.paid")
    else:
        with monkeypatch.context() as breaking:
            breaking.setattr(pipeline.guards, "judge_touch", lambda *_: 1 / 0)
            fall_due(again)
            pipeline.deliver_touches([again])
    (second,) = shop.record_event().task_ids

    assert rows([again])[0].state == ("cancelled" if how == "cancelled" else "unknown")
    assert (deliver_when_due(second)[0].reason, len(shop.fake_channel.received)) == ("cap", 1)


def test_suppressed_retry_of_unknown_stays_unknown(shop):
    """I8: a guard that stops the retry is no evidence about the first attempt."""
    cap(1)
    shop.node(channel=shop.create_channel(), guard_dedupe="ignore")
    (first,) = shop.record_event(occurred_at=now() - timedelta(hours=1)).task_ids
    make_outcome_unknown(first, shop, "timeout")

    shop.record_event("conversation.started")
    (row,) = deliver_when_due(first)

    assert (row.state, row.reason) == ("unknown", "conversation")
    assert FailedTask.objects.get().failure == "unknown"
    (other,) = deliver_when_due(*shop.record_event(occurred_at=now() + timedelta(minutes=1)).task_ids)
    assert (other.state, other.reason) == ("suppressed", "cap")


def test_refused_retry_of_unknown_stays_unknown(shop):
    """I8: it may have been delivered, so a person decides."""
    shop.node(channel=shop.create_channel(retry_delays=[1]))
    (task_id,) = shop.record_event().task_ids
    make_outcome_unknown(task_id, shop, "worker lost")
    shop.answer(Permanent("http_400"))

    (row,) = deliver_when_due(task_id)

    assert (row.state, row.reason) == ("unknown", "http_400")
    assert row.reserved_at is not None
    assert FailedTask.objects.get().failure == "unknown"


def test_unknown_slot_survives_a_pause(shop):
    cap(1)
    shop.node(channel=shop.create_channel(), guard_dedupe="ignore")
    (task_id,) = shop.record_event().task_ids
    make_outcome_unknown(task_id, shop, "worker lost")
    commands.pause_scope("all")
    deliver_when_due(task_id)
    commands.resume_scope("all")
    dispatch.resume_unpaused()

    (other,) = deliver_when_due(*shop.record_event().task_ids)
    assert (other.state, other.reason) == ("scheduled", "cap"), "its slot is taken"
    shop.answer(Delivered())
    assert deliver_when_due(task_id)[0].state == "delivered"
    assert deliver_when_due(other.pk)[0].state == "suppressed"


def make_outcome_unknown(task_id, shop, how):
    """The attempt's outcome is unknown, and the touch waits for a retry."""
    fall_due(task_id)
    if how == "timeout":
        shop.answer(Unknown("timeout"))
        deliver([task_id])
    else:
        node = Touch.objects.get(pk=task_id).node
        content = Content("guide", node.template_id, 1, counts=True)
        with transaction.atomic():
            ((due,), locked_at) = touch_ledger.lock_due([task_id])
            assert locked_at
            decision = Settlement("running", content=content, verdict=GuardVerdict("send"))
            touch_ledger.write_decisions({decision: [task_id]}, at=locked_at, lease=LEASE)
        touch_ledger.mark_sending(sendings(Claim(due.task_id, due.lease_no)))
        expire_lease(task_id)
        dispatch.rescue_lost_work()
    (row,) = rows([task_id])
    assert (row.state, row.attempt, row.reserved_at is None) == ("scheduled", 1, False)
