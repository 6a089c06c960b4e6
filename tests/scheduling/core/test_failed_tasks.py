"""What a person does about what failed: each action once, with their name, and never a second message by accident."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import time_machine
from django.contrib.auth import get_user_model
from django.utils.timezone import now

from scheduling.channels.base import Delivered, Unknown
from scheduling.dispatch import dispatcher
from scheduling.errors import Conflict, NotFound
from scheduling.ids import new_id
from scheduling.ledger import dead_letters
from scheduling.models import Event, FailedTask, HarassmentRule, Touch
from scheduling.operations import failed_tasks
from scheduling.operations.failed_tasks import Actor
from tests.scheduling.core.conftest import deliver_at_last, pass_time, rows

pytestmark = pytest.mark.django_db(transaction=True)
HOUR = timedelta(hours=1)
ANN = Actor("ann", reason="the shop asked for it")


@pytest.fixture
def buried(matrix: Any, hook: Any, happen: Any, receiver: Any) -> Any:
    """A touch that failed (400) or whose outcome nobody knows (no answer)."""
    hook.idempotent = False
    hook.save()
    matrix.node(channel=hook, expires_after=timedelta(hours=1))

    def buried(answer: Any = 422, user: str = "ann") -> FailedTask:
        receiver.script = [answer]
        (row,) = deliver_at_last(*happen(user=user).task_ids)
        return FailedTask.objects.get(task_id=row.pk)

    return buried


def test_a_failed_task_keeps_what_it_was_and_why_it_failed(buried: Any) -> None:
    row = buried()
    assert (row.state, row.failure, row.reason, row.detail) == ("open", "failed", "http_422", "as told")
    assert (row.payload["node"], row.payload["user_id"], row.channel) == ("guide", "ann", "hook")
    assert row.payload["event"]["data"] == Event.objects.get().data
    assert [attempt["status"] for attempt in row.attempts] == [422]


def test_the_same_failure_has_the_same_fingerprint_and_another_has_another(buried: Any) -> None:
    assert buried().fingerprint == buried(user="bob").fingerprint != buried(404, user="cid").fingerprint


def test_a_retry_is_a_new_task_with_the_same_key_and_each_knows_the_other(buried: Any, receiver: Any) -> None:
    row = buried()

    task_id = failed_tasks.retry_failed_task(row.pk, ANN)
    assert dispatcher.dispatch_due_touches() == 1
    (again,) = deliver_at_last(task_id)

    row.refresh_from_db()
    assert (again.state, again.retry_of, again.root_id) == ("delivered", row.task_id, row.root_id)
    assert (row.state, row.retried_as) == ("retried", task_id)
    assert receiver.keys == [str(row.task_id)] * 2
    assert [call.json["data"]["task_id"] for call in receiver.calls] == [str(row.task_id), str(task_id)]


@pytest.mark.parametrize("as_new", [False, True])
@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_a_retry_is_due_now_by_the_databases_clock(buried: Any, as_new: bool, ahead: timedelta) -> None:
    """By the clock of a node that is ahead it would wait, and its slot would count for longer."""
    row, before = buried(), now()
    with time_machine.travel(now() + ahead, tick=True):
        task_id = failed_tasks.retry_failed_task(row.pk, ANN, as_new=as_new)

    (again,) = rows([task_id])
    row.refresh_from_db()
    assert before <= again.due_at == again.planned_at <= now()
    assert again.expires_at == again.due_at + HOUR
    assert before <= row.acted_at <= now()
    assert not as_new or before <= again.reserved_at <= now()


def test_many_begin_now_by_the_databases_clock(buried: Any) -> None:
    found, before = [buried(user=f"user-{number}").pk for number in range(2)], now()
    with time_machine.travel(now() + HOUR, tick=True):
        failed_tasks.retry_all(found, ANN, per_second=1)
    first, second = Touch.objects.exclude(retry_of=None).order_by("due_at").values_list("due_at", flat=True)
    assert before <= first <= now()
    assert second - first == timedelta(seconds=1)


def test_a_retry_as_new_has_a_key_of_its_own(buried: Any, receiver: Any) -> None:
    row = buried()
    task_id = failed_tasks.retry_failed_task(row.pk, ANN, as_new=True)
    deliver_at_last(task_id)
    assert receiver.keys == [str(row.task_id), str(task_id)]


def test_what_is_sent_as_new_is_not_held_against_itself(matrix: Any, happen: Any, theatre: Any, puppet: Any) -> None:
    """The unknown one keeps its slot, and a repeat of its content would be suppressed for three days."""
    matrix.node(channel=puppet(idempotent=False))
    theatre.play = lambda message: Unknown("timeout")
    (first,) = deliver_at_last(*happen().task_ids)
    assert first.state == "unknown"
    theatre.play = lambda message: Delivered()

    (again,) = deliver_at_last(failed_tasks.retry_failed_task(FailedTask.objects.get().pk, ANN, as_new=True))

    assert again.state == "delivered"


def test_a_retry_begins_a_new_life(buried: Any) -> None:
    row = buried()
    pass_time(days=3)
    (again,) = deliver_at_last(failed_tasks.retry_failed_task(row.pk, ANN))
    assert again.state == "delivered"


def test_a_retry_that_fails_again_is_a_failed_task_again_under_the_same_key(buried: Any, receiver: Any) -> None:
    first = buried()
    receiver.script = [422]
    deliver_at_last(failed_tasks.retry_failed_task(first.pk, ANN))
    second = FailedTask.objects.get(state="open")
    assert (second.root_id, second.task_id != first.task_id) == (first.root_id, True)
    deliver_at_last(failed_tasks.retry_failed_task(second.pk, ANN))
    assert len(set(receiver.keys)) == 1


def test_a_failed_touch_is_judged_anew_when_it_is_retried(buried: Any, happen: Any) -> None:
    HarassmentRule.objects.filter(kind="cap").update(limit=1)
    row = buried()
    other = happen()
    deliver_at_last(*other.task_ids)
    (again,) = deliver_at_last(failed_tasks.retry_failed_task(row.pk, ANN))
    assert (again.state, again.reason) == ("suppressed", "dedupe")


def test_an_unknown_one_takes_its_slot_along_because_it_is_the_same_delivery(buried: Any) -> None:
    HarassmentRule.objects.filter(kind="cap").update(limit=1)
    row = buried("hang_up")
    (old,) = rows([row.task_id])

    task_id = failed_tasks.retry_failed_task(row.pk, ANN)

    (before, again) = rows([row.task_id, task_id])
    assert (before.reserved_at, again.reserved_at) == (None, old.reserved_at)
    assert deliver_at_last(task_id)[0].state == "delivered"


def test_of_two_who_click_at_once_one_publishes(buried: Any, race: Any) -> None:
    row = buried()

    def click(number: int) -> Any:
        try:
            return failed_tasks.retry_failed_task(row.pk, Actor(f"person {number}"))
        except Conflict as error:
            return error

    answers = race(8, click)

    published = [answer for answer in answers if isinstance(answer, UUID)]
    assert len(published) == 1
    assert Touch.objects.filter(retry_of=row.task_id).count() == 1
    assert FailedTask.objects.get().retried_as == published[0]


def test_an_unknown_one_that_is_refused_when_it_is_retried_is_still_unknown(buried: Any, receiver: Any) -> None:
    """I8: the refusal says nothing about the first time."""
    row = buried("hang_up")
    receiver.script = [422]
    (again,) = deliver_at_last(failed_tasks.retry_failed_task(row.pk, ANN))
    assert (again.state, again.reason) == ("unknown", "http_422")
    assert again.reserved_at is not None
    assert FailedTask.objects.get(state="open").failure == "unknown"


@pytest.mark.parametrize("delivered", [True, False])
def test_a_person_who_found_out_settles_an_unknown_one(buried: Any, delivered: bool) -> None:
    row = buried("hang_up")
    failed_tasks.resolve_failed_task(row.pk, ANN, delivered=delivered)
    row.refresh_from_db()
    assert row.state == ("resolved_delivered" if delivered else "resolved_not_delivered")
    assert (rows([row.task_id])[0].reserved_at is None) == (not delivered)


def test_a_slot_that_a_person_freed_can_be_taken_by_the_next(buried: Any, happen: Any) -> None:
    HarassmentRule.objects.filter(kind="cap").update(limit=1)
    row = buried("hang_up")
    failed_tasks.resolve_failed_task(row.pk, ANN, delivered=False)
    assert deliver_at_last(*happen().task_ids)[0].state == "delivered"


def test_only_an_unknown_outcome_can_be_resolved(buried: Any) -> None:
    row = buried()
    with pytest.raises(Conflict, match="unknown"):
        failed_tasks.resolve_failed_task(row.pk, ANN, delivered=True)
    row.refresh_from_db()
    assert row.state == "open"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("retry", {"retry": False, "ignore": False, "archive": False}),
        ("ignore", {"retry": True, "ignore": False, "archive": True}),
        ("archive", {"retry": False, "ignore": False, "archive": False}),
    ],
)
def test_what_can_be_done_after_what(buried: Any, first: str, then: dict[str, bool]) -> None:
    for number, (second, allowed) in enumerate(then.items()):
        row = buried(user=f"user-{number}")
        getattr(failed_tasks, f"{first}_failed_task")(row.pk, ANN)
        if allowed:
            getattr(failed_tasks, f"{second}_failed_task")(row.pk, ANN)
        else:
            with pytest.raises(Conflict):
                getattr(failed_tasks, f"{second}_failed_task")(row.pk, ANN)


@pytest.mark.parametrize("action", ["retry", "ignore", "archive", "resolve"])
def test_who_did_it_and_why_is_kept(buried: Any, action: str) -> None:
    user = get_user_model().objects.create(username="ann")
    row = buried("hang_up")
    options = {"delivered": True} if action == "resolve" else {}

    getattr(failed_tasks, f"{action}_failed_task")(row.pk, Actor("Ann", user, "because"), **options)

    row.refresh_from_db()
    assert (row.actor, row.actor_name, row.action_reason) == (user, "Ann", "because")
    assert abs(row.acted_at - now()) < timedelta(seconds=10)


def test_what_is_not_there_is_not_found() -> None:
    with pytest.raises(NotFound):
        failed_tasks.retry_failed_task(new_id(), ANN)


def test_a_broker_message_can_be_put_away_but_not_published_again() -> None:
    dead_letters.record_unreadable_message("not_json", b"\xff\x00", queue="touch.high")
    row = FailedTask.objects.get()
    with pytest.raises(Conflict, match="ignore or archive"):
        failed_tasks.retry_failed_task(row.pk, ANN)
    row.refresh_from_db()
    assert (row.state, row.retried_as) == ("open", None)
    failed_tasks.archive_failed_task(row.pk, ANN)


def test_many_are_published_again_at_a_pace_and_those_already_done_passed_over(buried: Any) -> None:
    found = [buried(user=f"user-{number}").pk for number in range(5)]
    failed_tasks.archive_failed_task(found[2], ANN)

    assert failed_tasks.retry_all([*found, new_id()], ANN, per_second=2) == failed_tasks.BulkResult(done=4, conflicts=2)

    due = sorted(Touch.objects.exclude(retry_of=None).values_list("due_at", flat=True))
    assert [(later - due[0]).total_seconds() for later in due] == [0, 0.5, 1, 1.5]
    assert set(FailedTask.objects.filter(state="retried").values_list("actor_name", flat=True)) == {"ann"}


@pytest.mark.parametrize("as_new", [False, True])
def test_many_keep_their_delivery_keys_unless_they_are_sent_as_new(buried: Any, as_new: bool) -> None:
    found = [buried(user=f"user-{number}") for number in range(2)]

    failed_tasks.retry_all([row.pk for row in found], ANN, as_new=as_new)

    for row in found:
        again = Touch.objects.get(retry_of=row.task_id)
        assert again.root_id == (again.task_id if as_new else row.root_id)
