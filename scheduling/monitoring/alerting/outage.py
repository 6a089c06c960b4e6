"""What is known of a receiver while the database is away, and what was said of that."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db import transaction

from scheduling.models import Alert, AlertReceiver
from scheduling.monitoring.alerting.following import begin
from scheduling.monitoring.alerting.messages import Line

DATABASE = "database"


@dataclass
class Known:
    """A receiver as the database last knew it."""

    receiver: AlertReceiver
    line: Line
    #: That the database is away, while it cannot be stored; and until two looks in a row have found it there.
    outage: Alert | None = None

    def goes_on(self, now: datetime) -> Alert:
        """Anew where it was over for so long that whoever had heard of it has heard of its end."""
        gone_at = self.outage.gone_at if self.outage else None
        if self.outage is None or (gone_at is not None and now - gone_at >= self.receiver.holds_for):
            self.outage = begin(self.receiver.pk, DATABASE, "", 1.0, now)
        return self.outage

    def is_there(self, now: datetime) -> None:
        """From now on the row says what was said. One look may be an accident: where the next one fails, the outage
        goes on, for who has not heard of it as for who has."""
        if self.outage is None or self.outage.gone_at is not None:
            self.outage = None
            return
        if self.outage.tried:
            _store(self.outage)
        self.outage.gone_at = now

    def hand_in(self) -> None:
        """What was said, so that its end is said as well, by whoever looks next."""
        if self.outage is not None and self.outage.tried:
            _store(self.outage)
        self.outage = None


@transaction.atomic
def _store(alert: Alert) -> None:
    """Whoever has the receiver may be about to write its own row of this: it is written over, never exchanged."""
    if not AlertReceiver.objects.select_for_update().filter(pk=alert.receiver_id).exists():
        return
    standing = Alert.objects.filter(receiver_id=alert.receiver_id, condition=DATABASE, subject=alert.subject)
    alert.pk = standing.values_list("pk", flat=True).first()
    alert.save(force_insert=alert.pk is None, force_update=alert.pk is not None)
