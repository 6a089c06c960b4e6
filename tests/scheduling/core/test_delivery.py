"""Delivery of a due touch: judged when due, sent once, its end logged with the reason."""

from datetime import datetime, timedelta

import pytest
import time_machine
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils.timezone import now
from prometheus_client.registry import REGISTRY

from scheduling import dispatch, sql
from scheduling.configuration import snapshot
from scheduling.delivery import due_batch, pipeline
from scheduling.delivery.sender import sender
from scheduling.ids import new_id
from scheduling.ledger.touches import touch_ledger
from scheduling.models import ChannelConfig, Community, FailedTask, HarassmentRule, Touch
from scheduling.operations import commands
from scheduling.policy.send_times import SPREAD
from tests.scheduling.core.conftest import deliver, deliver_when_due, expire_lease, fall_due, make_quiet_now, rows
from tests.scheduling.core.fake_channels import FakeChannel, FakePresence
from tests.support.claims import claim_touches
from tests.support.touch_logs import list_attempts
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def end(row):
    return row.state, row.reason


# --- through a channel -----------------------------------------------------------------------------------------------


def test_due_touch_is_delivered_with_its_trace(matrix, record_event):
    matrix.node()
    receipt = record_event()

    (row,) = deliver_when_due(*receipt.task_ids)

    assert (row.state, row.lease_until, row.attempt, row.lease_no) == ("delivered", None, 1, 1)
    assert (row.content_type, row.template_version) == ("guide", 1)
    assert row.due_at <= row.reserved_at <= row.sending_at <= row.settled_at
    (verdict,), (attempt,) = row.verdicts, row.attempts
    assert (verdict.decision, verdict.rule) == ("send", "")
    assert (attempt.outcome, attempt.number, attempt.body) == ("delivered", 1, "hi ann")


def test_profiles_are_read_only_for_texts_that_name_them(matrix, record_event):
    commands.update_customer("ann", {"attributes": {"city": "上海"}, "tags": ["vip"]})
    matrix.node()
    with CaptureQueriesContext(connection) as without:
        deliver_when_due(*record_event(event_id="e1").task_ids)
    matrix.node("city", template=matrix.template("city", body="{{ customer.attributes.city }}"))
    with CaptureQueriesContext(connection) as reading:
        deliver_when_due(*record_event(event_id="e2").task_ids)

    assert [sum("scheduling_customerprofile" in each["sql"] for each in queries) for queries in (without, reading)] == [
        0,
        1,
    ]
    assert "上海" in {each.body for each in list_attempts()}


def test_webhook_receives_touch_data_and_key(shop, hook, receiver):
    shop.node(channel=hook)
    receipt = shop.record_event(chat_id="c1", event_id="e1")

    (row,) = deliver_when_due(*receipt.task_ids)

    (call,) = receiver.calls
    assert call.headers["webhook-id"] == str(row.root_id) == str(row.pk)
    assert call.json["data"] == call.json["data"] | {
        "task_id": str(row.pk), "user_id": "ann", "chat_id": "c1", "node": "guide", "content_type": "guide",
        "body": "hi ann",
    }  # fmt: skip
    assert call.json["data"]["event"]["id"] == "e1"
    assert (row.state, [each.status for each in row.attempts]) == ("delivered", [200])


def test_duplicate_wakeups_send_once(shop, race):
    """I2: a duplicated wake-up finds nothing to claim."""
    shop.node(channel=shop.create_channel())
    (task_id,) = shop.record_event().task_ids
    fall_due(task_id)

    race(8, lambda number: pipeline.deliver_touches([task_id, task_id]))
    deliver([])

    assert len(shop.fake_channel.received) == 1
    assert rows([task_id])[0].state == "delivered"


def test_values_are_escaped_for_the_channel_in_the_customers_zone(shop, monkeypatch):
    monkeypatch.setattr(FakeChannel, "escape", lambda self, value: value.replace("<", "＜"), raising=False)
    commands.update_customer("ann", {"name": "<at>", "timezone": "America/New_York"})
    body = "<b>{{ user.name }}</b> {{ event.data.at|date:'H:i' }}"
    shop.node(channel=shop.create_channel(), template=shop.template("guide", body=body))

    (row,) = deliver_when_due(*shop.record_event(data={"at": "2026-03-03T12:00:00Z"}).task_ids)
    assert (row.state, row.reason) == ("delivered", "")

    assert [each.body for each in shop.fake_channel.received] == ["<b>＜at></b> 07:00"]
    assert [each.body for each in list_attempts()] == ["<b>＜at></b> 07:00"]


def test_community_target_is_used(shop, hook, receiver):
    shop.node(channel=hook)
    Community.objects.create(chat_id="c1", targets={"hook": {"url": f"{receiver.url}/c1"}})
    deliver_when_due(*shop.record_event(chat_id="c1").task_ids, *shop.record_event(chat_id="c2", user="bob").task_ids)
    assert sorted(call.path for call in receiver.calls) == ["/hook", "/hook/c1"]


def test_touch_that_cannot_be_sent_fails_without_slot(matrix, record_event):
    matrix.node("robot", channel=ChannelConfig.objects.create(key="robot", kind="wecom"))
    matrix.node("gone", channel=ChannelConfig.objects.create(key="gone", kind="log", retired_at=now()))
    matrix.node("order", template=matrix.template("order", body="{{ event.data.order.no }}"))

    found = deliver_when_due(*record_event(chat_id="c1", data={}).task_ids)

    assert {row.node.key: (row.state, row.reason, row.reserved_at) for row in found} == {
        "robot": ("failed", "no_target", None),
        "gone": ("failed", "channel_retired", None),
        "order": ("failed", "template_data_missing", None),
    }
    assert FailedTask.objects.count() == 3
    assert "order" in FailedTask.objects.get(reason="template_data_missing").detail


# --- judged when it is due -------------------------------------------------------------------------------------------


def test_verdict_stores_rule_version_and_figures(matrix, record_event):
    for number in range(4):
        matrix.node(f"node-{number}")
    cap = HarassmentRule.objects.get(kind="cap")
    cap.limit = 2
    cap.save()

    waiting = record_event().task_ids
    deliver_when_due(*waiting)  # what finds the slots taken but not settled is held, and judged again
    found = deliver_when_due(*waiting)

    assert sorted(end(row) for row in found) == [("delivered", "")] * 2 + [("suppressed", "cap")] * 2
    first = min(row.reserved_at for row in found if row.reserved_at)
    for row in found:
        verdict = row.verdicts[-1]
        if row.state == "delivered":
            continue
        assert (verdict.rule, verdict.rule_version) == ("cap", 2)
        assert (verdict.observed, verdict.limit, verdict.next_eligible_at) == ("2", "2 in 1d", first + DAY)


def test_template_edit_applies_to_waiting_touches(matrix, record_event):
    node = matrix.node(delay=HOUR)
    receipt = record_event()
    text = node.template.texts.get()
    text.body = "new {{ user.name }}"
    text.save()

    (row,) = deliver_when_due(*receipt.task_ids)

    assert ([each.body for each in row.attempts], row.template_version) == (["new ann"], 2)


def test_canary_text_is_sent_to_its_communities(matrix, record_event):
    matrix.node(canary_template=matrix.template("guide-v2", body="v2"), canary_communities=["c1"])
    deliver_when_due(*record_event(chat_id="c1").task_ids, *record_event(chat_id="c2", user="bob").task_ids)
    said = {touch.chat_id: touch.attempts[0].body for touch in Touch.objects.all()}
    assert said == {"c1": "v2", "c2": "hi bob"}


def test_quiet_hours_defer_touch_without_slot(matrix, record_event):
    rule, ends_at = make_quiet_now(), now() + HOUR
    matrix.node()

    (row,) = deliver_when_due(*record_event().task_ids)

    assert end(row) == ("scheduled", "quiet_hours")
    assert row.reserved_at is None
    assert abs(row.due_at - ends_at) < timedelta(minutes=1) + SPREAD
    rule.delete()
    (row,) = deliver_when_due(row.pk)
    assert (row.state, row.attempt, row.lease_no) == ("delivered", 1, 2)


# --- Presence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rescued", ["before", "after"])
def test_touch_rescued_around_its_lock_is_judged_in_full(shop, integrate, second_connection, monkeypatch, rescued):
    """A second message finds the touch with a worker; the rescue puts it back before the claim, or after the lock."""
    shop.node()
    (task_id,) = shop.record_event().task_ids
    integrate(presence=(FakePresence("answered"),))
    fall_due(task_id)
    lose_worker(task_id)
    lock_customers = due_batch.locks.lock_customers_of_touches

    def lock_beside_the_rescue(task_ids):
        if rescued == "before":
            second_connection(dispatch.rescue_lost_work)
        locked = lock_customers(task_ids)
        if rescued == "after":
            second_connection(dispatch.rescue_lost_work)
        return locked

    with monkeypatch.context() as patch:
        patch.setattr(due_batch.locks, "lock_customers_of_touches", lock_beside_the_rescue)
        pipeline.deliver_touches([task_id])
    deliver([task_id])

    assert end(rows([task_id])[0]) == ("suppressed", "answered")
    assert not FailedTask.objects.exists()


def lose_worker(task_id):
    """A worker claims it and is never seen again; its lease is over."""
    assert claim_touches([task_id])
    expire_lease(task_id)


# --- pauses ----------------------------------------------------------------------------------------------------------


def test_pause_parks_due_touches_and_resume_spreads_them(shop):
    shop.node()
    waiting = shop.plan(12)
    commands.pause_scope("all", reason="stop")

    found = deliver_when_due(*waiting)
    assert {(row.state, row.paused_by) for row in found} == {("scheduled", "all")}
    dispatch.dispatch_due_touches()
    dispatch.resume_unpaused()
    dispatch.rescue_lost_work()
    assert {row.state for row in rows(waiting)} == {"scheduled"}, "nothing moves while the pause lasts"

    commands.resume_scope("all")
    dispatch.resume_unpaused()
    due = [row.due_at for row in rows(waiting)]
    assert max(due) - min(due) > timedelta(seconds=20)
    assert max(due) <= now() + dispatch.RESUME_SPREAD
    assert {row.state for row in deliver_when_due(*waiting)} == {"delivered"}


# --- never early -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [60, -60])
def test_wrong_node_clock_sends_nothing_early(shop, valkey, ahead, monkeypatch):
    """I5: the clock of the database decides, and a premature wake-up is published again."""
    shop.node(delay=timedelta(seconds=25))
    published = []
    monkeypatch.setattr(pipeline, "publish_touches", lambda wakeups, channels: published.extend(wakeups))
    (task_id,) = shop.record_event(occurred_at=None).task_ids

    with time_machine.travel(datetime.now().astimezone() + timedelta(seconds=ahead), tick=True):
        pipeline.deliver_touches([task_id])
        (row,) = rows([task_id])
        assert (row.state, row.lease_no) == ("queued", 0)
        assert [wakeup.task_id for wakeup in published] == [task_id]
        remaining = published[0].due_at - datetime.now().astimezone()
        assert timedelta(seconds=2) < remaining <= timedelta(seconds=25), "owed by its own clock, not at once"
        with connection.cursor() as cursor:
            cursor.execute("UPDATE scheduling_touch SET due_at = statement_timestamp()")
        deliver([task_id])

    (row,) = rows([task_id])
    (attempt,) = row.attempts
    assert row.state == "delivered"
    assert row.due_at <= row.reserved_at <= attempt.started_at <= attempt.ended_at <= row.settled_at + HOUR / 3600


# --- neighbours ------------------------------------------------------------------------------------------------------


def test_failing_touch_does_not_affect_its_batch(shop, monkeypatch):
    shop.node()
    waiting = shop.plan(9)
    judge = pipeline.guards.judge_touch

    def poisoned(touch, *rest):
        if touch.customer.user_id == "user-4":
            raise ZeroDivisionError("nobody thought of it")
        return judge(touch, *rest)

    def count_failed():
        labels = {"state": "failed", "reason": "internal_error"}
        return REGISTRY.get_sample_value("aftertouch_touches_ended_total", labels) or 0.0

    monkeypatch.setattr(pipeline.guards, "judge_touch", poisoned)
    before = count_failed()
    found = deliver_when_due(*waiting)

    assert count_failed() - before == 1, "it was missing in the counts"
    assert [end(row) for row in found].count(("delivered", "")) == 8
    assert end(found[4]) == ("failed", "internal_error")
    assert "nobody thought of it" in FailedTask.objects.get().detail
    assert len(list_attempts()) == 8


def test_lost_database_connection_fails_no_touch(shop, second_connection, monkeypatch):
    """A connection that ends in the middle by a fail-over."""
    shop.node()
    (waiting,) = shop.record_event().task_ids
    fall_due(waiting)
    connection.ensure_connection()
    pid = connection.connection.info.backend_pid
    write = touch_ledger.write_decisions

    def broken(decisions, **conditions):
        second_connection(lambda: terminate(pid))
        write(decisions, **conditions)

    with monkeypatch.context() as breaking:
        breaking.setattr(touch_ledger, "write_decisions", broken)
        with pytest.raises(sql.UNAVAILABLE_ERRORS):
            pipeline.deliver_touches([waiting])
    connection.close()

    assert not FailedTask.objects.exists()
    assert [end(row) for row in deliver_when_due(waiting)] == [("delivered", "")]


def terminate(pid):
    """End the backend, and return when it is gone."""
    sql.rows("SELECT pg_terminate_backend(%(pid)s, 60000)", {"pid": pid})


def test_lost_connection_after_commit_delays_no_claimed_touch(shop, hook, receiver, second_connection, monkeypatch):
    """The search for premature wake-ups failed, and claimed touches waited 45 s for their lease."""
    shop.node(channel=hook)
    (task_id,) = shop.record_event().task_ids
    fall_due(task_id)
    search = touch_ledger.premature_wakeups

    def search_without_backend(task_ids):
        connection.ensure_connection()
        pid = connection.connection.info.backend_pid
        second_connection(lambda: terminate(pid))
        return search(task_ids)

    monkeypatch.setattr(touch_ledger, "premature_wakeups", search_without_backend)
    with pytest.raises(sql.UNAVAILABLE_ERRORS):
        pipeline.deliver_touches([task_id, new_id()])
    connection.close()

    assert sender().drain(WAIT_LIMIT)
    assert end(rows([task_id])[0]) == ("delivered", "")
    assert receiver.keys == [str(task_id)]


@pytest.mark.parametrize("table", ["channelconfig", "community"])
def test_delivery_defers_touch_when_secret_key_is_missing(shop, table):
    """During a key rotation node by node. No touch fails of it, and another node may deliver it."""
    shop.node()
    Community.objects.create(chat_id="odd", targets={"webhook": {"url": "http://127.0.0.1:9/"}})
    (waiting,) = shop.record_event(chat_id="odd").task_ids
    column = {"channelconfig": "config", "community": "targets"}[table]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT max({column}) FROM scheduling_{table}")
        (kept,) = cursor.fetchone()
        cursor.execute(f"UPDATE scheduling_{table} SET {column} = 'gibberish'")
        cursor.execute("UPDATE scheduling_configuration SET version = version + 1, changed_at = clock_timestamp()")

    (row,) = deliver_when_due(waiting)
    assert end(row) == ("scheduled", "secrets_unreadable")
    assert row.reserved_at is None
    assert not FailedTask.objects.exists()

    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE scheduling_{table} SET {column} = %s", [kept])
    assert [end(row) for row in deliver_when_due(waiting)] == [("delivered", "")]


def test_config_change_during_read_fails_no_touch(matrix, record_event):
    """A node with a new template is committed between two of the queries that read the configuration."""
    matrix.node()
    (task_id,) = record_event().task_ids
    once = [True]

    def change_configuration(execute, sql, params, many, context):
        result = execute(sql, params, many, context)
        if 'FROM "scheduling_template"' in sql and once:
            once.clear()
            matrix.node("newer", trigger="other", template=matrix.template("brand-new"))
        return result

    matrix.node("edit", trigger="other")
    with connection.execute_wrapper(change_configuration):
        snapshot.current()
    assert once == []
    assert deliver_when_due(task_id)[0].state == "delivered"


def test_channel_exception_is_unknown_outcome(shop):
    shop.node(channel=shop.create_channel(idempotent=False))
    shop.answer(ValueError("a bug of the channel"))
    (row,) = deliver_when_due(*shop.record_event().task_ids)
    assert end(row) == ("unknown", "channel_error")
    assert "a bug of the channel" in FailedTask.objects.get().detail
