"""Changes become messages once, in their transaction, and only if a subscription wants them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from django.db import connection, transaction

from config.local.processes import wait_until
from rpa_tasks.jobs.shops import pause_platform, record_login
from rpa_tasks.models import Flow, Job, LoginState, Platform, Shop
from scheduling import sql
from scheduling.channels.base import Report
from scheduling.customers import erasure
from scheduling.customers.erasure import continue_erasures, request_erasure
from scheduling.ledger.failures import record_unreadable_message
from scheduling.models import CustomerErasure, EndMark, FailedTask, WebhookFact, WebhookMessage
from scheduling.operations.commands import pause_scope, resume_scope
from scheduling.operations.failed_tasks import Actor, ignore_failed_task
from scheduling.receipts import record_reports
from scheduling.tasks import request_webhooks
from scheduling.webhooks import collect_messages, delete_old_messages, replay_messages, write_messages
from sessions.detection.silence_events import record_silences
from sessions.store.sessions import ClaimedSilence
from tests.scheduling.core.conftest import deliver
from tests.scheduling.webhooks.conftest import note_changes, pass_time, send_all
from tests.support.waiting import WAIT_LIMIT


def collect_all(count):
    """Collect until there are as many messages: an end is read when no earlier transaction runs."""
    for _ in range(int(WAIT_LIMIT) * 50):
        while collect_messages():
            pass
        if WebhookMessage.objects.count() >= count:
            break
        threading.Event().wait(0.02)
    found = list(WebhookMessage.objects.order_by("pk"))
    assert len(found) == count
    return found


def test_ended_touch_becomes_one_message(subscribe, matrix, record_event):
    subscribe(events=["touch.ended"], filter={"node": ["guide"]})
    collect_messages()  # the reader starts here
    matrix.node()
    matrix.node("other", trigger="order.paid", template=matrix.template("other"))
    touches = record_event(event_id="e1", chat_id="c1").task_ids
    deliver([*touches, *record_event("order.paid").task_ids])
    (row,) = collect_all(1)
    assert row.message_id == touches[0]
    assert row.object_key == f"touch:{touches[0]}"
    assert row.data == {
        "task_id": str(touches[0]), "delivery_key": str(touches[0]), "state": "delivered", "reason": "",
        "node": "guide", "user_id": "ann", "chat_id": "c1",
        "event": {"source": "shop", "id": "e1", "type": "material.downloaded"},
    }  # fmt: skip


def test_receipt_becomes_one_message_however_often_it_is_reported(subscribe, matrix, record_event):
    subscribe(events=["touch.receipt"], filter={"node": ["guide"]})
    matrix.node()
    (key,) = record_event(chat_id="c1").task_ids
    deliver([key])
    for kind in ("read", "read", "clicked"):
        record_reports([Report(kind, delivery_key=key)])
    read, clicked = collect_all(2)
    assert read.object_key == clicked.object_key == f"touch:{key}"
    assert clicked.data == read.data | {"receipt": "clicked"}
    assert read.data == {
        "task_id": str(key), "delivery_key": str(key), "receipt": "read", "node": "guide", "user_id": "ann",
        "chat_id": "c1",
    }  # fmt: skip


def test_changes_without_a_subscription_write_nothing(transactional_db, matrix, record_event):
    pause_scope("all")
    resume_scope("all")
    record_unreadable_message("bad", "x")
    matrix.node()
    (key,) = record_event().task_ids
    record_reports([Report("read", delivery_key=key)])
    request_webhooks()
    assert not WebhookFact.objects.exists()
    assert not EndMark.objects.filter(pk="webhooks").exists()


def test_pause_failed_task_shop_and_job_become_messages(subscribe, matrix):
    subscribe()
    matrix.node()
    pause_scope("node:guide")
    resume_scope("node:guide")
    record_unreadable_message("bad", "x")
    failed = FailedTask.objects.get()
    ignore_failed_task(failed.pk, Actor("ops"))
    platform = Platform.objects.create(key="pdd")
    shop = Shop.objects.create(platform=platform, shop_id="s1")
    Shop.objects.filter(pk=shop.pk).update(login_state=LoginState.NEEDED)
    record_login(shop.pk, by="ops")
    pause_platform(platform.pk, by="ops")
    flow = Flow.objects.create(platform=platform, task_type="sync_order", command=["true"])
    job = Job.objects.create(shop=shop, flow=flow, due_at=sql.now(), planned_at=sql.now())
    Job.objects.filter(pk=job.pk).update(state="cancelled", settled_at=sql.now(), reason="cancelled")
    found = [(row.type, row.object_key) for row in collect_all(8)]
    assert found == [
        ("pause.changed", "pause:node:guide"),
        ("pause.changed", "pause:node:guide"),
        ("failed_task.opened", f"failed_task:{failed.pk}"),
        ("failed_task.settled", f"failed_task:{failed.pk}"),
        ("shop.login_needed", "shop:pdd/s1"),
        ("shop.logged_in", "shop:pdd/s1"),
        ("pause.changed", "pause:platform:pdd"),
        ("job.ended", f"job:{job.pk}"),
    ]
    rows = list(WebhookMessage.objects.order_by("pk"))
    assert [row.data["paused"] for row in rows[:2]] == [True, False]
    assert rows[0].data["node"] == "guide"
    assert rows[3].data["state"] == "ignored"
    job_data = rows[7].data
    assert (job_data["platform"], job_data["shop_id"], job_data["state"]) == ("pdd", "s1", "cancelled")


def test_change_that_is_rolled_back_sends_nothing(subscribe, matrix):
    subscribe()
    with transaction.atomic():
        pause_scope("all")
        transaction.set_rollback(True)
    collect_messages()
    assert not WebhookMessage.objects.exists()


def test_silence_becomes_one_message_however_often_it_is_recorded(subscribe, matrix):
    subscribe(events=["session.silent"])
    silence = make_silence()
    record_silences([silence], silence.deadline_ms)
    record_silences([silence], silence.deadline_ms)
    (row,) = collect_all(1)
    assert row.object_key == "session:s1"
    assert row.data["user_id"] == "ann"


def test_concurrent_collections_write_each_message_once(subscribe, monkeypatch):
    monkeypatch.setattr("scheduling.webhooks.MOST_COLLECTED", 25)
    subscribe()
    note_changes(400, objects=20)

    def collect():
        try:
            for _ in range(40):
                collect_messages()
        finally:
            connection.close()

    threads = [threading.Thread(target=collect) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(WAIT_LIMIT)
    numbers = [row.data["number"] for row in collect_all(400)]
    assert numbers == sorted(numbers)


def test_replay_sends_a_range_again_with_the_same_ids(subscribe, receiver):
    hook = subscribe()
    note_changes(3)
    send_all()
    first = receiver.keys
    pass_time(hours=1)
    note_changes(2, start=3)
    send_all()
    now = sql.now()
    assert replay_messages(hook, now - timedelta(hours=2), now - timedelta(minutes=30), by="ops") == 3
    assert replay_messages(hook, now - timedelta(hours=2), now - timedelta(minutes=30), by="ops") == 0
    send_all()
    assert receiver.keys[5:] == first


def test_old_messages_are_deleted(subscribe, settings):
    subscribe()
    note_changes(3)
    send_all()
    pass_time(days=8)
    note_changes(1)
    send_all()
    assert delete_old_messages() == 3
    assert WebhookMessage.objects.count() == 1


def test_erasure_removes_a_customer_from_messages(subscribe, matrix, record_event, receiver):
    subscribe(events=["touch.ended", "session.silent"])
    collect_messages()
    matrix.node()
    deliver(record_event(chat_id="c1").task_ids)
    collect_all(1)
    send_all()
    silence = make_silence()
    record_silences([silence], silence.deadline_ms)
    collect_messages()
    request_erasure("ann", actor="ops")
    continue_erasures()
    rows = list(WebhookMessage.objects.order_by("pk"))
    assert len(rows) == 2
    for row in rows:
        assert not row.data.keys() & {"user_id", "chat_id", "session_id", "event"}
    assert rows[0].data["node"] == "guide"
    assert rows[1].object_key.startswith("erased:")


def test_end_collected_after_the_eraser_names_no_customer(subscribe, matrix, record_event, monkeypatch):
    subscribe(events=["touch.ended"])
    collect_messages()
    matrix.node()
    deliver(record_event(event_id="e-ann", chat_id="c1").task_ids)
    erase = erasure.erase_messages_of_customer
    monkeypatch.setattr(erasure, "erase_messages_of_customer", lambda user_id: (erase(user_id), collect_all(1)))
    request_erasure("ann", actor="ops")
    continue_erasures()
    assert find_named() == []
    assert CustomerErasure.objects.get().state == "done"


def test_erasure_waits_for_a_collector_that_has_read_its_events(subscribe, matrix, record_event, monkeypatch):
    subscribe(events=["touch.ended"])
    collect_messages()
    matrix.node()
    deliver(record_event(event_id="e-ann", chat_id="c1").task_ids)
    request_erasure("ann", actor="ops")
    has_read, may_write = threading.Event(), threading.Event()

    def write_late(wanted):
        if found := list(wanted):
            has_read.set()
            assert may_write.wait(WAIT_LIMIT)
        return write_messages(found)

    monkeypatch.setattr("scheduling.webhooks.write_messages", write_late)
    with ThreadPoolExecutor(2) as pool:
        collecting = pool.submit(run_in_thread, lambda: collect_all(1))
        assert has_read.wait(WAIT_LIMIT)
        erasing = pool.submit(run_in_thread, continue_erasures)
        assert wait_until(lambda: erasing.done() or count_advisory_waits() == 1, WAIT_LIMIT)
        waited = not erasing.done()
        may_write.set()
        collecting.result(WAIT_LIMIT)
        erasing.result(WAIT_LIMIT)
    assert waited
    assert find_named() == []
    assert CustomerErasure.objects.get().state == "done"


def run_in_thread(work):
    try:
        work()
    finally:
        connection.close()


def count_advisory_waits():
    return int(sql.rows("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted", {})[0][0])


def find_named():
    """Return the messages that have the user id, the chat or the event of ann."""
    assert WebhookMessage.objects.exists()
    found = WebhookMessage.objects.values_list("data", flat=True)
    return [data for data in found if data.get("user_id") == "ann" or data.get("chat_id") or "e-ann" in str(data)]


def make_silence():
    now_ms = int(sql.now().timestamp() * 1000)
    return ClaimedSilence("s1", "ann", "c1", ("default",), "default", 1, 1, now_ms, 1)
