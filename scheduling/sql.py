"""Set-based statements, where a query or an object a touch would cost an order of magnitude.

They bypass two habits of Django's cursor that cost more than the statements themselves: parameters pasted into the
text, and timestamps parsed in Python. Arrays are written `%(name)b` (binary); results come back binary, JSON parsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import psycopg
from django.db import InterfaceError, InternalError, OperationalError, connection, transaction
from psycopg.errors import LockNotAvailable
from psycopg.pq import Format

#: PostgreSQL is the trouble, not what it was asked. Internal: it ends a transaction in which it was kept waiting for
#: too long (25P03) with an error of that class.
AWAY = (OperationalError, InterfaceError, InternalError)


def took_too_long(error: BaseException) -> bool:
    """Whether PostgreSQL ended a transaction because it had waited too long for the next statement (25P03). The
    database is there; what was done between two statements took too long."""
    return getattr(error.__cause__, "sqlstate", None) == "25P03"


def rows(sql: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What the statement returns."""
    with _cursor() as cursor:
        cursor.execute(sql, parameters)
        found: list[tuple[Any, ...]] = cursor.fetchall()
        return found


def count(sql: str, parameters: Mapping[str, Any]) -> int:
    """How many rows the statement changed."""
    with _cursor() as cursor:
        cursor.execute(sql, parameters)
        return int(cursor.rowcount)


def copy(sql: str, records: list[tuple[Any, ...]]) -> None:
    """COPY … FROM STDIN, the fastest way to insert many rows."""
    if not records:
        return
    # Django gives a cursor's own calls its classes of errors, and not this one.
    with connection.cursor() as cursor, connection.wrap_database_errors, cursor.copy(sql) as stream:
        for record in records:
            stream.write_row(record)


def now() -> datetime:
    """The time by the database's clock, the only one that all nodes share."""
    found: datetime = rows("SELECT statement_timestamp()", {})[0][0]
    return found


@contextmanager
def within(patience: str) -> Iterator[None]:
    """A transaction each statement of which may take so long ("2s"). Raises `OperationalError` where one would take
    longer."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('statement_timeout', %s, true)", [patience])
        yield


def limit_lock_waits(wait: timedelta) -> None:
    """Let each later statement of this transaction wait for a lock no longer than `wait`.

    A statement that would wait longer raises an `OperationalError` that `is_lock_timeout` recognises.
    """
    rows("SELECT set_config('lock_timeout', %(wait)s, true)", {"wait": f"{wait / timedelta(milliseconds=1):.0f}ms"})


def is_lock_timeout(error: BaseException) -> bool:
    """Return whether another transaction held a lock for longer than this one may wait. PostgreSQL itself is well."""
    return isinstance(error.__cause__, LockNotAvailable)


@contextmanager
def brief_lock_waits(wait: timedelta = timedelta(seconds=1)) -> Iterator[None]:
    """Run a transaction that waits for each lock no longer than `wait` (see `limit_lock_waits`)."""
    with transaction.atomic():
        limit_lock_waits(wait)
        yield


def _cursor() -> Any:
    connection.ensure_connection()
    cursor = psycopg.Cursor(connection.connection)
    cursor.format = Format.BINARY
    wrap = connection.make_debug_cursor if connection.queries_logged else connection.make_cursor
    return wrap(cursor)  # type: ignore[arg-type]
