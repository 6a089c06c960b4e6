"""Implement a section that is a list of rows with keys.

The list is complete: rows that it omits are retired, and retired rows that it lists are restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from django.db.models import Model
from django.utils.timezone import now

from scheduling.configuration.file.base import Change, Difference, Section, Stamp
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.schema import REQUIRED, Field, nest_paths, read_fields
from scheduling.error_text import ErrorText as _
from scheduling.errors import InvalidInput
from scheduling.models.encrypted import Unreadable
from scheduling.models.versioned import differs_by_type


@dataclass(frozen=True, slots=True)
class Wanted:
    """A row as the file defines it."""

    path: str  #: position in the file: "nodes[2]"
    key: tuple[Any, ...]
    values: Mapping[str, Any]


class RowSection(Section):
    """Base class for a section with a model and a table of fields.

    The model needs `retired_at`, and `key` if other sections refer to it. Only changed rows are saved. They are saved
    with `save()`, so that versions and history follow.
    """

    model: ClassVar[type[Model]]
    identity: ClassVar[tuple[str, ...]] = ("key",)  #: columns that identify a row
    free: ClassVar[bool] = False  #: whether entries may hold keys outside the table

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        """Check what the table cannot check. Some values may be absent.

        Raises:
            InvalidInput: by column.
        """

    def defaults(self, values: Mapping[str, Any], position: int) -> dict[str, Any]:
        """Return defaults of absent keys that depend on the rest of the entry."""
        return {}

    # --- the file → what is wanted ---

    def claimed(self, given: Any) -> set[str]:
        entries = given if isinstance(given, list) else []
        return {entry["key"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("key"), str)}

    def read(self, given: Any, draft: Draft) -> list[Wanted]:
        wanted: dict[tuple[Any, ...], Wanted] = {}
        for position, path, entry in self.entries(given, draft):
            values = self.read_entry(entry, position, path, draft)
            if not all(column in values for column in self.identity):
                continue
            key = tuple(values[column] for column in self.identity)
            if key in wanted:
                draft.problem(
                    path, _("“%(name)s” is listed already, at %(path)s", name=self.label(values), path=wanted[key].path)
                )
            wanted.setdefault(key, Wanted(path, key, values))
        return list(wanted.values())

    def entries(self, given: Any, draft: Draft) -> list[tuple[int, str, dict[str, Any]]]:
        if not isinstance(given, list):
            draft.problem(self.name, _("must be a list"))
            return []
        found = []
        for position, entry in enumerate(given):
            if isinstance(entry, dict):
                found.append((position, f"{self.name}[{position}]", entry))
            else:
                draft.problem(f"{self.name}[{position}]", _("must be a mapping"))
        return found

    def read_entry(self, entry: dict[str, Any], position: int, path: str, draft: Draft) -> dict[str, Any]:
        values = read_fields(entry, self.fields, path, draft.problems, rest=self.free)
        self.fill(values, position, path, draft)
        draft.check_references(self.fields, values, path)
        self.judge(values, path, draft)
        return values

    def fill(self, values: dict[str, Any], position: int, path: str, draft: Draft) -> None:
        """Set defaults for absent keys, but not for keys with a wrong value."""
        defaults = self.standard(values, position)
        for field in self.fields:
            if field.name not in values and field.name in defaults and not draft.has_problem(f"{path}.{field.path}"):
                values[field.name] = defaults[field.name]

    def standard(self, values: Mapping[str, Any], position: int) -> dict[str, Any]:
        fixed = {field.name: copy(field.default) for field in self.fields if field.default is not REQUIRED}
        return fixed | self.defaults(values, position)

    def judge(self, values: Mapping[str, Any], path: str, draft: Draft) -> None:
        try:
            self.check(values, draft)
        except InvalidInput as error:
            for each in error.errors:
                draft.problem(f"{path}.{self.path_of(each.field)}", each.message)

    def path_of(self, column: str) -> str:
        """Return where the file writes a column. A dot leads inside the column."""
        head, dot, rest = column.partition(".")
        return next((field.path for field in self.fields if field.name == head), head) + dot + rest

    # --- compared with what is stored ---

    def stored(self) -> list[Any]:
        related = [field.name for field in self.fields if field.refers]
        rows = self.model._default_manager.all()
        return list(rows.select_related(*related) if related else rows)

    def key_of(self, row: Any) -> tuple[Any, ...]:
        of = {field.name: field.of for field in self.fields}
        return tuple(of[column](row) for column in self.identity)

    def row_of(self, key: tuple[Any, ...], draft: Draft) -> Any:
        """Return the stored row with this key, or None."""
        rows = draft.once(f"index of {self.name}", lambda: {self.key_of(row): row for row in draft.rows(self.name)})
        return rows.get(key)

    def values_of(self, row: Any) -> dict[str, Any]:
        return {field.name: field.of(row) for field in self.fields}

    def label(self, values: Mapping[str, Any]) -> str:
        return "/".join(str(values[column]) for column in self.identity)

    def may_be_unlisted(self, row: Any) -> bool:
        """Return whether no person wrote this row, so that the file need not list it."""
        return False

    def changes(self, given: Any, draft: Draft) -> list[Change]:
        wanted = self.read(given, draft)
        found = [change for each in wanted if (change := self.change(each.values, self.row_of(each.key, draft)))]
        listed = {each.key for each in wanted}
        missing = [row for row in draft.rows(self.name) if self.key_of(row) not in listed and self.lives(row)]
        return found + [self.retirement(row) for row in missing]

    def change(self, values: Mapping[str, Any], row: Any) -> Change | None:
        if row is None:
            return Change(self, "added", self.label(values), values=values)
        before = self.values_of(row)
        differences = self.differences(before, values)
        if row.retired_at is not None:
            return Change(self, "restored", self.label(values), differences, values, before, row)
        return Change(self, "changed", self.label(values), differences, values, before, row) if differences else None

    def lives(self, row: Any) -> bool:
        return row.retired_at is None and not self.may_be_unlisted(row)

    def retirement(self, row: Any) -> Change:
        before = self.values_of(row)
        return Change(self, "retired", self.label(before), before=before, row=row)

    def differences(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[Difference]:
        return [
            Difference(field.path, field.written(before[field.name]), field.written(after[field.name]))
            for field in self.fields
            if field.name in after and differs_by_type(before[field.name], after[field.name])
        ]

    # --- stored ---

    def store(self, change: Change, stamp: Stamp) -> None:
        row: Any = change.row or self.model()
        row.retired_at = now() if change.verb == "retired" else None
        if change.verb != "retired":
            self.put(row, change.values)
        stamp.on(row)
        row.save()

    def put(self, row: Any, values: Mapping[str, Any]) -> None:
        for field in self.fields:
            field.put(row, values[field.name])

    # --- stored → the file ---

    def export(self, *, with_secrets: bool) -> Any:
        living = sorted((row for row in self.stored() if self.lives(row)), key=self.order)
        return [entry for position, row in enumerate(living) for entry in self._entries_of(row, position, with_secrets)]

    def _entries_of(self, row: Any, position: int, with_secrets: bool) -> list[dict[str, Any]]:
        values = self.values_of(row)
        try:
            return self.entries_of(values, position, with_secrets)
        except Unreadable as error:  # a file without this row would retire it or remove its secrets
            raise Unreadable(f"{self.noun} “{self.label(values)}”: {error}") from None

    def order(self, row: Any) -> Any:
        return self.key_of(row)

    def entries_of(self, values: Mapping[str, Any], position: int, with_secrets: bool) -> list[dict[str, Any]]:
        """Return the file's entries for one row, without values that equal the defaults."""
        return [nest_paths(self.written(self.fields, values, self.standard(values, position)))]

    def written(
        self, fields: Sequence[Field], values: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            field.path: field.written(values[field.name])
            for field in fields
            if field.name in values and (field.name not in defaults or values[field.name] != defaults[field.name])
        }


class SingleRowSection(RowSection):
    """Base class for a section that is a mapping, stored as one row."""

    def changes(self, given: Any, draft: Draft) -> list[Change]:
        if not isinstance(given, dict):
            draft.problem(self.name, _("must be a mapping"))
            return []
        values = read_fields(given, self.fields, self.name, draft.problems)
        self.fill(values, 0, self.name, draft)
        self.judge(values, self.name, draft)
        row = next(iter(draft.rows(self.name)), None)
        if row is None:
            return [Change(self, "added", self.label(values), values=values)]
        before = self.values_of(row)
        differences = self.differences(before, values)
        return [Change(self, "changed", self.label(values), differences, values, before, row)] if differences else []

    def label(self, values: Mapping[str, Any]) -> str:
        return self.noun

    def store(self, change: Change, stamp: Stamp) -> None:
        row: Any = change.row or self.model(pk=1)
        self.put(row, change.values)
        stamp.on(row)
        row.save()

    def export(self, *, with_secrets: bool) -> Any:
        row = self.model._default_manager.first()
        return self.written(self.fields, self.values_of(row), {}) if row else None
