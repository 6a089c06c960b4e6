"""Store the verdicts and the attempts of a touch in its row.

Both lists grow only. An entry is a JSON array of its values, without the last ones that equal their defaults, because
most verdicts are `send` without a rule. Instants are microseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django.db import models
from django.utils.translation import gettext_lazy as _

#: Kept of one touch: the first and the latest. The first `send` decides which version of a roll-out counts it.
MOST_VERDICTS = 50
EPOCH, MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)


class GuardDecision(models.TextChoices):
    SEND = "send", _("Send")
    HOLD = "hold", _("Defer")
    SUPPRESS = "suppress", _("Suppress")


class AttemptOutcome(models.TextChoices):
    DELIVERED = "delivered", _("Delivered")
    TRANSIENT = "transient", _("Failed, may succeed later")
    PERMANENT = "permanent", _("Failed for good")
    UNKNOWN = "unknown", _("Unknown")


class Verdict(NamedTuple):
    """A decision of the guards about a touch, with its rule."""

    at: datetime
    decision: str  #: of `GuardDecision`
    rule: str = ""
    rule_version: int | None = None
    observed: str = ""
    limit: str = ""
    next_eligible_at: datetime | None = None


class Attempt(NamedTuple):
    """One call of a channel for a touch."""

    number: int
    lease_no: int
    started_at: datetime
    ended_at: datetime | None = None
    outcome: str = AttemptOutcome.DELIVERED.value  #: of `AttemptOutcome`
    reason: str = ""
    detail: str = ""
    status: int | None = None
    subject: str = ""  #: complete: a retry sends it again
    body: str = ""


def encode_instant(at: datetime) -> int:
    """Return microseconds since 1970."""
    return (at - EPOCH) // MICROSECOND


def encode_entry(entry: Verdict | Attempt) -> list[Any]:
    """Return the stored form of a verdict or an attempt."""
    values = [encode_instant(each) if isinstance(each, datetime) else each for each in entry]
    for name in reversed(entry._fields):
        if name not in entry._field_defaults or values[-1] != entry._field_defaults[name]:
            break
        values.pop()
    return values


class LogField(models.JSONField):
    """A list of verdicts or attempts. NULL is the empty list: a new touch has neither."""

    def __init__(self, *args: Any, entry: type[Verdict] | type[Attempt], **kwargs: Any) -> None:
        """Set the class of the entries."""
        self.entry = entry
        self._instants = [number for number, name in enumerate(entry._fields) if name.endswith("at")]
        super().__init__(*args, **{"null": True, "default": list, "editable": False, **kwargs})

    def deconstruct(self) -> Any:
        name, path, args, kwargs = super().deconstruct()
        return name, path, args, {**kwargs, "entry": self.entry}

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> list[Any]:
        return [self._decode(each) for each in super().from_db_value(value, expression, connection) or ()]

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = [encode_entry(self.entry._make(each)) for each in value]
        if not value:
            return None  # Django would write the JSON value null, to which an entry cannot be added
        return super().get_db_prep_value(value, connection, prepared)

    def _decode(self, values: list[Any]) -> Any:
        for number in self._instants:
            if number < len(values) and values[number] is not None:
                values[number] = EPOCH + values[number] * MICROSECOND
        return self.entry(*values)
