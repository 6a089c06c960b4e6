"""What can go wrong by the caller's doing. The docstring is the message unless a better one is given.

AftertouchError
├── InvalidInput        a field says something that cannot be meant
├── NotFound            there is no such thing
└── Conflict            somebody else got there first, or the state does not allow it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldError:
    field: str
    message: str


class AftertouchError(Exception):
    """Something went wrong."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.__doc__)


class InvalidInput(AftertouchError):
    """The input does not fit."""

    def __init__(self, *errors: FieldError) -> None:
        super().__init__("; ".join(f"{error.field}: {error.message}" for error in errors))
        self.errors: Sequence[FieldError] = errors

    @classmethod
    def of(cls, field: str, message: str) -> InvalidInput:
        return cls(FieldError(field, message))


class NotFound(AftertouchError):
    """There is no such thing."""


class Conflict(AftertouchError):
    """Somebody else got there first."""
