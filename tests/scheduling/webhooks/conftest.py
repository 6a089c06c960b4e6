"""Subscriptions, a receiver that verifies signatures, and a sender that ends when nothing is due."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from standardwebhooks.webhooks import Webhook as Verifier

from scheduling import sql, webhooks
from scheduling.ids import new_id
from scheduling.ledger import ends
from scheduling.models import WebhookEvent, WebhookFact, WebhookMessage, WebhookSubscription
from scheduling.webhooks import OutboxSender
from tests.scheduling.core.receivers import Call, ScriptedReceiver

SECRET = "whsec_" + base64.b64encode(b"a secret of 24 bytes or more").decode()
SECOND_SECRET = "whsec_" + base64.b64encode(b"the secret after the rotation").decode()


@pytest.fixture(autouse=True)
def _local_receivers(settings, monkeypatch) -> None:
    """A slow machine ends no request, a sender that finds nothing looks again soon, and ends are read at once."""
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1"]
    monkeypatch.setattr(webhooks, "TIMEOUT", timedelta(seconds=20))
    monkeypatch.setattr(webhooks, "IDLE", 0.05)
    monkeypatch.setattr(ends, "WRITE_LAG", timedelta(0))


@pytest.fixture
def receiver() -> Iterator[ScriptedReceiver]:
    with ScriptedReceiver() as server:
        yield server


@pytest.fixture
def subscribe(receiver, transactional_db) -> Callable[..., WebhookSubscription]:
    def subscribe(key: str = "crm", **changes: Any) -> WebhookSubscription:
        usual: dict[str, Any] = {
            "config": {"url": receiver.url, "secret": SECRET}, "events": list(WebhookEvent.values),
        }  # fmt: skip
        return WebhookSubscription.objects.create(key=key, **usual | changes)

    return subscribe


def note_changes(count: int, objects: int = 1, *, start: int = 0) -> None:
    """Let `count` things happen to some objects in turn. `data.number` ascends for each."""
    at = sql.now()
    WebhookFact.objects.bulk_create(
        WebhookFact(
            type=WebhookEvent.PAUSE_CHANGED, object_key=f"pause:{number % objects}", at=at,
            data={"number": number, "object": number % objects},
        )
        for number in range(start, start + count)
    )  # fmt: skip


def write_waiting(hook: WebhookSubscription, count: int, objects: int = 1) -> None:
    """Write messages that wait, as collecting does."""
    from scheduling.webhooks import Occurrence, write_messages

    at = sql.now()
    write_messages(
        (
            hook.pk,
            Occurrence(new_id(), "pause.changed", f"pause:{n % objects}", at, {"number": n, "object": n % objects}),
        )
        for n in range(count)
    )


def send_all(linger: float = 0.1) -> None:
    """Run a sender until nothing is due."""
    OutboxSender(linger).run()


def pass_time(**span: float) -> None:
    """Let everything that is stored have happened that much earlier."""
    with connection.cursor() as cursor:
        moved = {"span": timedelta(**span)}
        for table, columns in {
            "message": ("due_at", "first_tried_at", "ended_at", "occurred_at"),
            "endpoint": ("failing_since", "rest_until", "problem_at", "delivered_at"),
        }.items():
            moves = ", ".join(f"{column} = {column} - %(span)s" for column in columns)
            cursor.execute(f"UPDATE scheduling_webhook{table} SET {moves}", moved)


def count_states() -> dict[str, int]:
    states = list(WebhookMessage.objects.values_list("state", flat=True))
    return {state: states.count(state) for state in set(states)}


def verify(call: Call, raw: bytes, secret: str = SECRET) -> Any:
    return Verifier(secret).verify(raw, {name.lower(): value for name, value in call.headers.items()})
