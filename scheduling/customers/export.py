"""Collect everything that is stored about one customer, and what identifies one, now and in the past."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from scheduling.app_integrations import integrations
from scheduling.ledger import anonymization
from scheduling.ledger.anonymization import Identity
from scheduling.models import (
    Complaint,
    Customer,
    CustomerChange,
    DisabledTarget,
    Event,
    FailedTask,
    Touch,
    WebhookMessage,
)
from scheduling.models.node import digest_address
from scheduling.receipts.recording import load_receipts
from scheduling.webhooks.message_history import find_messages_of_customer


def collect_identity(row: Customer) -> Identity:
    """Return the user id with the present and the former addresses and names."""
    addresses, names = row.stored_addresses(), {row.name}
    for change in CustomerChange.objects.filter(customer=row).values_list("before", "after"):
        for values in change:
            addresses |= Customer(addresses=values.get("addresses")).stored_addresses()
            names.add(values.get("name") or "")
    return Identity(row.user_id, tuple(sorted(addresses - {""})), tuple(sorted(names - {""})))


MOST_ENTRIES = 10_000  #: latest events, and as many of each other list


def export_customer(row: Customer) -> dict[str, Any]:
    """Return the customer's data without its profile fields, for JSON.

    `complete` is false if a list is cut or if a store does not answer.
    """
    who = collect_identity(row)
    events = list(Event.objects.filter(customer=row).order_by("-pk")[:MOST_ENTRIES])
    touches = Touch.objects.filter(event__customer=row).select_related("node").order_by("-pk")
    rows = list(touches[:MOST_ENTRIES])
    receipts = load_receipts({each.root_id for each in rows})
    messages = find_messages_of_customer(who.user_id, MOST_ENTRIES)
    found: dict[str, list[Any]] = {
        "events": [_serialize(each, "source event_id type occurred_at received_at chat_id data") for each in events],
        "touches": [
            {"node": each.node.key, **_serialize(each, "task_id state reason due_at settled_at chat_id content_type"),
             "verdicts": [each._asdict() for each in each.verdicts],
             "messages": [_serialize(attempt, "started_at outcome subject body") for attempt in each.attempts],
             "receipts": receipts.get(each.root_id, [])}
            for each in rows
        ],
        "changes": [
            _serialize(each, "at actor before after")
            for each in CustomerChange.objects.filter(customer=row).order_by("-pk")[:MOST_ENTRIES]
        ],
        "complaints": list(Complaint.objects.filter(customer=row).values_list("complained_at", flat=True)),
        "failed_tasks": _export_failed_tasks(who, [each.pk for each in rows]),
        "disabled_addresses": _export_disabled_addresses(who),
        "webhook_messages": [
            _serialize(each, "message_id type occurred_at state data")
            for each in WebhookMessage.objects.filter(pk__in=messages).order_by("-pk")
        ],
    }  # fmt: skip
    silent = False
    for name, export in [entry for app in integrations() for entry in app.user_exporters.items()]:
        entries = export(who, [each.root_id for each in rows], MOST_ENTRIES)
        silent |= entries is None
        found[name] = entries or []
    return found | {"complete": not silent and all(len(each) < MOST_ENTRIES for each in found.values())}


def _export_failed_tasks(who: Identity, task_ids: Sequence[UUID]) -> list[dict[str, Any]]:
    found = FailedTask.objects.filter(pk__in=anonymization.find_failed_tasks_of_customer(who, task_ids, MOST_ENTRIES))
    return [_serialize(each, "origin task_id state reason detail payload failed_at") for each in found.order_by("-pk")]


def _export_disabled_addresses(who: Identity) -> list[dict[str, Any]]:
    addresses = {digest_address(each): each for each in who.addresses}
    found = DisabledTarget.objects.filter(target_digest__in=addresses).select_related("channel").order_by("pk")
    return [
        {"address": addresses[each.target_digest], "channel": each.channel.key,
         **_serialize(each, "reason disabled_at")}
        for each in found
    ]  # fmt: skip


def _serialize(row: Any, names: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names.split()}
