"""Store receipts of sent messages: once for each message and kind, in any order, with what follows from them.

Events come first: their ids are made of the delivery key, so a repeat after a crash stores nothing twice. The sender
of a receipt that got no answer sends it again. Addresses of customers that bounced for good are disabled.

Callbacks of vendors report receipts, and messages of customers. Mail reports by delivery status notifications (RFC
3464) and complaints (RFC 5965). The sent mail is known by its `Message-ID`, which contains the delivery key. An
outsider does not know the key. Its receiver does, but such a mail can disable only the address that it names, and only
if it is the customer's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from email import message_from_bytes, policy
from email.errors import MessageError
from email.message import EmailMessage, Message
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import UUID

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Count
from django.db.models.functions import Now
from django.utils.encoding import punycode

from scheduling import sql
from scheduling.channels.base import CallbackResult, CustomerMessage, Report, channel_kinds
from scheduling.configuration import snapshot
from scheduling.configuration.snapshot import Snapshot
from scheduling.delivery.routing import find_delivery_keys, store_disabled_targets
from scheduling.ids import new_id
from scheduling.ledger import locks
from scheduling.models import Customer, CustomerChange, DeliveryReceipt, ReceiptKind, WebhookEvent, WebhookFact
from scheduling.models.customer import REPLYING
from scheduling.models.encrypted import Sealed
from scheduling.models.node import digest_address
from scheduling.planning.ingest import NewEvent, record_and_publish
from scheduling.planning.own_events import load_causes
from scheduling.policy.matrix import RECEIPT_TYPES, SOURCE, compose_end_data, read_depth
from scheduling.policy.specs import ChannelSpec
from scheduling.webhooks import note_facts

log = structlog.get_logger(__name__)


def load_receipts(delivery_keys: Iterable[UUID]) -> dict[UUID, list[dict[str, Any]]]:
    """Return the receipts of messages by delivery key, each in order of time, for JSON."""
    found: dict[UUID, list[dict[str, Any]]] = {}
    rows = DeliveryReceipt.objects.filter(delivery_key__in=set(delivery_keys)).order_by("at", "id")
    for row in rows:
        receipt = {"type": row.kind, "time": row.at, "received_at": row.received_at, "detail": row.detail}
        found.setdefault(row.delivery_key, []).append(receipt)
    return found


def count_receipts(node_id: int, span: timedelta) -> dict[str, int]:
    """Return the number of receipts of a node by kind, received within the last `span`."""
    received = DeliveryReceipt.objects.filter(node_id=node_id, received_at__gt=Now() - span)
    return dict(received.values_list("kind").annotate(Count("pk")))


def count_delivered_touches(node_id: int, span: timedelta) -> int:
    """Return the number of touches of a node that were delivered within the last `span`."""
    ((count,),) = sql.rows(_DELIVERED, {"node": node_id, "span": span})
    return int(count)


_DELIVERED = """
SELECT count(*) FROM scheduling_touch_ended
WHERE settled_at > statement_timestamp() - %(span)s::interval AND node_id = %(node)s AND state = 'delivered'
"""


# --- recording --------------------------------------------------------------------------------------------------------


BATCH = 500
DETAIL = 300  #: characters
ERASED = "erased:"  #: start of the user id of an erased customer
#: By kind of a receipt, the event that always follows.
CONSEQUENCES: Mapping[str, str] = {
    ReceiptKind.REPLIED: "conversation.started",
    ReceiptKind.COMPLAINED: "complaint.received",
}


class ReportedTouch(NamedTuple):
    """The first touch of a delivery key."""

    task_id: UUID
    node_id: int
    event_id: UUID
    customer_id: int
    user_id: str
    chat_id: str
    created_at: datetime


class RefusedReport(NamedTuple):
    position: int
    field: str
    message: str


@dataclass(slots=True)
class RecordingResult:
    accepted: int = 0
    duplicates: int = 0
    refused: list[RefusedReport] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FoundReport:
    """A report with its touch and its time."""

    report: Report
    touch: ReportedTouch
    at: datetime


def record_reports(reports: Sequence[Report]) -> RecordingResult:
    """Store up to `BATCH` receipts and what follows from new ones. Idempotent.

    A reply opens a conversation, a complaint is recorded, and a node that has a kind as its trigger gets an event.
    Reports about unknown messages are refused one by one; the others are stored.

    Raises:
        django.db.Error: PostgreSQL is unavailable. Send all of them again.
    """
    config, now, result = snapshot.current(), sql.now(), RecordingResult()
    found = _find_touches(config, reports, result, now)
    first: dict[tuple[UUID, str], FoundReport] = {}
    for each in sorted(found, key=lambda one: one.at):
        first.setdefault((each.touch.task_id, each.report.kind), each)
    keys = sorted({key for key, _ in first})
    stored = {(row[0], row[1]) for row in sql.rows(_STORED, {"keys": list(keys)})} if keys else set()
    new = [each for key, each in first.items() if key not in stored]
    _record_consequences(config, new)
    lasting = {each.touch.task_id: each for each in found if each.report.permanent}
    inserted = _store(config, first, lasting)
    result.accepted = inserted
    result.duplicates = len(found) - inserted
    return result


def _find_touches(
    config: Snapshot, reports: Sequence[Report], result: RecordingResult, now: datetime
) -> list[FoundReport]:
    channels = {spec.key: spec.id for spec in config.channels.values()}
    by_vendor = [(channels[each.channel], each.vendor_id) for each in reports if each.channel in channels]
    keys = find_delivery_keys(by_vendor)
    named = [each.delivery_key or keys.get((channels.get(each.channel, 0), each.vendor_id)) for each in reports]
    wanted = sorted({key for key in named if key})
    rows = sql.rows(_TOUCHES, {"keys": list(wanted)}) if wanted else []
    touches = {row[0]: ReportedTouch._make(row) for row in rows}
    found = []
    for position, (report, key) in enumerate(zip(reports, named, strict=True)):
        if report.channel and report.channel not in channels:
            result.refused.append(RefusedReport(position, "channel", "there is no such channel"))
        elif key is None:
            days = settings.AFTERTOUCH_VENDOR_IDS_DAYS
            message = f"no message of this channel has this id; ids are kept for {days} days"
            result.refused.append(RefusedReport(position, "vendor_id", message))
        elif key not in touches:
            days = settings.AFTERTOUCH_RETENTION_DAYS
            name = "delivery_key" if report.delivery_key else "vendor_id"
            message = f"no touch has this delivery key; touches are kept for {days} days"
            result.refused.append(RefusedReport(position, name, message))
        elif report.permanent and _has_sealed_address(config, touches[key]):
            message = "the settings of this channel cannot be read on this server; send it again later"
            result.refused.append(RefusedReport(position, "channel", message))
        else:
            found.append(FoundReport(report, touches[key], report.at or now))
    return found


def _has_sealed_address(config: Snapshot, touch: ReportedTouch) -> bool:
    """Return whether settings that cannot be read here name the address: once stored, the bounce disables nothing."""
    node = config.nodes.get(touch.node_id)
    kind = channel_kinds().get(node.channel.kind) if node else None
    return bool(node and kind and not kind.address_key and isinstance(node.channel.config, Sealed))


def _record_consequences(config: Snapshot, new: Sequence[FoundReport]) -> None:
    """Record the events that follow from new receipts. Lock their customers: an erased one must not come back."""
    wanted = [each for each in new if _has_consequence(each.report) or _is_report_followed(config, each)]
    if not wanted:
        return
    with transaction.atomic():
        sql.limit_lock_waits(settings.TIMEOUTS.event_lock)
        remaining = locks.lock_remaining(each.touch.customer_id for each in wanted)
        if events := _compose_events(config, [each for each in wanted if each.touch.customer_id in remaining]):
            record_and_publish(events)


def _compose_events(config: Snapshot, new: Sequence[FoundReport]) -> list[NewEvent]:
    events = [_compose_event(each, CONSEQUENCES[each.report.kind]) for each in new if _has_consequence(each.report)]
    followed = [each for each in new if _is_report_followed(config, each)]
    causes = load_causes({each.touch.event_id for each in followed}) if followed else {}
    for each in followed:
        node, cause, task_id = config.nodes.get(each.touch.node_id), causes.get(each.touch.event_id), each.touch.task_id
        if node and cause and read_depth(cause.type, cause.data) <= node.most_depth:
            data = compose_end_data(node, task_id, task_id, "", cause)
            events.append(replace(_compose_event(each, f"touch.{each.report.kind}"), data=data, trace_id=cause.trace))
    return events


def _has_consequence(report: Report) -> bool:
    return report.kind in CONSEQUENCES and (report.kind != ReceiptKind.REPLIED or report.opens_conversation)


def _is_report_followed(config: Snapshot, found: FoundReport) -> bool:
    """Return whether a node has this receipt as its trigger, or cancels by it."""
    kind = f"touch.{found.report.kind}"
    return kind in RECEIPT_TYPES and bool(config.triggered.get(kind) or config.cancelling.get(kind))


def _compose_event(found: FoundReport, kind: str) -> NewEvent:
    touch = found.touch
    data = {"task_id": str(touch.task_id), **({"chat_id": touch.chat_id} if touch.chat_id else {})}
    return NewEvent(SOURCE, f"{kind}:{touch.task_id}", kind, touch.user_id, touch.chat_id, found.at, data)


def _store(config: Snapshot, first: Mapping[tuple[UUID, str], FoundReport], lasting: Mapping[UUID, FoundReport]) -> int:
    """Store the receipts and what follows in the same transaction. Return the number of new receipts.

    `lasting` are permanent bounces. One can follow a bounce that might have passed.
    """
    if not first:
        return 0
    ordered = [first[key] for key in sorted(first)]  # one order for all writers prevents deadlocks
    with transaction.atomic():
        written = sql.rows(
            _STORE,
            {
                "ids": [new_id() for _ in ordered],
                "keys": [each.touch.task_id for each in ordered],
                "kinds": [each.report.kind for each in ordered],
                "nodes": [each.touch.node_id for each in ordered],
                "ats": [each.at for each in ordered],
                "details": [_detail_of(each) for each in ordered],
            },
        )
        inserted = {(row[0], row[1]) for row in written if row[2]}
        new = [each for each in ordered if (each.touch.task_id, each.report.kind) in inserted]
        # The details of permanent bounces replace others. A repeated report differs in nothing: it must not disable
        # an address that an operator has enabled since.
        given = {"keys": list(lasting), "details": [_detail_of(each) for each in lasting.values()]}
        differing = {row[0] for row in sql.rows(_REPLACE_DETAILS, given)} if lasting else set()
        gone = {each.touch.task_id for each in new if each.report.permanent} | differing
        _disable_bounced_targets(config, [lasting[key] for key in sorted(gone)])
        note_facts([_compose_fact(config, each) for each in new])
    return len(new)


def _disable_bounced_targets(config: Snapshot, bounced: Iterable[FoundReport]) -> None:
    """Disable the addresses at which the messages bounced.

    Without the bounced address it is the customer's present one. If that was changed after the touch, the bounce is not
    about it. Idempotent.
    """
    targets = []
    for each in bounced:
        node = config.nodes.get(each.touch.node_id)
        kind = channel_kinds().get(node.channel.kind) if node else None
        if node is None or kind is None:
            continue
        name = kind.address_key or str(node.channel.config.get("address") or "")  # of a declared HTTP channel
        row = Customer.objects.filter(pk=each.touch.customer_id).first()
        address = str(row.addresses.get(name) or "") if row and name and isinstance(row.addresses, dict) else ""
        if each.report.address:
            is_present = _encode_domain(address) == _encode_domain(each.report.address)
        else:
            changes = CustomerChange.objects.filter(customer=each.touch.customer_id, at__gt=each.touch.created_at)
            is_present = not changes.filter(after__has_key="addresses").exists()
        if address and is_present:
            targets.append((node.channel.id, digest_address(address), "", f"bounced: {_detail_of(each)}"[:200]))
    store_disabled_targets(targets)


def _encode_domain(address: str) -> str:
    """Return an address as mail servers write it: `ann@xn--fsqu00a.cn` for `ann@例子.cn`."""
    name, at, domain = address.lower().rpartition("@")
    try:
        return f"{name}{at}{punycode(domain)}"
    except UnicodeError:  # no domain
        return f"{name}{at}{domain}"


def _compose_fact(config: Snapshot, found: FoundReport) -> WebhookFact:
    touch, node = found.touch, config.nodes.get(found.touch.node_id)
    data = {
        "task_id": str(touch.task_id), "delivery_key": str(touch.task_id), "receipt": found.report.kind,
        "node": node.key if node else None,
    }  # fmt: skip
    if not touch.user_id.startswith(ERASED):
        data |= {"user_id": touch.user_id, "chat_id": touch.chat_id}
    return WebhookFact(type=WebhookEvent.TOUCH_RECEIPT, object_key=f"touch:{touch.task_id}", at=found.at, data=data)


def _detail_of(found: FoundReport) -> str:
    return "" if found.touch.user_id.startswith(ERASED) else found.report.detail[:DETAIL]


_TOUCHES = """
SELECT t.task_id, t.node_id, t.event_id, t.customer_id, c.user_id, t.chat_id, t.created_at
FROM scheduling_touch AS t JOIN scheduling_customer AS c ON c.id = t.customer_id
WHERE t.task_id = ANY(%(keys)b) AND t.root_id = t.task_id
"""
_STORED = "SELECT delivery_key, kind FROM scheduling_deliveryreceipt WHERE delivery_key = ANY(%(keys)b)"
_STORE = """
INSERT INTO scheduling_deliveryreceipt AS r (id, delivery_key, kind, node_id, at, received_at, detail)
SELECT id, delivery_key, kind, node_id, at, statement_timestamp(), detail
FROM unnest(%(ids)b::uuid[], %(keys)b::uuid[], %(kinds)b::text[], %(nodes)b::bigint[], %(ats)b::timestamptz[],
            %(details)b::text[]) AS v(id, delivery_key, kind, node_id, at, detail)
ORDER BY delivery_key, kind
ON CONFLICT (delivery_key, kind) DO UPDATE SET at = EXCLUDED.at WHERE EXCLUDED.at < r.at
RETURNING delivery_key, kind, xmax = 0
"""
_REPLACE_DETAILS = """
UPDATE scheduling_deliveryreceipt AS r SET detail = v.detail
FROM unnest(%(keys)b::uuid[], %(details)b::text[]) AS v(key, detail)
WHERE r.delivery_key = v.key AND r.kind = 'bounced' AND r.detail <> v.detail
RETURNING r.delivery_key
"""


def erase_receipts(delivery_keys: Sequence[UUID]) -> int:
    """Empty the details of the receipts of these messages and delete the vendors' ids. Return the number of receipts.

    Call it while the customer is locked. Idempotent.
    """
    keys = {"keys": sorted(set(delivery_keys))}
    sql.execute("DELETE FROM scheduling_vendormessage WHERE delivery_key = ANY(%(keys)b)", keys)
    return sql.execute("UPDATE scheduling_deliveryreceipt SET detail = '' WHERE delivery_key = ANY(%(keys)b)", keys)


# --- callbacks of vendors ---------------------------------------------------------------------------------------------


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
    reports = [each if each.delivery_key else replace(each, channel=spec.key) for each in result.reports]
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
        events = [
            NewEvent(
                SOURCE, _name_message(f"message:{spec.key}:{each.message_id}:{user_id}"), "conversation.started",
                user_id, "", each.at, {"channel": spec.key},
            )
            for user_id, each in spoken
        ]  # fmt: skip
        if events:
            record_and_publish(events)
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


# --- mail about sent mail ---------------------------------------------------------------------------------------------


LARGEST_MAIL = 1_048_576  #: bytes; the rest of a larger one is not read
MOST_PARTS = 50
#: The mailbox or its domain does not exist, or is closed. Other refusals, such as a full mailbox, may pass.
GONE = re.compile(r"5\.(1\.(1|2|3|6|10)|2\.1)\b")
MESSAGE_ID = re.compile(r"<([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})@", re.IGNORECASE)
HEADERS = re.compile(rb"^message-id:\s*(<[^>\r\n]{1,300}>)", re.IGNORECASE | re.MULTILINE)
KINDS = {"failed": "bounced", "delivered": "delivered"}


def record_bounce(content: bytes) -> RecordingResult:
    """Record what a mail reports. Idempotent.

    Raises:
        ValueError: it reports nothing about a mail of Aftertouch.
        django.db.Error: PostgreSQL is unavailable.
    """
    return record_reports([read_bounce(content)])


def read_bounce(content: bytes) -> Report:
    """Return the receipt of a mail. Raises `ValueError` if it reports nothing about a mail of Aftertouch."""
    content = content[:LARGEST_MAIL]
    try:
        mail = message_from_bytes(content, policy=policy.default.clone(raise_on_defect=False))
        parts = [part for _, part in zip(range(MOST_PARTS), mail.walk(), strict=False)]
        report, key = _read_report(parts), _find_delivery_key(mail, parts, content)
    except (MessageError, LookupError, AttributeError, ValueError, RecursionError, TypeError) as error:
        raise ValueError("the mail cannot be read") from error
    if report is None:
        raise ValueError("the mail is no report about a delivery")
    if key is None:
        raise ValueError("the mail names no message of Aftertouch")
    return Report(delivery_key=key, **report)


def _read_report(parts: Sequence[Message]) -> dict[str, Any] | None:
    for part in parts:
        kind = part.get_content_type()
        if kind == "message/feedback-report":
            return {"kind": "complained", "detail": "feedback-report"}
        if kind == "message/delivery-status":
            for block in part.get_payload() if part.is_multipart() else ():
                if isinstance(block, Message) and (found := _read_recipient(block)):
                    return found
    return None


def _read_recipient(block: Message) -> dict[str, Any] | None:
    """Return the receipt of one recipient, or None for a block about the whole mail and for a delay."""
    kind = KINDS.get(_read_mail_header(block, "Action").lower())
    if kind is None:
        return None
    status = _read_mail_header(block, "Status")
    text = _read_mail_header(block, "Diagnostic-Code").partition(";")[2]
    detail = " ".join(f"{status} {text}".split())[:DETAIL]
    if kind == "delivered":
        return {"kind": kind, "detail": detail}
    address = _read_mail_header(block, "Original-Recipient") or _read_mail_header(block, "Final-Recipient")
    address = address.rpartition(";")[2].strip()[:254]
    return {"kind": kind, "detail": detail, "address": address, "permanent": bool(GONE.match(status) and address)}


def _read_mail_header(block: Message, name: str) -> str:
    text = str(block.get(name, ""))
    return "".join(letter if letter.isprintable() else " " for letter in text).strip()


def _find_delivery_key(mail: EmailMessage | Message, parts: Sequence[Message], content: bytes) -> UUID | None:
    """Return the key of the returned mail: of its part, or of its headers in the text of the report."""
    for part in parts:
        if part is not mail and part.get("Message-ID") and (found := MESSAGE_ID.match(str(part["Message-ID"]).strip())):
            return UUID(found[1])
    own = str(mail.get("Message-ID", "")).strip()
    for name in HEADERS.findall(content):
        text = name.decode("ascii", "replace")
        if text != own and (found := MESSAGE_ID.match(text)):
            return UUID(found[1])
    return None
