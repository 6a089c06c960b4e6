"""A fake channel, a scripted receiver, and time that can be moved."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, transaction
from django.utils.timezone import now

from scheduling.channels.base import Outcome, channel_kinds
from scheduling.channels.http_client import close_shared_transport
from scheduling.channels.vendors.base import shared_tokens
from scheduling.delivery import pipeline
from scheduling.delivery.lanes import ReceiverLanes
from scheduling.delivery.sender import sender
from scheduling.ledger.touches import Sending
from scheduling.ledger.transitions import Claim
from scheduling.models import ChannelConfig, HarassmentRule, Node, Template, Touch
from tests.scheduling.core.fake_channels import FakeChannel, FakeChannelState
from tests.scheduling.core.receivers import ScriptedReceiver
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.waiting import WAIT_LIMIT


@contextmanager
def held_by_second_connection(act: Callable[[], Any], *, commit: bool) -> Iterator[threading.Event]:
    """`act` in a transaction of another connection that stays open until the event is set."""
    acted, finish = threading.Event(), threading.Event()

    def run() -> None:
        try:
            with transaction.atomic():
                act()
                acted.set()
                finish.wait(WAIT_LIMIT)
                if not commit:
                    transaction.set_rollback(True)
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert acted.wait(WAIT_LIMIT)
        yield finish
    finally:
        finish.set()
        thread.join(WAIT_LIMIT)


SHIFTED = {
    "touch": "due_at planned_at lease_until queued_at sending_at settled_at created_at expires_at reserved_at",
    "event": "occurred_at received_at",
    "customer": "last_active_at conversation_at opted_out_at objected_at inactive_since created_at",
    "failedtask": "failed_at acted_at",
    "complaint": "complained_at",
    "automaticrollout": "step_at judged_at counted_until",
    "bulkaction": "begun_at ended_at next_at retry_at",
    "customerimport": "created_at ended_at retry_at",
    "endmark": "settled_at ceiling",
    "disabledtarget": "disabled_at",
}


LOGS = ("verdicts", "attempts")


LATER = datetime(2100, 1, 1, tzinfo=UTC)  #: until then all rows of a bulk action are due


def pass_time(**span: float) -> None:
    """Let time pass: everything that is stored happened that much earlier."""
    with connection.cursor() as cursor:
        for table, columns in SHIFTED.items():
            moves = ", ".join(f"{column} = {column} - %(span)s" for column in columns.split())
            cursor.execute(f"UPDATE scheduling_{table} SET {moves}", {"span": timedelta(**span)})
    logged = list(Touch.objects.exclude(verdicts=None, attempts=None).only("pk", *LOGS))
    for touch in logged:
        for log in LOGS:
            setattr(touch, log, [_shift_entry(each, timedelta(**span)) for each in getattr(touch, log)])
    Touch.objects.bulk_update(logged, LOGS, batch_size=500)


def _shift_entry(entry: Any, span: timedelta) -> Any:
    return entry._make(each - span if isinstance(each, datetime) else each for each in entry)


def fall_due(*task_ids: UUID) -> None:
    """Let waiting touches be due now; all of them where none is named."""
    chosen = Touch.objects.filter(pk__in=task_ids) if task_ids else Touch.objects.all()
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE scheduling_touch SET due_at = LEAST(due_at, statement_timestamp()) WHERE task_id = ANY(%s)"
            " AND state IN ('scheduled', 'queued')",
            [list(chosen.values_list("pk", flat=True))],
        )


def expire_lease(*task_ids: UUID) -> None:
    """Let the leases of these touches run out, as if their worker had been gone for that long."""
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE scheduling_touch SET lease_until = statement_timestamp() - interval '1 second'"
            " WHERE task_id = ANY(%s) AND lease_until IS NOT NULL",
            [list(task_ids)],
        )


def sendings(*claims: Claim) -> list[Sending]:
    """What is asked about these claims before they are sent: everything that may stop them."""
    rows = Touch.objects.select_related("node", "event").in_bulk([claim.task_id for claim in claims])
    return [
        Sending(claim, row.node_id, row.node.channel_id, marketing=True, event_at=row.event.occurred_at)
        for claim in claims
        for row in [rows[claim.task_id]]
    ]


def deliver(task_ids: Iterable[UUID]) -> None:
    """Deliver what is due of these, and wait until all of it is settled."""
    assert not connection.in_atomic_block, "the sender does not see the rows of an open transaction"
    pipeline.deliver_touches(list(task_ids))
    assert sender().drain(WAIT_LIMIT), "the sender did not settle in time"


def deliver_when_due(*task_ids: UUID) -> list[Touch]:
    """Let them fall due and deliver them; returns their rows in the same order."""
    fall_due(*task_ids)
    deliver(task_ids)
    return rows(task_ids)


def make_quiet_now() -> HarassmentRule:
    """Quiet hours that have lasted an hour and end in an hour."""
    began = now() - timedelta(hours=1)
    return HarassmentRule.objects.create(
        kind="quiet_hours", quiet_from=began.time(), quiet_to=(began + timedelta(hours=2)).time(), timezone="UTC"
    )


def rows(task_ids: Sequence[UUID]) -> list[Touch]:
    found = Touch.objects.in_bulk(list(task_ids))
    return [found[task_id] for task_id in task_ids]


@pytest.fixture
def _sending(settings, monkeypatch) -> Iterator[None]:
    """A sender that may call this machine, knows no receiver of another test, and holds nothing when the test ends."""
    # The longest that a channel may have: a slow machine ends few calls.
    monkeypatch.setattr(ChannelConfig._meta.get_field("timeout"), "default", timedelta(seconds=20))
    sender().lanes = ReceiverLanes()
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1"]
    settings.CHANNELS = settings.CHANNELS | {"fake": "tests.scheduling.core.fake_channels.FakeChannel"}
    channel_kinds.cache_clear()
    _in_sending_thread(close_shared_transport)
    yield
    assert sender().drain(WAIT_LIMIT)
    _in_sending_thread(close_shared_transport)
    channel_kinds.cache_clear()


def _in_sending_thread(act: Callable[[], Any]) -> None:
    loop = sender()._loop
    if loop is not None:
        asyncio.run_coroutine_threadsafe(act(), loop).result(WAIT_LIMIT)


@pytest.fixture
def fake_channel(_sending) -> Iterator[FakeChannelState]:
    """The script of the fake channel and its received messages."""
    FakeChannel.fake_channel = FakeChannelState()
    yield FakeChannel.fake_channel
    FakeChannel.fake_channel.release_calls.set()


@pytest.fixture
def receiver(_sending) -> Iterator[ScriptedReceiver]:
    """A real HTTP server; it responds with 200 unless scripted."""
    with ScriptedReceiver() as server:
        yield server


@pytest.fixture
def create_fake_channel(matrix, fake_channel) -> Callable[..., ChannelConfig]:
    """Create rows of fake channels."""

    def create_fake_channel(key: str = "fake", **changes: Any) -> ChannelConfig:
        usual: dict[str, Any] = {"kind": "fake", "idempotent": True, "config": {"name": key}}
        return ChannelConfig.objects.create(key=key, **usual | changes)

    return create_fake_channel


@dataclass
class Shop:
    """A matrix, the events of its customers, and a channel that answers as the test wants."""

    matrix: MatrixBuilder
    record_event: RecordEvent
    create_channel: Callable[..., ChannelConfig]
    fake_channel: FakeChannelState

    def node(self, key: str = "guide", trigger: str = "material.downloaded", **changes: Any) -> Node:
        return self.matrix.node(key, trigger, **changes)

    def template(self, key: str, **changes: Any) -> Template:
        return self.matrix.template(key, **changes)

    def plan(self, count: int, type: str = "material.downloaded", **changes: Any) -> list[UUID]:
        """Touches of so many customers, `user-0` and so on, by one event each."""
        return [self.record_event(type, f"user-{number}", **changes).task_ids[0] for number in range(count)]

    def answer(self, *answers: Outcome | Exception) -> None:
        """Let the channel answer so from now on. The last answer repeats."""
        waiting = list(answers)
        self.fake_channel.play = lambda message: waiting.pop(0) if len(waiting) > 1 else waiting[0]


@pytest.fixture
def shop(matrix, record_event, create_fake_channel, fake_channel) -> Shop:
    return Shop(matrix, record_event, create_fake_channel, fake_channel)


@pytest.fixture
def hook(matrix, receiver) -> ChannelConfig:
    """A webhook channel that leads to the receiver."""
    return ChannelConfig.objects.create(key="hook", kind="webhook", idempotent=True, config={"url": receiver.url})


@pytest.fixture
def forgotten_tokens() -> Iterator[None]:
    """Forget tokens of vendors: another test had the same vendor at another port, or the same port."""
    shared_tokens.cache_clear()
    yield
    shared_tokens.cache_clear()
