"""What a channel's answer leads to, and what becomes of a touch whose worker is gone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.utils.timezone import now

from scheduling.channels.base import Delivered, Message, Outcome, Permanent, Transient
from scheduling.delivery import pipeline
from scheduling.delivery.outgoing import LEASE
from scheduling.dispatch import dispatcher
from scheduling.ledger.touches import touches
from scheduling.models import Attempt, DisabledTarget, Event, FailedTask, Node, TemplateText, Touch
from scheduling.operations import failed_tasks
from scheduling.operations.failed_tasks import Actor
from tests.scheduling.core.conftest import PATIENCE, deliver, deliver_at_last, fall_due, lapse, rows, sendings
from tests.scheduling.core.puppets import Theatre

ANN = Actor("ann")

pytestmark = pytest.mark.django_db(transaction=True)


def seconds_until_due(row: Touch) -> float:
    """From the end of the last attempt."""
    ended_at = Attempt.objects.filter(touch=row).latest("pk").ended_at
    assert ended_at is not None
    return (row.due_at - ended_at).total_seconds()


@pytest.fixture
def one(matrix: Any, hook: Any, happen: Any) -> UUID:
    """A touch for the webhook with two retries, after 10 and 60 seconds."""
    hook.retry_delays = [10, 60]
    hook.save()
    matrix.node(channel=hook)
    task_id: UUID = happen().task_ids[0]
    return task_id


# --- answers ---------------------------------------------------------------------------------------------------------


def test_a_failure_that_may_pass_is_tried_again_by_the_schedule_until_it_ends(one: UUID, receiver: Any) -> None:
    receiver.script = [503, 503, 503]

    waits = []
    for attempt in (1, 2):
        (row,) = deliver_at_last(one)
        assert (row.state, row.reason, row.attempt) == ("scheduled", "http_503", attempt)
        assert row.planned_at == row.planned_at
        waits.append(seconds_until_due(row))
    (row,) = deliver_at_last(one)

    assert 10 <= waits[0] <= 11.1
    assert 60 <= waits[1] <= 66.1
    assert (row.state, row.reason, row.attempt, row.reserved_at) == ("failed", "http_503", 3, None)
    assert receiver.keys == [str(one)] * 3, "the receiver sees one key"
    failed = FailedTask.objects.get()
    assert (failed.failure, failed.task_id, failed.reason, failed.channel) == ("failed", one, "http_503", "hook")
    assert [attempt["outcome"] for attempt in failed.attempts] == ["transient"] * 3


def test_the_receiver_may_ask_for_more_time_but_not_for_less(one: UUID, receiver: Any) -> None:
    receiver.script = [(503, {"Retry-After": "120"}), (429, {"Retry-After": "1"})]
    (row,) = deliver_at_last(one)
    assert seconds_until_due(row) == pytest.approx(120, abs=0.001)
    (row,) = deliver_at_last(one)
    assert (row.reason, seconds_until_due(row) >= 60) == ("throttled", True)


def test_a_retry_that_would_come_after_the_end_of_its_life_is_not_waited_for(one: UUID, receiver: Any) -> None:
    Touch.objects.update(expires_at=now() + timedelta(seconds=5))
    receiver.script = [503]
    (row,) = deliver_at_last(one)
    assert (row.state, row.reason) == ("failed", "http_503")


def test_deliver_with_an_ingress_that_answers_404_retries_by_the_schedule(one: UUID, receiver: Any) -> None:
    receiver.script = [404, 403]
    (row,) = deliver_at_last(one)
    assert (row.state, row.reason, row.attempt) == ("scheduled", "http_404", 1)
    deliver_at_last(one)
    (row,) = deliver_at_last(one)
    assert (row.state, row.attempt, FailedTask.objects.count()) == ("delivered", 3, 0)


def test_deliver_with_a_404_at_each_attempt_ends_in_a_failed_task(one: UUID, receiver: Any) -> None:
    receiver.script = [404] * 20
    for _ in range(20):
        (row,) = deliver_at_last(one)
        if row.state != "scheduled":
            break
    assert (row.state, row.reason) == ("failed", "http_404")
    assert FailedTask.objects.get().reason == "http_404"


def test_a_refusal_fails_at_once(one: UUID, receiver: Any) -> None:
    receiver.script = [422]
    (row,) = deliver_at_last(one)
    assert (row.state, row.reason, row.attempt) == ("failed", "http_422", 1)
    assert FailedTask.objects.get().detail == "as told"


def test_a_receiver_that_is_gone_is_not_asked_again_until_a_person_enables_it(
    one: UUID, receiver: Any, happen: Any
) -> None:
    receiver.script = [410]
    assert deliver_at_last(one)[0].reason == "gone"

    (row,) = deliver_at_last(*happen(user="bob").task_ids)
    assert (row.state, row.reason, len(receiver.calls)) == ("failed", "target_disabled", 1)

    DisabledTarget.objects.all().delete()
    assert deliver_at_last(*happen(user="cid").task_ids)[0].state == "delivered"


def test_a_receiver_that_is_gone_takes_no_other_with_it(one: UUID, receiver: Any, happen: Any) -> None:
    from scheduling.models import Community

    Community.objects.create(chat_id="c1", targets={"hook": {"url": f"{receiver.url}/c1"}})
    receiver.script = [410]
    deliver_at_last(*happen(chat_id="c1", user="bob").task_ids)
    assert deliver_at_last(one)[0].state == "delivered"


def test_no_answer_means_a_repeat_with_the_same_key_where_that_is_harmless(one: UUID, receiver: Any) -> None:
    """I8: an idempotent channel is asked again."""
    receiver.script = ["hang_up"]
    (row,) = deliver_at_last(one)
    assert row.state == "scheduled"
    assert row.reserved_at is not None
    (row,) = deliver_at_last(one)
    assert (row.state, row.attempt) == ("delivered", 2)
    assert receiver.keys == [str(one)] * 2
    assert list(Attempt.objects.values_list("outcome", flat=True)) == ["unknown", "delivered"]


def test_no_answer_is_a_question_for_a_person_where_a_repeat_would_be_a_second_message(
    one: UUID, hook: Any, receiver: Any
) -> None:
    """I8: never blind."""
    hook.idempotent = False
    hook.save()
    receiver.script = ["hang_up"]
    (row,) = deliver_at_last(one)
    assert row.state == "unknown"
    assert row.reserved_at is not None
    assert FailedTask.objects.get().failure == "unknown"
    deliver_at_last(one)
    dispatcher.rescue_lost_work()
    assert len(receiver.calls) == 1


def test_no_answer_ever_is_a_question_for_a_person_in_the_end(one: UUID, receiver: Any) -> None:
    receiver.script = ["hang_up"] * 9
    for _ in range(3):
        (row,) = deliver_at_last(one)
    assert (row.state, row.attempt) == ("unknown", 3)
    assert FailedTask.objects.get().failure == "unknown"


# --- a worker that is gone -------------------------------------------------------------------------------------------


def vanish(task_id: UUID, *, sending: bool) -> None:
    """A worker claims it, may begin to send, and is never seen again."""
    fall_due(task_id)
    (claim,) = touches.claim([task_id], lease=LEASE)
    if sending:
        assert touches.mark_sending(sendings(claim)) == {task_id: None}
    assert dispatcher.rescue_lost_work() == (0, 0), "its lease still runs"
    lapse(task_id)
    assert dispatcher.rescue_lost_work() == (0, 1)


def test_a_worker_that_vanished_before_it_sent_costs_nothing(one: UUID, receiver: Any) -> None:
    vanish(one, sending=False)
    (row,) = rows([one])
    assert (row.state, row.attempt, row.reason) == ("scheduled", 0, "worker_lost")
    assert deliver_at_last(one)[0].state == "delivered"
    assert len(receiver.calls) == 1


def test_a_worker_that_vanished_while_it_sent_is_repeated_with_the_same_key(one: UUID, receiver: Any) -> None:
    """I8"""
    vanish(one, sending=True)
    (row,) = rows([one])
    assert (row.state, row.attempt) == ("scheduled", 1)
    (row,) = deliver_at_last(one)
    assert (row.state, row.attempt, receiver.keys) == ("delivered", 2, [str(one)])


def test_a_worker_that_vanished_while_it_sent_something_unrepeatable_leaves_a_question(
    one: UUID, hook: Any, receiver: Any
) -> None:
    """I8"""
    hook.idempotent = False
    hook.save()
    vanish(one, sending=True)
    (row,) = rows([one])
    assert (row.state, row.reason) == ("unknown", "worker_lost")
    assert FailedTask.objects.get().task_id == one
    assert receiver.calls == []


def test_workers_that_vanish_again_and_again_are_not_fed_for_ever(one: UUID) -> None:
    for _ in range(3):
        vanish(one, sending=True)
    (row,) = rows([one])
    assert (row.state, row.attempt) == ("unknown", 3)


def test_a_hint_that_was_lost_comes_back(one: UUID, valkey: Any) -> None:
    fall_due(one)
    dispatcher.dispatch_due_touches()
    valkey.flushall()
    lapse(one)
    assert dispatcher.rescue_lost_work() == (1, 0)
    assert dispatcher.dispatch_due_touches() == 1


def test_two_rescues_at_once_decide_once(one: UUID, hook: Any, race: Any) -> None:
    hook.idempotent = False
    hook.save()
    fall_due(one)
    touches.mark_sending(sendings(*touches.claim([one], lease=LEASE)))
    lapse(one)
    assert sum(runs for _, runs in race(4, lambda number: dispatcher.rescue_lost_work())) == 1
    assert FailedTask.objects.count() == 1


# --- repeats say what was said first ---------------------------------------------------------------------------------


def edit(body: str, *, subject: str = "") -> None:
    text = TemplateText.objects.get()
    text.subject, text.body = subject, body
    text.save()


def bodies(receiver: Any) -> list[str]:
    return [call.json["data"]["body"] for call in receiver.calls]


def test_deliver_with_a_template_edited_between_attempts_repeats_the_first_body(one: UUID, receiver: Any) -> None:
    edit("hi {{ user.name }}", subject="{{ event.data.title }}")
    receiver.script = [503, "hang_up"]
    Event.objects.update(data={"title": "t" * 300})
    deliver_at_last(one)

    edit("edited {{ event.data.missing }}")
    deliver_at_last(one)
    (row,) = deliver_at_last(one)

    assert (row.state, receiver.keys, bodies(receiver)) == ("delivered", [str(one)] * 3, ["hi ann"] * 3)
    assert set(Attempt.objects.values_list("subject", flat=True)) == {"t" * 300}
    assert row.template_version == 2, "what was said"


@pytest.fixture
def lost(matrix: Any, puppet: Any, happen: Any, theatre: Theatre) -> UUID:
    """A touch that a worker is sending and never settles: "hi ann"."""
    matrix.node(channel=puppet(timeout=timedelta(seconds=30), retry_delays=[10, 60, 60]))
    task_id: UUID = happen().task_ids[0]
    lose_a_sending_worker(task_id, theatre)
    return task_id


def lose_a_sending_worker(task_id: UUID, theatre: Theatre) -> None:
    theatre.blocks = True
    theatre.on_stage.clear()
    fall_due(task_id)
    pipeline.deliver_touches([task_id])
    assert theatre.on_stage.wait(PATIENCE)
    theatre.blocks = False
    lapse(task_id)
    assert dispatcher.rescue_lost_work() == (0, 1)


def deliver_until(state: str, task_id: UUID) -> Touch:
    """While another attempt still hangs, which keeps the sender from being drained."""
    attempts = Attempt.objects.count()
    fall_due(task_id)
    pipeline.deliver_touches([task_id])
    ends_at = now() + timedelta(seconds=PATIENCE)
    while Attempt.objects.count() == attempts:
        assert now() < ends_at, "never settled"
    wait_for(state, task_id)
    return rows([task_id])[0]


def test_deliver_after_a_lost_worker_renders_the_text_that_it_sent(lost: UUID, theatre: Theatre) -> None:
    edit("edited {{ user.name }}")
    answers: list[Outcome] = [Transient("busy"), Delivered()]
    theatre.play = lambda message: answers.pop(0) if answers else Delivered()

    deliver_until("scheduled", lost)
    edit("later {{ user.name }}")
    row = deliver_until("delivered", lost)

    assert (row.attempt, row.template_version) == (3, 1)
    assert [message.body for message in theatre.heard] == ["hi ann"] * 3


def test_deliver_after_two_lost_workers_renders_the_text_of_the_first(lost: UUID, theatre: Theatre) -> None:
    edit("edited {{ user.name }}")
    lose_a_sending_worker(lost, theatre)
    edit("later {{ user.name }}")

    row = deliver_until("delivered", lost)

    assert (row.attempt, row.template_version) == (3, 1)
    assert [message.body for message in theatre.heard] == ["hi ann"] * 3


def test_deliver_after_a_lost_worker_without_that_text_renders_the_present_one(lost: UUID, theatre: Theatre) -> None:
    edit("edited {{ user.name }}")
    TemplateText.history.all().delete()

    row = deliver_until("delivered", lost)

    assert (row.template_version, [message.body for message in theatre.heard]) == (2, ["hi ann", "edited ann"])


def test_publish_again_under_the_same_key_repeats_the_first_body(one: UUID, receiver: Any, matrix: Any) -> None:
    receiver.script = [422, 422]
    deliver_at_last(one)
    edit("edited {{ user.name }}")
    Node.objects.update(template=matrix.template("another", body="another"))

    again = failed_tasks.retry_failed_task(FailedTask.objects.get(state="open").pk, ANN)
    deliver_at_last(again)
    (last,) = deliver_at_last(failed_tasks.retry_failed_task(FailedTask.objects.get(state="open").pk, ANN))

    assert (last.state, receiver.keys, bodies(receiver)) == ("delivered", [str(one)] * 3, ["hi ann"] * 3)


def test_publish_again_as_new_sends_the_present_text(one: UUID, receiver: Any) -> None:
    receiver.script = [422]
    deliver_at_last(one)
    edit("edited {{ user.name }}")

    again = failed_tasks.retry_failed_task(FailedTask.objects.get().pk, ANN, as_new=True)
    (row,) = deliver_at_last(again)

    assert (row.state, receiver.keys, bodies(receiver)) == (
        "delivered", [str(one), str(again)], ["hi ann", "edited ann"],
    )  # fmt: skip


# --- stale results ---------------------------------------------------------------------------------------------------


def test_a_result_that_comes_after_its_lease_was_taken_is_dropped(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre
) -> None:
    """I3: the second worker has delivered it; the first one's refusal means nothing any more."""
    matrix.node(channel=puppet(timeout=timedelta(seconds=30)))
    (task_id,) = happen().task_ids
    fall_due(task_id)
    answers: list[Outcome] = [Delivered(), Permanent("too_late")]
    theatre.play = lambda message: answers.pop(0)

    theatre.blocks = True
    pipeline.deliver_touches([task_id])
    assert theatre.on_stage.wait(PATIENCE)
    lapse(task_id)
    dispatcher.rescue_lost_work()
    theatre.blocks = False
    fall_due(task_id)
    pipeline.deliver_touches([task_id])
    wait_for("delivered", task_id)
    theatre.let_go.set()
    deliver([])

    (row,) = rows([task_id])
    assert (row.state, row.lease_no, len(theatre.heard), answers) == ("delivered", 2, 2, [])
    assert list(Attempt.objects.filter(lease_no=2).values_list("outcome", flat=True)) == ["delivered"]
    assert not Attempt.objects.filter(reason="too_late").exists()
    assert not FailedTask.objects.exists()


def test_what_was_taken_away_before_it_was_sent_is_not_sent(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: between the claim and `mark_sending` the process stood still for longer than its lease."""
    matrix.node(channel=puppet())
    (task_id,) = happen().task_ids
    fall_due(task_id)
    mark_sending = touches.mark_sending

    def stolen_first(*claims: Any, **margin: Any) -> Any:
        elsewhere(lambda: (lapse(task_id), dispatcher.rescue_lost_work()))
        return mark_sending(*claims, **margin)

    monkeypatch.setattr(touches, "mark_sending", stolen_first)
    deliver([task_id])

    assert theatre.heard == []
    assert [(row.state, row.attempt) for row in rows([task_id])] == [("scheduled", 0)]


def test_each_repeat_carries_the_key_of_the_first(matrix: Any, puppet: Any, happen: Any, theatre: Theatre) -> None:
    matrix.node(channel=puppet())
    (task_id,) = happen().task_ids
    theatre.play = no_answer_first()
    deliver_at_last(task_id)
    deliver_at_last(task_id)
    assert [message.delivery_key for message in theatre.heard] == [task_id, task_id]


def no_answer_first() -> Any:
    answers: list[Outcome | Exception] = [ValueError("a bug of the channel"), Delivered()]

    def play(message: Message) -> Outcome | Exception:
        return answers.pop(0)

    return play


def wait_for(state: str, task_id: UUID) -> None:
    ends_at = now() + timedelta(seconds=25)
    while Touch.objects.get(pk=task_id).state != state:
        assert now() < ends_at, f"never {state}"
