"""The table a section is made of: which key of an entry is which column, and what it is when the entry is silent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Model

from scheduling.configuration.file.values import Value
from scheduling.errors import InvalidInput

REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in the file. `str()` is what people read: `nodes[2].template: there is no template “x”`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


@dataclass(frozen=True, slots=True)
class Field:
    """One key of an entry. A dot in `path` leads into a group: `rollout.percent`."""

    path: str
    value: Value
    column: str = ""  #: of the row, where it is not called like the path
    default: Any = REQUIRED
    refers: str = ""  #: the section whose keys it names; the column is a foreign key

    @property
    def name(self) -> str:
        return self.column or self.path

    def of(self, row: Model) -> Any:
        """What the row holds, a reference as the other row's key."""
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
    entry: Mapping[str, Any], fields: Sequence[Field], path: str, problems: list[Problem], *, rest: bool = False
) -> dict[str, Any]:
    """The values of `entry` by column, without those that are wrong and those it is silent about. With `rest`, keys
    that the table does not know are left to the caller, else they are problems."""
    given = dict(_flatten(entry, "", {field.path for field in fields}, path, problems, rest))
    values: dict[str, Any] = {}
    for field in fields:
        if field.path not in given:
            if field.default is REQUIRED and not any(each.path == f"{path}.{field.path}" for each in problems):
                problems.append(Problem(f"{path}.{field.path}", "is missing"))
            continue
        if given[field.path] is None and field.default is None:
            values[field.name] = None
            continue
        try:
            values[field.name] = field.value.read(given[field.path])
        except InvalidInput as error:
            problems.extend(Problem(f"{path}.{field.path}.{each.field}", each.message) for each in error.errors)
        except ValueError as error:
            problems.append(Problem(f"{path}.{field.path}", str(error)))
    return values


def _flatten(
    entry: Mapping[str, Any], prefix: str, known: set[str], path: str, problems: list[Problem], rest: bool
) -> Iterator[tuple[str, Any]]:
    for key, item in entry.items():
        inner = f"{prefix}{key}"
        if inner in known and "." not in key:
            yield inner, item
        elif "." in key or not any(each.startswith(f"{inner}.") for each in known):
            if not (rest and not prefix):
                names = sorted({each.removeprefix(prefix).split(".")[0] for each in known if each.startswith(prefix)})
                problems.append(Problem(f"{path}.{inner}", f"is not known here; known are {', '.join(names)}"))
        elif isinstance(item, dict):
            yield from _flatten(item, f"{inner}.", known, path, problems, rest)
        elif item is not None:
            problems.append(Problem(f"{path}.{inner}", "must be a mapping"))


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"rollout.percent": 5}` → `{"rollout": {"percent": 5}}`."""
    entry: dict[str, Any] = {}
    for path, value in values.items():
        *groups, key = path.split(".")
        inner = entry
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[key] = value
    return entry
