"""Show the timeline of a touch and the receipts for it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.contrib.postgres.aggregates import ArrayAgg
from django.db.models import OuterRef, Subquery
from django.utils.translation import gettext as _

from scheduling.admin.dashboard.charts import Figure
from scheduling.admin.labels import translate_reason
from scheduling.admin.page_reads import PageTimeLimit
from scheduling.admin.shown_values import find_address, format_instant
from scheduling.durations import parse_duration
from scheduling.ids import reveal_odd_characters
from scheduling.models import (
    Attempt,
    AttemptOutcome,
    Category,
    Customer,
    DeliveryReceipt,
    DisabledTarget,
    FailedTask,
    GuardDecision,
    Node,
    ReceiptKind,
    Touch,
    Verdict,
)
from scheduling.models.node import digest_address
from scheduling.models.touch import MOST_VERDICTS
from scheduling.monitoring.duration_text import describe_duration
from scheduling.policy.guards import ALL_NODES
from scheduling.receipts import count_delivered_touches, count_receipts
from scheduling.redaction import redact_text

SPAN = timedelta(days=7)


def build_receipt_figures(node: Node) -> list[Figure]:
    """Return the receipts of the last seven days by kind with their share of the delivered touches. [] for none."""
    within = PageTimeLimit(settings.TIMEOUTS.dashboard)
    counts = within(lambda: count_receipts(node.pk, SPAN))
    if counts == {}:
        return []
    delivered = within(lambda: count_delivered_touches(node.pk, SPAN))
    figures = []
    for kind in ReceiptKind.values:
        count = None if counts is None else counts.get(kind, 0)
        is_bad = kind in (ReceiptKind.BOUNCED, ReceiptKind.COMPLAINED) and counts and kind in counts
        share = ""
        if count is not None and delivered:
            percent = f"{100 * count / delivered:.1f}"
            share = _("%(share)s %% of %(delivered)s delivered") % {"share": percent, "delivered": delivered}
        figures.append(Figure(ReceiptKind(kind).label, count, tone="bad" if is_bad else "", hint=share))
    return figures


def receipt_kinds_subquery() -> Subquery:
    """Return the kinds of a touch's receipts."""
    mine = DeliveryReceipt.objects.filter(delivery_key=OuterRef("root_id")).order_by().values("delivery_key")
    return Subquery(mine.annotate(kinds=ArrayAgg("kind")).values("kinds"))


def format_receipt_kinds(row: Any) -> str:
    return ", ".join(str(ReceiptKind(kind).label) for kind in sorted(row.receipt_kinds or ()))


def list_disabled_addresses(customer: Customer) -> list[DisabledTarget]:
    """Return the disabled targets among a customer's addresses, each with its `address_name` and a redacted reason."""
    if not isinstance(customer.addresses, dict) or not customer.addresses:
        return []
    names = {digest_address(address): name for name, address in customer.addresses.items()}
    found = list(DisabledTarget.objects.filter(target_digest__in=names).select_related("channel"))
    for each in found:
        each.address_name = names[each.target_digest]  # type: ignore[attr-defined]
        each.reason = redact_text(each.reason)
    return found


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One step, with its facts as label and value."""

    at: datetime | None
    icon: str
    tone: str  #: "good", "bad", "wait", "plain"
    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    body: str = ""
    link: str = ""
    link_text: str = ""


def build_timeline(touch: Touch) -> list[TimelineEntry]:
    """Return the steps of a touch in order of time."""
    between = []
    if touch.queued_at is not None:  # the latest dispatch to the workers
        facts = [(_("wake-ups"), str(touch.wakeups))] if touch.wakeups > 1 else []
        between.append(TimelineEntry(touch.queued_at, "move_to_inbox", "plain", _("Dispatched"), facts))
    entries = [_build_verdict_entry(each) for each in touch.verdicts]
    if len(entries) >= MOST_VERDICTS:
        entries.insert(1, TimelineEntry(entries[0].at, "more_horiz", "plain", _("Earlier verdicts are not shown")))
    between += entries
    between += [_build_attempt_entry(each) for each in touch.attempts]
    # A verdict and its attempt may share an instant. Verdicts are added first, and the sort is stable.
    between.sort(key=lambda moment: moment.at.timestamp() if moment.at else 0)
    return [
        _build_event_entry(touch),
        _build_plan_entry(touch),
        *between,
        _build_end_entry(touch),
        *_build_follow_up_entries(touch),
    ]


def format_verdict_figure(text: str) -> str:
    """Format the observed value or limit of a verdict: local time for instants, a count with its window for caps."""
    try:
        return format_instant(datetime.fromisoformat(text))
    except ValueError:
        pass
    if text == ALL_NODES:
        return _("global hold-out, of all nodes")
    if found := re.fullmatch(r"(\d+) in (\S+)(?: of (.+))?", text):
        with suppress(ValueError):
            span = describe_duration(parse_duration(found[2]))
            words = _("%(count)s in %(span)s") % {"count": found[1], "span": span}
            return words + describe_counted_kinds((found[3] or "").split(", "))
    if found := re.fullmatch(r"(\d+) \((\d+) unsettled\)", text):
        return _("%(count)s, %(open)s of them still being sent") % {"count": found[1], "open": found[2]}
    return _name_category(text)


def _name_category(text: str) -> str:
    """Return the label of a message category; another text unchanged."""
    return str(Category(text).label) if text in Category.values else text


def describe_counted_kinds(kinds: Iterable[str]) -> str:
    """Return in brackets what a rule counts, such as `channel sms` or `tag sale`; "" for all messages."""
    names = {"channel": _("channel"), "category": _("category"), "tag": _("tag")}
    pairs = [each.partition(" ") for each in kinds if each]
    shown = [f"{names.get(name, name)} {_name_category(value)}" for name, _blank, value in pairs]
    return f" ({', '.join(shown)})" if shown else ""


def _build_event_entry(touch: Touch) -> TimelineEntry:
    event = touch.event
    facts = [
        (_("type"), event.type),
        (_("source"), f"{event.source} # {reveal_odd_characters(event.event_id)}"),
        (_("received at"), format_instant(event.received_at)),
        (_("trace id"), event.trace.hex),
    ]
    link, words = find_address(event), _("open the event")
    return TimelineEntry(event.occurred_at, "bolt", "plain", _("Event"), facts, link=link, link_text=words)


def _build_plan_entry(touch: Touch) -> TimelineEntry:
    facts = [
        (_("node"), f"{touch.node.key} (v{touch.node_version})"),
        (_("delay"), describe_duration(touch.planned_at - touch.event.occurred_at)),
        (_("planned for"), format_instant(touch.planned_at)),
        (_("expires at"), format_instant(touch.expires_at)),
    ]
    return TimelineEntry(touch.created_at, "event_upcoming", "plain", _("Planned"), facts)


def _build_verdict_entry(verdict: Verdict) -> TimelineEntry:
    titles = {
        GuardDecision.SEND: (_("Guards passed"), "verified", "good"),
        GuardDecision.HOLD: (_("Deferred"), "hourglass_top", "wait"),
        GuardDecision.SUPPRESS: (_("Suppressed"), "block", "bad"),
    }
    title, icon, tone = titles[GuardDecision(verdict.decision)]
    return TimelineEntry(verdict.at, icon, tone, title, list_verdict_facts(verdict))


def list_verdict_facts(verdict: Any) -> list[tuple[str, str]]:
    """Return the facts of a stored or previewed verdict."""
    version = f" (v{verdict.rule_version})" if verdict.rule_version else ""
    facts = [
        (_("rule"), f"{translate_reason(verdict.rule)}{version}" if verdict.rule else ""),
        (_("observed"), format_verdict_figure(verdict.observed)),
        (_("limit"), format_verdict_figure(verdict.limit)),
        (_("next eligible"), format_instant(verdict.next_eligible_at) if verdict.next_eligible_at else ""),
    ]
    return [(label, value) for label, value in facts if value]


def _build_attempt_entry(attempt: Attempt) -> TimelineEntry:
    tone = {"delivered": "good", "transient": "wait"}.get(attempt.outcome, "bad")
    took = ""
    if attempt.ended_at is not None:
        took = _("%(ms)s ms") % {"ms": round((attempt.ended_at - attempt.started_at).total_seconds() * 1000)}
    facts = [
        (_("outcome"), str(AttemptOutcome(attempt.outcome).label)),
        (_("reason"), translate_reason(attempt.reason) if attempt.reason else ""),
        (_("status"), str(attempt.status) if attempt.status is not None else ""),
        (_("took"), took), (_("answer"), redact_text(attempt.detail)), (_("subject"), redact_text(attempt.subject)),
    ]  # fmt: skip
    title = _("Attempt %(number)s") % {"number": attempt.number}
    shown = [fact for fact in facts if fact[1]]
    return TimelineEntry(attempt.started_at, "outgoing_mail", tone, title, shown, body=redact_text(attempt.body))


def _build_end_entry(touch: Touch) -> TimelineEntry:
    facts = [(_("reason"), translate_reason(touch.reason))] if touch.reason else []
    if touch.state in ("scheduled", "queued", "running"):
        facts.append((_("due at"), format_instant(touch.due_at)))
        title = _("Now: %(state)s") % {"state": touch.get_state_display()}
        return TimelineEntry(None, "schedule", "wait", title, facts)
    tone = "good" if touch.state == "delivered" else "bad" if touch.state in ("failed", "unknown") else "plain"
    icon = {"delivered": "check_circle", "cancelled": "cancel", "suppressed": "block"}.get(touch.state, "error")
    if touch.state == "delivered" and touch.settled_at:
        late = (touch.settled_at - touch.planned_at).total_seconds()
        facts.append((_("after its time"), _("%(seconds)s s") % {"seconds": f"{late:.1f}"}))
    return TimelineEntry(touch.settled_at, icon, tone, touch.get_state_display(), facts)


def _build_follow_up_entries(touch: Touch) -> list[TimelineEntry]:
    """Return what followed the end: receipts, complaints, the failed task, and new touches that repeat this one."""
    moments = [
        _build_receipt_entry(each) for each in DeliveryReceipt.objects.filter(delivery_key=touch.root_id).order_by("at")
    ]
    moments += [
        TimelineEntry(
            each.complained_at, "sentiment_dissatisfied", "bad", _("Complaint"),
            link=find_address(each), link_text=_("open the complaint"),
        )
        for each in touch.complaints.order_by("complained_at")
    ]  # fmt: skip
    if failed := FailedTask.objects.filter(task_id=touch.pk).first():
        facts = [(_("state"), failed.get_state_display())]
        if failed.acted_at:
            facts += [(_("by"), failed.actor_name), (_("reason of the action"), failed.action_reason)]
        moments.append(TimelineEntry(
            failed.acted_at, "person_alert", "plain", _("Failed task"), facts,
            link=find_address(failed), link_text=_("open the failed task"),
        ))  # fmt: skip
    moments += [
        TimelineEntry(
            again.created_at, "replay", "plain", _("Published again"), [(_("state"), again.get_state_display())],
            link=find_address(again), link_text=str(again.pk),
        )
        for again in Touch.objects.filter(retry_of=touch.pk)
    ]  # fmt: skip
    return moments


def _build_receipt_entry(receipt: DeliveryReceipt) -> TimelineEntry:
    bad = receipt.kind in (ReceiptKind.BOUNCED, ReceiptKind.COMPLAINED)
    facts = [(_("received at"), format_instant(receipt.received_at))]
    if receipt.detail:
        facts.append((_("answer"), redact_text(receipt.detail)))
    title = _("Receipt: %(kind)s") % {"kind": receipt.get_kind_display()}
    return TimelineEntry(receipt.at, "mark_chat_read", "bad" if bad else "good", title, facts)
