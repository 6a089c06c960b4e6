"""What a channel's answer leads to, and what becomes of a touch whose worker is gone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import redis
from django.utils.timezone import now

from config.local.processes import wait_until
from scheduling import dispatch
from scheduling.channels.base import Delivered, Outcome, Permanent, Transient
from scheduling.delivery import pipeline
from scheduling.delivery.outgoing import LEASE
from scheduling.ledger.touches import touches
from scheduling.models import ChannelConfig, DisabledTarget, Event, FailedTask, Node, TemplateText, Touch
from scheduling.operations import failed_tasks
from scheduling.operations.failed_tasks import Actor
from tests.scheduling.core.conftest import WAIT_LIMIT, deliver, deliver_when_due, expire_lease, fall_due, rows, sendings
from tests.scheduling.core.fake_channels import CreateFakeChannel, FakeChannelState
from tests.scheduling.core.receivers import ScriptedReceiver
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.second_connection import Race, SecondConnection
from tests.support.touch_logs import list_attempts

ANN = Actor("ann")

pytestmark = pytest.mark.django_db(transaction=True)


def seconds_until_due(row: Touch) -> float:
    """From the end of the last attempt."""
    ended_at = row.attempts[-1].ended_at
    assert ended_at is not None
    return (row.due_at - ended_at).total_seconds()


@pytest.fixture
def hook_touch(matrix: MatrixBuilder, hook: ChannelConfig, record_event: RecordEvent) -> UUID:
    """A touch for the webhook with two retries, after 10 and 60 seconds."""
    hook.retry_delays = [10, 60]
    hook.save()
    matrix.node(channel=hook)
    task_id: UUID = record_event().task_ids[0]
    return task_id


# --- answers ---------------------------------------------------------------------------------------------------------


def test_transient_failure_is_retried_until_schedule_ends(hook_touch: UUID, receiver: ScriptedReceiver) -> None:
    receiver.script = [503, 503, 503]

    waits = []
    for attempt in (1, 2):
        (row,) = deliver_when_due(hook_touch)
        assert (row.state, row.reason, row.attempt) == ("scheduled", "http_503", attempt)
        assert row.planned_at == row.planned_at
        waits.append(seconds_until_due(row))
    (row,) = deliver_when_due(hook_touch)

    assert 10 <= waits[0] <= 11.1
    assert 60 <= waits[1] <= 66.1
    assert (row.state, row.reason, row.attempt, row.reserved_at) == ("failed", "http_503", 3, None)
    assert receiver.keys == [str(hook_touch)] * 3, "the receiver sees one key"
    failed = FailedTask.objects.get()
    assert (failed.failure, failed.task_id, failed.reason, failed.channel) == ("failed", hook_touch, "http_503", "hook")
    assert [attempt["outcome"] for attempt in failed.attempts] == ["transient"] * 3


def test_retry_after_prolongs_but_never_shortens(hook_touch: UUID, receiver: ScriptedReceiver) -> None:
    receiver.script = [(503, {"Retry-After": "120"}), (429, {"Retry-After": "1"})]
    (row,) = deliver_when_due(hook_touch)
    assert seconds_until_due(row) == pytest.approx(120, abs=0.001)
    (row,) = deliver_when_due(hook_touch)
    assert (row.reason, seconds_until_due(row) >= 60) == ("throttled", True)


def test_retry_beyond_expiry_fails_at_once(hook_touch: UUID, hook: ChannelConfig, receiver: ScriptedReceiver) -> None:
    hook.retry_delays = [3600]
    hook.save()
    Touch.objects.update(expires_at=now() + timedelta(minutes=30))
    receiver.script = [503]
    (row,) = deliver_when_due(hook_touch)
    assert (row.state, row.reason) == ("failed", "http_503")


def test_http_404_is_retried_by_the_schedule(hook_touch: UUID, receiver: ScriptedReceiver) -> None:
    receiver.script = [404, 403]
    (row,) = deliver_when_due(hook_touch)
    assert (row.state, row.reason, row.attempt) == ("scheduled", "http_404", 1)
    deliver_when_due(hook_touch)
    (row,) = deliver_when_due(hook_touch)
    assert (row.state, row.attempt, FailedTask.objects.count()) == ("delivered", 3, 0)


def test_permanent_refusal_fails_at_once(hook_touch: UUID, receiver: ScriptedReceiver) -> None:
    receiver.script = [422]
    (row,) = deliver_when_due(hook_touch)
    assert (row.state, row.reason, row.attempt) == ("failed", "http_422", 1)
    assert FailedTask.objects.get().detail == "as told"


def test_gone_target_is_disabled_until_enabled(
    hook_touch: UUID, receiver: ScriptedReceiver, record_event: RecordEvent
) -> None:
    receiver.script = [410]
    assert deliver_when_due(hook_touch)[0].reason == "gone"

    (row,) = deliver_when_due(*record_event(user="bob").task_ids)
    assert (row.state, row.reason, len(receiver.calls)) == ("failed", "target_disabled", 1)

    DisabledTarget.objects.all().delete()
    assert deliver_when_due(*record_event(user="cid").task_ids)[0].state == "delivered"


def test_gone_target_does_not_disable_others(
    hook_touch: UUID, receiver: ScriptedReceiver, record_event: RecordEvent
) -> None:
    from scheduling.models import Community

    Community.objects.create(chat_id="c1", targets={"hook": {"url": f"{receiver.url}/c1"}})
    receiver.script = [410]
    deliver_when_due(*record_event(chat_id="c1", user="bob").task_ids)
    assert deliver_when_due(hook_touch)[0].state == "delivered"


def test_no_answer_is_retried_on_idempotent_channel(hook_touch: UUID, receiver: ScriptedReceiver) -> None:
    """I8: an idempotent channel is asked again."""
    receiver.script = ["hang_up"]
    (row,) = deliver_when_due(hook_touch)
    assert row.state == "scheduled"
    assert row.reserved_at is not None
    (row,) = deliver_when_due(hook_touch)
    assert (row.state, row.attempt) == ("delivered", 2)
    assert receiver.keys == [str(hook_touch)] * 2
    assert [each.outcome for each in list_attempts()] == ["unknown", "delivered"]


def test_no_answer_is_unknown_on_other_channel(
    hook_touch: UUID, hook: ChannelConfig, receiver: ScriptedReceiver
) -> None:
    """I8: never blind."""
    hook.idempotent = False
    hook.save()
    receiver.script = ["hang_up"]
    (row,) = deliver_when_due(hook_touch)
    assert row.state == "unknown"
    assert row.reserved_at is not None
    assert FailedTask.objects.get().failure == "unknown"
    deliver_when_due(hook_touch)
    dispatch.rescue_lost_work()
    assert len(receiver.calls) == 1


@pytest.mark.parametrize("lost", [False, True], ids=["no answer", "worker lost"])
@pytest.mark.parametrize("change", ["another channel", "not idempotent"])
def test_attempt_in_doubt_is_not_repeated_on_a_changed_channel(
    hook_touch: UUID, hook: ChannelConfig, receiver: ScriptedReceiver, create_fake_channel: CreateFakeChannel,
    fake_channel: FakeChannelState, change: str, lost: bool,
) -> None:  # fmt: skip
    """I8: another receiver does not know the key."""
    if lost:
        lose_worker(hook_touch, sending=True)
    else:
        receiver.script = ["hang_up"]
        deliver_when_due(hook_touch)
    if change == "another channel":
        node = Node.objects.get()
        node.channel = create_fake_channel()
        node.save()
    else:
        hook.idempotent = False
        hook.save()

    (row,) = deliver_when_due(hook_touch)

    assert (row.state, row.reason) == ("unknown", "channel_changed")
    assert lost or row.reserved_at is not None
    assert FailedTask.objects.get().failure == "unknown"
    assert (len(receiver.calls), fake_channel.received) == (0 if lost else 1, [])


def test_attempt_in_doubt_is_not_repeated_by_a_channel_that_became_idempotent(
    hook_touch: UUID, hook: ChannelConfig, receiver: ScriptedReceiver
) -> None:
    """I8: the worker is lost while the channel is not idempotent; its flag changes before the rescue."""
    hook.idempotent = False
    hook.save()
    fall_due(hook_touch)
    (claim,) = touches.claim([hook_touch], lease=LEASE)
    assert touches.mark_sending(sendings(claim)) == {hook_touch: None}
    hook.idempotent = True
    hook.save()
    expire_lease(hook_touch)
    dispatch.rescue_lost_work()

    (row,) = deliver_when_due(hook_touch)

    assert (row.state, row.reason, receiver.calls) == ("unknown", "channel_changed", [])


def test_attempt_in_doubt_is_not_repeated_on_a_channel_that_changed_before_its_call(
    hook_touch: UUID, receiver: ScriptedReceiver, create_fake_channel: CreateFakeChannel,
    fake_channel: FakeChannelState, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """I8: the message went to the channel of its verdict."""
    other, mark_sending = create_fake_channel(), touches.mark_sending

    def change_first(*arguments: Any, **options: Any) -> Any:
        node = Node.objects.get()
        node.channel = other
        node.save()
        return mark_sending(*arguments, **options)

    monkeypatch.setattr(touches, "mark_sending", change_first)
    receiver.script = ["hang_up"]
    deliver_when_due(hook_touch)
    monkeypatch.undo()

    (row,) = deliver_when_due(hook_touch)

    assert (row.state, row.reason) == ("unknown", "channel_changed")
    assert (len(receiver.calls), fake_channel.received) == (1, [])


def test_no_answer_at_each_attempt_ends_as_unknown(hook_touch: UUID, receiver: ScriptedReceiver) -> None:
    receiver.script = ["hang_up"] * 9
    for _ in range(3):
        (row,) = deliver_when_due(hook_touch)
    assert (row.state, row.attempt) == ("unknown", 3)
    assert FailedTask.objects.get().failure == "unknown"


# --- a worker that is gone -------------------------------------------------------------------------------------------


def lose_worker(task_id: UUID, *, sending: bool) -> None:
    """A worker claims it, may start to send, and vanishes."""
    fall_due(task_id)
    (claim,) = touches.claim([task_id], lease=LEASE)
    if sending:
        assert touches.mark_sending(sendings(claim)) == {task_id: None}
    assert dispatch.rescue_lost_work() == (0, 0), "its lease still runs"
    expire_lease(task_id)
    assert dispatch.rescue_lost_work() == (0, 1)


def test_worker_lost_before_send_costs_no_attempt(hook_touch: UUID, receiver: ScriptedReceiver) -> None:
    lose_worker(hook_touch, sending=False)
    (row,) = rows([hook_touch])
    assert (row.state, row.attempt, row.reason) == ("scheduled", 0, "worker_lost")
    assert deliver_when_due(hook_touch)[0].state == "delivered"
    assert len(receiver.calls) == 1


def test_worker_lost_during_send_repeats_same_key(hook_touch: UUID, receiver: ScriptedReceiver) -> None:
    """I8"""
    lose_worker(hook_touch, sending=True)
    (row,) = rows([hook_touch])
    assert (row.state, row.attempt) == ("scheduled", 1)
    (row,) = deliver_when_due(hook_touch)
    assert (row.state, row.attempt, receiver.keys) == ("delivered", 2, [str(hook_touch)])


def test_worker_lost_on_not_idempotent_is_unknown(
    hook_touch: UUID, hook: ChannelConfig, receiver: ScriptedReceiver
) -> None:
    """I8"""
    hook.idempotent = False
    hook.save()
    lose_worker(hook_touch, sending=True)
    (row,) = rows([hook_touch])
    assert (row.state, row.reason) == ("unknown", "worker_lost")
    assert FailedTask.objects.get().task_id == hook_touch
    assert receiver.calls == []


def test_workers_lost_repeatedly_end_as_unknown(hook_touch: UUID) -> None:
    for _ in range(3):
        lose_worker(hook_touch, sending=True)
    (row,) = rows([hook_touch])
    assert (row.state, row.attempt) == ("unknown", 3)


def test_lost_wakeup_is_dispatched_again(hook_touch: UUID, valkey: redis.Redis) -> None:
    fall_due(hook_touch)
    dispatch.dispatch_due_touches()
    valkey.flushall()
    expire_lease(hook_touch)
    assert dispatch.rescue_lost_work() == (1, 0)
    assert dispatch.dispatch_due_touches() == 1


def test_concurrent_rescues_decide_once(hook_touch: UUID, hook: ChannelConfig, race: Race) -> None:
    hook.idempotent = False
    hook.save()
    fall_due(hook_touch)
    touches.mark_sending(sendings(*touches.claim([hook_touch], lease=LEASE)))
    expire_lease(hook_touch)
    assert sum(runs for _, runs in race(4, lambda number: dispatch.rescue_lost_work())) == 1
    assert FailedTask.objects.count() == 1


# --- retries repeat the first content --------------------------------------------------------------------------------


def edit(body: str, *, subject: str = "") -> None:
    text = TemplateText.objects.get()
    text.subject, text.body = subject, body
    text.save()


def bodies(receiver: ScriptedReceiver) -> list[str]:
    return [call.json["data"]["body"] for call in receiver.calls]


def test_retry_after_template_edit_repeats_first_body(hook_touch: UUID, receiver: ScriptedReceiver) -> None:
    edit("hi {{ user.name }}", subject="{{ event.data.title }}")
    receiver.script = [503, "hang_up"]
    Event.objects.update(data={"title": "t" * 300})
    deliver_when_due(hook_touch)

    edit("edited {{ event.data.missing }}")
    deliver_when_due(hook_touch)
    (row,) = deliver_when_due(hook_touch)

    assert (row.state, receiver.keys, bodies(receiver)) == ("delivered", [str(hook_touch)] * 3, ["hi ann"] * 3)
    assert {each.subject for each in list_attempts()} == {"t" * 300}
    assert row.template_version == 2, "what was said"


@pytest.fixture
def touch_of_lost_worker(
    matrix: MatrixBuilder,
    create_fake_channel: CreateFakeChannel,
    record_event: RecordEvent,
    fake_channel: FakeChannelState,
) -> UUID:
    """A touch that a worker is sending and never settles: "hi ann"."""
    matrix.node(channel=create_fake_channel(retry_delays=[10, 60, 60]))
    task_id: UUID = record_event().task_ids[0]
    lose_a_sending_worker(task_id, fake_channel)
    return task_id


def lose_a_sending_worker(task_id: UUID, fake_channel: FakeChannelState) -> None:
    fake_channel.blocks = True
    fake_channel.on_stage.clear()
    fall_due(task_id)
    pipeline.deliver_touches([task_id])
    assert fake_channel.on_stage.wait(WAIT_LIMIT)
    fake_channel.blocks = False
    expire_lease(task_id)
    assert dispatch.rescue_lost_work() == (0, 1)


def deliver_until(state: str, task_id: UUID) -> Touch:
    """While another attempt still hangs, which keeps the sender from being drained."""
    attempts = len(list_attempts())
    fall_due(task_id)
    pipeline.deliver_touches([task_id])
    assert wait_until(lambda: len(list_attempts()) > attempts, WAIT_LIMIT), "never settled"
    wait_for(state, task_id)
    return rows([task_id])[0]


def test_lost_worker_retry_repeats_sent_text(touch_of_lost_worker: UUID, fake_channel: FakeChannelState) -> None:
    edit("edited {{ user.name }}")
    answers: list[Outcome] = [Transient("busy"), Delivered()]
    fake_channel.play = lambda message: answers.pop(0) if answers else Delivered()

    deliver_until("scheduled", touch_of_lost_worker)
    edit("later {{ user.name }}")
    row = deliver_until("delivered", touch_of_lost_worker)

    assert (row.attempt, row.template_version) == (3, 1)
    assert [message.body for message in fake_channel.received] == ["hi ann"] * 3


def test_two_lost_workers_retry_repeats_first_text(touch_of_lost_worker: UUID, fake_channel: FakeChannelState) -> None:
    edit("edited {{ user.name }}")
    lose_a_sending_worker(touch_of_lost_worker, fake_channel)
    edit("later {{ user.name }}")

    row = deliver_until("delivered", touch_of_lost_worker)

    assert (row.attempt, row.template_version) == (3, 1)
    assert [message.body for message in fake_channel.received] == ["hi ann"] * 3


def test_lost_worker_retry_without_history_uses_new_text(
    touch_of_lost_worker: UUID, fake_channel: FakeChannelState
) -> None:
    edit("edited {{ user.name }}")
    TemplateText.history.all().delete()

    row = deliver_until("delivered", touch_of_lost_worker)

    assert (row.template_version, [message.body for message in fake_channel.received]) == (2, ["hi ann", "edited ann"])


def test_manual_retry_same_key_repeats_first_body(
    hook_touch: UUID, receiver: ScriptedReceiver, matrix: MatrixBuilder
) -> None:
    receiver.script = [422, 422]
    deliver_when_due(hook_touch)
    edit("edited {{ user.name }}")
    Node.objects.update(template=matrix.template("another", body="another"))

    again = failed_tasks.retry_failed_task(FailedTask.objects.get(state="open").pk, ANN)
    deliver_when_due(again)
    (last,) = deliver_when_due(failed_tasks.retry_failed_task(FailedTask.objects.get(state="open").pk, ANN))

    assert (last.state, receiver.keys, bodies(receiver)) == ("delivered", [str(hook_touch)] * 3, ["hi ann"] * 3)


def test_manual_retry_as_new_sends_current_text(hook_touch: UUID, receiver: ScriptedReceiver) -> None:
    receiver.script = [422]
    deliver_when_due(hook_touch)
    edit("edited {{ user.name }}")

    again = failed_tasks.retry_failed_task(FailedTask.objects.get().pk, ANN, as_new=True)
    (row,) = deliver_when_due(again)

    assert (row.state, receiver.keys, bodies(receiver)) == (
        "delivered", [str(hook_touch), str(again)], ["hi ann", "edited ann"],
    )  # fmt: skip


# --- stale results ---------------------------------------------------------------------------------------------------


def test_result_after_lost_lease_is_dropped(
    matrix: MatrixBuilder,
    create_fake_channel: CreateFakeChannel,
    record_event: RecordEvent,
    fake_channel: FakeChannelState,
) -> None:
    """I3: the second worker has delivered it; the first one's refusal means nothing any more."""
    matrix.node(channel=create_fake_channel())
    (task_id,) = record_event().task_ids
    fall_due(task_id)
    answers: list[Outcome] = [Delivered(), Permanent("too_late")]
    fake_channel.play = lambda message: answers.pop(0)

    fake_channel.blocks = True
    pipeline.deliver_touches([task_id])
    assert fake_channel.on_stage.wait(WAIT_LIMIT)
    expire_lease(task_id)
    dispatch.rescue_lost_work()
    fake_channel.blocks = False
    fall_due(task_id)
    pipeline.deliver_touches([task_id])
    wait_for("delivered", task_id)
    fake_channel.release_calls.set()
    deliver([])

    (row,) = rows([task_id])
    assert (row.state, row.lease_no, len(fake_channel.received), answers) == ("delivered", 2, 2, [])
    assert [each.outcome for each in row.attempts if each.lease_no == 2] == ["delivered"]
    assert "too_late" not in {each.reason for each in row.attempts}
    assert not FailedTask.objects.exists()


def test_touch_rescued_before_send_is_not_sent(
    matrix: MatrixBuilder,
    create_fake_channel: CreateFakeChannel,
    record_event: RecordEvent,
    fake_channel: FakeChannelState,
    second_connection: SecondConnection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I3: between the claim and `mark_sending` the process pauses for longer than its lease."""
    matrix.node(channel=create_fake_channel())
    (task_id,) = record_event().task_ids
    fall_due(task_id)
    mark_sending = touches.mark_sending

    def stolen_first(*claims: Any, **margin: Any) -> Any:
        second_connection(lambda: (expire_lease(task_id), dispatch.rescue_lost_work()))
        return mark_sending(*claims, **margin)

    monkeypatch.setattr(touches, "mark_sending", stolen_first)
    deliver([task_id])

    assert fake_channel.received == []
    assert [(row.state, row.attempt) for row in rows([task_id])] == [("scheduled", 0)]


def wait_for(state: str, task_id: UUID) -> None:
    assert wait_until(lambda: Touch.objects.get(pk=task_id).state == state, WAIT_LIMIT), f"never {state}"
