"""Messages reach a real receiver: signed, in order for each object, at least once, and later if it fails."""

import threading
from collections import defaultdict
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import quote, urlsplit

import pytest
from django.db import connection

from config.local.processes import wait_until
from scheduling import sql, webhooks
from scheduling.models import WebhookEndpoint, WebhookMessage, WebhookSubscription
from scheduling.webhooks import (
    FAILURES_TO_REST,
    AttemptResult,
    OutboxSender,
    claim_messages,
    enable_endpoint,
    find_sendable,
    pause_endpoint,
    put_subscription,
    retire_subscription,
    settle_attempts,
)
from tests.rpa_tasks.browsers.proxies import PASSWORD, USER, ProxyProcess
from tests.scheduling.core.programs import program
from tests.scheduling.core.receivers import ScriptedReceiver
from tests.scheduling.webhooks.conftest import (
    SECOND_SECRET,
    SECRET,
    count_states,
    note_changes,
    pass_time,
    send_all,
    verify,
    write_waiting,
)
from tests.support.waiting import WAIT_LIMIT

MANY, IN_FLIGHT = 200, 20


def test_message_reaches_the_receiver_with_signatures_of_both_secrets(subscribe, receiver):
    subscribe(config={"url": receiver.url, "secret": f"{SECRET} {SECOND_SECRET}"})
    note_changes(1)
    send_all()
    (call,) = receiver.calls
    row = WebhookMessage.objects.get()
    assert call.json.keys() == {"type", "timestamp", "data"}
    assert call.json["type"] == "pause.changed"
    assert call.json["data"] == {"number": 0, "object": 0}
    assert call.headers["webhook-id"] == str(row.message_id)
    for secret in (SECRET, SECOND_SECRET):
        assert verify(call, call.raw, secret) == call.json
    assert row.state == "delivered"
    assert row.status == 200


def test_message_goes_through_the_proxy(subscribe, receiver, settings):
    subscribe()
    note_changes(2)
    proxy = ProxyProcess("http")
    try:
        settings.AFTERTOUCH_HTTP_PROXY = proxy.url.replace("://", f"://{USER}:{quote(PASSWORD)}@")
        send_all()
    finally:
        targets = proxy.read_targets()
    assert count_states() == {"delivered": 2}
    assert set(targets) == {urlsplit(receiver.url).netloc}


def test_filter_and_types_select_the_messages(subscribe, receiver):
    subscribe("other-type", events=["job.ended"])
    subscribe("other-object", filter={"node": ["guide"], "shop": ["pdd/s2"]})
    subscribe("this", filter={"platform": ["pdd"], "shop": ["pdd/s1"], "node": ["guide"]})
    from scheduling.models import WebhookFact

    data = {"platform": "pdd", "shop_id": "s1"}
    WebhookFact.objects.create(type="shop.login_needed", object_key="shop:pdd/s1", at=sql.now(), data=data)
    send_all()
    assert [row.subscription.key for row in WebhookMessage.objects.select_related("subscription")] == ["this"]


def test_failing_receiver_gets_each_object_in_order_and_every_message(subscribe, receiver):
    subscribe()
    receiver.script = [500, 500, "hang_up", 200, 500]
    note_changes(12, objects=3)
    for _ in range(60):
        send_all(0)
        if count_states() == {"delivered": 12}:
            break
        pass_time(minutes=30)
    assert count_states() == {"delivered": 12}
    confirmed = defaultdict(list)
    for call in receiver.calls:
        numbers = confirmed[call.json["data"]["object"]]
        if call.json["data"]["number"] not in numbers:
            numbers.append(call.json["data"]["number"])
    assert all(numbers == sorted(numbers) for numbers in confirmed.values())


def test_two_senders_at_once_keep_the_order_of_each_object(subscribe, receiver):
    hook = subscribe()
    receiver.delay = 0.005
    write_waiting(hook, 150, objects=7)
    senders = [threading.Thread(target=OutboxSender(0.5).run) for _ in range(2)]
    for each in senders:
        each.start()
    for each in senders:
        each.join(120)
    assert count_states() == {"delivered": 150}
    numbers = defaultdict(list)
    for call in receiver.calls:
        numbers[call.json["data"]["object"]].append(call.json["data"]["number"])
    assert sum(map(len, numbers.values())) == 150
    assert all(each == sorted(each) for each in numbers.values())


@pytest.mark.faults
def test_killed_sender_loses_no_message(subscribe, receiver):
    hook = subscribe()
    receiver.delay = 0.2
    write_waiting(hook, 600, objects=600)
    text = """
import django
django.setup()
from django.conf import settings
settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1"]
from scheduling.webhooks import OutboxSender
OutboxSender(60).run()
"""
    sessions = _count_sessions()
    with program(text) as process:
        while len(receiver.calls) < 250 and process.poll() is None:
            threading.Event().wait(0.01)
        process.kill()
    assert wait_until(lambda: _count_sessions() == sessions, 60, 0.01)  # its last claim may still be under way
    seen = len(receiver.calls)
    assert 250 <= seen < 600
    pass_time(minutes=2)  # the leases of the killed sender
    receiver.delay = 0
    send_all()
    assert count_states() == {"delivered": 600}
    assert {call.json["data"]["number"] for call in receiver.calls} == set(range(600))


def _count_sessions():
    counted = """
    SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'
    """
    return int(sql.rows(counted, {})[0][0])


def test_receiver_that_answers_410_is_disabled(subscribe, receiver):
    hook = subscribe()
    receiver.script = [410]
    note_changes(2)
    send_all()
    note_changes(1, start=2)
    send_all()
    endpoint = WebhookEndpoint.objects.get(pk=hook.pk)
    assert endpoint.state == "disabled"
    assert endpoint.problem == "http_410"
    assert len(receiver.calls) == 1
    assert count_states() == {"waiting": 2}


def test_throttling_receiver_gets_nothing_before_the_time_it_names(subscribe, receiver):
    hook = subscribe()
    receiver.script = [(429, {"Retry-After": "300"})]
    note_changes(3, objects=1)
    send_all()
    assert len(receiver.calls) == 1
    pass_time(seconds=290)
    send_all(0)
    assert len(receiver.calls) == 1
    assert WebhookEndpoint.objects.get(pk=hook.pk).state == "resting"
    pass_time(seconds=20)
    send_all()
    assert count_states() == {"delivered": 3}


@pytest.mark.parametrize(("refused", "outcome"), [(1, "delivered"), (FAILURES_TO_REST, "failed")])
def test_late_result_does_not_end_the_time_that_the_receiver_named(subscribe, refused, outcome):
    hook = subscribe()
    write_waiting(hook, 20, objects=20)
    claimed = claim_messages(hook.pk, hook.version, refused + FAILURES_TO_REST)
    wait = timedelta(minutes=5)
    refusals = [AttemptResult(each.id, each.attempt, "failed", retry_after=wait) for each in claimed[:refused]]
    settle_attempts(hook.pk, hook.version, refusals)
    settle_attempts(
        hook.pk, hook.version, [AttemptResult(each.id, each.attempt, outcome) for each in claimed[refused:]]
    )
    pass_time(minutes=4)
    assert find_sendable([hook.pk]) == []
    assert claim_messages(hook.pk, hook.version, 20) == []
    pass_time(minutes=2)
    assert find_sendable([hook.pk]) == [(hook.pk, outcome == "failed")]


def test_dead_receiver_rests_and_one_message_probes_it(subscribe, receiver):
    hook = subscribe()
    receiver.script = [500] * 1000
    note_changes(50, objects=50)
    send_all()
    calls = len(receiver.calls)
    assert calls <= 50
    assert WebhookEndpoint.objects.get(pk=hook.pk).state == "resting"
    assert find_sendable([hook.pk]) == []
    pass_time(seconds=30)
    send_all(0)
    assert len(receiver.calls) == calls + 1
    receiver.script = []
    pass_time(minutes=10)
    send_all()
    assert count_states() == {"delivered": 50}
    assert WebhookEndpoint.objects.get(pk=hook.pk).failures == 0


def test_message_that_fails_for_a_day_is_given_up_and_the_next_one_follows(subscribe, receiver):
    subscribe()
    receiver.script = [500] * 1000
    note_changes(2)
    tries = 0
    while count_states().get("given_up", 0) == 0 and tries < 60:
        pass_time(hours=tries / 4)
        send_all(0)
        tries += 1
    assert len(receiver.calls) >= 5
    assert {call.json["data"]["number"] for call in receiver.calls} == {0}
    receiver.script = []
    pass_time(hours=1)
    send_all()
    assert count_states() == {"given_up": 1, "delivered": 1}


def test_hanging_receiver_delays_no_other(subscribe, receiver, monkeypatch):
    monkeypatch.setattr(webhooks, "TIMEOUT", timedelta(seconds=4))
    with ScriptedReceiver(delay=60) as hanging:
        slow = subscribe("slow", config={"url": hanging.url, "secret": SECRET})
        fast = subscribe("fast")
        write_waiting(slow, 20, objects=20)
        write_waiting(fast, 20, objects=20)
        sender = OutboxSender(0.2)
        sender.wake()
        while WebhookMessage.objects.filter(subscription=fast, state="delivered").count() < 20:
            threading.Event().wait(0.02)
        assert not WebhookMessage.objects.filter(subscription=slow, state="delivered").exists()
        sender.finish(60)
    assert (
        WebhookMessage.objects.filter(subscription=slow, state="waiting", problem__startswith="timeout").count() == 20
    )


def _disable(hook):
    hook.enabled = False
    hook.save()


def test_running_sender_claims_nothing_after_a_stop(subscribe, receiver):
    stops = {
        "disabled": _disable, "retired": lambda hook: retire_subscription(hook.key, actor="test"),
        "paused": pause_endpoint,
    }  # fmt: skip
    working = subscribe("working")
    write_waiting(working, 1)
    assert claim_messages(working.pk, WebhookSubscription.objects.get(pk=working.pk).version, 1)
    for key, stop in stops.items():
        other = subscribe(key)
        write_waiting(other, 1)
        stop(other)
        assert claim_messages(other.pk, WebhookSubscription.objects.get(pk=other.pk).version, 1) == [], key
    WebhookMessage.objects.all().delete()
    hook = subscribe()
    with _sending(hook, receiver) as sender:
        pause_endpoint(hook)
        sent = WebhookMessage.objects.filter(attempt__gt=0).count()
        assert wait_until(lambda: count_states().get("delivered", 0) >= len(receiver.calls), WAIT_LIMIT)
        sender.finish(60)
    assert len(receiver.calls) <= sent + IN_FLIGHT < MANY
    assert count_states() == {"delivered": len(receiver.calls), "waiting": MANY - len(receiver.calls)}


def test_running_sender_sends_to_a_new_address(subscribe, receiver):
    hook = subscribe()
    with ScriptedReceiver() as moved, _sending(hook, receiver):
        hook.config = {"url": moved.url, "secret": SECOND_SECRET}
        hook.save()
        sent = WebhookMessage.objects.filter(attempt__gt=0).count()
        assert wait_until(lambda: count_states() == {"delivered": MANY}, WAIT_LIMIT)
        assert len(receiver.calls) <= sent + IN_FLIGHT < MANY
        assert len(moved.calls) == MANY - len(receiver.calls)
        assert verify(moved.calls[0], moved.calls[0].raw, SECOND_SECRET) == moved.calls[0].json


@contextmanager
def _sending(hook, receiver):
    """Enter when a sender has sent the first of many messages. One claim may be under way at that instant."""
    receiver.delay = 0.5
    write_waiting(hook, MANY, objects=MANY)
    sender = OutboxSender()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(webhooks, "TIMEOUT", timedelta(seconds=60))  # a slow machine is no failing receiver
        patched.setattr(webhooks, "MOST_IN_FLIGHT", IN_FLIGHT)
        sender.wake()
        try:
            assert wait_until(lambda: len(receiver.calls) >= IN_FLIGHT, 60, 0.01)
            yield sender
        finally:
            sender.finish(60)


def test_stale_result_changes_nothing(subscribe):
    hook = subscribe()
    write_waiting(hook, 1)
    (first,) = claim_messages(hook.pk, hook.version, 10)
    assert claim_messages(hook.pk, hook.version, 10) == []
    pass_time(minutes=2)
    (second,) = claim_messages(hook.pk, hook.version, 10)
    settle_attempts(hook.pk, hook.version, [AttemptResult(first.id, first.attempt, "delivered", status=200)])
    assert count_states() == {"waiting": 1}
    settle_attempts(hook.pk, hook.version, [AttemptResult(second.id, second.attempt, "delivered", status=200)])
    assert count_states() == {"delivered": 1}


def test_webhook_that_comes_back_with_another_address_sends_nothing_of_before(subscribe, receiver):
    hook = subscribe()
    write_waiting(hook, 2)
    WebhookEndpoint.objects.update(disabled_at=sql.now(), problem="http_410")
    retire_subscription(hook.key, actor="test")
    with ScriptedReceiver() as other:
        given = {"url": other.url, "secret": SECOND_SECRET, "events": ["pause.changed"]}
        put_subscription(hook.key, given, actor="test")
        note_changes(1, start=7)
        send_all()
        assert [call.json["data"]["number"] for call in other.calls] == [7]
    assert count_states() == {"given_up": 2, "delivered": 1}
    assert receiver.calls == []


def test_webhook_that_comes_back_unchanged_sends_what_waited(subscribe, receiver):
    hook = subscribe()
    write_waiting(hook, 2)
    retire_subscription(hook.key, actor="test")
    put_subscription(hook.key, {"url": receiver.url, "secret": SECRET, "events": hook.events}, actor="test")
    send_all()
    assert count_states() == {"delivered": 2}


def test_new_address_ends_the_rest_of_the_former_one(subscribe, receiver):
    hook = subscribe(config={"url": "https://example.com/former", "secret": SECRET})
    WebhookEndpoint.objects.update(rest_until=sql.now() + timedelta(hours=20), failures=9, failing_since=sql.now())
    hook.enabled = True
    hook.save()
    write_waiting(hook, 1)
    assert find_sendable([hook.pk]) == []
    hook.config = {"url": receiver.url, "secret": SECRET}
    hook.save()
    send_all()
    assert count_states() == {"delivered": 1}


def test_enabled_webhook_sends_what_waits_at_once(subscribe, receiver):
    """A message that has failed for hours would wait as long again."""
    hook = subscribe()
    write_waiting(hook, 3, objects=3)
    (in_flight,) = claim_messages(hook.pk, hook.version, 1)
    WebhookMessage.objects.exclude(pk=in_flight.id).update(due_at=sql.now() + timedelta(hours=10))
    enable_endpoint(hook)
    send_all()
    assert [call.json["data"]["number"] for call in receiver.calls] in ([1, 2], [2, 1])
    assert count_states() == {"delivered": 2, "waiting": 1}


@pytest.mark.parametrize("outcome", ["failed", "delivered"])
def test_late_answer_of_former_address_shows_nothing_about_the_new_one(subscribe, outcome):
    hook = subscribe()
    write_waiting(hook, FAILURES_TO_REST, objects=FAILURES_TO_REST)
    claimed, former = claim_messages(hook.pk, hook.version, 10), hook.version
    hook.config = {"url": "https://example.com/moved", "secret": SECRET}
    hook.save()
    before = WebhookEndpoint.objects.filter(pk=hook.pk).values().get()
    late = [AttemptResult(each.id, each.attempt, outcome, "http_410", 410, timedelta(hours=1)) for each in claimed]
    settle_attempts(hook.pk, former, late)
    assert WebhookEndpoint.objects.filter(pk=hook.pk).values().get() == before
    assert count_states() == {"waiting" if outcome == "failed" else outcome: FAILURES_TO_REST}


@pytest.mark.usefixtures("fresh_tables")
def test_claim_reads_no_more_than_it_takes(subscribe):
    hook = subscribe()
    write_waiting(hook, 5_000, objects=5_000)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE scheduling_webhookmessage")
        from scheduling import webhooks

        statement = "EXPLAIN " + webhooks._CLAIM_MESSAGES
        given = {"hook": hook.pk, "version": hook.version, "most": 50, "lease": webhooks.LEASE}
        plan = "\n".join(line for (line,) in sql.rows(statement, given))
    assert "webhook_due" in plan
    assert "webhook_order" in plan
    assert "Seq Scan on scheduling_webhookmessage" not in plan


def test_private_address_gets_no_request(subscribe):
    urls = {"plain": "http://10.0.0.1/x", "private": "https://127.0.0.2/x"}
    for key, url in urls.items():
        subscribe(key, config={"url": url, "secret": SECRET})
    note_changes(1)
    send_all()
    problems = WebhookEndpoint.objects.values_list("problem", flat=True)
    assert len(problems) == 2
    assert all("private_address" in problem or "scheme" in problem for problem in problems), problems
