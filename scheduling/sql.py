"""Run set-based statements: a query or an object per touch would cost an order of magnitude more.

The cursor skips two parts of Django's that cost more than the statements: parameters pasted into the text, and
timestamps parsed in Python. Write arrays as `%(name)b` (binary). Results are binary; JSON is parsed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from django.db import InterfaceError, InternalError, OperationalError, connection, transaction
from psycopg.adapt import Dumper
from psycopg.errors import LockNotAvailable
from psycopg.pq import Format

#: Errors of PostgreSQL, not of the statement. `InternalError` is one of them: it reports the end of a transaction that
#: waited too long for its next statement (25P03).
UNAVAILABLE_ERRORS = (OperationalError, InterfaceError, InternalError)
_UUID = psycopg.adapters.types["uuid"].oid
_UUID_ARRAY = psycopg.adapters.types["uuid"].array_oid


def is_idle_timeout(error: BaseException) -> bool:
    """Return whether PostgreSQL ended a transaction that waited too long for its next statement (25P03).

    The database is available. The code between two statements took too long.
    """
    return getattr(error.__cause__, "sqlstate", None) == "25P03"


def rows(sql: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the rows of a statement."""
    with _open_cursor() as cursor:
        cursor.execute(sql, parameters)
        found: list[tuple[Any, ...]] = cursor.fetchall()
        return found


def execute(sql: str, parameters: Mapping[str, Any]) -> int:
    """Return the number of rows that a statement changed."""
    with _open_cursor() as cursor:
        cursor.execute(sql, parameters)
        return int(cursor.rowcount)


def copy_rows(sql: str, records: list[tuple[Any, ...]], types: Sequence[str] = ()) -> None:
    """Insert many rows with `COPY … FROM STDIN`, the fastest way.

    `types` are those of the columns, for a statement with `FORMAT BINARY`. Text costs the client ten times as much.
    """
    if not records:
        return
    # Django wraps the errors of a cursor's own calls, but not of this one.
    with connection.cursor() as cursor, connection.wrap_database_errors, cursor.copy(sql) as stream:
        if types:
            stream.set_types(types)
        for record in records:
            stream.write_row(record)


class UuidArray:
    """The ids of a batch as a `uuid[]`, written as `%(name)b` in half of psycopg's time."""

    __slots__ = ("ids",)

    def __init__(self, ids: Sequence[UUID]) -> None:
        self.ids = ids


class _UuidArrayDumper(Dumper):
    format = Format.BINARY
    oid = _UUID_ARRAY

    def dump(self, obj: UuidArray) -> bytes:
        size = b"\0\0\0\x10"
        head = struct.pack("!iiIii", 1, 0, _UUID, len(obj.ids), 1)
        return head + b"".join([size + each.bytes for each in obj.ids])


class _UuidArrayTextDumper(Dumper):
    """Shows the ids to a cursor that puts parameters into the text, as Django's log of queries does."""

    oid = _UUID_ARRAY

    def dump(self, obj: UuidArray) -> bytes:
        return f"{{{','.join(map(str, obj.ids))}}}".encode()


psycopg.adapters.register_dumper(UuidArray, _UuidArrayTextDumper)
psycopg.adapters.register_dumper(UuidArray, _UuidArrayDumper)


def now() -> datetime:
    """Return the time of the database's clock, the only one that all nodes share."""
    found: datetime = rows("SELECT statement_timestamp()", {})[0][0]
    return found


@contextmanager
def limit_statement_time(seconds: float) -> Iterator[None]:
    """Open a transaction that limits the time of each statement.

    Raises:
        OperationalError: a statement takes longer.
    """
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('statement_timeout', %s, true)", [_format_milliseconds(seconds)])
        yield


def limit_lock_waits(seconds: float) -> datetime:
    """Limit how long each later statement of this transaction waits for a lock. Return the database's time.

    A longer wait raises an `OperationalError` that `is_lock_timeout` recognises.
    """
    statement = "SELECT set_config('lock_timeout', %(wait)s, true), statement_timestamp()"
    ((_, at),) = rows(statement, {"wait": _format_milliseconds(seconds)})
    assert isinstance(at, datetime)
    return at


def is_lock_timeout(error: BaseException) -> bool:
    """Return whether another transaction held a lock for too long. PostgreSQL itself is available."""
    return isinstance(error.__cause__, LockNotAvailable)


@contextmanager
def brief_lock_waits(seconds: float = 1.0) -> Iterator[None]:
    """Open a transaction that waits for each lock no longer than `seconds` (see `limit_lock_waits`)."""
    with transaction.atomic():
        limit_lock_waits(seconds)
        yield


def _format_milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}ms"


def _open_cursor() -> Any:
    connection.ensure_connection()
    cursor = psycopg.Cursor(connection.connection)
    cursor.format = Format.BINARY
    wrap = connection.make_debug_cursor if connection.queries_logged else connection.make_cursor
    return wrap(cursor)  # type: ignore[arg-type]
