"""Export a customer, or erase it: remove personal data from every table, keep an anonymous history and a log.

The request empties the customer's own rows, cancels unsent touches and frees the user id: a later event creates a new
customer. A pass then works through the events, a batch in one transaction, after the last touch that was being sent has
ended. Then it removes what other tables have copied from events and touches, and what operators typed: filters,
reasons, notes, comments and the log of actions. All parts are idempotent, and a killed pass repeats only its batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import structlog
from django.apps import apps
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import close_old_connections, transaction
from simple_history.models import HistoricalChanges

from scheduling import sql
from scheduling.app_integrations import PersonalData, integrations
from scheduling.audit import record_action
from scheduling.customers.imports import is_in_stored_file
from scheduling.error_text import ErrorText as _
from scheduling.errors import NotFound
from scheduling.ledger import anonymization, locks
from scheduling.ledger.anonymization import Identity
from scheduling.models import (
    Complaint,
    Customer,
    CustomerChange,
    CustomerErasure,
    CustomerProfile,
    DisabledTarget,
    Event,
    FailedTask,
    Touch,
    WebhookMessage,
)
from scheduling.models.customer import digest_user_id
from scheduling.models.node import digest_address, enable_targets
from scheduling.receipts import erase_receipts, load_receipts
from scheduling.webhooks import erase_messages_of_customer, find_messages_of_customer

log = structlog.get_logger(__name__)


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
    failed = anonymization.find_failed_tasks_of_customer(who, [each.pk for each in rows], MOST_ENTRIES)
    addresses = {digest_address(each): each for each in who.addresses}
    disabled = DisabledTarget.objects.filter(target_digest__in=addresses)
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
        "failed_tasks": [
            _serialize(each, "origin task_id state reason detail payload failed_at")
            for each in FailedTask.objects.filter(pk__in=failed).order_by("-pk")
        ],
        "disabled_addresses": [
            {"address": addresses[each.target_digest], "channel": each.channel.key,
             **_serialize(each, "reason disabled_at")}
            for each in disabled.select_related("channel").order_by("pk")
        ],
    }  # fmt: skip
    silent = False
    for place in list_personal_data():
        entries = place.export(who, [each.root_id for each in rows], MOST_ENTRIES)
        silent |= entries is None
        found[place.name] = entries or []
    return found | {"complete": not silent and all(len(each) < MOST_ENTRIES for each in found.values())}


def list_personal_data() -> list[PersonalData]:
    """Return the places of personal data outside events and touches. Messages come last: ends of jobs become some."""
    messages = PersonalData("webhook_messages", _export_messages, erase_messages_of_customer)
    return [*(place for app in integrations() for place in app.personal_data), messages]


def _export_messages(who: Identity, delivery_keys: Sequence[UUID], most: int) -> list[dict[str, Any]]:
    found = WebhookMessage.objects.filter(pk__in=find_messages_of_customer(who.user_id, most))
    return [_serialize(each, "message_id type occurred_at state data") for each in found.order_by("-pk")]


def _serialize(row: Any, names: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names.split()}


#: Columns that are emptied as a whole, besides the reasons of versions.
TEXTS = (
    ("django_admin_log", "change_message"),
    ("django_admin_log", "object_repr"),
    ("scheduling_bulkaction", "reason"),
    ("scheduling_bulkaction", "note"),
    ("scheduling_failedtask", "action_reason"),
    ("scheduling_failedtaskcomment", "text"),
    ("scheduling_pause", "reason"),
    ("scheduling_customerimport", "file_name"),
    ("django_celery_beat_periodictask", "description"),
    ("scheduling_auditentry", "label"),
    ("scheduling_auditentry", "reason"),
)


def list_text_columns() -> list[tuple[str, str]]:
    """Return tables and columns of texts that are emptied if they name the customer."""
    versions = [model._meta.db_table for model in apps.get_models() if issubclass(model, HistoricalChanges)]
    return [*TEXTS, *((table, "history_change_reason") for table in versions)]


def erase_operator_texts(who: Identity) -> int:
    """Empty texts that name the customer. Return the number of rows. Idempotent."""
    given = {"text": who.build_pattern(), "values": [who.user_id, *who.addresses, *who.names]}
    count = sum(sql.execute(_EMPTY.format(table=table, column=column), given) for table, column in list_text_columns())
    return count + sum(sql.execute(each, given) for each in (_EMPTY_BULK_FILTERS, _EMPTY_AUDIT))


_EMPTY = "UPDATE {table} SET {column} = '' WHERE {column} ~ %(text)s"
_EMPTY_AUDIT = "UPDATE scheduling_auditentry SET changes = '[]' WHERE changes::text ~ %(text)s"
_NAMED = "(value ~ %(text)s OR value = ANY(%(values)s::text[]))"
_EMPTY_BULK_FILTERS = f"""
UPDATE scheduling_bulkaction AS b
SET filter = (SELECT jsonb_object_agg(key, CASE WHEN {_NAMED} THEN 'erased' ELSE value END)
              FROM jsonb_each_text(b.filter))
WHERE EXISTS (SELECT FROM jsonb_each_text(b.filter) WHERE {_NAMED})
"""  # noqa: S608 (made of constants)


BATCH = 500  #: events per transaction
State = CustomerErasure.State


class ErasureDelayed(Exception):
    """What an eraser must remove is still being written. The next pass tries again.

    `cancel` cancels what still waits. It runs after the transaction of the eraser was rolled back.
    """

    def __init__(self, reason: str, cancel: Callable[[], object] = lambda: None) -> None:
        super().__init__(reason)
        self.cancel = cancel


def request_erasure(user_id: str, *, actor: str) -> CustomerErasure:
    """Start the erasure of a customer. A repeat returns the last erasure of this user id.

    Raises:
        NotFound: there is no such customer, and none was erased.
    """
    digest = digest_user_id(user_id)
    with transaction.atomic():
        locked = locks.lock_customers_by_user_id([user_id])
        if not locked:
            past = CustomerErasure.objects.filter(digest=digest).first()
            if past is None:
                raise NotFound(_("There is no customer %(user_id)s.", user_id=user_id))
            return past
        row = Customer.objects.get(pk=locked[user_id].id)
        at = sql.now()  # imports compare it with the time of an upload
        erasure = CustomerErasure(digest=digest, customer=row, actor=actor[:160], user_id=user_id, requested_at=at)
        who = collect_identity(row)
        erasure.identifiers = {"addresses": who.addresses, "names": who.names}
        erasure.counts = _erase_own_rows(row, str(erasure.pk))
        erasure.save(force_insert=True)
        record_action("erased", row, actor=actor)
    log.info("erasure_requested", id=str(erasure.pk), actor=actor)
    return erasure


def _erase_own_rows(row: Customer, erasure_id: str) -> dict[str, int]:
    kind = ContentType.objects.get_for_model(Customer)
    log_entries = LogEntry.objects.filter(content_type=kind, object_id=str(row.pk))
    counts = {
        "profiles": CustomerProfile.objects.filter(pk=row.pk).delete()[0],
        "changes": CustomerChange.objects.filter(customer=row).delete()[0],
        "log entries": log_entries.update(object_repr="", change_message=""),
    }
    anonymization.cancel_unsent(row.pk)
    row.user_id = f"erased:{erasure_id}"
    row.name = row.locale = row.timezone = ""
    row.addresses = row.consent = {}
    row.last_active_at = row.conversation_at = row.inactive_since = None
    row.save()
    return counts | {"customers": 1}


# --- pass -------------------------------------------------------------------------------------------------------------


def continue_erasures() -> None:
    """Work on all erasures that are under way, the oldest first. One that fails or waits does not delay the others."""
    for erasure in CustomerErasure.objects.filter(state=State.RUNNING).order_by("requested_at"):
        try:
            try:
                _continue_erasure(erasure)
            except ErasureDelayed as reason:
                log.info("erasure_delayed", id=str(erasure.pk), reason=str(reason))
                with transaction.atomic():
                    reason.cancel()
        except Exception:
            log.exception("erasure_failed", id=str(erasure.pk))
            close_old_connections()


def _continue_erasure(erasure: CustomerErasure) -> None:
    """Anonymize events and touches, then remove their copies.

    What copies the customer from events and touches copies nothing more once they are anonymous. So the erasure ends
    only if they were before the erasers start. Another pass may still hold their last batch.
    """
    while _erase_batch(erasure.pk):
        pass
    anonymous = not sql.rows(_HISTORY, {"customer": erasure.customer_id})[0][0]
    who = Identity(erasure.user_id, **{kind: tuple(words) for kind, words in erasure.identifiers.items()})
    if not anonymous or is_in_stored_file(who.user_id, erasure.requested_at):
        return  # the next pass: the erasers scan whole tables, and the id may belong to a new customer by then
    delays = []
    for place in list_personal_data():
        try:
            place.erase(who)
        except ErasureDelayed as delay:  # a job that runs keeps no other copies
            delays.append(delay)
    if delays:
        raise delays[0]
    _end_erasure(erasure.pk, who)


def _erase_batch(erasure_id: UUID) -> bool:
    """Anonymize one batch of events with all that belongs to them. Return whether more are left.

    The first batch waits for touches that are being sent: their workers still write texts.
    """
    with transaction.atomic():
        mine = CustomerErasure.objects.select_for_update(skip_locked=True, of=("self",)).select_related("customer")
        erasure = mine.filter(pk=erasure_id, state=State.RUNNING).first()
        if erasure is None or erasure.customer is None:
            return False
        locks.lock_customers_by_user_id([erasure.customer.user_id])
        if anonymization.cancel_unsent(erasure.customer.pk):
            return False
        counts: Counter[str] = Counter(erasure.counts)
        events = [row[0] for row in sql.rows(_EVENTS, {"customer": erasure.customer.pk, "most": BATCH})]
        if events:
            _erase_events(erasure.customer, events, counts)
        erasure.counts = dict(counts)
        erasure.save()
    return bool(events)


def _erase_events(row: Customer, events: Sequence[UUID], counts: Counter[str]) -> None:
    """Anonymize events with their touches, failed tasks and jobs."""
    counts["chats"] += locks.delete_personal_chats(events)
    anonymization.lock_failed_tasks(events)
    task_ids, keys = anonymization.anonymize_touches(events)
    counts["touches"] += len(task_ids)
    counts["failed tasks"] += anonymization.empty_failed_tasks(task_ids)
    counts["log entries"] += anonymization.blank_log_entries([*events, *task_ids])
    counts["receipts"] += erase_receipts(keys)
    counts["jobs"] += sum(place.erase_deliveries(keys) for place in list_personal_data())
    counts["events"] += sql.execute(_ANONYMIZE_EVENTS, {"ids": list(events), "user_id": row.user_id})


def _end_erasure(erasure_id: UUID, who: Identity) -> None:
    """Remove what names the customer outside its history, and end the erasure.

    It waits until the uploaded files that name the customer are deleted (see `imports`).
    """
    with transaction.atomic():
        mine = CustomerErasure.objects.select_for_update(skip_locked=True)
        erasure = mine.filter(pk=erasure_id, state=State.RUNNING).first()
        if erasure is None or is_in_stored_file(who.user_id, erasure.requested_at):
            return
        counts: Counter[str] = Counter(erasure.counts)
        counts["failed tasks"] += anonymization.empty_failed_tasks_of_customer(who)
        counts["operators' texts"] += erase_operator_texts(who)
        enable_targets(who.addresses)
        erasure.state, erasure.ended_at = State.DONE, sql.now()
        erasure.user_id, erasure.identifiers, erasure.counts = "", {}, dict(counts)
        erasure.save()
    log.info("erasure_done", id=str(erasure_id), **{name.replace(" ", "_"): n for name, n in counts.items()})


# An anonymous event has the new id of its customer.
_EVENTS = """
SELECT e.id FROM scheduling_event AS e JOIN scheduling_customer AS c ON c.id = e.customer_id
WHERE e.customer_id = %(customer)s AND e.user_id <> c.user_id LIMIT %(most)s
"""
_HISTORY = f"SELECT EXISTS ({_EVENTS.replace('%(most)s', '1')})"
# The id of the source may name the customer. A repeated event counts as new then.
_ANONYMIZE_EVENTS = """
UPDATE scheduling_event AS e
SET user_id = %(user_id)s, event_id = 'erased:' || e.id, data = '{}', trace_id = NULL,
    chat_id = CASE WHEN EXISTS (SELECT FROM scheduling_community AS c WHERE c.chat_id = e.chat_id
                                AND (c.name <> '' OR c.targets <> ''))
                   THEN e.chat_id ELSE '' END
WHERE e.id = ANY(%(ids)b)
"""
