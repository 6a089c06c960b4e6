"""Read, compare, store and write the rows of one model as a section of the configuration file.

Keys, values and defaults derive from the fields of the model. A class declares the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from django.core.exceptions import ValidationError
from django.db import models
from django.utils.timezone import now
from django.utils.translation import override

from scheduling.configuration.file.notation import REQUIRED, SEND_WINDOWS, Notation, derive_notation
from scheduling.error_text import ErrorText
from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector, FieldError, InvalidInput, errors_within
from scheduling.models import Calendar
from scheduling.models.encrypted import EncryptedJSONField, Sealed, Unreadable
from scheduling.policy.send_times import list_calendars
from scheduling.strict_text import is_same_json

Verb = Literal["added", "restored", "changed", "retired"]
Key = tuple[Any, ...]
Reference = tuple[str, type[models.Model], str]  #: place, model and key of a row that another one needs
Place = tuple[str, ...]  #: the names that lead to a value of an entry: `("rollout", "percent")`
KEPT = "(kept)"  #: in place of a secret in a file: keep the stored value
HIDDEN = "(secret)"  #: in place of a secret in printed output
ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class Field:
    """One key of an entry. A dot in `path` leads into a group: `rollout.percent`."""

    path: str
    column: str  #: of the row; empty: a word of the format that is not stored
    notation: Notation
    default: Any = REQUIRED
    nullable: bool = False
    related: type[models.Model] | None = None  #: of a foreign key; the file has the key of its row
    member: str = ""  #: of the mapping that the column stores

    @property
    def name(self) -> str:
        """Return the name of the value in rules: that of the column, or the path of a member."""
        return self.path if self.member else self.column or self.path

    def get(self, row: Any) -> Any:
        """Return the row's value, or for a reference the key of the other row."""
        if not self.column:
            return self.default
        stored: Any = getattr(row, self.column, None)  # a reference that could not be read has no row
        if self.member and not isinstance(stored, Sealed):
            return stored.get(self.member, self.default)
        return stored.key if self.related and stored is not None else stored

    def put(self, row: Any, value: Any) -> None:
        if self.member:
            stored = getattr(row, self.column)
            others = {} if isinstance(stored, Sealed) else {k: v for k, v in stored.items() if k != self.member}
            value = {**others, self.member: value} if value else others
        if self.column:
            setattr(row, self.column, value)

    def write(self, row: Any) -> Any:
        value = self.get(row)
        return value if value is None or isinstance(value, Sealed) else self.notation.write(value)


@dataclass(frozen=True, slots=True)
class Listed:
    """A row as the file wants it."""

    path: str  #: place of the entry: `nodes[2]`
    key: Key
    entry: Mapping[str, Any]
    row: Any
    stored: Any  #: the row with the same key; None for a new one


@dataclass(frozen=True, slots=True)
class Difference:
    """One changed value of a row, in the file's notation. Secrets are already hidden."""

    path: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Change:
    """The change that a file makes to one row."""

    section: Section
    verb: Verb
    before: Any  #: the stored row; None for an added one
    after: Any  #: None for a retired row
    differences: Sequence[Difference] = ()

    @property
    def label(self) -> str:
        return self.section.label(self.after or self.before)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Identify the change: equal for the same change to the same row."""
        entries = [row and self.section.write_entry(row) for row in (self.before, self.after)]
        return (self.section.name, self.verb, self.label, *entries, self.before and self.before.pk)


@dataclass(frozen=True, slots=True)
class Stamp:
    """The author and the reason of changes, for the history of rows and the audit log."""

    reason: str
    actor: Any = None  #: a user, or None for the command line and an API client
    client: str = ""  #: `api:<name of the key>`

    @property
    def author(self) -> str:
        return self.actor.get_username() if self.actor else self.client

    def on(self, row: Any) -> None:
        row._change_reason = (f"{self.client}: {self.reason}" if self.client else self.reason)[:100]
        if self.actor is not None:
            row._history_user = self.actor


class Section:
    """A section that is a list of rows with keys. Instances have no state; the plan holds what is being read.

    The list is complete: rows that it omits are retired, and retired rows that it lists are restored. Only changed rows
    are saved. They are saved with `save()`, so that versions and history follow.
    """

    name: ClassVar[str]
    noun: ClassVar[str]  #: one of its rows, in messages: "template"
    model: ClassVar[type[models.Model]]
    further_tables: ClassVar[tuple[type[models.Model], ...]] = ()  #: that a change writes beside the model's
    identity: ClassVar[tuple[str, ...]] = ("key",)  #: columns that identify a row
    left_out: ClassVar[frozenset[str]] = frozenset()  #: columns that the file does not have
    required: ClassVar[frozenset[str]] = frozenset()  #: columns without a default, although the model has one
    paths: ClassVar[Mapping[str, str]] = {}  #: by the column or its beginning
    notations: ClassVar[Mapping[str, Notation]] = {}  #: of columns whose type is not enough
    further: ClassVar[tuple[Field, ...]] = ()  #: keys that are no columns: members of a column, or words of the format
    named: ClassVar[tuple[type[models.Model], ...]] = ()  #: of rows that a row names without a foreign key
    settings: ClassVar[str] = ""  #: encrypted column with all keys of an entry that no field has
    scope: ClassVar[str] = ""  #: that an API key needs beside `config.write` to change it

    # --- derived from the model ---

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        columns = [
            field for field in self.model._meta.concrete_fields
            if field.editable and not field.primary_key and field.name not in self.left_out
            and (field.name in self.notations or not isinstance(field, EncryptedJSONField))
        ]  # fmt: skip
        return (*map(self._derive_field, columns), *self.further)

    def _derive_field(self, field: Any) -> Field:
        related = field.related_model if isinstance(field, models.ForeignKey) else None
        in_database = field.has_db_default() and not field.has_default()
        default = None if related else field.db_default if in_database else field.get_default()
        default = getattr(default, "value", default)  # of a choice
        if field.name in self.required or (not field.blank and default in (None, "", [], {})):
            default = REQUIRED
        start = next((start for start in self.paths if field.name.startswith(start)), "")
        return Field(
            self.paths.get(start, "") + field.name.removeprefix(start), field.name,
            self.notations.get(field.name) or derive_notation(field), default, field.null, related,
        )  # fmt: skip

    @property
    def tables(self) -> tuple[type[models.Model], ...]:
        """Return the models whose tables are locked while changes are stored."""
        return (self.model, *self.further_tables)

    def choose_fields(self, given: Any) -> Sequence[Field]:
        """Return the fields that apply to an entry or a row."""
        return self.fields

    def read_values(self, row: Any) -> dict[str, Any]:
        """Return the values of a row by name, of a reference the key of the other row."""
        return {field.name: field.get(row) for field in self.choose_fields(row)}

    # --- declared by the section ---

    def own_defaults(self, values: Mapping[str, Any], position: int, stored: Any = None) -> dict[str, Any]:
        """Return defaults that depend on the other values, the place in the list or the stored row."""
        return {"position": position} if any(field.name == "position" for field in self.fields) else {}

    def check_among(self, rows: Sequence[Listed], plan: Plan) -> None:
        """Check rows that are valid by themselves among the others, as they will be after the file is applied.

        Add notes.

        Raises:
            InvalidInput: by place in the file; see `errors_at`.
        """

    def list_references(self, row: Any) -> Iterator[Reference]:
        """Yield the place, the model and the key of each row that a valid row needs."""
        for field in self.choose_fields(row):
            if field.related and (key := field.get(row)) is not None:
                yield field.path, field.related, key
            if field.notation is SEND_WINDOWS:
                windows = field.get(row)
                for place, key in list_calendars(windows):
                    window = f"{field.path}[{place}]" if len(windows) > 1 else field.path
                    yield f"{window}.calendar", Calendar, key

    def may_refer_to(self, model: type[models.Model]) -> bool:
        """Return whether `list_references` may yield a row of the model."""
        has_windows = any(field.notation is SEND_WINDOWS for field in self.fields)
        named = {*self.named, *(field.related for field in self.fields), *((Calendar,) if has_windows else ())}
        return model in named

    def find_secrets(self, entry: Mapping[str, Any]) -> Iterable[Place]:
        """Return the places of secrets in an entry."""
        return ()

    def check_kept_secrets(self, kept: Iterable[Place], stored: Any, row: Any) -> None:
        """Check that the row may have the stored secrets which the file keeps: it sends them to the same address.

        Raises:
            InvalidInput: by place in the entry.
        """

    def may_be_unlisted(self, row: Any) -> bool:
        """Return whether no person wrote this row, so that the file need not list it."""
        return False

    def note_changes(self, changes: Sequence[Change], plan: Plan) -> None:
        """Add notes about effects that the differences do not show."""

    # --- the file → rows ---

    def read(self, given: Any, plan: Plan) -> dict[Key, Listed]:
        """Return the rows of the section by key.

        Raises:
            InvalidInput: by place in the file, with the errors of the first wrong entry.
        """
        listed: dict[Key, Listed] = {}
        for position, (path, entry) in enumerate(self.list_entries(given)):
            with errors_within(path):
                if not isinstance(entry, dict):
                    raise ValueError(_("must be a mapping"))
                self.add(self.read_entry(entry, position, path, listed, plan), listed)
        return listed

    def list_entries(self, given: Any) -> list[tuple[str, Any]]:
        """Return the place and the value of each entry."""
        if not isinstance(given, list):
            raise InvalidInput.of(self.name, _("must be a list"))
        return [(f"{self.name}[{position}]", entry) for position, entry in enumerate(given)]

    def add(self, one: Listed, listed: dict[Key, Listed]) -> None:
        first = listed.setdefault(one.key, one)
        if first is not one:
            what = _("“%(name)s” is listed already, at %(path)s", name=self.label(one.row), path=first.path)
            raise InvalidInput.of("", what)

    def read_entry(
        self, entry: dict[str, Any], position: int, path: str, earlier: Mapping[Key, Listed], plan: Plan
    ) -> Listed:
        """Return the row of an entry.

        Raises:
            InvalidInput: by place in the entry.
        """
        found = ErrorCollector()
        fields = self.choose_fields(entry)
        values = read_fields(entry, fields, found, rest=bool(self.settings))
        for field in fields:  # references are to rows as they will be after the file is applied
            if field.related and (name := values.get(field.name)) is not None:
                values[field.name] = plan.in_use(field.related).get((name,))
                if values[field.name] is None:
                    found.add(field.path, plan.describe_missing(field.related, name))
        found.raise_if_any()
        new = self.new_row()
        put_values(new, fields, self.defaults(values, position) | values)
        key = self.key_of(new, earlier)
        stored = plan.stored(self).get(key)
        row = copy(stored) if stored is not None else new
        row.retired_at = None
        restored, kept = self.restore_secrets(entry, stored)
        if kept:
            values |= read_fields(restored, [each for each in fields if not each.related], found, rest=True)
            found.raise_if_any()
        put_values(row, fields, self.defaults(values, position, stored) | values)
        if self.settings:
            setattr(row, self.settings, {name: restored[name] for name in restored.keys() - self.own_keys})
        if kept:
            self.check_kept_secrets(kept, stored, row)
        return Listed(path, key, entry, row, stored)

    def new_row(self) -> Any:
        return self.model()

    def defaults(self, values: Mapping[str, Any], position: int, stored: Any = None) -> dict[str, Any]:
        fixed = {field.name: field.default for field in self.choose_fields(values) if field.default is not REQUIRED}
        return fixed | self.own_defaults(values, position, stored)

    @cached_property
    def own_keys(self) -> set[str]:
        return {field.path.partition(".")[0] for field in self.fields}

    def check(self, rows: Sequence[Listed], plan: Plan) -> None:
        """Check rows by themselves, then among the other rows.

        Raises:
            InvalidInput: by place in the file.
        """
        for one in rows:
            with self.errors_at(one):
                check_row(one.row, {field.name for field in self.fields if field.related})
        self.check_among(rows, plan)
        for one in rows:
            with errors_within(one.path):
                for place, model, key in self.list_references(one.row):
                    if (key,) not in plan.in_use(model):
                        raise InvalidInput.of(place, plan.describe_missing(model, key))

    @contextmanager
    def errors_at(self, one: Listed) -> Iterator[None]:
        """Let errors of the block, by name of a value or by place in the entry, name their place in the file."""
        with errors_within(one.path):
            try:
                yield
            except InvalidInput as error:
                found = [FieldError(self.path_of(each.field), each.message) for each in error.errors]
                raise InvalidInput(*found) from None

    def path_of(self, name: str) -> str:
        """Return where the file writes a value. A dot leads inside the value."""
        if self.settings:
            name = name.removeprefix(f"{self.settings}.")
        head, dot, rest = name.partition(".")
        return next((field.path for field in self.fields if field.name == head), head) + dot + rest

    # --- compared with what is stored ---

    def list_rows(self, given: Any = None) -> Iterable[Any]:
        """Return the stored rows in the order of the model, retired ones included."""
        related = [field.column for field in self.fields if field.related]
        rows = self.model._default_manager.all()
        return rows.select_related(*related) if related else rows

    @cached_property
    def _identity_fields(self) -> list[Field]:
        return [field for name in self.identity for field in self.fields if field.name == name]

    def key_of(self, row: Any, taken: Collection[Key] = ()) -> Key:
        """Return the key of a row. `taken` are those of the rows before it."""
        return tuple(field.get(row) for field in self._identity_fields)

    def label(self, row: Any) -> str:
        return "/".join(map(str, self.key_of(row)))

    def list_changes(self, plan: Plan) -> list[Change]:
        listed = plan.listed[self.name]
        changes = [change for one in listed.values() if (change := self._compare(one))]
        for key, row in plan.stored(self).items():
            if key not in listed and not is_retired(row) and not self.may_be_unlisted(row):
                changes.append(Change(self, "retired", row, None))
        self.note_changes(changes, plan)
        return changes

    def _compare(self, one: Listed) -> Change | None:
        if one.stored is None:
            return Change(self, "added", None, one.row)
        before, after = self.write_entry(one.stored), self.write_entry(one.row)
        secrets = {*self.find_secrets(before), *self.find_secrets(after)}
        differences = list(list_differences(before, after, secrets))
        if is_retired(one.stored):
            return Change(self, "restored", one.stored, one.row, differences)
        return Change(self, "changed", one.stored, one.row, differences) if differences else None

    # --- stored ---

    def store(self, change: Change, stamp: Stamp) -> None:
        """Write one change. The rows that it refers to are already written."""
        row = change.after
        if row is None:
            row = change.before
            row.retired_at = now()
        stamp.on(row)
        row.save()

    # --- rows → the file ---

    def export(self, *, with_secrets: bool) -> Any:
        """Return the section in the file's notation, or None to leave it out.

        Raises:
            Unreadable: a secret cannot be read here. A file without its row would retire it or remove the secret.
        """
        rows = [row for row in self.list_rows() if not is_retired(row)]
        return [entry for position, row in enumerate(rows) for entry in self.export_row(row, position, with_secrets)]

    def export_row(self, row: Any, position: int, with_secrets: bool) -> list[dict[str, Any]]:
        """Return the entries of a row, without values that equal the defaults."""
        fields = self.choose_fields(row)
        values = self.read_values(row)
        defaults = self.defaults(values, position)
        entry = self.write_fields(
            row, [each for each in fields if values[each.name] != defaults.get(each.name, REQUIRED)]
        )
        try:
            if self.settings and isinstance(sealed := getattr(row, self.settings), Sealed):
                sealed.open()  # its members have no names that could be marked
            for place in self.find_secrets(entry):
                if not with_secrets and find_value(entry, place):
                    put_value(entry, place, KEPT)
            for value in _list_leaves(entry):
                if isinstance(value, Sealed):
                    value.open()
        except Unreadable as error:
            raise Unreadable(f"{self.noun} “{self.label(row)}”: {error}") from None
        return [entry]

    def write_entry(self, row: Any) -> dict[str, Any]:
        """Return the whole entry of a row, with its secrets."""
        return self.write_fields(row, self.choose_fields(row))

    def write_fields(self, row: Any, fields: Sequence[Field]) -> dict[str, Any]:
        entry: dict[str, Any] = {}
        for field in fields:
            put_value(entry, tuple(field.path.split(".")), deepcopy(field.write(row)))
        if self.settings:
            stored = getattr(row, self.settings)
            entry |= {self.settings: stored} if isinstance(stored, Sealed) else dict(sorted(deepcopy(stored).items()))
        return entry

    # --- secrets ---

    def restore_secrets(self, entry: dict[str, Any], stored: Any) -> tuple[dict[str, Any], list[Place]]:
        """Replace the marks of kept secrets by the stored values. Return also the places of these."""
        kept = [place for place in self.find_secrets(entry) if find_value(entry, place) == KEPT]
        if not kept:
            return entry, kept
        entry, former = deepcopy(entry), self.write_entry(stored) if stored is not None else {}
        for place in kept:
            value = find_value(former, place)
            if not value or isinstance(value, Sealed):
                sealed = any(isinstance(each, Sealed) for each in _list_leaves(former))
                problem = _("what is stored cannot be read here") if sealed else _("there is nothing stored to keep")
                raise InvalidInput.of(".".join(place), problem)
            put_value(entry, place, value)
        return entry, kept


class Plan:
    """One file being read: the rows that it lists, and the stored rows."""

    def __init__(self, document: Mapping[str, Any], sections: Mapping[str, Section]) -> None:
        self.document, self.sections = document, sections
        self.section_of: dict[type[models.Model], Section] = {each.model: each for each in self.sections.values()}
        self.listed: dict[str, dict[Key, Listed]] = {}
        self.notes: list[str] = []
        self._stored: dict[str, dict[Key, Any]] = {}
        self._in_use: dict[str, dict[Key, Any]] = {}

    def describe_missing(self, model: type[models.Model], key: str) -> str:
        return _("there is no %(noun)s “%(name)s”", noun=_(self.section_of[model].noun), name=key)

    def note(self, text: str) -> None:
        """Add a remark about something that is allowed and may be a mistake."""
        if text not in self.notes:
            self.notes.append(text)

    def stored(self, section: Section) -> dict[Key, Any]:
        """Return the stored rows of a section by key, retired ones included. They are read once."""
        if section.name not in self._stored:
            rows: dict[Key, Any] = {}
            for row in section.list_rows(self.document.get(section.name)):
                rows[section.key_of(row, rows)] = row
            self._stored[section.name] = rows
        return self._stored[section.name]

    def in_use(self, model: type[models.Model]) -> dict[Key, Any]:
        """Return the rows as they will be after the file is applied, by key, without retired ones."""
        section = self.section_of[model]
        if section.name not in self._in_use:
            self._in_use[section.name] = (
                {key: one.row for key, one in self.listed[section.name].items()}
                if section.name in self.listed
                else {key: row for key, row in self.stored(section).items() if not is_retired(row)}
            )
        return self._in_use[section.name]

    def unlisted(self, section: Section) -> list[Any]:
        """Return the rows in use that the file does not list and that stay in use."""
        listed = self.listed.get(section.name)
        rows = [row for key, row in self.stored(section).items() if not (is_retired(row) or key in (listed or ()))]
        return rows if listed is None else [row for row in rows if section.may_be_unlisted(row)]


def is_retired(row: Any) -> bool:
    return getattr(row, "retired_at", None) is not None  # a single row is never retired


class SingleRow(Section):
    """A section that is a mapping, stored as one row."""

    identity = ()

    def list_entries(self, given: Any) -> list[tuple[str, Any]]:
        return [(self.name, given)]

    def new_row(self) -> Any:
        return self.model(pk=1)

    def label(self, row: Any) -> str:
        return self.noun

    def may_be_unlisted(self, row: Any) -> bool:
        return True

    def export(self, *, with_secrets: bool) -> Any:
        row = next(iter(self.list_rows()), None)
        return self.write_entry(row) if row is not None else None


def put_values(row: Any, fields: Sequence[Field], values: Mapping[str, Any]) -> None:
    for field in fields:
        field.put(row, deepcopy(values[field.name]) if field.related is None else values[field.name])


def read_fields(
    entry: Mapping[str, Any], fields: Sequence[Field], found: ErrorCollector, *, rest: bool = False
) -> dict[str, Any]:
    """Return the valid values of an entry by name, and add an error for each of the others. Absent keys are left out.

    With `rest`, unknown keys are left to the caller; otherwise they are errors.
    """
    given = dict(_flatten(entry, "", {field.path for field in fields}, found, rest))
    values: dict[str, Any] = {}
    for field in fields:
        with found.within(field.path):
            if field.path not in given:
                if field.default is REQUIRED:
                    raise ValueError(_("is missing"))
            elif given[field.path] is None and field.nullable:
                values[field.name] = None
            else:
                values[field.name] = field.notation.read(given[field.path])
    return values


def _flatten(
    entry: Mapping[str, Any], prefix: str, known: set[str], found: ErrorCollector, rest: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each known key. A group that is null is as absent."""
    for key, item in entry.items():
        inner = f"{prefix}{key}"
        if inner in known and "." not in key:
            yield inner, item
        elif "." in key or not any(each.startswith(f"{inner}.") for each in known):
            if not (rest and not prefix):
                names = sorted({each.removeprefix(prefix).split(".")[0] for each in known if each.startswith(prefix)})
                found.add(inner, _("is not known here; known are %(known)s", known=", ".join(names)))
        elif isinstance(item, dict):
            yield from _flatten(item, f"{inner}.", known, found, rest)
        elif item is not None:
            found.add(inner, _("must be a mapping"))


def check_row(row: models.Model, read: Collection[str] = ()) -> None:
    """Check what `full_clean` checks, except columns that are read already.

    The keys of entries are unique, and constraints of the database would be a query for each row.

    Raises:
        InvalidInput: by column, one error each.
    """
    try:
        row.full_clean(exclude=read, validate_unique=False, validate_constraints=False)
    except ValidationError as error:
        problems = []
        for name, errors in error.error_dict.items():
            # Texts of bounds and rules are more precise than those of Django.
            first = next((each for each in errors if isinstance(each.message, ErrorText)), errors[0])
            with override("en"):
                problems.append(FieldError(name, str(next(iter(first)))))
        raise InvalidInput(*problems) from None


def find_value(entry: Any, place: Place) -> Any:
    for name in place:
        entry = entry.get(name) if isinstance(entry, dict) else None
    return entry


def put_value(entry: dict[str, Any], place: Place, value: Any) -> None:
    *groups, name = place
    for group in groups:
        entry = entry.setdefault(group, {})
    entry[name] = value


def list_differences(
    before: Mapping[str, Any], after: Mapping[str, Any], secrets: Iterable[Place], place: Place = ()
) -> Iterator[Difference]:
    """Yield each value that differs. Mappings are compared by their members."""
    for name in dict.fromkeys([*before, *after]):
        inner = (*place, name)
        was, will = before.get(name, ABSENT), after.get(name, ABSENT)
        parts = [{} if each is ABSENT else each for each in (was, will)]
        if inner not in secrets and any(parts) and all(isinstance(each, dict) for each in parts):
            yield from list_differences(parts[0], parts[1], secrets, inner)
        elif not is_same_json(was, will):
            shown = [None if each is ABSENT else each for each in (was, will)]
            if isinstance(was, Sealed):
                shown = ["(unreadable)", HIDDEN]
            elif inner in secrets:
                shown = [HIDDEN if each else each for each in shown]
            yield Difference(".".join(inner), *shown)


def _list_leaves(entry: Any) -> Iterator[Any]:
    if isinstance(entry, dict):
        for each in entry.values():
            yield from _list_leaves(each)
    else:
        yield entry
