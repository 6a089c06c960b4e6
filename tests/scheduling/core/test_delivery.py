"""A due touch on its way out: judged when it is due, sent once, and its end told with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, ClassVar

import pytest
import time_machine
from django.db import connection
from django.utils.timezone import now
from pytest_django import Settings

from config.local.processes import wait_until
from scheduling import sql
from scheduling.delivery import due_batch, judging, pipeline, presence, settlement
from scheduling.dispatch import dispatcher
from scheduling.ids import new_id
from scheduling.ledger import locks
from scheduling.models import Attempt, Community, FailedTask, HarassmentRule, Pause, Touch, Verdict
from scheduling.operations import commands
from tests.scheduling.core.conftest import PATIENCE, deliver, deliver_at_last, fall_due, pass_time, rows
from tests.scheduling.core.puppets import Theatre
from tests.scheduling.core.receivers import ScriptedReceiver

pytestmark = pytest.mark.django_db
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
sends = pytest.mark.django_db(transaction=True)  # the sender has threads, and threads have connections of their own


def end(row: Touch) -> tuple[str, str]:
    return row.state, row.reason


# --- through a channel -----------------------------------------------------------------------------------------------


def test_a_due_touch_is_delivered_with_the_trace_of_how_it_came_to_it(matrix: Any, happen: Any) -> None:
    matrix.node()
    receipt = happen()

    (row,) = deliver_at_last(*receipt.task_ids)

    assert (row.state, row.lease_until, row.attempt, row.lease_no) == ("delivered", None, 1, 1)
    assert (row.content_type, row.template_version, row.reserved_at) == ("guide", 1, row.sending_at)
    assert row.due_at <= row.sending_at <= row.settled_at
    verdict, attempt = Verdict.objects.get(), Attempt.objects.get()
    assert (verdict.decision, verdict.rule) == ("send", "")
    assert (attempt.outcome, attempt.number, attempt.body) == ("delivered", 1, "hi ann")


def test_a_text_may_name_what_its_event_carried(matrix: Any, happen: Any) -> None:
    template = matrix.template("parcel", body="{{ event.data.order.number }} to {{ event.data['city'] }}")
    matrix.node(template=template)
    receipt = happen(data={"order": {"number": 7}, "city": "杭州"})

    deliver_at_last(*receipt.task_ids)

    assert Attempt.objects.get().body == "7 to 杭州"


def test_a_customers_address_is_where_a_message_goes(matrix: Any, happen: Any) -> None:
    matrix.node()
    commands.update_customer("ann", {"addresses": {"email": "ann@example.com"}})
    receipt = happen()

    (ann,) = locks.lock_customers(receipt.task_ids).values()

    assert ann.addresses["email"] == "ann@example.com"


@sends
def test_a_webhook_hears_who_what_and_under_which_key(matrix: Any, hook: Any, happen: Any, receiver: Any) -> None:
    matrix.node(channel=hook)
    receipt = happen(chat_id="c1", event_id="e1")

    (row,) = deliver_at_last(*receipt.task_ids)

    (call,) = receiver.calls
    assert call.headers["webhook-id"] == str(row.root_id) == str(row.pk)
    assert call.json["data"] == call.json["data"] | {
        "task_id": str(row.pk), "user_id": "ann", "chat_id": "c1", "node": "guide", "content_type": "guide",
        "body": "hi ann",
    }  # fmt: skip
    assert call.json["data"]["event"]["id"] == "e1"
    assert (row.state, Attempt.objects.get().status) == ("delivered", 200)


@sends
def test_two_messages_about_one_touch_send_it_once(
    matrix: Any, puppet: Any, happen: Any, race: Any, theatre: Any
) -> None:
    """I2: a duplicated hint finds nothing to claim."""
    matrix.node(channel=puppet())
    (task_id,) = happen().task_ids
    fall_due(task_id)

    race(8, lambda number: pipeline.deliver_touches([task_id, task_id]))
    deliver([])

    assert len(theatre.heard) == 1
    assert rows([task_id])[0].state == "delivered"


def test_a_message_about_something_that_is_not_there_is_dropped(matrix: Any) -> None:
    pipeline.deliver_touches([new_id()])


@sends
def test_the_communitys_own_target_is_used(matrix: Any, hook: Any, happen: Any, receiver: Any) -> None:
    matrix.node(channel=hook)
    Community.objects.create(chat_id="c1", targets={"hook": {"url": f"{receiver.url}/c1"}})
    deliver_at_last(*happen(chat_id="c1").task_ids, *happen(chat_id="c2", user="bob").task_ids)
    assert sorted(call.path for call in receiver.calls) == ["/hook", "/hook/c1"]


def test_where_there_is_nowhere_to_send_it_the_touch_fails_and_takes_no_slot(matrix: Any, happen: Any) -> None:
    from scheduling.models import ChannelConfig

    robot = ChannelConfig.objects.create(key="robot", kind="wecom")
    gone = ChannelConfig.objects.create(key="gone", kind="log", retired_at=now())
    matrix.node("robot", channel=robot)
    matrix.node("gone", channel=gone)

    found = deliver_at_last(*happen(chat_id="c1").task_ids)

    assert sorted(end(row) for row in found) == [("failed", "channel_retired"), ("failed", "no_target")]
    assert [row.reserved_at for row in found] == [None, None]
    assert FailedTask.objects.count() == 2


def test_a_text_whose_data_is_missing_fails_and_says_what(matrix: Any, happen: Any) -> None:
    matrix.node(template=matrix.template("order", body="{{ event.data.order.no }}"))
    (row,) = deliver_at_last(*happen(data={}).task_ids)
    assert end(row) == ("failed", "template_data_missing")
    assert row.reserved_at is None
    assert "order" in FailedTask.objects.get().detail


# --- judged when it is due -------------------------------------------------------------------------------------------


def test_a_verdict_keeps_its_rule_version_figures_and_the_next_eligible_time(matrix: Any, happen: Any) -> None:
    for number in range(4):
        matrix.node(f"node-{number}")
    cap = HarassmentRule.objects.get(kind="cap")
    cap.limit = 2
    cap.save()

    waiting = happen().task_ids
    deliver_at_last(*waiting)  # what finds the slots taken but not settled is held, and judged again
    found = deliver_at_last(*waiting)

    assert sorted(end(row) for row in found) == [("delivered", "")] * 2 + [("suppressed", "cap")] * 2
    first = min(row.reserved_at for row in found if row.reserved_at)
    for verdict in Verdict.objects.filter(decision="suppress"):
        assert (verdict.rule, verdict.rule_version) == ("cap", 2)
        assert (verdict.observed, verdict.limit, verdict.next_eligible_at) == ("2", "2 in 1d", first + DAY)


def test_the_same_content_is_not_told_again_within_72_hours(matrix: Any, happen: Any) -> None:
    matrix.node()
    deliver_at_last(*happen().task_ids)
    pass_time(hours=71)
    (early,) = deliver_at_last(*happen().task_ids)
    pass_time(hours=1)
    (again,) = deliver_at_last(*happen().task_ids)
    assert [end(early), end(again)] == [("suppressed", "dedupe"), ("delivered", "")]


def test_a_conversation_that_began_while_it_waited_keeps_it_back(matrix: Any, happen: Any) -> None:
    matrix.node(delay=HOUR)
    waiting = happen()
    happen("conversation.started")
    (row,) = deliver_at_last(*waiting.task_ids)
    assert end(row) == ("suppressed", "conversation")


def test_an_opt_out_that_came_while_it_waited_stops_marketing_only(matrix: Any, happen: Any) -> None:
    matrix.node("offer", template=matrix.template("offer", category="marketing"))
    matrix.node("parcel", template=matrix.template("parcel", category="service"))
    receipt = happen()
    commands.update_customer("ann", {"opted_out": True})
    found = deliver_at_last(*receipt.task_ids)
    assert {row.node.key: end(row) for row in found} == {
        "offer": ("suppressed", "opted_out"),
        "parcel": ("delivered", ""),
    }


def test_a_node_that_was_disabled_or_retired_meanwhile_keeps_quiet(matrix: Any, happen: Any) -> None:
    off, gone = matrix.node("off"), matrix.node("gone")
    receipt = happen()
    off.enabled, gone.retired_at = False, now()
    off.save()
    gone.save()
    assert [end(row) for row in deliver_at_last(*receipt.task_ids)] == [("suppressed", "node_disabled")] * 2


def test_what_waited_longer_than_its_life_is_not_sent(matrix: Any, happen: Any) -> None:
    matrix.node(expires_after=HOUR)
    receipt = happen()
    pass_time(hours=1, seconds=1)
    (row,) = deliver_at_last(*receipt.task_ids)
    assert end(row) == ("suppressed", "expired")


def test_an_edit_of_the_text_reaches_what_already_waits(matrix: Any, happen: Any) -> None:
    node = matrix.node(delay=HOUR)
    receipt = happen()
    text = node.template.texts.get()
    text.body = "new {{ user.name }}"
    text.save()

    (row,) = deliver_at_last(*receipt.task_ids)

    assert (Attempt.objects.get().body, row.template_version) == ("new ann", 2)


def test_a_canary_text_goes_to_its_communities(matrix: Any, happen: Any) -> None:
    matrix.node(canary_template=matrix.template("guide-v2", body="v2"), canary_communities=["c1"])
    deliver_at_last(*happen(chat_id="c1").task_ids, *happen(chat_id="c2", user="bob").task_ids)
    said = {attempt.touch.chat_id: attempt.body for attempt in Attempt.objects.select_related("touch")}
    assert said == {"c1": "v2", "c2": "hi bob"}


def test_at_night_it_goes_back_into_the_table_without_a_slot_and_comes_out_in_the_morning(
    matrix: Any, happen: Any
) -> None:
    night = now() - HOUR
    rule = HarassmentRule.objects.create(
        kind="quiet_hours", quiet_from=night.time(), quiet_to=(night + 2 * HOUR).time(), timezone="UTC"
    )
    matrix.node()

    (row,) = deliver_at_last(*happen().task_ids)

    assert end(row) == ("scheduled", "quiet_hours")
    assert row.reserved_at is None
    assert abs(row.due_at - night - 2 * HOUR) < timedelta(minutes=1)
    rule.delete()
    (row,) = deliver_at_last(row.pk)
    assert (row.state, row.attempt, row.lease_no) == ("delivered", 1, 2)


# --- Presence --------------------------------------------------------------------------------------------------------


class Answers:
    """A Presence provider that says what the test told it."""

    event_types: ClassVar[frozenset[str]] = frozenset()
    said: dict[str, str] | Exception = {}
    asked: list[presence.PresenceQuestion]

    def presence_blocks(self, questions: Any) -> list[str]:
        assert not connection.in_atomic_block or len(connection.savepoint_ids) == 0
        if isinstance(Answers.said, Exception):
            raise Answers.said
        return [Answers.said.get(question.user_id, "") for question in questions]

    def note_sending(self, questions: Any, sent: Any) -> None:
        """Count nothing."""


@pytest.fixture
def present(settings: Settings) -> Any:
    settings.PRESENCE = ["tests.scheduling.core.test_delivery.Answers"]
    presence.presence_providers.cache_clear()
    provider = presence.presence_providers()[0]
    yield type(provider)
    presence.presence_providers.cache_clear()


def test_presence_is_asked_for_each_touch(matrix: Any, happen: Any, present: Any) -> None:
    matrix.node()
    present.said = {"bob": "conversation", "cid": "answered"}
    found = deliver_at_last(*(happen(user=user).task_ids[0] for user in ("ann", "bob", "cid")))
    assert [end(row) for row in found] == [
        ("delivered", ""),
        ("suppressed", "conversation"),
        ("suppressed", "answered"),
    ]


def test_where_presence_is_away_everything_waits_half_a_minute(matrix: Any, happen: Any, present: Any) -> None:
    matrix.node()
    present.said = ConnectionError("away")
    (row,) = deliver_at_last(*happen().task_ids)
    assert end(row) == ("scheduled", "presence_unknown")
    assert timedelta(seconds=5) < row.due_at - now() <= timedelta(seconds=30)
    present.said = {}
    assert deliver_at_last(row.pk)[0].state == "delivered"


@sends
def test_a_touch_that_came_back_after_presence_was_asked_is_not_sent_without_its_word(
    matrix: Any, happen: Any, present: Any, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second message finds the touch with a worker; the rescue puts it back before the claim."""
    matrix.node()
    (task_id,) = happen().task_ids
    present.said = {"ann": "answered"}
    fall_due(task_id)
    run_away(task_id)
    lock_customers = due_batch.locks.lock_customers

    def rescued_first(task_ids: Any) -> Any:
        elsewhere(dispatcher.rescue_lost_work)
        return lock_customers(task_ids)

    monkeypatch.setattr(due_batch.locks, "lock_customers", rescued_first)
    pipeline.deliver_touches([task_id])

    assert end(rows([task_id])[0]) == ("suppressed", "answered")


@sends
def test_a_touch_that_came_back_after_the_customers_were_locked_is_left_to_the_next_message(
    matrix: Any, happen: Any, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix.node()
    (task_id,) = happen().task_ids
    fall_due(task_id)
    run_away(task_id)
    lock_customers = due_batch.locks.lock_customers

    def rescued_after(task_ids: Any) -> Any:
        locked = lock_customers(task_ids)
        elsewhere(dispatcher.rescue_lost_work)
        return locked

    monkeypatch.setattr(due_batch.locks, "lock_customers", rescued_after)
    pipeline.deliver_touches([task_id])
    monkeypatch.undo()
    pipeline.deliver_touches([task_id])

    assert end(rows([task_id])[0]) == ("delivered", "")
    assert not FailedTask.objects.exists()


def run_away(task_id: Any) -> None:
    """A worker claims it and is never seen again; its lease is over."""
    from scheduling.delivery.outgoing import LEASE
    from scheduling.ledger.touches import touches
    from tests.scheduling.core.conftest import lapse

    assert touches.claim([task_id], lease=LEASE)
    lapse(task_id)


# --- pauses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["all", "channel:log", "node:guide"])
def test_a_pause_parks_what_falls_due_and_a_resume_spreads_it(matrix: Any, happen: Any, scope: str) -> None:
    matrix.node()
    waiting = [happen(user=f"user-{number}").task_ids[0] for number in range(30)]
    commands.pause_scope(scope, reason="stop")

    found = deliver_at_last(*waiting)
    assert {(row.state, row.parked) for row in found} == {("scheduled", scope)}
    dispatcher.dispatch_due_touches()
    dispatcher.rescue_lost_work()
    assert {row.state for row in rows(waiting)} == {"scheduled"}, "nothing moves while the pause lasts"

    commands.resume_scope(scope)
    dispatcher.rescue_lost_work()
    due = [row.due_at for row in rows(waiting)]
    assert max(due) - min(due) > timedelta(seconds=20)
    assert max(due) <= now() + dispatcher.RESUME_SPREAD
    assert {row.state for row in deliver_at_last(*waiting)} == {"delivered"}


def test_a_pause_of_another_node_lets_it_pass(matrix: Any, happen: Any) -> None:
    matrix.node()
    matrix.node("other", trigger="x")
    commands.pause_scope("node:other")
    assert deliver_at_last(*happen().task_ids)[0].state == "delivered"


def test_two_pauses_must_both_end(matrix: Any, happen: Any) -> None:
    matrix.node()
    (task_id,) = happen().task_ids
    commands.pause_scope("all")
    commands.pause_scope("node:guide")
    deliver_at_last(task_id)
    Pause.objects.filter(scope="all").delete()
    dispatcher.rescue_lost_work()
    (row,) = deliver_at_last(task_id)
    assert (row.state, row.parked) == ("scheduled", "node:guide")


# --- never early -----------------------------------------------------------------------------------------------------


@sends
@pytest.mark.parametrize("ahead", [60, -60])
def test_a_node_whose_clock_is_wrong_sends_nothing_early(
    matrix: Any, happen: Any, valkey: Any, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5: the clock of the database decides, and the hint that came too soon is owed again."""
    matrix.node(delay=timedelta(seconds=25))
    published: list[Any] = []
    monkeypatch.setattr(pipeline, "publish_touches", lambda hints, channels: published.extend(hints))
    (task_id,) = happen(occurred_at=None).task_ids

    with time_machine.travel(datetime.now().astimezone() + timedelta(seconds=ahead), tick=True):
        pipeline.deliver_touches([task_id])
        (row,) = rows([task_id])
        assert (row.state, row.lease_no) == ("queued", 0)
        assert [hint.task_id for hint in published] == [task_id]
        remaining = published[0].due_at - datetime.now().astimezone()
        assert timedelta(seconds=2) < remaining <= timedelta(seconds=25), "owed by its own clock, not at once"
        with connection.cursor() as cursor:
            cursor.execute("UPDATE scheduling_touch SET due_at = statement_timestamp()")
        pipeline.deliver_touches([task_id])

    (row,) = rows([task_id])
    attempt = Attempt.objects.get()
    assert row.state == "delivered"
    assert row.due_at <= row.reserved_at <= attempt.started_at <= attempt.ended_at <= row.settled_at + HOUR / 3600


@sends
def test_no_receiver_hears_of_a_touch_before_it_is_due(matrix: Any, hook: Any, happen: Any, receiver: Any) -> None:
    """I5: lateness is never negative, whoever asks how often."""
    matrix.node(channel=hook, delay=timedelta(milliseconds=300))
    waiting = [happen(user=f"user-{number}").task_ids[0] for number in range(20)]
    ends_at = now() + timedelta(seconds=60)
    while now() < ends_at and Touch.objects.exclude(state="delivered").exists():
        deliver(waiting)
        time.sleep(0.02)

    due = {str(row.pk): row.due_at for row in rows(waiting)}
    assert len(receiver.calls) == 20
    assert all(call.at >= due[call.json["data"]["task_id"]] for call in receiver.calls)


# --- neighbours ------------------------------------------------------------------------------------------------------


def test_a_touch_that_nobody_thought_of_does_not_take_its_neighbours_with_it(
    matrix: Any, happen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix.node()
    waiting = [happen(user=f"user-{number}").task_ids[0] for number in range(9)]
    judge = judging.guards.judge_touch

    def poisoned(touch: Any, *rest: Any) -> Any:
        if touch.customer.user_id == "user-4":
            raise ZeroDivisionError("nobody thought of it")
        return judge(touch, *rest)

    monkeypatch.setattr(judging.guards, "judge_touch", poisoned)
    found = deliver_at_last(*waiting)

    assert [end(row) for row in found].count(("delivered", "")) == 8
    assert end(found[4]) == ("failed", "internal_error")
    assert "nobody thought of it" in FailedTask.objects.get().detail
    assert Attempt.objects.count() == 8


@sends
@pytest.mark.parametrize("how", ["terminated", "kept waiting"])
def test_the_databases_trouble_is_no_touchs_fault(
    matrix: Any, happen: Any, elsewhere: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A connection that ends in the middle, by a fail-over or because this process was frozen for too long."""
    matrix.node()
    (waiting,) = happen().task_ids
    fall_due(waiting)
    connection.ensure_connection()
    pid = connection.connection.info.backend_pid

    def gone() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [pid])
            return cursor.fetchone() == (0,)

    def terminate() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [pid])

    record = settlement.record_verdicts

    def broken(*verdicts: Any) -> None:
        if how == "terminated":
            elsewhere(terminate)
        else:
            with connection.cursor() as cursor:
                cursor.execute("SET idle_in_transaction_session_timeout = 1")
        assert wait_until(lambda: elsewhere(gone), 20)
        record(*verdicts)

    with monkeypatch.context() as breaking:
        breaking.setattr(settlement, "record_verdicts", broken)
        with pytest.raises(sql.UNAVAILABLE_ERRORS):
            pipeline.deliver_touches([waiting])
    connection.close()

    assert not FailedTask.objects.exists()
    assert [end(row) for row in deliver_at_last(waiting)] == [("delivered", "")]


@sends
@pytest.mark.parametrize("table", ["channelconfig", "community"])
def test_what_this_node_has_not_the_key_for_waits(matrix: Any, happen: Any, table: str) -> None:
    """While keys are changed node by node. Nobody's touch fails of it, and another node may take it."""
    matrix.node()
    Community.objects.create(chat_id="odd", targets={"webhook": {"url": "http://127.0.0.1:9/"}})
    (waiting,) = happen(chat_id="odd").task_ids
    column = {"channelconfig": "config", "community": "targets"}[table]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT max({column}) FROM scheduling_{table}")
        (kept,) = cursor.fetchone()
        cursor.execute(f"UPDATE scheduling_{table} SET {column} = 'gibberish'")
        cursor.execute("UPDATE scheduling_configuration SET version = version + 1, changed_at = clock_timestamp()")

    (row,) = deliver_at_last(waiting)
    assert end(row) == ("scheduled", "secrets_unreadable")
    assert row.reserved_at is None
    assert not FailedTask.objects.exists()

    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE scheduling_{table} SET {column} = %s", [kept])
    assert [end(row) for row in deliver_at_last(waiting)] == [("delivered", "")]


def test_a_configuration_that_changes_while_it_is_read_is_no_touchs_fault(matrix: Any, happen: Any) -> None:
    """A node with a new template is committed between two of the queries that read the configuration."""
    from scheduling.configuration import snapshot

    matrix.node()
    (task_id,) = happen().task_ids
    once = [True]

    def meanwhile(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        if 'FROM "scheduling_template"' in sql and once:
            once.clear()
            matrix.node("newer", trigger="other", template=matrix.template("brand-new"))
        return result

    matrix.node("edit", trigger="other")
    with connection.execute_wrapper(meanwhile):
        snapshot.current()
    assert once == []
    assert deliver_at_last(task_id)[0].state == "delivered"


@sends
def test_a_dead_endpoint_does_not_hold_up_another(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre, receiver: ScriptedReceiver, hook: Any
) -> None:
    """The dead one is being waited for all the while."""
    matrix.node("dead", channel=puppet("dead", timeout=timedelta(seconds=30)))
    matrix.node("alive", channel=hook)
    theatre.blocks = True
    waiting = [task_id for number in range(20) for task_id in happen(user=f"user-{number}").task_ids]
    fall_due(*waiting)

    pipeline.deliver_touches(waiting)
    assert theatre.on_stage.wait(PATIENCE)
    delivered = Touch.objects.filter(node__key="alive", state="delivered")
    assert wait_until(lambda: delivered.count() == 20, 25), "the living endpoint waits for the dead one"

    assert Touch.objects.filter(node__key="dead", state="running").count() == 20
    theatre.let_go.set()
    deliver([])
    assert not Touch.objects.exclude(state="delivered").exists()


@sends
def test_a_quota_holds_what_is_too_much_without_spending_an_attempt_or_a_slot(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre, settings: Settings, valkey: Any
) -> None:
    from scheduling.channels.kinds import channel_kinds

    settings.CHANNELS = settings.CHANNELS | {"limited": "tests.scheduling.core.puppets.Limited"}
    channel_kinds.cache_clear()
    matrix.node(channel=puppet(f"limited-{new_id()}", kind="limited"))
    waiting = [happen(user=f"user-{number}").task_ids[0] for number in range(5)]

    found = deliver_at_last(*waiting)

    assert sorted(row.state for row in found) == ["delivered"] * 2 + ["scheduled"] * 3
    assert len(theatre.heard) == Attempt.objects.count() == 2
    for row in found:
        if row.state == "scheduled":
            assert (row.reason, row.attempt, row.reserved_at) == ("quota", 0, None)
            assert row.due_at > now() + timedelta(minutes=50)


@sends
def test_a_node_or_a_channel_that_blows_up_is_an_unknown_outcome(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre
) -> None:
    matrix.node(channel=puppet(idempotent=False))
    theatre.play = lambda message: ValueError("a bug of the channel")  # type: ignore[assignment]
    (row,) = deliver_at_last(*happen().task_ids)
    assert end(row) == ("unknown", "channel_error")
    assert "a bug of the channel" in FailedTask.objects.get().detail


def test_what_ends_is_never_moved_again(matrix: Any, happen: Any) -> None:
    matrix.node()
    (task_id,) = happen().task_ids
    (_row,) = deliver_at_last(task_id)
    before = Touch.objects.values().get()
    pipeline.deliver_touches([task_id])
    dispatcher.dispatch_due_touches()
    dispatcher.rescue_lost_work()
    assert Touch.objects.values().get() == before
