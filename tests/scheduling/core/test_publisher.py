"""Wake-up messages: which touches share one, and when it arrives."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from scheduling import dispatch
from scheduling.dispatch import DUE_SPAN, ETA_MARGIN, FEW, LONGEST_SPAN, build_wakeup_messages
from scheduling.ids import new_id
from scheduling.ledger.transitions import WakeUp


def wakeup(due_at):
    return WakeUp(new_id(), due_at, 1, 1)


def test_message_arrives_when_its_last_touch_falls_due():
    """Neither earlier, which would claim nothing, nor at the end of the span."""
    begin = datetime.fromtimestamp(round(datetime.now(UTC).timestamp()) + 20, UTC)
    together = [wakeup(begin + timedelta(milliseconds=each)) for each in (2, 3, 6)]
    later = wakeup(begin + 2 * LONGEST_SPAN)
    (_, first, ids), (_, second, others) = build_wakeup_messages([later, *together], {})
    assert {UUID(each) for each in ids} == {each.task_id for each in together}
    assert first == together[-1].due_at + ETA_MARGIN
    assert (second, others) == (later.due_at + ETA_MARGIN, [str(later.task_id)])


def test_many_touches_wait_less_for_others_than_few():
    """At 116 a second a message per 10 ms carried one touch, and cost as much as ten."""
    begin = datetime.now(UTC) + timedelta(seconds=20)

    def share(count, gap):
        wakeups = [wakeup(begin + number * gap) for number in range(count)]
        return [len(ids) for _, _, ids in build_wakeup_messages(wakeups, {})]

    assert share(12, LONGEST_SPAN / 5) == [6, 6]
    assert share(100, DUE_SPAN / 20) == [21, 21, 21, 21, 16]
    assert max(share(100, DUE_SPAN / 2)) == FEW


def test_due_touch_waits_for_no_later_one():
    now = datetime.now(UTC)
    (_, first, _), (_, second, _) = build_wakeup_messages([wakeup(now), wakeup(now + LONGEST_SPAN)], {})
    assert (first, second) == (None, now + LONGEST_SPAN + ETA_MARGIN)


@pytest.mark.django_db
def test_wakeup_of_a_node_that_the_snapshot_lacks_is_published(monkeypatch):
    """An error here left all touches of the pass without a message until the rescue."""
    messages = []
    monkeypatch.setattr(
        dispatch, "publish_touches", lambda wakeups, nodes: messages.extend(build_wakeup_messages(wakeups, nodes))
    )
    dispatch.publish_wakeups([wakeup(datetime.now(UTC)), wakeup(datetime.now(UTC))])
    assert [len(ids) for _, _, ids in messages] == [2]
