"""Version the rows that operators edit. Every process sees an edit from its next batch on.

`full_clean` checks the values of a row together: for forms, configuration files and the API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar, TypeVar

from django.core.exceptions import ValidationError
from django.db import connection, models, transaction
from django.db.models.expressions import DatabaseDefault
from django.utils.deconstruct import deconstructible
from django.utils.translation import gettext_lazy as _

from scheduling.error_text import ErrorText
from scheduling.errors import ErrorCollector, InvalidInput, check_key, check_number
from scheduling.models.encrypted import Sealed
from scheduling.strict_text import check_storable, is_same_json


@deconstructible
class Bound:
    """A validator of a column: `check` raises `ValueError` for a wrong value. Files derive their notation from it."""

    def __init__(self, check: Callable[..., None], **limits: Any) -> None:
        self.check, self.limits = check, limits

    def __call__(self, value: Any) -> None:
        try:
            self.check(value, **self.limits)
        except ValueError as error:
            raise ValidationError(error.args[0]) from None


KEY, PERCENT = Bound(check_key), Bound(check_number, least=0, most=100)
Rules = Callable[[Mapping[str, Any]], None]


class Checked(models.Model):
    """A row whose app has rules about its values: functions that `rules_of` marks.

    They are not methods, because they know channels and texts, which import the models.
    """

    rules: ClassVar[Rules | None] = None  #: raises `InvalidInput` by column; a dot leads inside a JSON column

    class Meta:
        abstract = True

    def clean(self) -> None:
        super().clean()
        rules = type(self).rules
        try:
            values = {}  # by column, without those that cannot be read here; references are not loaded
            for field in self._meta.concrete_fields:
                value = self._state.fields_cache.get(field.name) or getattr(self, field.attname)
                if not isinstance(value, (Sealed, DatabaseDefault)):
                    values[field.name] = value
            check_storable(values)
            if rules is not None:
                rules(values)
        except InvalidInput as error:
            found: dict[str, list[str]] = {}
            for each in error.errors:
                # Some words are a library's. Forms and files know the errors of rules by their type.
                text = each.message if isinstance(each.message, ErrorText) else ErrorText(each.message)
                found.setdefault(each.field, []).append(text)
            raise ValidationError(found) from None


def rules_of(model: type[Checked]) -> Callable[[Callable[[Mapping[str, Any], ErrorCollector], None]], Rules]:
    """Make a function the rules of a model. It adds errors; the rules raise them. The app imports its module when it
    is ready.
    """

    def register(check: Callable[[Mapping[str, Any], ErrorCollector], None]) -> Rules:
        @wraps(check)
        def rules(values: Mapping[str, Any]) -> None:
            found = ErrorCollector()
            check(values, found)
            found.raise_if_any()

        model.rules = staticmethod(rules)
        return rules

    return register


Rows = TypeVar("Rows", bound="models.QuerySet[Any]")


def lock_for_write(rows: Rows) -> Rows:
    """Return these rows, locked on read until the transaction ends.

    The table lock is taken before the row locks. Storing a configuration file locks the whole table. Between the lock
    of a row and its write, that lock would cause a deadlock.
    """
    with connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {connection.ops.quote_name(rows.model._meta.db_table)} IN ROW EXCLUSIVE MODE")
    return rows.select_for_update(no_key=True, of=("self",))


class Versioned(Checked):
    """A row with a `version` that a verdict can name.

    Every save that changes a field increments it. Of two concurrent saves the later one reads the earlier one's number.
    """

    version = models.PositiveIntegerField(_("version"), default=1, editable=False)

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the row; increment `version` if a field has changed."""
        with transaction.atomic():
            before: dict[str, Any] | None = None
            if self.pk is not None:
                stored = lock_for_write(type(self)._default_manager.all())
                before = stored.filter(pk=self.pk).values().first()  # type: ignore[assignment]
            if before:
                after = {field.attname: getattr(self, field.attname) for field in self._meta.concrete_fields}
                same = all(is_same_json(before[name], value) for name, value in after.items() if name != "version")
                self.version = before["version"] + (not same)  # this row may be older than the stored one
            super().save(*args, **kwargs)


class Configuration(models.Model):
    """One row with a counter. A trigger on every table that operators edit increments it (see migration 0001).

    Processes compare it with the version of their snapshot, so that an edit applies from the next batch on.
    """

    version = models.BigIntegerField(default=1)
    changed_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return str(self.version)
