"""The invariants that no other file names: messages, time limits, purity, and no outside world in a transaction."""

import ast
from pathlib import Path

import pytest
from django.db import connection

from config.environment import ROOT
from scheduling import dispatch
from scheduling.channels.quota import QuotaGate
from scheduling.delivery import pipeline
from scheduling.models import Touch
from tests.scheduling.core.conftest import deliver, deliver_when_due, expire_lease, fall_due
from tests.scheduling.core.fake_channels import FakePresence
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

PURE = ("policy.matrix", "policy.rollout", "policy.guards", "policy.specs", "errors")


@each_row("module", PURE)
def test_pure_module_does_not_read_the_clock(module):
    """I10: `now` is a parameter."""
    tree = ast.parse(Path(ROOT, "scheduling", *module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    clocks = {"now", "utcnow", "today", "monotonic", "localtime", "perf_counter"}
    assert not {name for name in called if name.split(".")[-1] in clocks or name == "time.time"}


# --- I1: a message is a wake-up ---------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_broker_outage_loses_no_touch(shop, valkey, monkeypatch):
    """I1: a failed publish is only a lost wake-up; the row's lease brings it back."""
    import time

    from celery import current_app
    from kombu import pools

    shop.node()
    (task_id,) = shop.record_event().task_ids
    fall_due(task_id)
    with monkeypatch.context() as patched:
        patched.setattr(current_app.conf, "broker_url", "redis://127.0.0.1:1/0")
        pools.reset()
        current_app.amqp._producer_pool = None
        current_app._pool = None
        expire_lease(task_id)
        assert dispatch.rescue_lost_work() == (0, 0), "it is not known how long the queue is"
        began = time.monotonic()
        wakeups = [dispatch.WakeUp(task_id, Touch.objects.get().due_at, 1, 0)]
        dispatch.publish_touches(wakeups, {})
        assert time.monotonic() - began < WAIT_LIMIT  # what waits for ever is what must not be
    pools.reset()
    current_app.amqp._producer_pool = None
    current_app._pool = None

    assert dispatch.rescue_lost_work() == (1, 0)
    assert dispatch.dispatch_due_touches() == 1
    assert deliver_when_due(task_id)[0].state == "delivered"


# --- I4: no outside world in a transaction ---------------------------------------------------------------------------


class CallRecorder:
    """Remembers, at each call of the outside world, whether the calling thread was inside a transaction."""

    def __init__(self):
        self.seen = {}

    def record(self, name, function):
        def recorded(*args, **named):
            self.seen.setdefault(name, []).append(connection.in_atomic_block)
            return function(*args, **named)

        return recorded


@pytest.mark.django_db(transaction=True)
def test_no_outside_call_in_a_transaction(shop, settings, valkey, integrate, monkeypatch):
    """I4: neither a channel, nor the broker, nor Redis, nor Presence, from intake to the last rescue."""
    from scheduling.channels.base import channel_kinds

    settings.CHANNELS = settings.CHANNELS | {"limited": "tests.scheduling.core.fake_channels.Limited"}
    integrate(presence=(FakePresence("", "material.downloaded"),))
    channel_kinds.cache_clear()
    witness = CallRecorder()
    for module, name in [
        (dispatch, "publish_touches"),
        (pipeline, "publish_touches"),
        (dispatch, "oldest_message_at"),
    ]:
        monkeypatch.setattr(module, name, witness.record(name, getattr(module, name)))
    monkeypatch.setattr(QuotaGate, "acquire", witness.record("quota", QuotaGate.acquire))
    monkeypatch.setattr(QuotaGate, "reserve", witness.record("slots", QuotaGate.reserve))
    monkeypatch.setattr(FakePresence, "presence_blocks", witness.record("presence", FakePresence.presence_blocks))
    monkeypatch.setattr(FakePresence, "note_sending", witness.record("note_sending", FakePresence.note_sending))

    shop.node("sent", channel=shop.create_channel("i4"))
    shop.node("limited", channel=shop.create_channel("i4-limited", kind="limited"))
    shop.node("early", trigger="later", guard_dedupe="ignore")
    receipt = shop.record_event()
    later = shop.record_event("later", user="bob")
    Touch.objects.filter(pk__in=later.task_ids).update(due_at="2999-01-01T00:00Z")
    deliver(later.task_ids)
    deliver_when_due(*receipt.task_ids)
    fall_due()
    expire_lease(*later.task_ids)
    dispatch.rescue_lost_work()
    dispatch.dispatch_due_touches()

    assert shop.fake_channel.in_transaction == [False, False]
    assert set(witness.seen) == {
        "publish_touches",
        "oldest_message_at",
        "quota",
        "slots",
        "presence",
        "note_sending",
    }
    assert not any(inside for calls in witness.seen.values() for inside in calls), witness.seen
