"""The sender on its bad days: what breaks in one parcel stays with that parcel."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError, connection

from config.local.processes import wait_until
from scheduling.channels.base import Delivered, Message, Outcome, Permanent, Transient, Unknown
from scheduling.channels.quota import QuotaGate
from scheduling.delivery import pipeline, sender
from scheduling.delivery.outgoing import DeliveryResult
from scheduling.delivery.settlement import settle_results
from scheduling.models import Attempt, ChannelConfig, Community, FailedTask, Touch
from tests.scheduling.core.conftest import PATIENCE, deliver_at_last, fall_due, rows
from tests.scheduling.core.puppets import Puppet, Theatre
from tests.scheduling.core.receivers import ScriptedReceiver

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (Transient("throttled", retry_after=timedelta.max), ("failed", "internal_error")),
        (Permanent("no\0reason"), ("failed", "internal_error")),
        (Permanent("gone", "a\0b", disable_target=True), ("failed", "gone")),
        (Unknown("no\0reason"), ("unknown", "internal_error")),
        (Delivered("fine", status=2**40), ("delivered", "")),
    ],
    ids=["a time beyond all time", "a reason nobody can store", "a detail nobody can store", "no answer", "a status"],
)
def test_an_answer_that_cannot_be_settled_does_not_take_its_neighbours_with_it(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre, answer: Outcome, end: tuple[str, str]
) -> None:
    """Settled together they all fail together, for 45 seconds; then their leases are over and their results lost."""
    matrix.node(channel=puppet(idempotent=False))
    theatre.play = lambda message: answer if message.user_id == "user-3" else Delivered("heard")
    waiting = [happen(user=f"user-{number}").task_ids[0] for number in range(6)]

    found = deliver_at_last(*waiting)

    odd = found.pop(3)
    assert {row.state for row in found} == {"delivered"}
    assert (odd.state, odd.reason) == end
    assert FailedTask.objects.count() == (odd.state != "delivered")
    assert Attempt.objects.count() == 6


def test_a_channel_that_cannot_name_its_target_fails_alone_and_leaks_nothing(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix.node(channel=puppet())

    def target_key(self: Puppet, message: Message) -> str:
        if message.user_id == "user-1":
            raise KeyError("url")
        return "here"

    monkeypatch.setattr(Puppet, "target_key", target_key)
    waiting = [happen(user=f"user-{number}").task_ids[0] for number in range(3)]
    found = deliver_at_last(*waiting)

    assert [(row.state, row.reason) for row in found] == [
        ("delivered", ""), ("failed", "channel_error"), ("delivered", ""),
    ]  # fmt: skip
    assert sender.sender()._pending == 0
    assert found[1].reserved_at is None


def test_a_dead_endpoint_with_more_than_a_process_may_hold_does_not_hold_up_another(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waited behind it filled the process, and the next batch stood still until the dead one's batch was over."""
    monkeypatch.setattr(sender, "IN_FLIGHT", 10)
    monkeypatch.setattr(sender, "IN_FLIGHT_PER_TARGET", 2)
    matrix.node("dead", channel=puppet("dead", timeout=timedelta(seconds=30)))
    matrix.node("alive", trigger="other", channel=puppet("alive"))
    theatre.blocks = True
    dead = [happen(user=f"user-{number}").task_ids[0] for number in range(12)]
    fall_due(*dead)
    pipeline.deliver_touches(dead)
    assert wait_until(lambda: len(theatre.heard) == 2, 15)
    theatre.blocks = False

    (alive,) = happen(type="other", user="bob").task_ids
    fall_due(alive)
    started_at = time.monotonic()  # it would stand still for the 20 s of a batch
    pipeline.deliver_touches([alive])
    assert time.monotonic() - started_at < 15, "it was not even taken over"
    while Touch.objects.get(pk=alive).state != "delivered":
        assert time.monotonic() - started_at < 15, "it waits for the dead one"
        time.sleep(0.05)

    given_back = Touch.objects.filter(node__key="dead", state="scheduled", reason="target_busy", attempt=0)
    assert wait_until(lambda: given_back.count() == 10, 15)
    assert Touch.objects.filter(node__key="dead", state="running").count() == 2
    theatre.let_go.set()


def test_a_chunk_is_marked_with_the_time_that_its_slowest_channel_may_take(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that ends during the call would let another worker send it as well."""
    margins: list[timedelta] = []
    real = sender.touches.mark_sending

    def mark_sending(sendings: Any, *, margin: timedelta) -> Any:
        margins.append(margin)
        return real(sendings, margin=margin)

    monkeypatch.setattr(sender.touches, "mark_sending", mark_sending)
    matrix.node("quick", channel=puppet("quick", timeout=timedelta(seconds=5)))
    matrix.node("slow", trigger="other", channel=puppet("slow", timeout=timedelta(seconds=15)))
    both = [*happen().task_ids, *happen("other", "bob").task_ids]

    assert {row.state for row in deliver_at_last(*both)} == {"delivered"}
    assert margins == [timedelta(seconds=17)]


def test_results_that_cannot_be_settled_at_first_are_settled_later(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def fail_twice(results: list[DeliveryResult]) -> None:
        tries.append(len(results))
        if len(tries) <= 2:
            raise OperationalError("the server is starting up")
        settle_results(results)

    monkeypatch.setattr(sender, "settle_results", fail_twice)
    leaving = sender.Sender(QuotaGate.connect(settings.REDIS_URL))
    monkeypatch.setattr(pipeline, "sender", lambda: leaving)
    matrix.node(channel=puppet())
    (task_id,) = happen().task_ids
    fall_due(task_id)
    pipeline.deliver_touches([task_id])

    assert leaving.finish(PATIENCE)
    assert (tries, rows([task_id])[0].state) == ([1, 1, 1], "delivered")


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def marked_in(monkeypatch: pytest.MonkeyPatch) -> list[tuple[threading.Thread, int]]:
    """The thread and the database's session of each write that marks."""
    found: list[tuple[threading.Thread, int]] = []

    def mark_sending(*arguments: Any, **more: Any) -> Any:
        stood = real(*arguments, **more)
        found.append((threading.current_thread(), _session()))
        return stood

    real = sender.touches.mark_sending
    monkeypatch.setattr(sender.touches, "mark_sending", mark_sending)
    return found


def _session() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def _lives(session: int) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [session])
        return cursor.fetchone() is not None


def test_whatever_takes_the_loops_own_threads_holds_up_no_marking(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre, marked_in: list[tuple[threading.Thread, int]]
) -> None:
    """All channels were marked in them, by whichever was free, and each that ever did kept its connection."""
    matrix.node("busy", channel=puppet("busy", timeout=timedelta(seconds=30)))
    matrix.node("other", trigger="other", channel=puppet("other"))
    theatre.blocks = True
    busy = [happen(user=f"user-{number}").task_ids[0] for number in range(40)]
    fall_due(*busy)
    pipeline.deliver_touches(busy)
    assert wait_until(lambda: len(theatre.heard) == 40, PATIENCE)
    theatre.blocks = False

    (other,) = happen(type="other", user="bob").task_ids
    fall_due(other)
    pipeline.deliver_touches([other])

    assert wait_until(lambda: Touch.objects.get(pk=other).state == "delivered", PATIENCE)
    assert {row.state for row in rows(busy)} == {"running"}, "it was marked when they had let go"
    assert len(set(marked_in)) == 1
    theatre.let_go.set()


def test_a_process_that_leaves_lets_go_of_the_threads_and_the_connection_that_marked(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre, monkeypatch: pytest.MonkeyPatch,
    marked_in: list[tuple[threading.Thread, int]],
) -> None:  # fmt: skip
    leaving = sender.Sender(QuotaGate.connect(settings.REDIS_URL))
    monkeypatch.setattr(pipeline, "sender", lambda: leaving)
    matrix.node(channel=puppet())
    fall_due(*(ids := happen().task_ids))
    pipeline.deliver_touches(ids)

    assert leaving.finish(PATIENCE)

    assert Touch.objects.get().state == "delivered"
    ((thread, session),) = marked_in
    assert not thread.is_alive()
    assert wait_until(lambda: not _lives(session), PATIENCE)


# --- two rows of channels that lead to one robot ---------------------------------------------------------------------


@pytest.fixture
def robot(matrix: Any, receiver: ScriptedReceiver) -> ScriptedReceiver:
    """Of a community that names one for DingTalk as such, with a channel for texts and one for markdown."""
    Community.objects.create(chat_id="c1", targets={"dingtalk": {"url": receiver.url}})
    for form in ("text", "markdown"):
        channel = ChannelConfig.objects.create(key=form, kind="dingtalk", config={"format": form})
        matrix.node(form, trigger=form, channel=channel)
    return receiver


def test_a_robots_quota_is_its_own_whichever_channels_lead_to_it(robot: ScriptedReceiver, happen: Any) -> None:
    """It took 20 a minute from each of them, and its vendor mutes a robot for ten minutes that is sent 21."""
    robot.script = [{"errcode": 0}] * 30
    texts, others = (
        [happen(form, f"{form}-{number}", chat_id="c1").task_ids[0] for number in range(15)]
        for form in ("text", "markdown")
    )

    first, later = deliver_at_last(*texts), deliver_at_last(*others)

    assert len(robot.calls) == 20
    assert {row.state for row in first} == {"delivered"}
    ends = sorted((row.state, row.reason) for row in later)
    assert ends == [("delivered", "")] * 5 + [("scheduled", "quota")] * 10


def test_a_robot_that_was_muted_through_one_channel_is_left_alone_by_the_other(
    robot: ScriptedReceiver, happen: Any
) -> None:
    robot.script = [{"errcode": 130101, "errmsg": "send too fast"}]
    (text,) = happen("text", "ann", chat_id="c1").task_ids
    (other,) = happen("markdown", "bob", chat_id="c1").task_ids

    found = deliver_at_last(text) + deliver_at_last(other)

    assert [(row.state, row.reason) for row in found] == [("scheduled", "vendor_130101"), ("scheduled", "quota")]
    assert len(robot.calls) == 1
