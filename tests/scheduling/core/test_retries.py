"""What a channel's answer leads to, and what becomes of a touch whose worker is gone."""

from datetime import timedelta

import pytest
import time_machine
from django.utils.timezone import now

from config.local.processes import wait_until
from scheduling import dispatch
from scheduling.channels.base import Delivered, Permanent, Transient
from scheduling.delivery import pipeline
from scheduling.ledger.touches import touch_ledger
from scheduling.models import (
    Community,
    DisabledTarget,
    Event,
    FailedTask,
    Node,
    TemplateText,
    Touch,
)
from scheduling.operations import failed_tasks
from scheduling.operations.failed_tasks import Actor
from tests.scheduling.core.conftest import deliver, deliver_when_due, expire_lease, fall_due, rows, sendings
from tests.support.claims import claim_touches
from tests.support.touch_logs import list_attempts
from tests.support.waiting import WAIT_LIMIT

ANN = Actor("ann")

pytestmark = pytest.mark.django_db(transaction=True)


def seconds_until_due(row):
    """From the end of the last attempt."""
    ended_at = row.attempts[-1].ended_at
    assert ended_at is not None
    return (row.due_at - ended_at).total_seconds()


@pytest.fixture
def hook_touch(matrix, hook, record_event):
    """A touch for the webhook with two retries, after 10 and 60 seconds."""
    hook.retry_delays = [10, 60]
    hook.save()
    matrix.node(channel=hook)
    return record_event().task_ids[0]


# --- answers ---------------------------------------------------------------------------------------------------------


def test_transient_failure_is_retried_until_schedule_ends(hook_touch, receiver):
    receiver.script = [503, 503, 503]

    waits = []
    for attempt in (1, 2):
        (row,) = deliver_when_due(hook_touch)
        assert (row.state, row.reason, row.attempt) == ("scheduled", "http_503", attempt)
        waits.append(seconds_until_due(row))
    (row,) = deliver_when_due(hook_touch)

    assert 10 <= waits[0] <= 11.1
    assert 60 <= waits[1] <= 66.1
    assert (row.state, row.reason, row.attempt, row.reserved_at) == ("failed", "http_503", 3, None)
    assert receiver.keys == [str(hook_touch)] * 3, "the receiver sees one key"
    failed = FailedTask.objects.get()
    assert (failed.failure, failed.task_id, failed.reason, failed.channel) == ("failed", hook_touch, "http_503", "hook")
    assert [attempt["outcome"] for attempt in failed.attempts] == ["transient"] * 3


def test_retry_after_prolongs_but_never_shortens(hook_touch, receiver):
    receiver.script = [(503, {"Retry-After": "120"}), (429, {"Retry-After": "1"})]
    (row,) = deliver_when_due(hook_touch)
    assert seconds_until_due(row) == pytest.approx(120, abs=0.001)
    (row,) = deliver_when_due(hook_touch)
    assert (row.reason, seconds_until_due(row) >= 60) == ("throttled", True)


def test_retry_beyond_expiry_fails_at_once(hook_touch, hook, receiver):
    hook.retry_delays = [3600]
    hook.save()
    Touch.objects.update(expires_at=now() + timedelta(minutes=30))
    receiver.script = [503]
    (row,) = deliver_when_due(hook_touch)
    assert (row.state, row.reason) == ("failed", "http_503")


def test_permanent_refusal_fails_at_once(hook_touch, receiver):
    receiver.script = [422]
    (row,) = deliver_when_due(hook_touch)
    assert (row.state, row.reason, row.attempt) == ("failed", "http_422", 1)
    assert FailedTask.objects.get().detail == "as told"


def test_gone_target_alone_is_disabled_until_enabled(hook_touch, receiver, record_event):
    Community.objects.create(chat_id="c1", targets={"hook": {"url": f"{receiver.url}/c1"}})

    def deliver_to_community(user):
        (row,) = deliver_when_due(*record_event(chat_id="c1", user=user).task_ids)
        return row.state, row.reason

    receiver.script = [410]
    assert deliver_to_community("ann") == ("failed", "gone")
    assert deliver_to_community("bob") == ("failed", "target_disabled")
    assert deliver_when_due(hook_touch)[0].state == "delivered", "it goes to another target"
    assert len(receiver.calls) == 2

    DisabledTarget.objects.all().delete()
    assert deliver_to_community("cid") == ("delivered", "")


def test_no_answer_is_retried_on_idempotent_channel(hook_touch, receiver):
    """I8: an idempotent channel is asked again."""
    receiver.script = ["hang_up"]
    (row,) = deliver_when_due(hook_touch)
    assert row.state == "scheduled"
    assert row.reserved_at is not None
    (row,) = deliver_when_due(hook_touch)
    assert (row.state, row.attempt) == ("delivered", 2)
    assert receiver.keys == [str(hook_touch)] * 2
    assert [each.outcome for each in list_attempts()] == ["unknown", "delivered"]


def test_no_answer_is_unknown_on_other_channel(hook_touch, hook, receiver):
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
    hook_touch, hook, receiver, create_fake_channel, fake_channel, change, lost
):
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


def test_attempt_in_doubt_is_not_repeated_by_a_channel_that_became_idempotent(hook_touch, hook, receiver):
    """I8: the worker is lost while the channel is not idempotent; its flag changes before the rescue."""
    hook.idempotent = False
    hook.save()
    fall_due(hook_touch)
    (claim,) = claim_touches([hook_touch])
    assert touch_ledger.mark_sending(sendings(claim)) == {hook_touch: None}
    hook.idempotent = True
    hook.save()
    expire_lease(hook_touch)
    dispatch.rescue_lost_work()

    (row,) = deliver_when_due(hook_touch)

    assert (row.state, row.reason, receiver.calls) == ("unknown", "channel_changed", [])


def test_attempt_in_doubt_is_not_repeated_on_a_channel_that_changed_before_its_call(
    hook_touch, receiver, create_fake_channel, fake_channel, monkeypatch
):
    """I8: the message went to the channel of its verdict."""
    other, mark_sending = create_fake_channel(), touch_ledger.mark_sending

    def change_first(*arguments, **options):
        node = Node.objects.get()
        node.channel = other
        node.save()
        return mark_sending(*arguments, **options)

    monkeypatch.setattr(touch_ledger, "mark_sending", change_first)
    receiver.script = ["hang_up"]
    deliver_when_due(hook_touch)
    monkeypatch.undo()

    (row,) = deliver_when_due(hook_touch)

    assert (row.state, row.reason) == ("unknown", "channel_changed")
    assert (len(receiver.calls), fake_channel.received) == (1, [])


@pytest.mark.parametrize("lost", [False, True], ids=["no answer", "worker lost"])
def test_attempt_in_doubt_at_each_try_ends_as_unknown(hook_touch, receiver, lost):
    receiver.script = ["hang_up"] * 9
    for _ in range(3):
        lose_worker(hook_touch, sending=True) if lost else deliver_when_due(hook_touch)
    (row,) = rows([hook_touch])
    assert (row.state, row.attempt) == ("unknown", 3)
    assert FailedTask.objects.get().failure == "unknown"


# --- a worker that is gone -------------------------------------------------------------------------------------------


def lose_worker(task_id, *, sending):
    """A worker claims it, may start to send, and vanishes."""
    fall_due(task_id)
    (claim,) = claim_touches([task_id])
    if sending:
        assert touch_ledger.mark_sending(sendings(claim)) == {task_id: None}
    assert dispatch.rescue_lost_work() == (0, 0), "its lease still runs"
    expire_lease(task_id)
    assert dispatch.rescue_lost_work() == (0, 1)


def test_worker_lost_before_send_costs_no_attempt(hook_touch, receiver):
    lose_worker(hook_touch, sending=False)
    (row,) = rows([hook_touch])
    assert (row.state, row.attempt, row.reason) == ("scheduled", 0, "worker_lost")
    assert deliver_when_due(hook_touch)[0].state == "delivered"
    assert len(receiver.calls) == 1


def test_worker_lost_during_send_repeats_same_key(hook_touch, receiver):
    """I8"""
    lose_worker(hook_touch, sending=True)
    (row,) = rows([hook_touch])
    assert (row.state, row.attempt) == ("scheduled", 1)
    (row,) = deliver_when_due(hook_touch)
    assert (row.state, row.attempt, receiver.keys) == ("delivered", 2, [str(hook_touch)])


def test_worker_lost_on_not_idempotent_is_unknown(hook_touch, hook, receiver):
    """I8"""
    hook.idempotent = False
    hook.save()
    lose_worker(hook_touch, sending=True)
    (row,) = rows([hook_touch])
    assert (row.state, row.reason) == ("unknown", "worker_lost")
    assert FailedTask.objects.get().task_id == hook_touch
    assert receiver.calls == []


def test_rescue_returns_everything_in_one_pass(matrix, record_event, valkey, monkeypatch):
    """A thousand a tick is 200 a second: less than what falls due in that time."""
    monkeypatch.setattr(dispatch, "PASS_LIMIT", 2)
    matrix.node()
    waiting = [record_event(user=f"user-{number}").task_ids[0] for number in range(5)]
    for state, found in (("queued", (5, 0)), ("running", (0, 5))):
        Touch.objects.update(state=state, queued_at=now(), lease_no=1, lease_until=now())
        expire_lease(*waiting)
        assert dispatch.rescue_lost_work() == found
        assert set(Touch.objects.values_list("state", flat=True)) == {"scheduled"}


def test_rescue_continues_when_node_clock_steps(matrix, record_event, valkey, monkeypatch):
    """A step forwards ended each pass early, and a step backwards let it take as long as the step."""
    monkeypatch.setattr(dispatch, "PASS_LIMIT", 2)
    matrix.node()
    lost = [record_event(user=f"user-{number}").task_ids[0] for number in range(5)]
    Touch.objects.update(state="running", lease_no=1, lease_until=now())
    expire_lease(*lost)
    real = dispatch.rescue_expired_runs

    with time_machine.travel(now(), tick=True) as clock:

        def rescue():
            clock.shift(timedelta(hours=1))
            return real()

        monkeypatch.setattr(dispatch, "rescue_expired_runs", rescue)
        assert dispatch.rescue_lost_work() == (0, 5)


def test_rescue_uses_database_time_for_lost_run(hook_touch):
    """By the clock of a node that is ahead it would wait for as long."""
    Touch.objects.update(state="running", lease_no=1, lease_until=now())
    expire_lease(hook_touch)
    with time_machine.travel(now() + timedelta(hours=1), tick=True):
        assert dispatch.rescue_lost_work() == (0, 1)
    assert Touch.objects.get().due_at <= now()


def test_concurrent_rescues_decide_once(hook_touch, hook, race):
    hook.idempotent = False
    hook.save()
    fall_due(hook_touch)
    touch_ledger.mark_sending(sendings(*claim_touches([hook_touch])))
    expire_lease(hook_touch)
    assert sum(runs for _, runs in race(4, lambda number: dispatch.rescue_lost_work())) == 1
    assert FailedTask.objects.count() == 1


# --- retries repeat the first content --------------------------------------------------------------------------------


def edit(body, *, subject=""):
    text = TemplateText.objects.get()
    text.subject, text.body = subject, body
    text.save()


def bodies(receiver):
    return [call.json["data"]["body"] for call in receiver.calls]


def test_retry_after_template_edit_repeats_first_body(hook_touch, receiver):
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
def fake_touch(matrix, create_fake_channel, record_event):
    """A due touch for a fake channel, with the text "hi ann"."""
    matrix.node(channel=create_fake_channel(retry_delays=[10, 60, 60]))
    task_id = record_event().task_ids[0]
    fall_due(task_id)
    return task_id


@pytest.fixture
def touch_of_lost_worker(fake_touch, fake_channel):
    """A touch that a worker is sending and never settles."""
    lose_a_sending_worker(fake_touch, fake_channel)
    return fake_touch


def lose_a_sending_worker(task_id, fake_channel):
    fake_channel.blocks = True
    fake_channel.on_stage.clear()
    fall_due(task_id)
    pipeline.deliver_touches([task_id])
    assert fake_channel.on_stage.wait(WAIT_LIMIT)
    fake_channel.blocks = False
    expire_lease(task_id)
    assert dispatch.rescue_lost_work() == (0, 1)


def deliver_until(state, task_id):
    """While another attempt still hangs, which keeps the sender from being drained."""
    attempts = len(list_attempts())
    fall_due(task_id)
    pipeline.deliver_touches([task_id])
    assert wait_until(lambda: len(list_attempts()) > attempts, WAIT_LIMIT), "never settled"
    wait_for(state, task_id)
    return rows([task_id])[0]


def test_lost_workers_retry_repeats_first_text(touch_of_lost_worker, fake_channel):
    edit("edited {{ user.name }}")
    lose_a_sending_worker(touch_of_lost_worker, fake_channel)
    edit("later {{ user.name }}")
    answers = [Transient("busy"), Delivered()]
    fake_channel.play = lambda message: answers.pop(0) if answers else Delivered()

    deliver_until("scheduled", touch_of_lost_worker)
    edit("latest {{ user.name }}")
    row = deliver_until("delivered", touch_of_lost_worker)

    assert (row.attempt, row.template_version) == (4, 1)
    assert [message.body for message in fake_channel.received] == ["hi ann"] * 4


def test_lost_worker_retry_without_history_uses_new_text(touch_of_lost_worker, fake_channel):
    edit("edited {{ user.name }}")
    TemplateText.history.all().delete()

    row = deliver_until("delivered", touch_of_lost_worker)

    assert (row.template_version, [message.body for message in fake_channel.received]) == (2, ["hi ann", "edited ann"])


def test_manual_retry_repeats_first_body_unless_sent_as_new(hook_touch, receiver, matrix):
    receiver.script = [422] * 3
    deliver_when_due(hook_touch)
    edit("edited {{ user.name }}")
    Node.objects.update(template=matrix.template("another", body="another"))

    def retry(**options):
        row = FailedTask.objects.get(state="open")
        return deliver_when_due(failed_tasks.retry_failed_task(row.pk, ANN, **options))[0]

    for _ in range(2):
        retry()
    new = retry(as_new=True)

    assert (new.state, receiver.keys) == ("delivered", [str(hook_touch)] * 3 + [str(new.pk)])
    assert bodies(receiver) == ["hi ann"] * 3 + ["edited ann"]


# --- stale results ---------------------------------------------------------------------------------------------------


def test_result_after_lost_lease_is_dropped(fake_touch, fake_channel):
    """I3: the second worker has delivered it; the first one's refusal means nothing any more."""
    answers = [Delivered(), Permanent("too_late")]
    fake_channel.play = lambda message: answers.pop(0)
    lose_a_sending_worker(fake_touch, fake_channel)
    fall_due(fake_touch)
    pipeline.deliver_touches([fake_touch])
    wait_for("delivered", fake_touch)
    fake_channel.release_calls.set()
    deliver([])

    (row,) = rows([fake_touch])
    assert (row.state, row.lease_no, len(fake_channel.received), answers) == ("delivered", 2, 2, [])
    assert [each.outcome for each in row.attempts if each.lease_no == 2] == ["delivered"]
    assert "too_late" not in {each.reason for each in row.attempts}
    assert not FailedTask.objects.exists()


def test_touch_rescued_before_send_is_not_sent(fake_touch, fake_channel, second_connection, monkeypatch):
    """I3: between the claim and `mark_sending` the process pauses for longer than its lease."""
    mark_sending = touch_ledger.mark_sending

    def stolen_first(*claims, **margin):
        second_connection(lambda: (expire_lease(fake_touch), dispatch.rescue_lost_work()))
        return mark_sending(*claims, **margin)

    monkeypatch.setattr(touch_ledger, "mark_sending", stolen_first)
    deliver([fake_touch])

    assert fake_channel.received == []
    assert [(row.state, row.attempt) for row in rows([fake_touch])] == [("scheduled", 0)]


def wait_for(state, task_id):
    assert wait_until(lambda: Touch.objects.get(pk=task_id).state == state, WAIT_LIMIT), f"never {state}"
