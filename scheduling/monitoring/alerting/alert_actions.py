"""Decide when to send a message about an alert.

Pure functions: time is a parameter, and nothing reads or writes the database.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

from scheduling.models import Alert


class AlertAction(StrEnum):
    """The message that is due about an alert."""

    FIRE = "fire"  #: the condition has held for `holds_for`
    REMIND = "remind"  #: a reminder
    RESOLVE = "resolve"  #: the condition has been absent for `holds_for`
    NONE = ""
    DROP = "drop"  #: the condition ended before a message was tried


def decide_alert_action(
    alert: Alert, value: float | None, now: datetime, *, holds_for: timedelta, remind_every: timedelta | None,
    rising: bool = False,
) -> AlertAction:  # fmt: skip
    """Record the current value (None: the condition is absent) and return the message that is due."""
    if value is None:
        return _decide_when_absent(alert, now, holds_for)
    if not _receiver_may_know(alert) and alert.absent_since is not None and now - alert.absent_since >= holds_for:
        alert.since, alert.first_value = now, value  # evaluations are further apart than `holds_for`, so one is enough
    alert.absent_since, alert.value = None, value
    if alert.notified_at is None:
        if rising and not alert.tried and value < alert.first_value:
            alert.since, alert.first_value = now, value
        return AlertAction.FIRE if now - alert.since >= holds_for else AlertAction.NONE
    due = remind_every is not None and alert.last_message_at is not None and now - alert.last_message_at >= remind_every
    return AlertAction.REMIND if due else AlertAction.NONE


def _decide_when_absent(alert: Alert, now: datetime, holds_for: timedelta) -> AlertAction:
    """Return RESOLVE after `holds_for` if the receiver may know of the alert.

    Otherwise drop the alert after two consecutive evaluations without it: a single evaluation may miss it.
    """
    missed, alert.absent_since = alert.absent_since is not None, alert.absent_since or now
    if not _receiver_may_know(alert):
        return AlertAction.DROP if missed else AlertAction.NONE
    return AlertAction.RESOLVE if now - alert.absent_since >= holds_for else AlertAction.NONE


def _receiver_may_know(alert: Alert) -> bool:
    """Return True also after an attempt whose response was lost: the message may have arrived."""
    return alert.notified_at is not None or alert.tried


def create_alert(receiver_id: int, condition: str, subject: str, value: float, now: datetime) -> Alert:
    """Return a new, unsaved alert whose condition holds since `now`."""
    return Alert(
        receiver_id=receiver_id, condition=condition, subject=subject, since=now, value=value, first_value=value
    )


def mark_notified(alert: Alert, action: AlertAction, now: datetime) -> None:
    """Record that the receiver accepted the message."""
    if action == AlertAction.FIRE:
        alert.notified_at = now
    alert.last_message_at = now
