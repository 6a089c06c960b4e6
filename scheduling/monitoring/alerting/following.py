"""When something is said about an alert. Time is a parameter; nothing here asks or writes anything."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

from scheduling.models import Alert


class Word(StrEnum):
    BEGINS = "begins"  #: it has held for long enough
    GOES_ON = "goes_on"  #: a reminder
    OVER = "over"  #: it has not held for as long
    NOTHING = ""
    FORGET = "forget"  #: it was over before anybody was told


def follow(
    alert: Alert, value: float | None, now: datetime, *, holds_for: timedelta, remind_every: timedelta | None,
    rising: bool = False,
) -> Word:  # fmt: skip
    """Note what is seen of it now (None: it does not hold) and say what its receiver should be told."""
    if value is None:
        return _absent(alert, now, holds_for)
    if not _may_know(alert) and alert.gone_at is not None and now - alert.gone_at >= holds_for:
        alert.since, alert.first_value = now, value  # looks are so far apart that one says enough
    alert.gone_at, alert.value = None, value
    if alert.told_at is None:
        if rising and not alert.tried and value < alert.first_value:
            alert.since, alert.first_value = now, value
        return Word.BEGINS if now - alert.since >= holds_for else Word.NOTHING
    due = remind_every is not None and alert.spoke_at is not None and now - alert.spoke_at >= remind_every
    return Word.GOES_ON if due else Word.NOTHING


def _absent(alert: Alert, now: datetime, holds_for: timedelta) -> Word:
    """Whoever may have been told of it is told that it is over. Before that, one look may miss what others see: only
    two in a row say that it is gone."""
    missed, alert.gone_at = alert.gone_at is not None, alert.gone_at or now
    if not _may_know(alert):
        return Word.FORGET if missed else Word.NOTHING
    return Word.OVER if now - alert.gone_at >= holds_for else Word.NOTHING


def _may_know(alert: Alert) -> bool:
    """An answer that was lost says nothing."""
    return alert.told_at is not None or alert.tried


def begin(receiver_id: int, condition: str, subject: str, value: float, now: datetime) -> Alert:
    return Alert(
        receiver_id=receiver_id, condition=condition, subject=subject, since=now, value=value, first_value=value
    )


def said(alert: Alert, word: Word, now: datetime) -> None:
    """Its receiver has it."""
    if word == Word.BEGINS:
        alert.told_at = now
    alert.spoke_at = now
