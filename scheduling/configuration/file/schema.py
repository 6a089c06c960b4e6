"""Define the table of a section: keys of an entry, their columns, value types and defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import time, timedelta
from typing import Any, Protocol

from django.db.models import Model

from scheduling.durations import format_duration, from_seconds, parse_duration, to_seconds
from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput

_CLOCK = re.compile(r"(?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{6})?)?")


class Value(Protocol):
    def read(self, given: Any) -> Any:
        """Return the stored form of a value from the file. Raises `ValueError` if it is wrong."""

    def write(self, stored: Any) -> Any:
        """Return the file's form of a stored value."""


class Plain:
    """A value with the same form in the file and in the database."""

    def write(self, stored: Any) -> Any:
        return stored


@dataclass(frozen=True, slots=True)
class Text(Plain):
    longest: int
    empty: bool = False

    def read(self, given: Any) -> str:
        if not isinstance(given, str):
            raise ValueError(_("must be text; put it in quotes") if given is not None else _("must be text"))
        if not self.empty and not given.strip():
            raise ValueError(_("must not be empty"))
        if len(given) > self.longest:
            raise ValueError(_("must not be longer than %(most)s characters", most=self.longest))
        return given


class Flag(Plain):
    def read(self, given: Any) -> bool:
        if not isinstance(given, bool):
            raise ValueError(_("must be true or false"))
        return given


@dataclass(frozen=True, slots=True)
class Whole(Plain):
    """A whole number. The validation of the row checks its range."""

    def read(self, given: Any) -> int:
        if not isinstance(given, int) or isinstance(given, bool):
            raise ValueError(_("must be a whole number"))
        return given


class Number:
    def read(self, given: Any) -> float:
        if not isinstance(given, (int, float)) or isinstance(given, bool):
            raise ValueError(_("must be a number"))
        return given

    def write(self, stored: float) -> int | float:
        return int(stored) if stored == int(stored) else stored


@dataclass(frozen=True, slots=True)
class Choice(Plain):
    options: Sequence[str]

    def read(self, given: Any) -> str:
        if given not in self.options:
            raise ValueError(_("must be one of %(known)s", known=", ".join(self.options)))
        return str(given)


@dataclass(frozen=True, slots=True)
class Named:
    """A choice that is stored as another value."""

    names: Mapping[str, Any]

    def read(self, given: Any) -> Any:
        if not isinstance(given, str) or given not in self.names:
            raise ValueError(_("must be one of %(known)s", known=", ".join(self.names)))
        return self.names[given]

    def write(self, stored: Any) -> Any:
        return next((name for name, value in self.names.items() if value == stored), stored)


class Duration:
    def read(self, given: Any) -> timedelta:
        if not isinstance(given, (str, int)) or isinstance(given, bool):
            raise ValueError(_("must be a duration like 15m, 2h, 7d or 1h30m"))
        return parse_duration(given)

    def write(self, stored: timedelta) -> str | int:
        return format_duration(stored) if stored else 0


class Seconds:
    """A duration that is stored as seconds."""

    def read(self, given: Any) -> int | float:
        return to_seconds(Duration().read(given))

    def write(self, stored: float) -> str | int:
        return Duration().write(from_seconds(stored))


class Clock:
    """A time of day, quoted because of its colon."""

    def read(self, given: Any) -> time:
        if not isinstance(given, str) or not _CLOCK.fullmatch(given):
            raise ValueError(_('must be a time like "22:00"'))
        return time.fromisoformat(given)

    def write(self, stored: time) -> str:
        return stored.isoformat("minutes" if stored == stored.replace(second=0, microsecond=0) else "auto")


@dataclass(frozen=True, slots=True)
class ListOf:
    each: Value

    def read(self, given: Any) -> list[Any]:
        if not isinstance(given, list):
            raise ValueError(_("must be a list"))
        return [self.each.read(item) for item in given]

    def write(self, stored: Sequence[Any]) -> list[Any]:
        return [self.each.write(item) for item in stored]


@dataclass(frozen=True, slots=True)
class MapOf:
    each: Value

    def read(self, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise ValueError(_("must be a mapping"))
        read: dict[str, Any] = {}
        errors = []
        for key, item in given.items():
            try:
                read[key] = self.each.read(item)
            except ValueError as error:
                errors.append(FieldError(key, str(error)))
        if errors:
            raise InvalidInput(*errors)
        return read

    def write(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self.each.write(item) for key, item in sorted(stored.items())}


class Anything(Plain):
    """Any value. The validation of the row checks it."""

    def read(self, given: Any) -> Any:
        return given


KEY = Text(64)
FLAG = Flag()
DURATION = Duration()
NUMBER = Number()


REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class FileProblem:
    """A problem in the file. `str()` gives `nodes[2].template: there is no template “x”`."""

    path: str
    message: str

    def __str__(self) -> str:
        return _("%(path)s: %(message)s", path=self.path, message=self.message) if self.path else self.message


@dataclass(frozen=True, slots=True)
class Field:
    """One key of an entry. A dot in `path` leads into a group: `rollout.percent`."""

    path: str
    value: Value
    column: str = ""  #: of the row, if it differs from the path
    default: Any = REQUIRED
    refers: str = ""  #: section whose keys it names; the column is a foreign key

    @property
    def name(self) -> str:
        return self.column or self.path

    def of(self, row: Model) -> Any:
        """Return the row's value, or for a reference the key of the other row."""
        stored = getattr(row, self.name)
        return stored.key if self.refers and stored is not None else stored

    def put(self, row: Model, value: Any) -> None:
        if self.refers and value is not None:
            related: Any = row._meta.get_field(self.name).related_model
            value = related._default_manager.get(key=value)
        setattr(row, self.name, value)

    def written(self, value: Any) -> Any:
        return None if value is None else self.value.write(value)


def read_fields(
    entry: Mapping[str, Any], fields: Sequence[Field], path: str, problems: list[FileProblem], *, rest: bool = False
) -> dict[str, Any]:
    """Return the valid values of `entry` by column; add the others to `problems`.

    Absent keys are left out. With `rest`, unknown keys are left to the caller; otherwise they are problems.
    """
    given = dict(_flatten(entry, "", {field.path for field in fields}, path, problems, rest))
    values: dict[str, Any] = {}
    for field in fields:
        if field.path not in given:
            if field.default is REQUIRED and not any(each.path == f"{path}.{field.path}" for each in problems):
                problems.append(FileProblem(f"{path}.{field.path}", _("is missing")))
            continue
        if given[field.path] is None and field.default is None:
            values[field.name] = None
            continue
        try:
            values[field.name] = field.value.read(given[field.path])
        except InvalidInput as error:
            problems.extend(
                FileProblem(_join_path(f"{path}.{field.path}", each.field), each.message) for each in error.errors
            )
        except ValueError as error:
            problems.append(FileProblem(f"{path}.{field.path}", str(error)))
    return values


def _join_path(path: str, inner: str) -> str:
    return f"{path}.{inner}" if inner and not inner.startswith("[") else f"{path}{inner}"


def _flatten(
    entry: Mapping[str, Any], prefix: str, known: set[str], path: str, problems: list[FileProblem], rest: bool
) -> Iterator[tuple[str, Any]]:
    for key, item in entry.items():
        inner = f"{prefix}{key}"
        if inner in known and "." not in key:
            yield inner, item
        elif "." in key or not any(each.startswith(f"{inner}.") for each in known):
            if not (rest and not prefix):
                names = sorted({each.removeprefix(prefix).split(".")[0] for each in known if each.startswith(prefix)})
                problems.append(
                    FileProblem(f"{path}.{inner}", _("is not known here; known are %(known)s", known=", ".join(names)))
                )
        elif isinstance(item, dict):
            yield from _flatten(item, f"{inner}.", known, path, problems, rest)
        elif item is not None:
            problems.append(FileProblem(f"{path}.{inner}", _("must be a mapping")))


def nest_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"rollout.percent": 5}` → `{"rollout": {"percent": 5}}`."""
    entry: dict[str, Any] = {}
    for path, value in values.items():
        *groups, key = path.split(".")
        inner = entry
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[key] = value
    return entry
