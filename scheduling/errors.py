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
        return _("%(path)s: %(message)s", path=self.field, message=self.message) if self.field else self.message


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


class ErrorCollector:
    """Collect errors by field."""

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


@contextmanager
def errors_within(path: str) -> Iterator[None]:
    """Let errors of the block name their place inside `path`. A `ValueError` is about all of it."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(*(FieldError(join_path(path, each.field), each.message) for each in error.errors)) from None
    except ValueError as error:
        raise InvalidInput.of(path, str(error)) from None


def describe_model_error(raw: Mapping[str, Any]) -> str:
    """Return the text of one error of a pydantic model: our own, before which pydantic puts “Value error, ”, or its."""
    return str(raw["ctx"]["error"] if raw["type"] == "value_error" else raw["msg"])


def join_path(path: str, inner: str) -> str:
    return f"{path}.{inner}" if inner and not inner.startswith("[") else f"{path}{inner}"


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Bounds of values, for columns (`models.versioned.Bound`) and for members of JSON. All raise `ValueError`.

_KEY = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
ZERO, TICK = timedelta(0), timedelta(microseconds=1)
MAX_RETRIES, MAX_RETRY_DELAY = 20, timedelta(days=7)


def check_key(value: str) -> None:
    if not _KEY.fullmatch(value):
        raise ValueError(_("must be lower-case letters, digits, “-”, “_” and “.”, at most 64"))


def check_number(value: Any, least: float, most: float) -> None:
    if not (is_number(value) and least <= value <= most):
        raise ValueError(_("must be between %(least)s and %(most)s", least=least, most=most))


def check_span(value: timedelta, least: timedelta = ZERO, most: timedelta = YEAR) -> None:
    if least > TICK and not least <= value <= most:
        raise ValueError(
            _("must be between %(least)s and %(most)s", least=format_duration(least), most=format_duration(most))
        )
    if value < least:
        raise ValueError(_("must be above zero") if least == TICK else _("must not be negative"))
    if value > most:
        raise ValueError(_("must not be longer than %(most)s", most=format_duration(most)))


def check_seconds(value: Any) -> None:
    """Check a duration that is stored as seconds."""
    if not is_number(value):
        raise ValueError(_("must be a duration in seconds"))
    if not 0 <= value <= YEAR.total_seconds():
        raise ValueError(_("must be between 0 and a year (365d)"))


def check_texts(value: Any, longest: int) -> None:
    if not isinstance(value, list) or not all(isinstance(each, str) and 0 < len(each) <= longest for each in value):
        raise ValueError(_("must be a list of texts of 1 to %(most)s characters", most=longest))
    if len(set(value)) < len(value):
        raise ValueError(_("names something twice"))


def check_retry_delays(value: Any) -> None:
    """Check pauses before retries, stored as seconds."""
    if not isinstance(value, list) or len(value) > MAX_RETRIES or not all(map(is_number, value)):
        raise ValueError(_("must be a list of at most %(most)s durations", most=MAX_RETRIES))
    if any(not 0 < each <= MAX_RETRY_DELAY.total_seconds() for each in value):
        raise ValueError(_("each must be above zero and at most %(most)s", most=format_duration(MAX_RETRY_DELAY)))
