"""Evaluate alert conditions for each receiver and send what is due, in a thread of the leading beat.

Each receiver is processed under a lease, so two concurrent passes send one message. The state is stored before the
message is sent and after the response. If the process dies between the two, the message is sent again after the lease:
a duplicate alert is better than a lost one. While the database is unavailable, receivers are known from memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import structlog
from django.conf import settings
from django.db import InterfaceError, OperationalError, close_old_connections, connection, connections, transaction
from django.db.models import Q
from django.db.models.functions import Now

from scheduling.channels.base import Delivered, Outcome, Permanent, Transient
from scheduling.delivery import routing
from scheduling.models import Alert, AlertReceiver
from scheduling.monitoring.alerting import conditions, messages
from scheduling.monitoring.alerting.alert_actions import AlertAction, create_alert, decide_alert_action, mark_notified
from scheduling.monitoring.alerting.conditions import MetricSamples, load_conditions
from scheduling.monitoring.alerting.database_time_limit import DatabaseTimeLimit
from scheduling.monitoring.alerting.messages import AlertRoute, DueAlert

log = structlog.get_logger(__name__)


DATABASE = "database"


@dataclass
class KnownReceiver:
    """A receiver as the database last returned it, and its database alert."""

    receiver: AlertReceiver
    route: AlertRoute
    #: The database alert while it cannot be stored. Kept until two consecutive evaluations reach the database.
    outage: Alert | None = None

    def continue_outage(self, now: datetime) -> Alert:
        """Return the database alert. Start a new one after an absence of `holds_for`: its end has been sent by then."""
        absent_since = self.outage.absent_since if self.outage else None
        if self.outage is None or (absent_since is not None and now - absent_since >= self.receiver.holds_for):
            self.outage = create_alert(self.receiver.pk, DATABASE, "", 1.0, now)
        return self.outage

    def record_recovery(self, now: datetime) -> None:
        """Hand the alert over to its database row.

        One successful evaluation may be an accident. If the next one fails, the same outage continues, whether or not
        its receiver knows of it.
        """
        if self.outage is None or self.outage.absent_since is not None:
            self.outage = None
            return
        if self.outage.tried:
            _store_database_alert(self.outage)
        self.outage.absent_since = now

    def store_outages(self) -> None:
        """Store the database alert if a message was tried: the next process to evaluate sends its end."""
        if self.outage is not None and self.outage.tried:
            _store_database_alert(self.outage)
        self.outage = None


@transaction.atomic
def _store_database_alert(alert: Alert) -> None:
    """Write the row of the database alert, or overwrite an existing one.

    The process that holds the receiver's lease may be about to write the same row. Overwriting keeps the row's id valid
    for it.
    """
    if not AlertReceiver.objects.select_for_update().filter(pk=alert.receiver_id).exists():
        return
    standing = Alert.objects.filter(receiver_id=alert.receiver_id, condition=DATABASE, subject=alert.subject)
    alert.pk = standing.values_list("pk", flat=True).first()
    alert.save(force_insert=alert.pk is None, force_update=alert.pk is not None)


LEASE = timedelta(seconds=90)  #: longer than the longest call of a channel and the statements around it
MIN_RETRY_DELAY, MAX_RETRY_DELAY = (
    timedelta(seconds=15),
    timedelta(minutes=10),
)  #: bounds of the retry delay after a failed message
#: the `problem` of a receiver whose pass failed unexpectedly; the next successful pass clears it
INTERNAL_ERROR = "internal_error"


class AlertEvaluator:
    """Evaluate all receivers once per call.

    One instance per process: it remembers whom to notify while the database is unavailable.
    """

    def __init__(self) -> None:
        self._known: dict[int, KnownReceiver] = {}

    def evaluate(self, now: datetime) -> None:
        try:
            self.evaluate_receivers(now)
        except (OperationalError, InterfaceError) as error:
            log.warning("alerts_without_database", error=str(error))
            connection.close()
            self._evaluate_without_database(now)

    def evaluate_receivers(self, now: datetime) -> None:
        """Evaluate the conditions of all enabled receivers and send what is due."""
        for each in self._known.values():
            each.record_recovery(now)
        enabled = dict(AlertReceiver.objects.filter(enabled=True).values_list("pk", "limits"))
        self._known = {pk: known for pk, known in self._known.items() if pk in enabled}
        if not enabled:
            return
        known = load_conditions()
        wanted = {known[key].metric for limits in enabled.values() for key in limits if key in known}
        seen = conditions.read_metrics(frozenset(wanted))
        for pk in enabled:
            try:
                self._process_receiver(pk, seen, now)
            except (OperationalError, InterfaceError):
                raise
            except Exception as error:  # an undecryptable secret or a defect: the other receivers are still notified
                log.exception("alert_receiver_failed", receiver=pk)
                AlertReceiver.objects.filter(pk=pk).update(
                    problem=_format_problem(INTERNAL_ERROR, f"{type(error).__name__} {error}")
                )

    def _process_receiver(self, pk: int, seen: MetricSamples, now: datetime) -> None:
        receiver = _take_receiver_lease(pk)
        if receiver is None:
            return
        try:
            route = self._resolve_route(receiver)
            due_alerts = _update_alerts(receiver, seen, now)
        except Exception:
            _release_receiver_lease(receiver)
            raise
        if due_alerts and _is_attempt_allowed(receiver, now):
            # If a later statement fails, the message may have been sent. The lease then delays the next attempt.
            store_notification_result(receiver, due_alerts, _send_due_alerts(route, due_alerts, now), now)
        _release_receiver_lease(receiver, **({"problem": ""} if receiver.problem.startswith(INTERNAL_ERROR) else {}))

    def _resolve_route(self, receiver: AlertReceiver) -> AlertRoute | routing.NoTarget:
        try:
            route = messages.resolve_route(receiver)
        except routing.NoTarget as error:
            self._known.pop(receiver.pk, None)
            return error
        before = self._known.get(receiver.pk)
        self._known[receiver.pk] = KnownReceiver(receiver, route, before.outage if before else None)
        return route

    # --- while the database is unavailable ----------------------------------------------------------------------------

    def _evaluate_without_database(self, now: datetime) -> None:
        for known in self._known.values():
            receiver = known.receiver
            if DATABASE not in receiver.limits:
                continue
            alert = known.continue_outage(now)
            action = _decide_action(alert, 1.0, now, receiver)
            if action and _is_attempt_allowed(receiver, now):
                alert.tried = True
                _record_outcome(receiver, [(action, alert)], _send_due_alerts(known.route, [(action, alert)], now), now)

    def store_outages(self) -> None:
        """Store the database alerts that were tried during an outage: the next process to evaluate sends their end."""
        for known in self._known.values():
            known.store_outages()


# --- under the lease ------------------------------------------------------------------------------------------------


def _take_receiver_lease(pk: int) -> AlertReceiver | None:
    """Take the lease of a receiver; None if another process holds it.

    Uses the database clock, because the pass may have started minutes ago.
    """
    free = AlertReceiver.objects.filter(Q(watched_until=None) | Q(watched_until__lte=Now()), pk=pk, enabled=True)
    with transaction.atomic():
        locked = free.select_for_update(of=("self",), skip_locked=True)
        receiver = locked.select_related("channel", "community").first()
        if receiver is not None:
            receiver.lease_no += 1
            AlertReceiver.objects.filter(pk=pk).update(lease_no=receiver.lease_no, watched_until=Now() + LEASE)
    return receiver


def _release_receiver_lease(receiver: AlertReceiver, **changes: str) -> None:
    AlertReceiver.objects.filter(pk=receiver.pk, lease_no=receiver.lease_no).update(watched_until=None, **changes)


def _lock_leased_receiver(receiver: AlertReceiver) -> bool:
    """Lock the receiver if this process still holds its lease. The lock covers the writes of the transaction."""
    mine = AlertReceiver.objects.filter(pk=receiver.pk, lease_no=receiver.lease_no)
    return mine.select_for_update().exists()


@transaction.atomic
def _update_alerts(receiver: AlertReceiver, seen: MetricSamples, now: datetime) -> list[DueAlert]:
    """Store the evaluated values and return the messages that are due."""
    if not _lock_leased_receiver(receiver):
        return []
    known = {key: each for key, each in load_conditions().items() if key in receiver.limits}
    standing = {(alert.condition, alert.subject): alert for alert in receiver.alerts.all()}
    due_alerts: list[DueAlert] = []
    for key, condition in known.items():
        found = condition.find_violations(seen, receiver.limits[key])
        if found is None:
            continue
        about = {alert.subject for alert in standing.values() if alert.condition == key}
        for subject in sorted(about | set(found)):
            value = found.get(subject)
            alert = standing.get((key, subject)) or create_alert(receiver.pk, key, subject, value or 0.0, now)
            action = _decide_action(alert, value, now, receiver, rising=condition.rising)
            if action == AlertAction.DROP:
                alert.delete()
                continue
            if action:
                due_alerts.append((action, alert))
                alert.tried = alert.tried or _is_attempt_allowed(receiver, now)
            alert.save()
    receiver.alerts.exclude(condition__in=known).delete()
    return due_alerts


def _decide_action(
    alert: Alert, value: float | None, now: datetime, receiver: AlertReceiver, *, rising: bool = False
) -> AlertAction:
    return decide_alert_action(
        alert, value, now, holds_for=receiver.holds_for, remind_every=receiver.remind_every, rising=rising
    )  # fmt: skip


@transaction.atomic
def store_notification_result(
    receiver: AlertReceiver, due_alerts: Sequence[DueAlert], outcome: Outcome, now: datetime
) -> None:
    """Store what a message came to, unless another process took the receiver over."""
    if not _lock_leased_receiver(receiver):
        return
    _record_outcome(receiver, due_alerts, outcome, now)
    receiver.save(update_fields=["tries", "retry_at", "problem", "notified_at"])
    for action, alert in due_alerts:
        if action == AlertAction.RESOLVE and isinstance(outcome, Delivered):
            alert.delete()
        else:
            alert.save()


# --- result of a message --------------------------------------------------------------------------------------------


def _is_attempt_allowed(receiver: AlertReceiver, now: datetime) -> bool:
    return receiver.retry_at is None or receiver.retry_at <= now


def _send_due_alerts(route: AlertRoute | routing.NoTarget, due_alerts: Sequence[DueAlert], now: datetime) -> Outcome:
    if isinstance(route, routing.NoTarget):
        return Permanent(route.reason, str(route))
    return messages.send_alerts(route, due_alerts, now)


def _record_outcome(receiver: AlertReceiver, due_alerts: Sequence[DueAlert], outcome: Outcome, now: datetime) -> None:
    """Record the outcome.

    Only a delivered message counts as sent: a robot may answer 200 with an error code in the body.
    """
    if isinstance(outcome, Delivered):
        receiver.tries, receiver.retry_at, receiver.problem, receiver.notified_at = 0, None, "", now
        for action, alert in due_alerts:
            mark_notified(alert, action, now)
        log.info("alerts_sent", receiver=receiver.name, count=len(due_alerts))
        return
    receiver.tries += 1
    wait = min(MIN_RETRY_DELAY * 2 ** min(receiver.tries - 1, 10), MAX_RETRY_DELAY)
    if isinstance(outcome, Transient) and outcome.retry_after:
        wait = max(wait, outcome.retry_after)
    receiver.retry_at = now + wait
    receiver.problem = _format_problem(outcome.reason, outcome.detail)
    log.warning("alerts_not_sent", receiver=receiver.name, reason=outcome.reason, detail=outcome.detail)


def _format_problem(reason: str, detail: str) -> str:
    return f"{reason} {detail}".strip().replace("\0", "")[:500]


STOP_TIMEOUT = 5.0  #: seconds; systemd gives beat 20 s to stop


class AlertThread:
    """Run `AlertEvaluator` in a daemon thread while this beat leads."""

    def __init__(self) -> None:
        self._evaluator = AlertEvaluator()
        self._time_limit = DatabaseTimeLimit(settings.TIMEOUTS.alert_pass)
        self._leads = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def set_leading(self, leads: bool) -> None:
        """Start or suspend the thread.

        Only the leading beat evaluates alerts. A beat that lost the database continues until it knows that another one
        leads.
        """
        if not leads:
            self._leads.clear()
            return
        self._leads.set()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run_passes, name="alerts", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Waits at most `STOP_TIMEOUT` for a message in progress."""
        self._ended.set()
        self._leads.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT)

    def _run_passes(self) -> None:
        while not self._ended.is_set():
            if self._run_pass():
                self._ended.wait(settings.AFTERTOUCH_ALERTS_EVERY.total_seconds())
            else:
                self._leads.wait()
        connections["default"].close()

    def _run_pass(self) -> bool:
        """Run one pass. Return False if this process does not lead and should wait."""
        try:
            self._time_limit.begin(connections["default"])
            close_old_connections()
            if self._leads.is_set():
                self._evaluator.evaluate(datetime.now(UTC))
                return True
            self._evaluator.store_outages()  # another beat leads since, and has to send the end
        except Exception:
            log.exception("alert_evaluation_failed")
            return True
        return False
