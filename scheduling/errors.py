"""Errors that callers cause. The docstring of a class is its message unless a better one is given.

AftertouchError
├── InvalidInput        the value of a field is not accepted
├── NotFound            the object does not exist
└── Conflict            another writer was first, or the state does not allow it
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from scheduling.durations import YEAR, format_duration
from scheduling.error_text import ErrorText as _


@dataclass(frozen=True, slots=True)
class FieldError:
    field: str
    message: str

    def __str__(self) -> str:
        return _("%(path)s: %(message)s", path=self.field, message=self.message)


class AftertouchError(Exception):
    """The action failed."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.__doc__)


class InvalidInput(AftertouchError):
    """The input is not accepted."""

    def __init__(self, *errors: FieldError) -> None:
        super().__init__("; ".join(map(str, errors)))
        self.errors: Sequence[FieldError] = errors

    @classmethod
    def of(cls, field: str, message: str) -> InvalidInput:
        return cls(FieldError(field, message))


class NotFound(AftertouchError):
    """The object does not exist."""


class Conflict(AftertouchError):
    """The object has changed, or its state does not allow this."""


_KEY = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
ZERO, TICK = timedelta(0), timedelta(microseconds=1)


class ErrorCollector:
    """Collect errors by field. Every check skips an absent field."""

    def __init__(self) -> None:
        self.errors: list[FieldError] = []

    def add(self, field: str, message: str) -> None:
        self.errors.append(FieldError(field, message))

    @contextmanager
    def within(self, path: str) -> Iterator[None]:
        """Add the errors that the block raises, as `errors_within` does."""
        try:
            with errors_within(path):
                yield
        except InvalidInput as error:
            self.errors += error.errors

    def raise_if_any(self) -> None:
        """Raise `InvalidInput` with all errors, if there are any."""
        if self.errors:
            raise InvalidInput(*self.errors)

    def key(self, values: Mapping[str, Any], field: str = "key") -> None:
        if field in values and not _KEY.fullmatch(values[field]):
            self.add(field, _("must be lower-case letters, digits, “-”, “_” and “.”, at most 64"))

    def span(self, values: Mapping[str, Any], field: str, *, least: timedelta = ZERO, most: timedelta = YEAR) -> None:
        value = values.get(field)
        if value is None:
            return
        if least > TICK and not least <= value <= most:
            self.add(
                field,
                _("must be between %(least)s and %(most)s", least=format_duration(least), most=format_duration(most)),
            )
        elif value < least:
            self.add(field, _("must be above zero") if least == TICK else _("must not be negative"))
        elif value > most:
            self.add(field, _("must not be longer than %(most)s", most=format_duration(most)))

    def seconds(self, values: Mapping[str, Any], field: str, *, name: str = "") -> None:
        """Check a duration that is stored as seconds."""
        value: Any = values.get(field)
        name = name or field
        if not is_number(value):
            self.add(name, _("must be a duration in seconds"))
        elif not 0 <= value <= YEAR.total_seconds():
            self.add(name, _("must be between 0 and a year (365d)"))

    def number(self, values: Mapping[str, Any], field: str, least: float, most: float) -> None:
        if field in values and not (is_number(values[field]) and least <= values[field] <= most):
            self.add(field, _("must be between %(least)s and %(most)s", least=least, most=most))

    def texts(self, values: Mapping[str, Any], field: str, *, longest: int) -> None:
        given = values.get(field, [])
        if not isinstance(given, list) or not all(isinstance(each, str) and 0 < len(each) <= longest for each in given):
            self.add(field, _("must be a list of texts of 1 to %(most)s characters", most=longest))
        elif len(set(given)) < len(given):
            self.add(field, _("names something twice"))


@contextmanager
def errors_within(path: str) -> Iterator[None]:
    """Let errors of the block name their place inside `path`. A `ValueError` is about all of it."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(
            *(FieldError(join_path(path, each.field), each.message) for each in error.errors)
        ) from None
    except ValueError as error:
        raise InvalidInput.of(path, str(error)) from None


def join_path(path: str, inner: str) -> str:
    return f"{path}.{inner}" if inner and not inner.startswith("[") else f"{path}{inner}"


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
