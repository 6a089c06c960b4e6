"""Erasure of a customer: no personal data stays in any table, and the history stays."""

import time
from dataclasses import replace
from datetime import timedelta
from urllib.parse import quote

import pytest
from django.apps import apps
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.db import OperationalError, connection, models, transaction
from django.test import Client as DjangoClient
from django_celery_beat.models import IntervalSchedule, PeriodicTask

from rpa_tasks.jobs.dead_letters import record_failed_job
from rpa_tasks.models import Evidence, Flow, Job, Platform, Run, Shop
from scheduling import sql
from scheduling.app_integrations import PersonalData
from scheduling.channels.base import CallbackResult, CustomerMessage, Report
from scheduling.configuration import snapshot
from scheduling.customers.erasure import (
    ErasureDelayed,
    continue_erasures,
    export_customer,
    list_text_columns,
    request_erasure,
)
from scheduling.delivery.routing import store_disabled_targets
from scheduling.ids import new_id
from scheduling.ledger.failures import record_unreadable_message
from scheduling.models import (
    BulkAction,
    ChannelConfig,
    Customer,
    CustomerErasure,
    CustomerImport,
    DisabledTarget,
    Event,
    FailedTask,
    FailedTaskComment,
    HarassmentRule,
    Node,
    Pause,
    Touch,
    WebhookMessage,
    WebhookSubscription,
)
from scheduling.models.node import digest_address
from scheduling.planning.own_events import update_last_active
from scheduling.receipts import record_callback, record_reports
from scheduling.webhooks import Occurrence, write_messages
from sessions.detection.presence import SILENT
from sessions.detection.silence_events import record_silences
from sessions.detection.watcher import store_activity
from sessions.frames import Frame
from sessions.models import SilencePolicy
from sessions.store import client
from sessions.store.inbox import START, Post
from sessions.store.sessions import SESSION_LIFETIME, ClaimedSilence, live_store
from sessions.store.stats import session_snapshot
from tests.scheduling.api.serving import cloud_event
from tests.scheduling.core.conftest import deliver_when_due
from tests.support.second_connection import act_behind_locks
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
SECRETS = ("ann-7731", "安妮亚", "ann7731", "紫金路", "%E5%AE%89%E5%A6%AE%E4%BA%9A")


def find_secrets():
    """Return the tables whose text has one of the secrets."""
    found = set()
    with connection.cursor() as cursor:
        for model in apps.get_models():
            table = model._meta.db_table
            cursor.execute(f"SELECT string_agg(t::text, '') FROM \"{table}\" AS t")
            text = cursor.fetchone()[0] or ""
            found |= {table for secret in SECRETS if secret in text or ascii(secret)[1:-1] in text}
    return found


@pytest.fixture
def chatting(api, valkey):
    """A customer with a name and a chat."""
    api("PUT", "/customers/ann-7731", {"name": "安妮亚"})
    live_store().note_activity([Frame("s-1", "ann-7731", chat_id="c")])
    live_store().put_messages([Post("s-1", "m1", "user", "紫金路", user_id="ann-7731")])
    return api


@pytest.fixture
def ann(chatting, matrix):
    """A customer with everything that can be stored."""
    HarassmentRule.objects.create(kind="cap", scope="community", limit=9, window=timedelta(hours=1))
    matrix.node("sent", template=matrix.template("sent", body="{{ user.name }} {{ event.data.street }}"))
    matrix.node("late", delay=timedelta(hours=10))
    matrix.node("rolled", rollout_percent=0)  # its verdict names the customer or the chat
    matrix.node("broken", template=matrix.template("broken", body="{{ event.data.missing }}"))
    chatting("PUT", "/customers/ann-7731", {
        "addresses": {"email": "ann7731@example.com"}, "attributes": {"street": "紫金路"}, "tags": ["紫金路"],
    })  # fmt: skip
    data = {"chat_id": "ann-7731-chat", "street": "紫金路"}
    answer = chatting.event(cloud_event(id="order-ann-7731", subject="ann-7731", data=data))
    deliver_when_due(*Touch.objects.exclude(node__key="late").values_list("pk", flat=True))
    assert answer.status_code == 202
    store_disabled_targets([(matrix.channel.pk, digest_address("ann7731@example.com"), "", "gone")])
    leave_copies()
    return chatting


def erase(client):
    assert client("DELETE", "/customers/ann-7731").status_code == 202
    continue_erasures()


def leave_copies():
    """Store what names the customer outside its own rows: jobs, schedules, messages and texts of operators."""
    store_job("failed", {"customers": [{"id": "ann-7731"}]})
    store_job("succeeded", {"to": ["ann7731@example.com"]})
    PeriodicTask.objects.create(
        name="hers", task="rpa_tasks.publish_for_shops", kwargs='{"payload": {"user": "ann-7731"}}',
        interval=IntervalSchedule.objects.create(every=1, period="days"),
    )  # fmt: skip
    record_unreadable_message("task_error", {"kwargs": {"user_id": "ann-7731"}}, queue="ticks")
    hook = WebhookSubscription.objects.create(key="crm", config={}, events=["touch.ended"])
    write_messages([(hook.pk, Occurrence(new_id(), "touch.ended", "touch:1", sql.now(), {"user_id": "ann-7731"}))])

    ops = User.objects.create_user("ops")
    for query in ("q=ann-7731", "q=%E5%AE%89%E5%A6%AE%E4%BA%9A", "email=ann7731%40example.com&o=1"):
        log_change(ops, Customer, "export", f"CSV Exported 3 rows. {query}")
    touch = Touch.objects.get(node__key="sent")
    log_change(ops, Touch, "安妮亚", "紫金路", str(touch.pk))
    log_change(ops, FailedTask, "x", "紫金路", str(FailedTask.objects.get(origin="touch").pk))
    for state in ("running", "done"):
        BulkAction.objects.create(
            action="retry", filter={"q": "安妮亚", "state": "open"}, per_second=1, state=state,
            reason="asked by ann-7731",
        )  # fmt: skip


def store_job(state, payload):
    platform, _ = Platform.objects.get_or_create(key="pdd")
    shop, _ = Shop.objects.get_or_create(platform=platform, shop_id="s1")
    flow, _ = Flow.objects.get_or_create(platform=platform, task_type="refund", command=["true"])
    job = Job.objects.create(
        shop=shop, flow=flow, due_at=sql.now(), planned_at=sql.now(), payload=payload, dedupe_key="refund:ann-7731",
        state=state, reason="x", settled_at=sql.now(), result={"user": "ann-7731"},
    )  # fmt: skip
    run = Run.objects.create(job=job, number=1, lease_no=1, started_at=sql.now(), outcome=state, detail="ann-7731")
    Evidence.objects.create(run=run, kind="log", content=b"ann-7731")
    if state == "failed":
        record_failed_job(job.pk)


def log_change(user, model, name, message, key=None):
    kind = ContentType.objects.get_for_model(model)
    LogEntry.objects.create(
        user=user, content_type=kind, object_id=key, object_repr=name, action_flag=CHANGE, change_message=message
    )


def test_erased_customer_leaves_no_personal_data_and_an_anonymous_history(ann):
    """Also nothing in comments on a task of another customer, reasons of pauses and versions, and names of files."""
    stored = {"scheduling_event", "scheduling_touch", "scheduling_failedtask", "scheduling_customer"}
    assert {*stored, "scheduling_community"} <= find_secrets()
    other = FailedTask.objects.create(origin="message", failure="failed", reason="x", payload={"user_id": "bob"})
    FailedTaskComment.objects.create(failed_task=other, author_name="ops", text="as ann-7731")
    Pause.objects.create(scope="node:sent", reason="ann-7731 complained")
    edited = [Node.objects.get(key="late")]
    edited.append(SilencePolicy.objects.create(key="p", threshold=timedelta(minutes=1)))
    for each in edited:
        each._change_reason = "asked by ann-7731"
        each.save()
    CustomerImport.objects.create(file_name="ann-7731.csv", actor_name="ops", size=1)
    PeriodicTask.objects.filter(name="hers").update(description="for ann-7731")

    answer = ann("DELETE", "/customers/ann-7731")

    assert (answer.status_code, answer.json()["state"]) == (202, "running")
    assert ann.get("/customers/ann-7731").status_code == 404
    assert Touch.objects.get(node__key="late").state == "cancelled"
    continue_erasures()
    assert find_secrets() == set()
    assert live_store().sessions_of(["ann-7731"]) == [""]
    assert live_store().known(["s-1"]) == [False]
    row = CustomerErasure.objects.get()
    assert (row.state, row.user_id, row.counts["events"], row.counts["touches"]) == ("done", "", 1, 4)
    assert set(BulkAction.objects.values_list("state", flat=True)) == {"running", "done"}
    assert not PeriodicTask.objects.get(name="hers").enabled
    assert sorted(Touch.objects.values_list("state", flat=True)) == ["cancelled", "delivered", "failed", "suppressed"]
    assert set(FailedTask.objects.exclude(pk=other.pk).values_list("state", flat=True)) == {"archived"}
    assert not FailedTask.objects.filter(state="archived", acted_at=None).exists(), "retention would keep it for ever"
    assert Event.objects.get().user_id == Customer.objects.get().user_id


def test_erasure_keeps_what_names_other_customers(chatting):
    log_change(User.objects.create_user("ops"), Customer, "export", "CSV Exported 3 rows. q=ann-77312")
    store_job("succeeded", {"user_id": "ann-7731-2", "note": "as ann-7731"})
    Job.objects.update(dedupe_key="", result=None)
    other = FailedTask.objects.create(origin="touch", failure="failed", reason="x", payload={"user_id": "bob"})
    FailedTaskComment.objects.create(failed_task=other, author_name="ops", text="as ann-77312")
    erase(chatting)
    assert LogEntry.objects.filter(change_message__contains="ann-77312").exists()
    assert CustomerErasure.objects.get().state == "done"
    assert Job.objects.filter(payload__user_id="ann-7731-2").exists()
    assert FailedTaskComment.objects.get().text == "as ann-77312"


#: Columns of free text that `erase_operator_texts` leaves, by the reason.
OTHERWISE_ERASED = {
    "the customer's own, or emptied with its events, touches, jobs or addresses": {
        "scheduling_customer.name", "scheduling_customerprofile.name", "scheduling_customererasure.user_id",
        "scheduling_event.source", "scheduling_event.event_id", "scheduling_event.user_id", "scheduling_event.chat_id",
        "scheduling_touch.chat_id", "scheduling_failedtask.detail", "scheduling_deliveryreceipt.detail",
        "scheduling_disabledtarget.chat_id", "scheduling_disabledtarget.reason",
        "scheduling_webhookfact.object_key", "scheduling_webhookmessage.object_key",
        "rpa_tasks_job.dedupe_key", "rpa_tasks_job.progress_message", "rpa_tasks_dedupewindow.key",
        "rpa_tasks_run.detail",
    },
    "found by another statement of an eraser": {
        "django_celery_beat_periodictask.args", "django_celery_beat_periodictask.kwargs",
    },
    "deleted within the hour": {"scheduling_undoableact.label"},
    "about users and their sign-ins": {
        "auth_permission.name", "auth_user.email", "django_session.session_data", "scheduling_invitation.email",
        "scheduling_signin.browser", "scheduling_identitylink.issuer", "scheduling_identitylink.subject",
    },
    "configuration: what is sent to everyone, names, addresses": {
        "scheduling_templatetext.subject", "scheduling_templatetext.body", "scheduling_historicaltemplatetext.subject",
        "scheduling_historicaltemplatetext.body", "scheduling_community.name", "scheduling_configdraft.base",
        "scheduling_configdraft.document", "scheduling_alertreceiver.address",
        "rpa_tasks_flow.cwd", "rpa_tasks_historicalflow.cwd", "rpa_tasks_shop.name", "rpa_tasks_historicalshop.name",
        *(f"django_celery_beat_periodictask.{name}"
          for name in ("task", "queue", "exchange", "routing_key", "headers")),
        "django_celery_beat_crontabschedule.minute",
    },
    "ciphertext": {
        "scheduling_channelconfig.config", "scheduling_community.targets", "scheduling_totpdevice.secret",
        "scheduling_webhooksubscription.config", "rpa_tasks_platform.proxy_secret", "rpa_tasks_shop.proxy_secret",
    },
    "written by the product about itself": {
        "django_admin_log.object_id", "scheduling_alert.subject", "scheduling_alertreceiver.problem",
        "scheduling_webhookendpoint.problem", "scheduling_webhookmessage.problem",
    },
}  # fmt: skip


def test_each_column_of_free_text_is_erased_or_has_a_reason():
    found = {
        f"{model._meta.db_table}.{field.column}"
        for model in apps.get_models()
        for field in model._meta.concrete_fields
        if isinstance(field, models.CharField | models.TextField) and not field.choices and not field.unique
        if field.max_length is None or field.max_length >= (100 if "reason" in field.name else 200)
    }
    erased = {f"{table}.{column}" for table, column in list_text_columns()}
    reasoned = set().union(*OTHERWISE_ERASED.values())
    assert erased & reasoned == set()
    assert found == erased | reasoned


def test_erasure_enables_former_addresses(chatting, matrix):
    for address in ("ann7731@example.com", "new7731@example.com"):
        chatting("PUT", "/customers/ann-7731", {"addresses": {"email": address}})
    store_disabled_targets([(matrix.channel.pk, digest_address("ann7731@example.com"), "", "gone")])
    erase(chatting)
    assert not DisabledTarget.objects.exists()


def test_session_outside_the_conversation_window_is_exported_and_deleted(chatting, settings):
    """Its timer still runs. A guide message would be sent to the erased customer."""
    settings.AFTERTOUCH_CONVERSATION_WINDOW = timedelta(milliseconds=1)
    live_store().note_activity([Frame("s-1", "ann-7731", chat_id="c")])
    deadline = time.monotonic() + WAIT_LIMIT
    while live_store().last_frames(["ann-7731"]) != [None]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (chat,) = chatting.get("/customers/ann-7731/export").json()["live_chats"]
    assert (chat["session_id"], [each["text"] for each in chat["messages"]]) == ("s-1", ["紫金路"])
    erase(chatting)
    assert live_store().known(["s-1"]) == [False]
    assert live_store().messages_since("s-1", START) == []
    assert sum(each.armed for each in live_store().shards()) == 0


def test_erasure_clears_activity_in_each_shard(chatting):
    """Activity lies in the shard of its session. The watcher would store the customer again."""
    live_store().note_activity([Frame(f"s-{number}", "ann-7731") for number in range(2, 40)])
    assert len(live_store().active_users(100)) > 1
    erase(chatting)
    assert live_store().active_users(100) == {}


def test_activity_before_the_request_creates_no_customer(chatting):
    """The watcher stores it later than the request of the erasure."""
    chatting("DELETE", "/customers/ann-7731")
    store_activity(live_store())
    assert live_store().active_users(100) == {}
    assert not Customer.objects.filter(user_id="ann-7731").exists()
    live_store().note_activity([Frame("s-9", "ann-7731")])
    store_activity(live_store())
    assert Customer.objects.get(user_id="ann-7731").last_active_at


def test_activity_that_waits_for_the_request_creates_no_customer(chatting, monkeypatch):
    """Its insert waits for the old row, whose user id the request changes."""
    monkeypatch.setattr(sql, "brief_lock_waits", transaction.atomic)
    seen = {"ann-7731": sql.now()}
    stored = act_behind_locks(lambda: request_erasure("ann-7731", actor="ops"), lambda: update_last_active(seen))
    assert stored == [{"ann-7731"}]
    assert not Customer.objects.filter(user_id="ann-7731").exists()


def test_customer_with_an_id_that_is_refused_today_can_be_exported_and_erased(api):
    for user_id in ("ann\u0085", "ann\ufffe"):
        Customer.objects.create(user_id=user_id)
        path = f"/customers/{quote(user_id)}"
        assert api.get(path).json()["user_id"] == user_id
        assert api.get(f"{path}/export").json()["customer"]["user_id"] == user_id
        assert api("DELETE", path).status_code == 202
        assert not Customer.objects.filter(user_id=user_id).exists()


def test_reply_that_waits_for_the_request_creates_no_customer(ann, settings):
    """A receipt and a vendor's callback read the customer before the request of the erasure commits."""
    ann("PUT", "/customers/ann-7731", {"addresses": {"wecom_app": "zhang"}})
    settings.TIMEOUTS = replace(settings.TIMEOUTS, event_lock=WAIT_LIMIT)
    row = ChannelConfig.objects.create(key="wecom_app", kind="wecom_app")
    channel = snapshot.current().channels[row.pk]
    reply = Report("replied", delivery_key=Touch.objects.filter(state="delivered").first().pk)
    message = CallbackResult(messages=[CustomerMessage("zhang", "m1", sql.now())])
    act_behind_locks(
        lambda: request_erasure("ann-7731", actor="ops"),
        lambda: record_reports([reply]),
        lambda: record_callback(channel, message),
    )
    assert not Customer.objects.filter(user_id="ann-7731").exists()
    assert not Event.objects.filter(type="conversation.started").exists()


def test_silence_from_before_the_request_becomes_no_event(chatting):
    """The event would create the customer again, with a guide message."""
    chatting("DELETE", "/customers/ann-7731")
    at = round(sql.now().timestamp() * 1000)
    early, late = at - 120_000, at + 1_000
    silences = [
        ClaimedSilence(f"s-{user_id}-{early}", user_id, "c", ("default",), "default", 1, early * 1000, at, 1)
        for user_id in ("ann-7731", "bob")
    ]
    assert set(record_silences(silences, at).stored) == set(silences)
    assert [*Customer.objects.filter(user_id__in=["ann-7731", "bob"]).values_list("user_id", flat=True)] == ["bob"]
    back = replace(silences[0], armed_at=late * 1000)
    record_silences([back], at)
    assert Event.objects.filter(type=SILENT, user_id="ann-7731").count() == 1


def test_session_that_another_user_has_now_is_neither_exported_nor_erased(chatting):
    live_store().close("s-1", "ann-7731")
    live_store().note_activity([Frame("s-1", "bob")])
    live_store().put_messages([Post("s-1", "m2", "user", "hi", user_id="bob")])
    export = chatting.get("/customers/ann-7731/export").json()
    assert (export["live_chats"], export["complete"]) == ([], True)
    erase(chatting)
    assert live_store().sessions_of(["ann-7731", "bob"]) == ["", "s-1"]
    assert session_snapshot(live_store(), "s-1").user_id == "bob"
    assert [(each.owner, "hi" in each.body) for each in live_store().messages_since("s-1", START)] == [("bob", True)]


def test_earlier_session_ends_with_its_lifetime(chatting):
    """The documentation states this limit."""
    live_store().note_activity([Frame("s-2", "ann-7731", chat_id="c")])
    erase(chatting)
    assert live_store().known(["s-1", "s-2"]) == [True, False]
    name = client.SESSION[client.shard_of("s-1")] + "s-1"
    (left,) = live_store().server.ask(lambda pipe: [pipe.pttl(name)])
    assert 0 < left <= SESSION_LIFETIME.total_seconds() * 1000


@pytest.mark.parametrize(
    "error", [OperationalError("canceling statement due to statement timeout"), ErasureDelayed("a job runs")]
)
def test_failing_eraser_delays_no_other_customer_and_a_delayed_one_no_other_eraser(chatting, integrate, error):
    """A job in a paused shop kept the customer's live chat until the shop was resumed."""
    erased = []

    def fail_for_ann(who):
        if who.user_id == "ann-7731":
            raise error
        return 0

    def note(who):
        erased.append(who.user_id)
        return 1

    chatting("PUT", "/customers/bob", {"name": "Bob"})
    for user_id in ("ann-7731", "bob"):
        chatting("DELETE", f"/customers/{user_id}")
    integrate(personal_data=[PersonalData("", lambda *_: [], erase) for erase in (fail_for_ann, note)])
    continue_erasures()
    assert [*CustomerErasure.objects.order_by("requested_at").values_list("state", flat=True)] == ["running", "done"]
    assert erased == (["ann-7731", "bob"] if isinstance(error, ErasureDelayed) else ["bob"])


def test_erasure_is_idempotent(chatting):
    first = chatting("DELETE", "/customers/ann-7731").json()
    assert chatting("DELETE", "/customers/ann-7731").json() == first
    continue_erasures()
    continue_erasures()
    assert chatting("DELETE", "/customers/ann-7731").json() == first | {"state": "done"}
    assert chatting("DELETE", "/customers/never-seen").status_code == 404


def test_event_after_the_erasure_creates_a_new_customer(chatting):
    chatting("DELETE", "/customers/ann-7731")
    chatting.event(cloud_event(id="later", subject="ann-7731"))
    continue_erasures()
    assert chatting.get("/customers/ann-7731").json()["name"] == ""
    assert Event.objects.filter(user_id="ann-7731").count() == 1
    second = chatting("DELETE", "/customers/ann-7731").json()["erasure_id"]
    assert CustomerErasure.objects.count() == 2
    assert second == str(CustomerErasure.objects.first().pk)


def test_export_has_all_data_of_the_customer(ann):
    told = ann.get("/customers/ann-7731/export").json()
    assert told["customer"]["attributes"] == {"street": "紫金路"}
    assert [each["event_id"] for each in told["events"]] == ["order-ann-7731"]
    assert any(m["body"] == "安妮亚 紫金路" for touch in told["touches"] for m in touch["messages"])
    assert (len(told["touches"]), told["changes"][0]["actor"], told["complete"]) == (4, "api:shop", True)
    assert [verdict["rule"] for touch in told["touches"] for verdict in touch["verdicts"]].count("rollout") == 1
    assert {each["origin"] for each in told["failed_tasks"]} == {"touch", "rpa_job", "message"}
    assert [each["address"] for each in told["disabled_addresses"]] == ["ann7731@example.com"]
    assert [each["data"] for each in told["webhook_messages"]] == [{"user_id": "ann-7731"}]
    WebhookMessage.objects.update(state="delivered")
    occurrence = Occurrence(new_id(), "touch.ended", "touch:2", sql.now(), {"user_id": "ann-7731"})
    write_messages([(WebhookSubscription.objects.get().pk, occurrence)])
    messages = export_customer(Customer.objects.get())["webhook_messages"]
    assert [each["state"] for each in messages] == ["waiting", "delivered"]
    assert [each["payload"] for each in told["rpa_jobs"]] == [
        {"to": ["ann7731@example.com"]}, {"customers": [{"id": "ann-7731"}]},
    ]  # fmt: skip
    assert told["rpa_jobs"][0]["runs"][0]["detail"] == "ann-7731"
    (chat,) = told["live_chats"]
    assert (chat["session_id"], [each["text"] for each in chat["messages"]]) == ("s-1", ["紫金路"])


@pytest.mark.usefixtures("fresh_tables")
def test_export_finds_messages_of_webhooks_by_their_indexes(transactional_db):
    Customer.objects.create(user_id="user-7")
    hook = WebhookSubscription.objects.create(key="crm", config={}, events=["touch.ended"])
    write_messages(
        (hook.pk, Occurrence(new_id(), "touch.ended", f"touch:{n}", sql.now(), {"user_id": f"user-{n}"}))
        for n in range(20_000)
    )
    WebhookMessage.objects.exclude(data__user_id="user-8").update(state="delivered")
    asked = []

    def note(execute, statement, parameters, many, context):
        if "scheduling_webhookmessage" in statement:
            asked.append((statement, parameters))
        return execute(statement, parameters, many, context)

    with connection.cursor() as cursor:
        cursor.execute("ANALYZE scheduling_webhookmessage")
        with connection.execute_wrapper(note):
            found = export_customer(Customer.objects.get())["webhook_messages"]
        plans = []
        for statement, parameters in asked:
            cursor.execute(f"EXPLAIN {statement}", parameters)
            plans.append("\n".join(row[0] for row in cursor.fetchall()))
    assert [each["data"] for each in found] == [{"user_id": "user-7"}]
    assert "webhook_user" in plans[0]
    assert "Seq Scan on scheduling_webhookmessage" not in "\n".join(plans), plans


def test_export_that_takes_too_long_does_not_ask_for_a_filter(chatting, settings, integrate):
    settings.TIMEOUTS = replace(settings.TIMEOUTS, export=0.5)

    def sleep(*_):
        return sql.rows("SELECT pg_sleep(30)", {})

    integrate(personal_data=[PersonalData("rpa_jobs", sleep, lambda who: 0)])
    answer = DjangoClient().get(
        "/api/v1/customers/ann-7731/export", headers={"Authorization": f"Bearer {chatting.key}"}
    )
    assert (answer.status_code, answer["Retry-After"]) == (503, "30")
    assert answer.json()["detail"] == "The data of this customer takes too long to read. Try again later."


def test_export_without_redis_is_incomplete(chatting, monkeypatch):
    def refuse(*_):
        raise client.StoreUnavailable("no answer")

    monkeypatch.setattr("sessions.store.sessions.Store.sessions_of", refuse)
    told = export_customer(Customer.objects.get())
    assert (told["live_chats"], told["complete"]) == ([], False)
