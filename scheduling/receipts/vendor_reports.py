"""Record what the callback of a vendor reports: receipts, and messages of customers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings
from django.db import transaction

from scheduling import sql
from scheduling.channels.vendors.callbacks import CallbackResult, CustomerMessage
from scheduling.configuration import snapshot
from scheduling.ledger import locks
from scheduling.models import ReceiptKind
from scheduling.models.customer import REPLYING
from scheduling.planning.group_commit import record_and_publish
from scheduling.planning.ingest import NewEvent
from scheduling.policy.journeys import SOURCE
from scheduling.policy.specs import ChannelSpec
from scheduling.receipts.recording import BATCH, Report, record_reports

log = structlog.get_logger(__name__)

REPLY_WITHIN = timedelta(days=7)  #: a later message is no reply to a touch
#: A vendor may report before the batch of its message is settled, and repeats a call that gets an error.
EARLY = timedelta(seconds=30)
SAME_ADDRESS = 10  #: customers that may share an address


class EarlyReceipt(Exception):
    """A report names a message that is perhaps not settled yet."""


def record_callback(spec: ChannelSpec, result: CallbackResult) -> None:
    """Record the receipts and messages of one callback. Idempotent. Reports about unknown messages are dropped.

    Raises:
        EarlyReceipt: a report of the last seconds names no known message; the others are recorded.
        django.db.Error: PostgreSQL is unavailable.
    """
    reports = [
        Report(
            each.kind,
            each.at,
            each.delivery_key,
            channel="" if each.delivery_key else spec.key,
            vendor_id=each.vendor_id,
            detail=each.detail,
            permanent=each.permanent,
        )
        for each in result.reports
    ]
    unknown: list[Report] = []
    for start in range(0, len(reports), BATCH):
        refused = record_reports(reports[start : start + BATCH]).refused
        unknown += [reports[start + each.position] for each in refused]
    for start in range(0, len(result.messages), BATCH):
        _record_messages(spec, result.messages[start : start + BATCH])
    if unknown:
        since = sql.now() - EARLY
        if any(each.vendor_id and each.at and each.at > since for each in unknown):
            raise EarlyReceipt
        log.info("unknown_receipts_dropped", channel=spec.key, count=len(unknown))


def _record_messages(spec: ChannelSpec, messages: Sequence[CustomerMessage]) -> None:
    """Open conversations of the customers with these addresses, and mark their latest touches as replied."""
    found = _find_customers(spec.kind, {each.address for each in messages})
    if not found:
        return
    with transaction.atomic():
        sql.limit_lock_waits(settings.TIMEOUTS.event_lock)
        # The locks keep an erased customer from coming back as a new one.
        users = locks.lock_remaining(key for keys in found.values() for key in keys)
        spoken = [(users[key], each) for each in messages for key in found.get(each.address, ()) if key in users]
        _open_conversations(spec, spoken)
    latest: dict[str, datetime] = {}
    for user_id, each in spoken:
        latest[user_id] = max(each.at, latest.get(user_id, each.at))
    answered = _find_answered_touches(spec.id, latest)
    record_reports(
        [
            Report(ReceiptKind.REPLIED, latest[user_id], key, opens_conversation=False)
            for user_id, key in answered.items()
        ]
    )


def _open_conversations(spec: ChannelSpec, spoken: Sequence[tuple[str, CustomerMessage]]) -> None:
    events = [
        NewEvent(
            SOURCE,
            _name_message(f"message:{spec.key}:{each.message_id}:{user_id}"),
            "conversation.started",
            user_id,
            "",
            each.at,
            {"channel": spec.key},
        )
        for user_id, each in spoken
    ]
    if events:
        record_and_publish(events, settings.TIMEOUTS.event_lock)


def _name_message(name: str) -> str:
    """Return a name of at most 255 characters. The ends of long ones differ, so a digest takes their place."""
    return name if len(name) <= 255 else f"{name[:190]}:{sha256(name.encode()).hexdigest()}"


def _find_customers(kind: str, addresses: set[str]) -> Mapping[str, list[int]]:
    """Return the customers by address. Only kinds with an index on their address can be asked."""
    if kind not in REPLYING:
        return {}
    found: dict[str, list[int]] = {}
    for address, key in sql.rows(_CUSTOMERS.format(key=kind), {"addresses": sorted(addresses)}):
        if len(found.setdefault(address, [])) < SAME_ADDRESS:
            found[address].append(key)
    return found


def _find_answered_touches(channel_id: int, latest: Mapping[str, datetime]) -> dict[str, UUID]:
    """Return the delivery key of the latest touch that each user got by this channel before the message."""
    nodes = [node.id for node in snapshot.current().nodes.values() if node.channel.id == channel_id]
    given: dict[str, Any] = {
        "nodes": nodes,
        "users": list(latest),
        "ats": list(latest.values()),
        "within": REPLY_WITHIN,
    }
    return dict(sql.rows(_ANSWERED, given))


_CUSTOMERS = """
SELECT addresses ->> '{key}', id FROM scheduling_customer
WHERE addresses ? '{key}' AND addresses ->> '{key}' = ANY(%(addresses)b::text[])
"""
_ANSWERED = """
SELECT v.user_id, t.root_id
FROM unnest(%(users)b::text[], %(ats)b::timestamptz[]) AS v(user_id, at)
JOIN scheduling_customer AS c ON c.user_id = v.user_id
CROSS JOIN LATERAL (
    SELECT root_id FROM scheduling_touch_ended
    WHERE customer_id = c.id AND state = 'delivered' AND node_id = ANY(%(nodes)b::bigint[])
      AND reserved_at <= v.at + interval '1 second' AND reserved_at > v.at - %(within)s::interval
    ORDER BY reserved_at DESC LIMIT 1
) AS t
"""
