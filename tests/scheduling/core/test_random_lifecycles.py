"""Random operations against a simple model: in any order, each touch ends once and no rule is broken.

The channel is the witness. It compares each message with the model: who opted out, who is in a conversation, what is
paused, and what was sent before. Time passes by moving all stored times into the past.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

import pytest
from django.db import transaction
from django.utils.timezone import now
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from scheduling import dispatch
from scheduling.channels.base import Delivered, Permanent, Transient, Unknown, channel_kinds
from scheduling.delivery import pipeline
from scheduling.delivery.sender import sender
from scheduling.delivery.settling import settle_results
from scheduling.ledger.touches import touch_ledger
from scheduling.models import ChannelConfig, FailedTask, Pause, TemplateText, Touch
from scheduling.models.touch import WAITING
from scheduling.operations import commands, failed_tasks
from scheduling.operations.failed_tasks import Actor
from scheduling.planning.ingest import NewEvent, Receipt, record_events
from tests.scheduling.core.conftest import pass_time
from tests.scheduling.core.fake_channels import Died, FakeChannel, FakeChannelState
from tests.support.claims import claim_touches
from tests.support.matrix import MatrixBuilder

USERS = ("ann", "bob")
ENDED = ("delivered", "suppressed", "cancelled", "failed", "unknown")
ANN = Actor("ann")
LIMIT, CAP_WINDOW, DEDUPE_WINDOW = 3, timedelta(hours=24), timedelta(hours=72)

answers = st.lists(st.sampled_from(["delivered", "delivered", "transient", "permanent", "unknown", "died"]), max_size=4)
users = st.sampled_from(USERS)
places = st.integers(0, 10_000)
ages = st.sampled_from([0, 0, 1, 30])
spans = st.sampled_from(
    [timedelta(minutes=1), timedelta(minutes=16), timedelta(hours=2), timedelta(hours=7), timedelta(hours=50)]
)
STEPS = (
    *["events"] * 8, *["tick"] * 8, *["time passes"] * 6,
    "duplicate", "paid", "batch_with_payment", "conversation", "complaint", "opt_in_again",
    "a_worker_takes_one_and_vanishes", "a_message_comes_twice", "switch", "edit_a_text", "pause", "resume", "cancel",
    "a_person_retries", "a_person_sends_it_as_new", "a_person_looks_and_finds_out",
)  # fmt: skip


@dataclass
class PossibleDelivery:
    """A delivery that the receiver has, or may have: by its key, which outlives retries."""

    user: str
    node: str
    content_type: str
    at: datetime  #: when its slot was taken, in the model's time


@dataclass
class Model:
    """What is known without looking into the database."""

    happened_at: dict[UUID, datetime] = field(default_factory=dict)  #: by touch, when its event happened
    receipts: list[tuple[NewEvent, Receipt]] = field(default_factory=list)
    planned: set[UUID] = field(default_factory=set)
    ended: dict[UUID, str] = field(default_factory=dict)
    possible_deliveries: dict[UUID, PossibleDelivery] = field(default_factory=dict)
    outcomes: dict[UUID, list[str]] = field(default_factory=lambda: defaultdict(list))  #: by key
    opted_out: set[str] = field(default_factory=set)
    conversation_at: dict[str, datetime] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    disabled: set[str] = field(default_factory=set)
    by_hand: set[UUID] = field(default_factory=set)  #: sent as new by a person, whom no cap holds back (decision 9)


class PromptSender:
    """Send in the calling thread, so that the order of operations is deterministic."""

    def __init__(self):
        self.lanes = sender().lanes

    def submit(self, parcels):
        stood = touch_ledger.mark_sending([parcel.sending for parcel in parcels])
        results = []
        for parcel in parcels:
            if parcel.claim.task_id in stood:
                parcel.sent_at = parcel.ended_at = time.monotonic()
                answer = FakeChannel.fake_channel.play(parcel.message)
                assert not isinstance(answer, Exception)
                results.append((parcel, answer))
        settle_results(results)


class RandomLifecycles(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self._whole = transaction.atomic()
        self._whole.__enter__()
        self.model = Model()
        self.passed = timedelta(0)
        self.coming = []
        self.unsettled = []
        self.number = 0
        self.objections = []
        FakeChannel.fake_channel = FakeChannelState(play=self.receive)

    @initialize()
    def build(self):
        builder = MatrixBuilder()
        for key, idempotent in (("safe", True), ("once", False)):
            config = {"name": key}
            ChannelConfig.objects.create(
                key=key, kind="fake", idempotent=idempotent, config=config, retry_delays=[60, 600]
            )
        self.nodes = {
            key: builder.node(key, channel=ChannelConfig.objects.get(key=channel), **changes)
            for key, channel, changes in (
                ("guide", "safe", {"trigger": "a"}),
                (
                    "parcel",
                    "safe",
                    {
                        "trigger": "a",
                        "delay": timedelta(minutes=15),
                        "priority": 0,
                        "over_cap": "defer",
                        "expires_after": timedelta(days=5),
                        "template": builder.template("parcel", category="service"),
                    },
                ),
                ("offer", "once", {"trigger": "b", "delay": timedelta(hours=1), "priority": 2, "on_repeat": "restart",
                                   "cancel_on": ["paid"]}),
                ("ask", "safe", {"trigger": "b", "on_repeat": "keep", "cancel_on": ["paid"]}),
                ("nudge", "once", {"trigger": "c", "guard_cap": "count_only", "guard_dedupe": "ignore",
                                   "guard_conversation": "ignore"}),
            )
        }  # fmt: skip

    def teardown(self):
        try:
            self.drain()
        finally:
            transaction.set_rollback(True)
            self._whole.__exit__(None, None, None)

    # --- the witness --------------------------------------------------------------------------------------------------

    def receive(self, message):
        try:
            self.compare_with_model(message)
        except AssertionError as error:
            self.objections.append(error)  # the delivery would take it for a failed touch
        said = self.coming.pop(0) if self.coming else "delivered"
        self.model.outcomes[message.delivery_key].append(said)
        self.unsettled.append(message)
        if said == "died":
            for each in self.unsettled:  # the database does not know of these messages either
                self.model.outcomes[each.delivery_key][-1] = "died"
                self.note_possible_delivery(each)
            raise Died
        if said in ("delivered", "unknown"):
            self.note_possible_delivery(message)
        given = {
            "delivered": Delivered(), "unknown": Unknown("timeout"), "transient": Transient("http_503"),
            "permanent": Permanent("http_400"),
        }  # fmt: skip
        return given[said]

    def note_possible_delivery(self, message):
        row = Touch.objects.get(pk=message.task_id)
        assert row.reserved_at is not None
        slot = PossibleDelivery(message.user_id, message.node, message.content_type, row.reserved_at + self.passed)
        self.model.possible_deliveries.setdefault(message.delivery_key, slot)

    def compare_with_model(self, message):
        model, user, key = self.model, message.user_id, message.delivery_key
        row = Touch.objects.get(pk=message.task_id)
        assert row.state == "running"
        assert row.due_at <= row.sending_at, "I5: it was early"
        assert not (message.category == "marketing" and user in model.opted_out), "told who opted out"
        assert message.node not in model.disabled, "a disabled node spoke"
        assert not model.paused & {"all", f"node:{message.node}"}, "a paused one spoke"
        if message.node != "nudge":
            talking = model.conversation_at.get(user)
            assert not talking or talking <= model.happened_at[row.event_id], "spoke into a newer conversation"
        assert "delivered" not in model.outcomes[key], "I8: delivered twice under one key"
        if message.node in ("offer", "nudge") and row.retry_of is None:
            assert not {"unknown", "died"} & set(model.outcomes[key]), "I8: repeated blindly"

    # --- what can happen ----------------------------------------------------------------------------------------------

    @rule(step=st.sampled_from(STEPS), user=users, place=places, data=st.data())
    def live(self, step, user, place, data):
        """One rule for all steps: the engine would switch rules off at random, and most of life is events and time."""
        if step == "events":
            types = data.draw(st.lists(st.sampled_from("aabbc"), min_size=1, max_size=3), "types")
            self.store_events(*(self.new(user, type, data.draw(ages, "minutes ago")) for type in types))
        elif step == "tick":
            self.tick(data.draw(answers, "answers"))
        elif step == "time passes":
            self.time_passes(data.draw(spans, "span"))
        else:
            getattr(self, f"_{step}")(user, place)

    def tick(self, coming):
        self.coming, self.unsettled = coming, []
        dispatch.dispatch_due_touches()
        due = Touch.objects.filter(state__in=WAITING, paused_by="", due_at__lte=now()).order_by("pk")
        try:
            pipeline.deliver_touches(list(due.values_list("pk", flat=True)))
        except Died:
            pass
        finally:
            self.coming = []

    def time_passes(self, span):
        pass_time(seconds=span.total_seconds())
        self.passed += span
        dispatch.resume_unpaused()
        dispatch.rescue_lost_work()

    def _duplicate(self, user, place):
        if self.model.receipts:
            event, first = self.model.receipts[place % len(self.model.receipts)]
            (again,) = record_events([event])
            assert (again.id, again.duplicate) == (first.id, True)

    def _paid(self, user, place):
        self.store_events(self.new(user, "paid", 0))

    def _batch_with_payment(self, user, place):
        self.store_events(*(self.new(user, type, 0) for type in ("b", "paid", "b")))

    def _conversation(self, user, place):
        event = self.new(user, "conversation.started", 0)
        self.store_events(event)
        assert event.occurred_at is not None
        self.model.conversation_at[user] = event.occurred_at + self.passed

    def _complaint(self, user, place):
        self.store_events(self.new(user, "complaint.received", 0))
        self.model.opted_out.add(user)

    def _opt_in_again(self, user, place):
        consent = {"given_at": now() + timedelta(days=1), "source": "shop"}  # later than any complaint
        commands.update_customer(user, {"opted_out": False, "consent": consent})
        self.model.opted_out.discard(user)

    def _a_worker_takes_one_and_vanishes(self, user, place):
        waiting = self.waiting()
        if waiting:
            claim_touches([waiting[place % len(waiting)]])

    def _a_message_comes_twice(self, user, place):
        pipeline.deliver_touches(list(Touch.objects.exclude(state__in=WAITING).values_list("pk", flat=True)))

    def _switch(self, user, place):
        key = ("guide", "ask", "offer")[place % 3]
        node = self.nodes[key]
        node.enabled = not node.enabled
        node.save()
        (self.model.disabled.discard if node.enabled else self.model.disabled.add)(key)

    def _edit_a_text(self, user, place):
        self.number += 1
        text = TemplateText.objects.get(template__key=("guide", "parcel")[place % 2])
        text.body = f"edition {self.number}"
        text.save()

    def _pause(self, user, place):
        scope = ("all", "node:guide", "node:parcel")[place % 3]
        commands.pause_scope(scope)
        self.model.paused.add(scope)

    def _resume(self, user, place):
        if self.model.paused:
            scope = sorted(self.model.paused)[place % len(self.model.paused)]
            commands.resume_scope(scope)
            self.model.paused.remove(scope)

    def _cancel(self, user, place):
        waiting = self.waiting()
        if waiting:
            commands.cancel_one_touch(waiting[place % len(waiting)], actor="ann")

    def _a_person_retries(self, user, place):
        if row := self.failed(place):
            self.model.planned.add(failed_tasks.retry_failed_task(row.pk, ANN))

    def _a_person_sends_it_as_new(self, user, place):
        if row := self.failed(place):
            task_id = failed_tasks.retry_failed_task(row.pk, ANN, as_new=True)
            self.model.planned.add(task_id)
            self.model.by_hand.add(task_id)

    def _a_person_looks_and_finds_out(self, user, place):
        row = self.failed(place)
        if row and row.failure == "failed":
            failed_tasks.ignore_failed_task(row.pk, ANN)
        elif row and row.root_id:
            failed_tasks.resolve_failed_task(row.pk, ANN, delivered=place % 2 == 0)
            if place % 2:
                self.model.possible_deliveries.pop(row.root_id, None)

    # --- what must always hold ----------------------------------------------------------------------------------------

    @invariant()
    def all_invariants_hold(self):
        self.recorder_has_no_violations()
        self.touches_are_neither_lost_nor_invented()
        self.each_new_end_is_correct()
        self.ended_touches_do_not_change()
        self.no_customer_exceeds_a_cap()

    def recorder_has_no_violations(self):
        if self.objections:
            raise self.objections[0]

    def touches_are_neither_lost_nor_invented(self):
        assert set(Touch.objects.values_list("pk", flat=True)) == self.model.planned

    def ended_touches_do_not_change(self):
        states = dict(Touch.objects.filter(state__in=ENDED).values_list("pk", "state"))
        assert {task_id: states.get(task_id) for task_id in self.model.ended} == self.model.ended
        self.model.ended = states

    def each_new_end_is_correct(self):
        buried = set(FailedTask.objects.values_list("task_id", "failure"))
        for row in Touch.objects.filter(state__in=ENDED).exclude(pk__in=self.model.ended):
            outcomes = set(self.model.outcomes[row.root_id])
            if row.state == "delivered":
                assert "delivered" in outcomes
            if row.state in ("failed", "suppressed"):
                assert not outcomes & {"delivered", "unknown", "died"}, f"{row.state}, but it may have been heard"
            if row.state in ("failed", "unknown"):
                assert (row.pk, row.state) in buried, "I9: nobody is asked about it"
            assert row.lease_until is None

    def no_customer_exceeds_a_cap(self):
        slots = list(self.model.possible_deliveries.values())
        for key, slot in self.model.possible_deliveries.items():
            if slot.node == "nudge" or key in self.model.by_hand:
                continue
            others = [each for each in slots if each.user == slot.user and each is not slot]
            before = [each for each in others if each.at < slot.at or (each.at == slot.at and each.node != "nudge")]
            in_window = [each for each in before if each.at > slot.at - CAP_WINDOW]
            assert len(in_window) < LIMIT, f"I6: {len(in_window) + 1} within a day: {slot}"
            same = [each for each in before if each.content_type == slot.content_type]
            assert not [each for each in same if each.at > slot.at - DEDUPE_WINDOW], f"told twice: {slot}"

    # --- the end ------------------------------------------------------------------------------------------------------

    def drain(self):
        """I9: once everything may go on, each touch ends in exactly one way."""
        for scope in list(self.model.paused):
            commands.resume_scope(scope)
        self.model.paused.clear()
        for _ in range(40):
            if not Touch.objects.exclude(state__in=ENDED).exists():
                break
            self.time_passes(timedelta(hours=6))
            self.tick([])
        assert not Touch.objects.exclude(state__in=ENDED).exists(), "it never ends"
        self.all_invariants_hold()

    # --- words --------------------------------------------------------------------------------------------------------

    def new(self, user, type, minutes_ago):
        self.number += 1
        happened_at = now() - timedelta(minutes=minutes_ago)
        return NewEvent("shop", f"e{self.number}", type, user, occurred_at=happened_at)

    def store_events(self, *events):
        for event, receipt in zip(events, record_events(events), strict=True):
            assert not receipt.duplicate
            assert event.occurred_at is not None
            self.model.receipts.append((event, receipt))
            self.model.planned.update(receipt.task_ids)
            self.model.happened_at[receipt.id] = event.occurred_at + self.passed

    def failed(self, place):
        rows = list(FailedTask.objects.filter(state="open").order_by("pk"))
        return rows[place % len(rows)] if rows else None

    def waiting(self):
        return list(Touch.objects.filter(state__in=WAITING).order_by("pk").values_list("pk", flat=True))


@pytest.fixture
def _register_fake_channel(settings, monkeypatch):
    settings.CHANNELS = settings.CHANNELS | {"fake": "tests.scheduling.core.fake_channels.FakeChannel"}
    channel_kinds.cache_clear()
    quiet = lambda wakeups, channels: 0  # noqa: E731
    monkeypatch.setattr(dispatch, "publish_touches", quiet)
    monkeypatch.setattr(pipeline, "publish_touches", quiet)
    monkeypatch.setattr(pipeline, "sender", PromptSender)
    monkeypatch.setattr(dispatch, "oldest_message_at", lambda queue: None)
    yield
    channel_kinds.cache_clear()


@pytest.mark.django_db
@pytest.mark.usefixtures("_register_fake_channel")
def test_random_histories_end_each_touch_once():
    """I6, I8, I9."""
    run_state_machine_as_test(
        RandomLifecycles,
        settings=settings(
            max_examples=16,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # thirty steps can be read; shrinking them takes minutes
        ),
    )
    assert not Pause.objects.exists()
