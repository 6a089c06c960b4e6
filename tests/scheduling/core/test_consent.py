"""I11: what was acknowledged before a touch is marked as sending stops it."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from unittest.mock import Mock
from uuid import UUID

import pytest
from django.db import transaction
from django.utils.timezone import now

from config.local.processes import select_port, wait_until
from scheduling import dispatch
from scheduling.delivery import lanes, pipeline, presence, sender
from scheduling.errors import Conflict
from scheduling.ledger.touches import touch_ledger
from scheduling.models import Customer, FailedTask, Node, Touch
from scheduling.operations import commands
from sessions.detection.presence import SessionPresence, parse_event_id
from sessions.frames import Frame
from sessions.policy import Policy, PolicySet
from sessions.store import stats
from sessions.store.client import Server, StoreUnavailable
from sessions.store.sessions import Store, live_store
from tests.scheduling.core.conftest import (
    deliver,
    deliver_when_due,
    fall_due,
    held_by_second_connection,
    rows,
    sendings,
)
from tests.scheduling.core.fake_channels import FakeChannelState, FakePresence
from tests.support.claims import claim_touches
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass
class Queue:
    """A receiver that is busy with one touch while another, judged as well, waits in its lane."""

    first: UUID
    second: UUID
    fake_channel: FakeChannelState

    def await_touch(self):
        """The first is answered and the second's turn comes. Returns the second when it is settled."""
        self.fake_channel.blocks = False
        self.fake_channel.release_calls.set()
        deliver([])
        return rows([self.second])[0]

    @property
    def heard(self):
        return [message.task_id for message in self.fake_channel.received]


@pytest.fixture
def start_queue(shop, monkeypatch):
    def start_queue(category="marketing", **changes):
        monkeypatch.setattr(lanes, "IN_FLIGHT_PER_TARGET", 1)
        shop.node(channel=shop.create_channel(), template=shop.template("guide", category=category), **changes)
        first, second = (shop.record_event(user=user).task_ids[0] for user in ("first", "second"))
        shop.fake_channel.blocks = True
        fall_due()
        pipeline.deliver_touches([first])
        assert shop.fake_channel.on_stage.wait(WAIT_LIMIT)
        pipeline.deliver_touches([second])
        assert rows([second])[0].state == "running"
        return Queue(first, second, shop.fake_channel)

    return start_queue


def edit(row, **changes):
    for name, value in changes.items():
        setattr(row, name, value)
    row.save()


def edit_node(key, **changes):
    edit(Node.objects.get(key=key), **changes)


def test_stops_before_the_mark_settle_with_their_reason(shop, monkeypatch):
    """Four touches are being sent, and the others of the same receiver wait in its lane."""
    monkeypatch.setattr(lanes, "IN_FLIGHT_PER_TARGET", 4)
    template, channel = shop.template("guide", category="marketing"), shop.create_channel()
    for key in ("guide", "paused", "disabled", "retired"):
        shop.node(key, trigger=key, channel=channel, template=template)
    stops = {
        "opt-out": (
            "guide", lambda: commands.update_customer("opt-out", {"opted_out": True}), ("suppressed", "opted_out", "")
        ),
        "complaint": (
            "guide", lambda: shop.record_event("complaint.received", "complaint"), ("suppressed", "opted_out", "")
        ),
        "chat": (
            "guide", lambda: shop.record_event("conversation.started", "chat"), ("suppressed", "conversation", "")
        ),
        "word": (
            "guide", lambda: live_store().note_activity([Frame("s1", "word", sender="user", kind="message")]),
            ("suppressed", "conversation", ""),
        ),
        "node paused": ("paused", lambda: commands.pause_scope("node:paused"), ("scheduled", "paused", "node:paused")),
        "node disabled": ("disabled", lambda: edit_node("disabled", enabled=False), ("scheduled", "node_disabled", "")),
        "node retired": ("retired", lambda: edit_node("retired", retired_at=now()), ("scheduled", "node_disabled", "")),
    }  # fmt: skip
    sending = shop.plan(4, "guide")
    waiting = [shop.record_event(trigger, user).task_ids[0] for user, (trigger, *_) in stops.items()]
    shop.fake_channel.blocks = True
    fall_due()
    pipeline.deliver_touches(sending)
    assert wait_until(lambda: len(shop.fake_channel.received) == 4, WAIT_LIMIT)
    pipeline.deliver_touches(waiting)
    assert {row.state for row in rows(waiting)} == {"running"}

    for _, act, _ in stops.values():
        act()
    shop.fake_channel.blocks = False
    shop.fake_channel.release_calls.set()
    deliver([])

    assert {message.task_id for message in shop.fake_channel.received} == set(sending)
    for row, (_, _, end) in zip(rows(waiting), stops.values(), strict=True):
        assert (row.state, row.reason, row.paused_by) == end
        assert (row.attempt, row.attempts, row.reserved_at) == (0, [], None), "its slot is given back"
        assert [each.rule for each in row.verdicts] == ["", row.reason]
        assert row.verdicts[-1].decision == ("hold" if row.paused_by else "suppress")
    assert not FailedTask.objects.exists()


@pytest.mark.parametrize(
    ("stop", "end"),
    [
        (lambda channel: commands.pause_scope("channel:fake"), ("scheduled", "paused", "channel:fake")),
        (lambda channel: edit(channel, retired_at=now()), ("failed", "channel_retired", "")),
    ],
    ids=["paused", "retired"],
)
def test_mark_sending_on_a_stopped_channel_sends_nothing(start_queue, stop, end):
    two = start_queue()
    stop(Node.objects.get().channel)

    row = two.await_touch()

    assert two.heard == [two.first]
    assert (row.state, row.reason, row.paused_by) == end
    assert (row.attempt, row.reserved_at) == (0, None)
    assert FailedTask.objects.count() == (row.state == "failed")


@pytest.mark.parametrize("is_on_again", [True, False])
def test_mark_sending_disabled_node_is_judged_again(start_queue, is_on_again):
    """The judgement compares the configuration version. An undo of the switch thus loses no touch."""
    two = start_queue()
    edit_node("guide", enabled=False)
    assert two.await_touch().state == "scheduled"
    if is_on_again:
        edit_node("guide", enabled=True)
    deliver([two.second])
    assert rows([two.second])[0].state == ("delivered" if is_on_again else "suppressed")


def test_mark_sending_paused_touch_is_sent_after_resume(start_queue):
    two = start_queue()
    commands.pause_scope("all")
    assert two.await_touch().paused_by == "all"

    commands.resume_scope("all")
    dispatch.resume_unpaused()
    fall_due()
    deliver([two.second])

    assert rows([two.second])[0].state == "delivered"


def test_mark_sending_opt_out_allows_service_content(start_queue):
    two = start_queue(category="service")
    commands.update_customer("second", {"opted_out": True})
    assert (two.await_touch().state, two.heard) == ("delivered", [two.first, two.second])


def test_mark_sending_node_may_ignore_conversation(start_queue, record_event):
    two = start_queue(guard_conversation="ignore")
    record_event("conversation.started", "second")
    assert two.await_touch().state == "delivered"


@pytest.mark.parametrize(
    ("cancel", "reason"),
    [
        (lambda shop, touch: commands.cancel_one_touch(touch, actor="ann"), "by:ann"),
        (lambda shop, touch: shop.record_event("order.paid", "second"), "event:order.paid"),
        (lambda shop, touch: shop.record_event(user="second"), "restarted:material.downloaded"),
    ],
    ids=["by a person", "by an event", "by a repetition"],
)
def test_cancel_queued_in_lane_is_not_sent(start_queue, shop, cancel, reason):
    two = start_queue(cancel_on=["order.paid"], on_repeat="restart")

    cancel(shop, two.second)
    (row,) = rows([two.second])
    assert (row.state, row.reason, row.lease_until, row.reserved_at) == ("cancelled", reason, None, None)

    assert two.await_touch().state == "cancelled"
    assert two.second not in two.heard


def test_cancel_touch_marked_as_sending_conflicts(start_queue):
    two = start_queue()
    with pytest.raises(Conflict, match="running"):
        commands.cancel_one_touch(two.first, actor="ann")
    two.await_touch()
    assert rows([two.first])[0].state == "delivered"


def test_opt_out_is_undone_by_no_event_and_no_other_update(matrix, record_event):
    triggers = ("material.downloaded", "order.paid", "conversation.started", "customer.inactive")
    for trigger in triggers:
        matrix.node(trigger, trigger=trigger)
    commands.update_customer("ann", {"opted_out": True})
    since = Customer.objects.get().opted_out_at

    task_ids = [task_id for trigger in triggers for task_id in record_event(trigger, "ann").task_ids]
    commands.update_customer("ann", {"name": "Ann", "level": "vip"})

    customer = Customer.objects.get()
    assert (customer.opted_out, customer.opted_out_at) == (True, since)
    deliver(task_ids)
    assert [*Touch.objects.values_list("state", "reason")] == [("suppressed", "opted_out")] * len(triggers)


# --- live chats ---


def test_presence_outage_defers_only_asking_nodes(shop, integrate):
    """Nodes that ignore conversations are sent in the same batch; for a silence Presence is always asked."""
    away = FakePresence(ConnectionError("away"), "session.silent")
    integrate(presence=(away,))
    shop.node("asks", channel=shop.create_channel())
    shop.node("ignores", channel=shop.create_channel("other"), guard_conversation="ignore", guard_dedupe="ignore")
    shop.node("guides", trigger="session.silent", channel=shop.create_channel("third"), guard_conversation="ignore")

    found = deliver_when_due(*shop.record_event().task_ids, *shop.record_event("session.silent", user="bob").task_ids)

    assert {row.node.key: (row.state, row.reason) for row in found} == {
        "asks": ("scheduled", "presence_unknown"),
        "ignores": ("delivered", ""),
        "guides": ("scheduled", "presence_unknown"),
    }
    for row in found:
        if row.state == "scheduled":
            assert (row.verdicts[-1].decision, row.reserved_at) == ("hold", None)
            assert timedelta(0) < row.due_at - now() <= timedelta(seconds=30)
    assert len(away.asked) == 2, "nothing was asked about the node that ignores it"


class Silence:
    """A session whose guide message was judged and waits in the lane of a busy receiver."""

    def __init__(self, store, record_event, fake_channel, blocker):
        self.store, self.happen, self.fake_channel, self.blocker = store, record_event, fake_channel, blocker
        self.send_frame("user")
        self.touch = self.fall_silent()
        fake_channel.blocks = True
        fall_due()
        pipeline.deliver_touches([blocker])
        assert fake_channel.on_stage.wait(WAIT_LIMIT)
        pipeline.deliver_touches([self.touch])
        assert rows([self.touch])[0].state == "running"

    def send_frame(self, side):
        """Return whether the timer of the next silence runs."""
        (noted,) = self.store.note_activity([Frame("s1", "ann", sender=side, kind="message")])
        return noted.deadline_ms > 0

    def fall_silent(self):
        """Wait until the session's silence is claimed, and hand it in. Returns its touch."""
        claims = []
        assert wait_until(
            lambda: claims.extend(self.store.claim_silent(1, sender.LEASE).silences) or claims, WAIT_LIMIT
        )
        receipt = self.happen("session.silent", "ann", event_id=f"s1:{claims[0].armed_at}")
        self.store.confirm(claims)
        return receipt.task_ids[0]

    def release_calls(self):
        self.fake_channel.blocks = False
        self.fake_channel.release_calls.set()

    def await_touch(self):
        self.release_calls()
        deliver([])
        return rows([self.touch])[0]

    @property
    def nudges(self):
        return stats.session_snapshot(self.store, "s1").nudges

    def await_nudge(self):
        """Wait until one is counted: the call waits half a second for the count, and a stall may be longer."""
        return wait_until(lambda: self.nudges == 1, WAIT_LIMIT)


@pytest.fixture
def silent_session(shop, monkeypatch, settings):
    monkeypatch.setattr(lanes, "IN_FLIGHT_PER_TARGET", 1)
    channel = shop.create_channel()
    shop.node("blocker", channel=channel)
    shop.node(
        "silent", trigger="session.silent", delay=timedelta(0), channel=channel, guard_dedupe="ignore",
        template=shop.template("silent", category="marketing"),
    )  # fmt: skip
    policies = PolicySet({"default": Policy(timedelta(milliseconds=1))})
    store = Store(Server(settings.REDIS_URL), lambda: policies)
    yield Silence(store, shop.record_event, shop.fake_channel, shop.record_event(user="blocker").task_ids[0])
    store.server.client.close()


def test_mark_sending_after_answer_keeps_guide_message(silent_session):
    """The policy allows one guide message. The first silence used none, so the next one is guided."""
    silent_session.send_frame("agent")
    row = silent_session.await_touch()
    assert (row.state, row.reason, silent_session.nudges) == ("suppressed", "answered", 0)

    touch = silent_session.fall_silent()
    deliver([touch])
    assert rows([touch])[0].state == "delivered"
    assert silent_session.await_nudge()
    assert [message.task_id for message in silent_session.fake_channel.received] == [silent_session.blocker, touch]


def test_mark_sending_presence_unknown_keeps_guide_message(silent_session, settings):
    """The silence is deferred while Redis is unavailable. It is answered before Redis is asked again."""
    here, settings.REDIS_URL = settings.REDIS_URL, f"redis://127.0.0.1:{select_port()}/0"
    row = silent_session.await_touch()
    settings.REDIS_URL = here
    assert (row.state, row.reason, silent_session.nudges) == ("scheduled", "presence_unknown", 0)

    silent_session.send_frame("agent")
    fall_due(silent_session.touch)
    deliver([silent_session.touch])
    assert (rows([silent_session.touch])[0].reason, silent_session.nudges) == ("answered", 0)

    touch = silent_session.fall_silent()
    deliver([touch])
    assert rows([touch])[0].state == "delivered"
    assert silent_session.await_nudge()


@pytest.mark.parametrize("reason", ["opted_out", "paused"])
def test_stopped_guide_message_is_not_counted(silent_session, reason):
    """The policy allows one guide message. The customer got none, so the next silence is guided."""
    if reason == "paused":
        commands.pause_scope("node:silent")
    else:
        commands.update_customer("ann", {"opted_out": True})
    assert (silent_session.await_touch().reason, silent_session.nudges) == (reason, 0)
    assert silent_session.send_frame("agent"), "the timer of the next silence runs"


def test_agent_answer_before_mark_gives_one_guide_message(silent_session, monkeypatch):
    """The last question was answered, so the message goes out. The policy allows one until the user writes."""
    mark, timers = touch_ledger.mark_sending, []

    def agent_writes_first(*arguments, **named):
        timers.append(silent_session.send_frame("agent"))
        return mark(*arguments, **named)

    monkeypatch.setattr(touch_ledger, "mark_sending", agent_writes_first)
    assert silent_session.await_touch().state == "delivered"
    assert timers == [False]
    assert silent_session.await_nudge()


def test_unmarked_guide_message_keeps_its_reservation(silent_session, monkeypatch):
    """Its row was locked or its claim is lost, so another worker may send the message now."""
    monkeypatch.setattr(touch_ledger, "mark_sending", lambda *_, **__: {})
    row = silent_session.await_touch()
    assert (row.state, row.reason) == ("scheduled", "mark_failed")
    assert not silent_session.send_frame("agent"), "no timer of a second message runs"


def test_note_sending_failure_sends_and_keeps_the_limit(silent_session, monkeypatch):
    monkeypatch.setattr(SessionPresence, "note_sending", Mock(side_effect=StoreUnavailable("no answer")))
    assert (silent_session.await_touch().state, silent_session.nudges) == ("delivered", 0)
    assert not silent_session.send_frame("agent"), "no timer of a second message runs"
    assert silent_session.send_frame("user")


def test_note_sending_hang_does_not_stop_the_touch(silent_session, monkeypatch):
    """It ends only after the touch is settled, and is counted then."""
    note, settled = presence.note_sending, threading.Event()

    def hang(noted):
        assert settled.wait(WAIT_LIMIT)
        note(noted)

    monkeypatch.setattr(presence, "note_sending", hang)
    try:
        silent_session.release_calls()
        assert wait_until(lambda: rows([silent_session.touch])[0].state == "delivered", WAIT_LIMIT)
        assert silent_session.nudges == 0
    finally:
        settled.set()
    assert silent_session.await_nudge()
    assert silent_session.await_touch().state == "delivered"


def test_killed_worker_guide_message_is_not_counted(silent_session):
    """The worker was killed between its last question and the mark. The customer opts out before the rescue."""
    silent_session.send_frame("agent")
    silent_session.await_touch()
    touch = silent_session.fall_silent()
    fall_due(touch)
    assert claim_touches([touch])
    asked = parse_event_id(rows([touch])[0].event.event_id)
    assert silent_session.store.still_silent([asked], send_until=[now() + sender.LEASE])[1] == [True]
    Touch.objects.filter(pk=touch).update(state="scheduled", lease_until=None)

    commands.update_customer("ann", {"opted_out": True})
    deliver([touch])

    assert (rows([touch])[0].reason, silent_session.nudges) == ("opted_out", 0)
    assert silent_session.send_frame("agent"), "the timer of the next silence runs"


# --- races ---


@pytest.fixture
def claimed(matrix, record_event):
    matrix.node()
    (task_id,) = record_event().task_ids
    fall_due(task_id)
    (claim,) = claim_touches([task_id])
    return claim


def test_mark_sending_row_locked_by_cancel_does_not_wait(claimed):
    """A wait would hold up every receiver, and after it the customer's consent would be that of before the wait."""
    cancel = partial(touch_ledger.cancel, [claimed.task_id], reason="by:ann")
    with held_by_second_connection(cancel, commit=False):
        assert touch_ledger.mark_sending(sendings(claimed)) == {}
    with held_by_second_connection(cancel, commit=True):
        assert touch_ledger.mark_sending(sendings(claimed)) == {}
        assert rows([claimed.task_id])[0].state == "running", "it waited for the commit"
    assert rows([claimed.task_id])[0].state == "cancelled"
    assert touch_ledger.mark_sending(sendings(claimed)) == {}


def test_mark_sending_uncommitted_opt_out_does_not_wait(claimed):
    """Who opts out has no answer yet. The mark does not wait for the customer's row. A cancel that failed is none."""
    with held_by_second_connection(partial(touch_ledger.cancel, [claimed.task_id], reason="by:ann"), commit=False):
        pass
    with held_by_second_connection(partial(commands.update_customer, "ann", {"opted_out": True}), commit=True):
        assert touch_ledger.mark_sending(sendings(claimed)) == {claimed.task_id: None}


def test_mark_sending_never_follows_acknowledged_opt_out(shop, race):
    """Many connections opt out and mark at once; `sending_at` is when the mark looked, by the same clock."""
    shop.node()
    users = [f"user-{number}" for number in range(40)]
    ids = {user: shop.record_event(user=user).task_ids[0] for user in users}
    fall_due()
    claims = {claim.task_id: claim for claim in claim_touches(list(ids.values()))}
    asked = {user: sendings(claims[ids[user]]) for user in users}
    acknowledged = {}
    dice = random.Random(1)

    def act(number):
        for user in dice.sample(users, len(users)):
            if number % 2:
                commands.update_customer(user, {"opted_out": True})
                acknowledged.setdefault(user, now())
            else:
                touch_ledger.mark_sending(asked[user])

    race(4, act)

    late = [
        user
        for user, task_id in ids.items()
        if (row := rows([task_id])[0]).sending_at and row.sending_at > acknowledged[user]
    ]
    assert late == []


@pytest.mark.parametrize("who", ["person", "event"])
def test_cancel_racing_mark_sending_has_one_winner(shop, race, who):
    shop.node(cancel_on=["order.paid"])
    users = [f"user-{number}" for number in range(30)]
    ids = {user: shop.record_event(user=user).task_ids[0] for user in users}
    fall_due()
    for user in users:  # with their slots, as delivery claims them
        Touch.objects.filter(pk=ids[user]).update(reserved_at=now())
    claims = {claim.task_id: claim for claim in claim_touches(list(ids.values()))}
    asked = {user: sendings(claims[ids[user]]) for user in users}
    marked = set()

    def act(number):
        for user in users:
            if number == 0:
                marked.update(touch_ledger.mark_sending(asked[user]))
            elif who == "event":
                shop.record_event("order.paid", user)
            else:
                with transaction.atomic():
                    touch_ledger.cancel([ids[user]], reason="by:ann")

    race(2, act)

    for row in rows(list(ids.values())):
        assert (row.state, row.sending_at is not None) == (
            ("running", True) if row.pk in marked else ("cancelled", False)
        )
