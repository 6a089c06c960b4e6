"""Send the main alerts through one of Aftertouch's own channels.

A thread of the leading beat compares the metrics with a table of conditions and keeps a row for each open alert.
Prometheus rules (`deploy/prometheus`) cover the loss of beat and PostgreSQL, and many more conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from uuid import UUID, uuid5

import structlog
from celery import current_app
from django.conf import settings
from django.db import transaction
from django.urls import reverse
from django.utils import translation
from django.utils.functional import Promise
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.broker_health import connect_broker
from scheduling.channels.base import Delivered, Message, Outcome, Permanent, Transient
from scheduling.channels.http_client import send_once
from scheduling.channels.quota import UNAVAILABLE_DELAY, QuotaGate
from scheduling.configuration import snapshot
from scheduling.db_timeouts import Deadline
from scheduling.delivery import routing
from scheduling.experiments.rollouts import withdrawn_canaries
from scheduling.ids import new_id
from scheduling.models import Alert, AlertReceiver
from scheduling.models.encrypted import Unreadable
from scheduling.monitoring import collectors
from scheduling.monitoring.complaint_stats import is_rising
from scheduling.monitoring.duration_text import describe_duration
from scheduling.policy.specs import CustomerSpec
from scheduling.queue_names import CORE_QUEUES
from scheduling.strict_text import storable_text

log = structlog.get_logger(__name__)

#: Samples (labels and value) by metric name. A metric that is missing here is unknown at the moment.
MetricSamples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]
Values = Mapping[str, float]  #: values by subject


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that holds for each subject whose value exceeds the limit."""

    key: str
    #: Return the values; None while they are unknown, which starts and ends no alert.
    probe: Callable[[MetricSamples], Values | None]
    limit: float
    title: Promise  #: %(what)s is replaced by the subjects
    action: Promise
    page: str = "admin:scheduling_touch_workers"
    is_duration: bool = False  #: the value is in seconds

    def name(self, subjects: Sequence[str]) -> str:
        """Return the title with the subjects."""
        more = len(subjects) - SUBJECTS
        named = _(", ").join(subjects[:SUBJECTS]) + (f" … (+{more})" if more > 0 else "")
        return str(self.title) % {"what": named}


SUBJECTS = 8  #: subjects named in a title; further ones are only counted
INSPECT_TIMEOUT = 1.0  #: seconds after the last response of a worker


def _metric(name: str, label: str = "") -> Callable[[MetricSamples], Values | None]:
    def probe(samples: MetricSamples) -> Values | None:
        known = samples.get(name)
        return None if known is None else {labels.get(label, ""): value for labels, value in known}

    return probe


def _find_unattended_queues(samples: MetricSamples) -> Values | None:
    """Return queues that hold messages, or always may, and that no worker consumes.

    Asks the workers directly, because their metrics are known on their own node only.
    """
    is_blocked = any(value for _labels, value in samples.get("aftertouch_broker_blocked", ()))
    if "celery_queue_length" not in samples or is_blocked:  # a blocked broker would hold this thread
        return None
    with connect_broker(INSPECT_TIMEOUT) as connection:
        answers = current_app.control.inspect(timeout=INSPECT_TIMEOUT, connection=connection).active_queues() or {}
    consumed = {queue["name"] for queues in answers.values() for queue in queues}
    # A core queue needs a consumer even while it is empty.
    needed = {*CORE_QUEUES} | {labels["queue_name"] for labels, length in samples["celery_queue_length"] if length}
    return dict.fromkeys(sorted(needed - consumed), 1.0)


def _find_blocked_broker(samples: MetricSamples) -> Values:
    """Return 1 also while the broker does not answer."""
    has_answer = "celery_queue_length" in samples
    return {"": float(not has_answer or any(value for _labels, value in samples["aftertouch_broker_blocked"]))}


def _count_unwatched_chats(samples: MetricSamples) -> Values:
    """Return the chats with a timer while no watcher runs: an installation without live chats needs none.

    Returns 1 while their Redis, or a node of it, does not answer: no silence is detected without it.
    """
    if "aftertouch_watchers" not in samples:
        return {"": 1.0}
    ((_labels, watchers),) = samples["aftertouch_watchers"]
    armed = sum(count for labels, count in samples["aftertouch_sessions"] if labels["state"] == "armed")
    return {"": 0.0 if watchers else armed}


def _find_rising_complaints(samples: MetricSamples) -> Values | None:
    if "aftertouch_complaint_rate" not in samples:
        return None
    before, touches = (
        {tuple(labels.values()): value for labels, value in samples[f"aftertouch_complaint_{name}"]}
        for name in ("rate_before", "touches")
    )
    return {
        "{node}: {template} v{version}".format(**labels): 1.0
        for labels, rate in samples["aftertouch_complaint_rate"]
        if is_rising(int(touches[text := tuple(labels.values())]), rate, before.get(text))
    }


def _find_withdrawn_canaries(_samples: MetricSamples) -> Values:
    return dict.fromkeys(withdrawn_canaries().values_list("node__key", flat=True), 1.0)


CONDITIONS = (
    Condition(
        "overdue", _metric("aftertouch_touches_oldest_overdue_seconds"), 60, gettext_lazy("Touches are late"),
        gettext_lazy("Are workers alive, is the broker, do queues grow? Add core workers if it is the load."),
        "admin:scheduling_touch_changelist", is_duration=True,
    ),
    Condition(
        "failed", _metric("aftertouch_failed_tasks_oldest_age_seconds", "origin"), 3600,
        gettext_lazy("Failed tasks not handled"),
        gettext_lazy("Publish them again, resolve them, or ignore them with a reason."),
        "admin:scheduling_failedtask_groups", is_duration=True,
    ),
    Condition(
        "login", _metric("aftertouch_rpa_logins_needed", "platform"), 0,
        gettext_lazy("Shops of %(what)s need a login"),
        gettext_lazy("Log them in. Their jobs wait until then."), "admin:rpa_tasks_shop_changelist",
    ),
    Condition(
        "unattended", _find_unattended_queues, 0, gettext_lazy("No worker consumes %(what)s"),
        gettext_lazy("Start a worker with this queue in -Q. Due work is delayed, not lost."),
    ),
    Condition(
        "broker_blocked", _find_blocked_broker, 0, gettext_lazy("The broker takes no messages"),
        gettext_lazy(
            "Add memory or disk to the broker. Touches are kept, are late, and are dispatched again automatically."
        ),
    ),
    Condition(
        "no_watcher", _count_unwatched_chats, 0, gettext_lazy("No watcher for live chats"),
        gettext_lazy(
            "Start a watcher, or the Redis of live chats."
            " Silences detected more than five minutes late get no guide message."
        ),
        "admin:chat_sessions_silencepolicy_live",
    ),
    Condition(
        "store_evicts", _metric("aftertouch_sessions_redis_evicts"), 0,
        gettext_lazy("Redis deletes live chats when it is full"),
        gettext_lazy("Set maxmemory-policy to noeviction. A full server then refuses writes instead."),
        "admin:chat_sessions_silencepolicy_live",
    ),
    Condition(
        "complaints_rising", _find_rising_complaints, 0, gettext_lazy("Complaints about %(what)s rise"),
        gettext_lazy("Compare the complaint rates, then edit or switch off the node."),
        "admin:scheduling_complaint_rates",
    ),
    Condition(
        "rollout", _find_withdrawn_canaries, 0, gettext_lazy("Canary withdrawn (%(what)s)"),
        gettext_lazy("Check the reason and the figures at the node, then change the text or remove the canary."),
        "admin:scheduling_node_changelist",
    ),
)  # fmt: skip
BY_KEY = {condition.key: condition for condition in CONDITIONS}


# --- one pass -------------------------------------------------------------------------------------------------------

HOLD = timedelta(minutes=1)  #: a condition holds, and later is absent, for this long before a message
REMIND = timedelta(days=1)
#: After a message without a response. Longer than the longest call of a channel, so that two passes send one message.
RETRY = timedelta(minutes=2)
NAMESPACE = UUID("6e0f3d5a-5a57-4c1f-9d43-8f1b8f9f1c11")


def evaluate_alerts(now: datetime) -> None:
    """Evaluate the conditions, and send what is due as one message. Does nothing without an enabled receiver.

    A message is claimed before it is sent and settled after the response. If the process dies between the two, it is
    sent again with the same key: a duplicate alert is better than a lost one.
    """
    receiver = AlertReceiver.objects.filter(enabled=True).select_related("channel", "community").first()
    if receiver is None:
        Alert.objects.all().delete()
        return
    _store_values(read_values(), now)
    with transaction.atomic():
        due = list(Alert.objects.select_for_update(skip_locked=True).filter(message_at__lte=now))
        Alert.objects.filter(pk__in=[alert.pk for alert in due]).update(tried=True, message_at=now + RETRY)
    if due:
        with translation.override(settings.LANGUAGE_CODE):
            subject, body = compose_message(due, now)
        # The same for a repeated message, so that the receiver can drop the duplicate.
        parts = [f"{alert}|{alert.since}|{alert.notified_at}|{alert.ended_at is not None}" for alert in due]
        outcome = send_alert_message(receiver, subject, body, now, uuid5(NAMESPACE, "\n".join(sorted(parts))))
        settle_message(receiver, due, outcome, now)


def read_values() -> dict[str, Values]:
    """Return the values beyond the limit by the key of each condition whose values are known."""
    samples: MetricSamples = {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in collectors.collect_metrics(Deadline(settings.TIMEOUTS.metrics))
    }
    beyond: dict[str, Values] = {}
    for condition in CONDITIONS:
        try:
            values = condition.probe(samples)
        except Exception as error:  # any exception of the broker's client
            log.warning("alert_unknown", condition=condition.key, error=str(error))
            continue
        if values is not None:
            beyond[condition.key] = {what[:200]: value for what, value in values.items() if value > condition.limit}
    return beyond


@transaction.atomic
def _store_values(beyond: Mapping[str, Values], now: datetime) -> None:
    """Store which alerts are open. An alert of an unknown condition stays as it is."""
    Alert.objects.exclude(condition__in=BY_KEY).delete()
    standing = Alert.objects.select_for_update().filter(condition__in=beyond).order_by("pk")
    rows = {(alert.condition, alert.subject): alert for alert in standing}
    for (key, subject), alert in rows.items():
        value = beyond[key].get(subject)
        if value is None and not alert.tried:
            alert.delete()
            continue
        if value is None and alert.ended_at is None:
            alert.ended_at, alert.message_at = now, now + HOLD
        elif value is not None and alert.ended_at is not None:
            alert.ended_at, alert.message_at = None, alert.notified_at + REMIND if alert.notified_at else now
        alert.value = alert.value if value is None else value
        alert.save(update_fields=["value", "ended_at", "message_at"])
    new = [
        Alert(condition=key, subject=subject, value=value, since=now, message_at=now + HOLD)
        for key, values in beyond.items()
        for subject, value in values.items()
        if (key, subject) not in rows
    ]
    Alert.objects.bulk_create(new, ignore_conflicts=True)  # another pass may have stored it


def settle_message(receiver: AlertReceiver, due: Sequence[Alert], outcome: Outcome, now: datetime) -> None:
    """Store what a message came to. Safe to repeat, and after another pass.

    Only a delivered message counts: a robot may answer 200 with an error code in the body.
    """
    alerts = Alert.objects.filter(pk__in=[alert.pk for alert in due])
    stored = AlertReceiver.objects.filter(pk=receiver.pk)
    if isinstance(outcome, Delivered):
        # An alert that ended, or ended and came back, while the message was under way starts from the next pass.
        alerts.filter(pk__in=[alert.pk for alert in due if alert.ended_at is not None]).delete()
        alerts.update(notified_at=now)
        alerts.filter(ended_at=None).update(message_at=now + REMIND)
        stored.update(problem="", notified_at=now)
        log.info("alerts_sent", count=len(due))
        return
    if isinstance(outcome, Transient) and outcome.retry_after:
        alerts.update(message_at=now + max(RETRY, outcome.retry_after))
    stored.update(problem=storable_text(f"{outcome.reason} {outcome.detail}".strip())[:500])
    log.warning("alerts_not_sent", reason=outcome.reason, detail=outcome.detail)


# --- one message ----------------------------------------------------------------------------------------------------


def find_receiver_route(receiver: AlertReceiver) -> routing.Route:
    """Return the route to a receiver.

    Raises:
        routing.NoTarget: the receiver has no address, or its channel cannot be used.
        Unreadable: a secret cannot be decrypted on this server.
    """
    row, place, addresses = receiver.channel, receiver.community, {}
    try:
        spec = snapshot.channel_spec(row)
    except Exception as error:  # a defect of the channel's row
        raise routing.NoTarget("channel_error", f"{type(error).__name__}: {error}"[:500]) from error
    with suppress(Exception):  # `find_route` tells what is wrong with the channel
        addresses[routing.channel_of(spec).address_key] = receiver.address
    chat_id, communities = (place.chat_id, {place.chat_id: place.targets}) if place else ("", {})
    who = CustomerSpec(0, "", addresses=addresses)
    route = routing.find_route(spec, who, chat_id, communities, routing.TargetLookup())
    if not isinstance(route, routing.Route):
        raise route
    if not route.target and not spec.config.get("url"):
        raise routing.NoTarget("no_target", f"no {spec.kind} target")
    return route


def send_alert_message(receiver: AlertReceiver, subject: str, body: str, now: datetime, key: UUID) -> Outcome:
    """Send one text, one attempt.

    Returns `Transient("quota")` if the receiver's quota, which it shares with touches, is used up. A receiver without a
    target and a defect of the channel become `Permanent`.
    """
    try:
        route = find_receiver_route(receiver)
    except routing.NoTarget as error:
        return Permanent(error.reason, str(error))
    except Unreadable as error:
        return Permanent("secrets_unreadable", str(error))
    gate = QuotaGate.connect(settings.REDIS_URL)
    grant = gate.acquire(route.channel.quotas, {route.vendor_key: 1})[route.vendor_key]
    # Without Redis no quota is known. One message a pass is within any quota.
    if not grant.granted and grant.next_in != UNAVAILABLE_DELAY:
        return Transient("quota", retry_after=grant.next_in)
    message = Message(
        task_id=new_id(), delivery_key=key, user_id="", chat_id="", node="alerts", content_type="alert",
        category="service", subject=subject, body=body, locale=settings.LANGUAGE_CODE, target=route.target,
        event={"source": "aftertouch", "id": str(key), "type": "aftertouch.alert", "time": now},
    )  # fmt: skip
    outcome = send_once(route.channel, message)
    if route.channel.quotas and isinstance(outcome, Transient) and outcome.retry_after:
        gate.throttle(route.vendor_key, outcome.retry_after)
    return outcome


def compose_message(due: Sequence[Alert], now: datetime) -> tuple[str, str]:
    """Return subject and body in the active language: a paragraph for each condition, open ones first."""
    order = list(BY_KEY)

    def place(alert: Alert) -> tuple[bool, int]:
        return alert.ended_at is not None, order.index(alert.condition)

    paragraphs = [
        _compose_paragraph(BY_KEY[order[index]], has_ended, list(alerts), now)
        for (has_ended, index), alerts in groupby(sorted(due, key=place), key=place)
    ]
    more = len(paragraphs) - 1
    subject = paragraphs[0].partition("\n")[0] + (_(" (and %(count)s more)") % {"count": more} if more else "")
    return subject, "\n\n".join(paragraphs)


def _compose_paragraph(condition: Condition, has_ended: bool, alerts: Sequence[Alert], now: datetime) -> str:
    since = min(alert.since for alert in alerts)
    until = max(alert.ended_at or now for alert in alerts) if has_ended else now
    values = {
        "title": condition.name(sorted(alert.subject for alert in alerts)),
        "since": f"{localtime(since):%m-%d %H:%M:%S}", "until": f"{localtime(until):%m-%d %H:%M:%S}",
        "span": describe_duration(max(until - since, timedelta(seconds=1))),
    }  # fmt: skip
    if has_ended:
        return "\n".join([_("[Over] %(title)s") % values, _("From %(since)s to %(until)s (%(span)s).") % values])
    lines = [_("[Alert] %(title)s") % values, _("Since %(since)s (%(span)s).") % values]
    if condition.is_duration:
        oldest = timedelta(seconds=round(max(alert.value for alert in alerts)))
        lines.append(_("The oldest: %(span)s.") % {"span": describe_duration(oldest)})
    link = settings.AFTERTOUCH_BASE_URL.rstrip("/") + reverse(condition.page)
    return "\n".join([*lines, str(condition.action), link])
