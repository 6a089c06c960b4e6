"""Rows that ops edit: each change is a new version with its author, and every process notices within one batch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from django.db import connection, models, transaction
from django.utils.translation import gettext_lazy as _

Rows = TypeVar("Rows", bound="models.QuerySet[Any]")


def locked_to_write(rows: Rows) -> Rows:
    """These rows, locked when they are read, until the transaction ends. The table comes before them: who stores a
    configuration file locks all of it, and if they came between the lock of a row and its write, each would wait for
    the other."""
    with connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {connection.ops.quote_name(rows.model._meta.db_table)} IN ROW EXCLUSIVE MODE")
    return rows.select_for_update(no_key=True, of=("self",))


class Versioned(models.Model):
    """A row whose `version` a verdict can name. Counted up by every save that changes something; of two saves at once
    the later one sees the earlier one's number."""

    version = models.PositiveIntegerField(_("version"), default=1, editable=False)

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        with transaction.atomic():
            stored = locked_to_write(type(self)._default_manager.all())
            before: dict[str, Any] | None = stored.filter(pk=self.pk).values().first()  # type: ignore[assignment]
            if before:
                after = {field.attname: getattr(self, field.attname) for field in self._meta.concrete_fields}
                if any(before[name] != value for name, value in after.items() if name != "version"):
                    self.version = before["version"] + 1
            super().save(*args, **kwargs)

    def take_over_all_but(self, edited: Collection[str]) -> None:
        """Of the fields that were not edited here, what is stored by now: whoever saves a row that was read before it
        was locked would write back what others changed meanwhile. Locks the row until the transaction ends."""
        row = locked_to_write(type(self)._default_manager.all()).get(pk=self.pk)
        for field in self._meta.concrete_fields:
            if field.name not in edited:
                setattr(self, field.attname, getattr(row, field.attname))


class Configuration(models.Model):
    """One row, counted up by a trigger on every table that ops edit (see migration 0001). Processes compare it with
    the version of their snapshot, so that an edit holds from the next batch on."""

    version = models.BigIntegerField(default=1)
    changed_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return str(self.version)
