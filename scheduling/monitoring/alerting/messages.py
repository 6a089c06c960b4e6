"""Compose and send alert messages: one message per receiver and pass, through the receiver's channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import groupby
from uuid import UUID, uuid5

from django.conf import settings
from django.urls import reverse
from django.utils import translation
from django.utils.timezone import localtime
from django.utils.translation import gettext as _

from scheduling.channels.base import Channel, Message, Outcome, Permanent, Transient
from scheduling.channels.once import send_once
from scheduling.channels.quota import UNAVAILABLE_DELAY, QuotaGate, receiver_key
from scheduling.configuration import snapshot
from scheduling.delivery import routing
from scheduling.durations import from_seconds
from scheduling.ids import new_id
from scheduling.models import Alert, AlertReceiver
from scheduling.monitoring.alerting.alert_actions import AlertAction
from scheduling.monitoring.alerting.conditions import Condition, Unit, load_conditions
from scheduling.monitoring.duration_text import describe_duration
from scheduling.policy.specs import ChannelSpec, CustomerSpec

NAMESPACE = UUID("6e0f3d5a-5a57-4c1f-9d43-8f1b8f9f1c11")
RANK = (AlertAction.FIRE, AlertAction.RESOLVE, AlertAction.REMIND)
SUBJECTS = 8  #: subjects named in a message; further ones are only counted
DueAlert = tuple[AlertAction, Alert]


@dataclass(frozen=True)
class AlertRoute:
    """The resolved channel and target of a receiver.

    Kept in memory, so that an alert can be sent while the database is unavailable.
    """

    spec: ChannelSpec
    channel: Channel
    target: dict[str, object]


def resolve_route(receiver: AlertReceiver) -> AlertRoute:
    """Resolve the channel and target of a receiver.

    Raises:
        routing.NoTarget: the receiver has no address.
    """
    spec = snapshot.channel_spec(receiver.channel)
    channel = routing.channel_of(spec)
    place = receiver.community
    who = CustomerSpec(0, "", addresses={channel.address_key: receiver.address} if receiver.address else {})
    chat_id, communities = (place.chat_id, {place.chat_id: place.targets}) if place else ("", {})
    target = routing.target_for(spec, channel, who, chat_id, communities)
    if not target and not spec.config.get("url"):
        raise routing.NoTarget("no_target", f"no {spec.kind} target")
    return AlertRoute(spec, channel, dict(target))


def send_alerts(route: AlertRoute, due_alerts: Sequence[DueAlert], now: datetime) -> Outcome:
    """Send one message, one attempt.

    Returns `Transient("quota")` if the receiver's quota for this minute is used up. The quota is shared with touches.
    """
    with translation.override(settings.LANGUAGE_CODE):
        subject, body = compose_message(due_alerts, now)
    return send_alert_message(route, subject, body, now, derive_delivery_key(due_alerts))


def send_alert_message(route: AlertRoute, subject: str, body: str, now: datetime, key: UUID) -> Outcome:
    """Send one text, one attempt. A defect of the channel becomes a `Permanent` outcome."""
    message = Message(
        task_id=new_id(), delivery_key=key, user_id="", chat_id="", node="alerts", content_type="alert",
        category="service", subject=subject, body=body, locale=settings.LANGUAGE_CODE, target=route.target,
        event={"source": "aftertouch", "id": str(key), "type": "aftertouch.alert", "time": now.isoformat()},
    )  # fmt: skip
    try:
        slot = receiver_key(route.channel, message)
    except Exception as error:  # a defect of the channel; handled as in delivery
        return Permanent("channel_error", f"{type(error).__name__}: {error}"[:500])
    grant = get_alert_quota().acquire(route.channel.quotas, {slot: 1})[slot]
    # Without Redis no quota is known. The alert may be about Redis itself, and one message a pass is within any quota.
    if not grant.granted and grant.next_in != UNAVAILABLE_DELAY:
        return Transient("quota", retry_after=grant.next_in)
    outcome = send_once(route.channel, message, route.spec.timeout)
    if route.channel.quotas and isinstance(outcome, Transient) and outcome.retry_after:
        get_alert_quota().throttle(slot, outcome.retry_after)
    return outcome


@cache
def get_alert_quota() -> QuotaGate:
    """Return the quota gate of this process for alerts."""
    return QuotaGate.connect(settings.REDIS_URL)


def derive_delivery_key(due_alerts: Sequence[DueAlert]) -> UUID:
    """Derive the key from the alerts and their times.

    A retry has the same key, so that the receiver can drop the duplicate.
    """
    parts = [
        f"{word}|{each.receiver_id}|{each.condition}|{each.subject}|{each.since}|{each.last_message_at}"
        for word, each in due_alerts
    ]
    return uuid5(NAMESPACE, "\n".join(sorted(parts)))


# --- text -----------------------------------------------------------------------------------------------------------


def compose_message(due_alerts: Sequence[DueAlert], now: datetime) -> tuple[str, str]:
    """Return subject and body in the active language."""
    known = load_conditions()
    order = list(known)

    def group(alert_of: DueAlert) -> tuple[int, int]:
        return RANK.index(alert_of[0]), order.index(alert_of[1].condition)

    parts = []
    for _rank, each in groupby(sorted(due_alerts, key=group), key=group):
        members = list(each)
        parts.append(
            _compose_paragraph(members[0][0], known[members[0][1].condition], [alert for _word, alert in members], now)
        )
    heads = [part.partition("\n")[0] for part in parts]
    more = len(heads) - 1
    subject = heads[0] + (_(" (and %(count)s more)") % {"count": more} if more else "")
    return subject, "\n\n".join(parts)


def _compose_paragraph(action: AlertAction, condition: Condition, alerts: Sequence[Alert], now: datetime) -> str:
    since = min(alert.since for alert in alerts)
    if action == AlertAction.RESOLVE:
        until = max(alert.absent_since or now for alert in alerts)
        lines = [_("[Over] %(title)s"), _("From %(since)s to %(until)s (%(span)s).")]
    else:
        until = now
        lines = [
            _("[Alert] %(title)s") if action == AlertAction.FIRE else _("[Still] %(title)s"),
            _("Since %(since)s (%(span)s)."),
        ]
    values = {
        "title": _format_title(condition, alerts), "since": _format_local_time(since),
        "until": _format_local_time(until),
        "span": _format_rough_duration((until - since).total_seconds()),
    }  # fmt: skip
    written = [line % values for line in lines]
    if action != AlertAction.RESOLVE:
        link = settings.AFTERTOUCH_BASE_URL.rstrip("/") + reverse(condition.page)
        written += [_format_severity(condition, alerts), str(condition.action), link]
    return "\n".join(line for line in written if line)


def _format_title(condition: Condition, alerts: Sequence[Alert]) -> str:
    names = sorted(condition.name(alert.subject) for alert in alerts)
    what = _(", ").join(names[:SUBJECTS]) + (f" … (+{len(names) - SUBJECTS})" if len(names) > SUBJECTS else "")
    return str(condition.title) % {"what": what}


def _format_severity(condition: Condition, alerts: Sequence[Alert]) -> str:
    worst = max(alert.value for alert in alerts)
    if condition.unit == Unit.SPAN:
        return _("The oldest: %(span)s.") % {"span": _format_rough_duration(worst)}
    if condition.unit == Unit.COUNT:
        return _("There are %(count)s.") % {"count": f"{worst:g}"}
    return ""


def _format_rough_duration(seconds: float) -> str:
    """Format a duration: whole minutes from 10 minutes on, whole hours from a day on."""
    step = 3600 if seconds >= 86400 else 60 if seconds >= 600 else 1
    return describe_duration(from_seconds(max(seconds // step * step, 1)))


def _format_local_time(instant: datetime) -> str:
    return f"{localtime(instant):%m-%d %H:%M:%S}"
