"""Turn what happened into messages of the outbox, one for each subscription that wants it.

Ends of touches are read with a mark (`scheduling.ledger.ends`). Other changes are facts, stored by the transaction of
the change. Without a subscription nothing is written and nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db import transaction
from psycopg.types.json import Jsonb

from scheduling import sql
from scheduling.configuration import snapshot
from scheduling.ids import new_id
from scheduling.ledger import ends
from scheduling.models import WebhookEndpoint, WebhookEvent, WebhookFact, WebhookMessage
from scheduling.policy.specs import WebhookSpec

READER = "webhooks"  #: of ends of touches
MOST_COLLECTED = 500  #: of each source in a transaction
_COLLECTING = 5_104_231  #: advisory lock: ids of messages ascend in the order of events of an object
TOUCH_ENDED = WebhookEvent.TOUCH_ENDED.value


class Occurrence(NamedTuple):
    """Something that happened to an object, as subscriptions see it."""

    message_id: UUID
    type: str
    object_key: str
    at: datetime
    data: Mapping[str, Any]


def note_facts(facts: Sequence[WebhookFact]) -> None:
    """Store facts that a subscription wants. Call it in the transaction of the change; without one it costs nothing."""
    wanted = snapshot.current().webhook_events
    if wanted and (noted := [each for each in facts if each.type in wanted]):
        WebhookFact.objects.bulk_create(noted)


def collect_messages(most: int = MOST_COLLECTED) -> bool:
    """Write the messages of the next events. Return whether more events wait.

    Events and messages change in one transaction: a killed process loses and repeats nothing. Of concurrent passes one
    works, and the others return.
    """
    config = snapshot.current()
    with transaction.atomic():
        if not sql.rows("SELECT pg_try_advisory_xact_lock(%(lock)s)", {"lock": _COLLECTING})[0][0]:
            return False
        gone = WebhookEndpoint.objects.filter(disabled_at__isnull=False).values_list("pk", flat=True)
        hooks = [hook for hook in config.webhooks.values() if hook.id not in set(gone)]
        found = _take_facts(most)
        more = len(found) == most
        if TOUCH_ENDED in config.webhook_events:
            batch = ends.take_ends(READER, most=most)
            found += _describe_ends(batch.ends, config)
            more |= batch.more
        else:
            ends.drop_reader(READER)
        write_messages((hook.id, each) for each in found for hook in hooks if wants_message(hook, each))
    return more


def wait_for_collector() -> None:
    """Wait until a running pass has stored its messages, and let none start before this transaction ends."""
    sql.rows("SELECT pg_advisory_xact_lock(%(lock)s)", {"lock": _COLLECTING})


def forget_events() -> None:
    """Drop events that no subscription waits for, so that a later one does not get them."""
    WebhookFact.objects.all().delete()
    ends.drop_reader(READER)


def wants_message(hook: WebhookSpec, event: Occurrence) -> bool:
    """Return whether type and filter match. A filter does not concern a message without its field."""
    if event.type not in hook.events:
        return False
    data = event.data
    given = {"node": data.get("node"), "platform": data.get("platform")}
    given["shop"] = f"{given['platform']}/{data['shop_id']}" if data.get("shop_id") else None
    return all(not given[name] or given[name] in wanted for name, wanted in hook.filter.items())


def write_messages(wanted: Iterable[tuple[int, Occurrence]]) -> int:
    """Insert messages by id of their subscription. Return their number."""
    at = sql.now()  # the claim compares with PostgreSQL's clock
    records = [
        (hook, each.message_id, each.type, each.object_key, each.at, Jsonb(each.data), "waiting", at, 0, "")
        for hook, each in wanted
    ]
    sql.copy_rows(_COPY_MESSAGES, records, tuple(_MESSAGE_COLUMNS.values()))
    return len(records)


def _take_facts(most: int) -> list[Occurrence]:
    rows = sorted(sql.rows(_TAKE_FACTS, {"most": most}))
    return [Occurrence(new_id(), *row[1:]) for row in rows]


def _describe_ends(found: Sequence[ends.EndedTouch], config: snapshot.Snapshot) -> list[Occurrence]:
    """Return the ends with their events. The id of the touch is that of the message: an end read again repeats it."""
    if not found:
        return []
    ids = sql.UuidArray(list({each.event_id for each in found}))
    events = {row[0]: row[1:] for row in sql.rows(_EVENTS_OF_ENDS, {"ids": ids})}
    described = []
    for each in found:
        source, event_id, event_type, user_id = events[each.event_id]
        data = {
            "task_id": str(each.task_id),
            "delivery_key": str(each.root_id),
            "state": each.state,
            "reason": each.reason,
            "node": config.nodes[each.node_id].key,
            "user_id": user_id,
            "chat_id": each.chat_id,
            "event": {"source": source, "id": event_id, "type": event_type},
        }
        described.append(Occurrence(each.task_id, TOUCH_ENDED, f"touch:{each.task_id}", each.settled_at, data))
    return described


_TAKE_FACTS = """
DELETE FROM scheduling_webhookfact
WHERE id = ANY(ARRAY(SELECT id FROM scheduling_webhookfact ORDER BY id LIMIT %(most)s))
RETURNING id, type, object_key, at, data
"""
_EVENTS_OF_ENDS = "SELECT id, source, event_id, type, user_id FROM scheduling_event WHERE id = ANY(%(ids)b)"
_MESSAGE_COLUMNS = {
    "subscription_id": "int8", "message_id": "uuid", "type": "varchar", "object_key": "varchar",
    "occurred_at": "timestamptz", "data": "jsonb", "state": "varchar", "due_at": "timestamptz", "attempt": "int4",
    "problem": "varchar",
}  # fmt: skip
_COPY_MESSAGES = f"COPY {WebhookMessage._meta.db_table} ({', '.join(_MESSAGE_COLUMNS)}) FROM STDIN (FORMAT BINARY)"
