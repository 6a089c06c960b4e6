"""A failed touch is edited and published again: the edited text is sent, and the difference is stored."""

import pytest

from scheduling.customers import erasure
from scheduling.errors import Conflict, InvalidInput
from scheduling.models import FailedTask, FailedTaskComment, Touch
from scheduling.operations import failed_tasks
from scheduling.operations.failed_tasks import Actor, check_touch_text, read_touch_text
from tests.scheduling.core.conftest import deliver_when_due
from tests.scheduling.core.test_failed_tasks import create_failed_task  # noqa: F401  a fixture
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)
ANN = Actor("ann", reason="wrong order number")
TEXT = {"subject": "", "body": "Your order A-17 is on its way."}


def test_edited_touch_is_sent_with_new_text_and_key(create_failed_task, receiver):  # noqa: F811
    row = create_failed_task()
    before = read_touch_text(row)
    task_id = failed_tasks.retry_failed_task(row.pk, ANN, payload=TEXT)
    (again,) = deliver_when_due(task_id)

    row.refresh_from_db()
    assert (again.state, again.retry_of, again.root_id) == ("delivered", row.task_id, task_id)
    assert receiver.calls[-1].json["data"]["body"] == again.attempts[0].body == TEXT["body"]
    assert receiver.keys == [str(row.task_id), str(task_id)]
    assert (row.state, row.retried_as, row.actor_name) == ("retried", task_id, "ann")
    assert row.difference == {"before": before, "after": TEXT}
    assert before
    assert before["body"] != TEXT["body"]


def test_retry_of_an_edited_touch_keeps_its_text(create_failed_task, receiver):  # noqa: F811
    first = create_failed_task()
    receiver.script = [422]
    deliver_when_due(failed_tasks.retry_failed_task(first.pk, ANN, payload=TEXT))
    second = FailedTask.objects.get(state="open")
    assert read_touch_text(second) == TEXT
    receiver.script = [422]
    deliver_when_due(failed_tasks.retry_failed_task(second.pk, ANN))
    third = FailedTask.objects.get(state="open")
    assert third.root_id == second.root_id
    deliver_when_due(failed_tasks.retry_failed_task(third.pk, ANN, as_new=True))
    assert [call.json["data"]["body"] for call in receiver.calls[1:]] == [TEXT["body"]] * 3


def test_edited_text_replaces_a_text_without_its_data(matrix, record_event):
    matrix.node("broken", template=matrix.template("broken", body="Order {{ event.data.order_no }}"))
    deliver_when_due(*record_event().task_ids)
    row = FailedTask.objects.get()
    assert read_touch_text(row) == {"subject": "", "body": "Order {{ event.data.order_no }}"}
    (again,) = deliver_when_due(failed_tasks.retry_failed_task(row.pk, ANN, payload={"body": "Order A-17"}))
    assert (again.state, again.attempts[0].body) == ("delivered", "Order A-17")


def test_unedited_payload_keeps_key_and_stores_no_difference(create_failed_task):  # noqa: F811
    row = create_failed_task()
    task_id = failed_tasks.retry_failed_task(row.pk, ANN, payload=read_touch_text(row))
    row.refresh_from_db()
    assert (row.difference, Touch.objects.get(pk=task_id).root_id) == (None, row.root_id)


def test_edit_after_unknown_outcome_needs_as_new(create_failed_task):  # noqa: F811
    row = create_failed_task("hang_up")
    with pytest.raises(InvalidInput, match="as_new"):
        failed_tasks.retry_failed_task(row.pk, ANN, payload=TEXT)
    row.refresh_from_db()
    assert (row.state, Touch.objects.count()) == ("open", 1)
    task_id = failed_tasks.retry_failed_task(row.pk, ANN, payload=TEXT, as_new=True)
    assert Touch.objects.get(pk=task_id).reserved_at


@each_row(
    "payload, field",
    [({}, "payload.body"), ({"body": 3}, "payload.body"), ({"body": "x", "chat": "c"}, "payload.chat"),
     ({"body": "{{ user.name }}"}, "payload.body"), ({"subject": "s" * 201, "body": "x"}, "payload.subject"),
     ({"body": "a\0b"}, "payload.body"), ({"body": "a\ud800"}, "payload.body")],
)  # fmt: skip
def test_invalid_text_is_refused_by_field(payload, field):
    with pytest.raises(InvalidInput) as refused:
        check_touch_text(payload)
    assert [each.field for each in refused.value.errors] == [field]


def test_concurrent_edits_publish_one(create_failed_task, race):  # noqa: F811
    row = create_failed_task()

    def edit(number):
        try:
            failed_tasks.retry_failed_task(row.pk, Actor(f"user{number}"), payload={"body": f"text {number}"})
        except Conflict:
            return "conflict"
        return "published"

    assert sorted(race(8, edit)) == [*["conflict"] * 7, "published"]
    row.refresh_from_db()
    assert Touch.objects.get(retry_of=row.task_id).pk == row.retried_as
    assert row.difference["after"]["body"] == f"text {row.actor_name[-1]}"


def test_erasure_empties_difference_and_deletes_comments(create_failed_task):  # noqa: F811
    row = create_failed_task()
    failed_tasks.add_comment(row.pk, "ann called", ANN)
    deliver_when_due(failed_tasks.retry_failed_task(row.pk, ANN, payload={"body": "Dear Ann"}))
    erasure.request_erasure("ann", actor="test")
    erasure.continue_erasures()
    row.refresh_from_db()
    assert (row.difference, FailedTaskComment.objects.count()) == (None, 0)


def test_comment_during_erasure_is_deleted_too(create_failed_task, race):  # noqa: F811
    """The erasure waits for the comment's lock on the row. Its next statement then finds the comment."""
    row = create_failed_task()
    erasure.request_erasure("ann", actor="test")
    acts = [lambda: failed_tasks.add_comment(row.pk, "ann called", ANN), erasure.continue_erasures]
    race(2, lambda number: acts[number]() and None)
    row.refresh_from_db()
    assert row.payload == {"node": "guide"}
