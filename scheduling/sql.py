"""Run set-based statements: a query or an object per touch would cost an order of magnitude more.

The cursor skips two parts of Django's that cost more than the statements: parameters pasted into the text, and
timestamps parsed in Python. Write arrays as `%(name)b` (binary). Results are binary; JSON is parsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import psycopg
from django.db import (
    DEFAULT_DB_ALIAS,
    InterfaceError,
    InternalError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from psycopg.errors import LockNotAvailable
from psycopg.pq import Format

#: Errors of PostgreSQL, not of the statement. `InternalError` is one of them: it reports the end of a transaction that
#: waited too long for its next statement (25P03).
UNAVAILABLE_ERRORS = (OperationalError, InterfaceError, InternalError)
#: Alias of the database that reads use; see `replica.read_from_replica`.
reads_from: ContextVar[str] = ContextVar("reads_from", default=DEFAULT_DB_ALIAS)


def is_idle_timeout(error: BaseException) -> bool:
    """Return whether PostgreSQL ended a transaction that waited too long for its next statement (25P03).

    The database is available. The code between two statements took too long.
    """
    return getattr(error.__cause__, "sqlstate", None) == "25P03"


def choose_read_alias() -> str:
    """Return the database that reads use: the replica within `replica.read_from_replica`.

    Reads of an open transaction stay on the primary, because its writes may depend on them.
    """
    alias = reads_from.get()
    return DEFAULT_DB_ALIAS if alias == DEFAULT_DB_ALIAS or connection.in_atomic_block else alias


def rows(sql: str, parameters: Mapping[str, Any], *, replan: bool = False) -> list[tuple[Any, ...]]:
    """Return the rows of a statement. Within `replica.read_from_replica` it may only read.

    `replan` plans each execution. A batch that probes ended touches needs it: a kept plan reads all of a partition that
    was empty when PostgreSQL planned.
    """
    with _open_cursor(choose_read_alias(), _ReplanningCursor if replan else psycopg.Cursor) as cursor:
        cursor.execute(sql, parameters)
        found: list[tuple[Any, ...]] = cursor.fetchall()
        return found


def execute(sql: str, parameters: Mapping[str, Any]) -> int:
    """Return the number of rows that a statement changed."""
    with _open_cursor(DEFAULT_DB_ALIAS) as cursor:
        cursor.execute(sql, parameters)
        return int(cursor.rowcount)


def copy_rows(sql: str, records: list[tuple[Any, ...]], types: Sequence[str]) -> None:
    """Insert many rows with `COPY … FROM STDIN (FORMAT BINARY)`, the fastest way. `types` are those of the columns.

    Text costs the client ten times as much.
    """
    if not records:
        return
    # Django wraps the errors of a cursor's own calls, but not of this one.
    with connection.cursor() as cursor, connection.wrap_database_errors, cursor.copy(sql) as stream:
        stream.set_types(types)
        for record in records:
            stream.write_row(record)


def parallel_rows(**arrays: str) -> str:
    """Return, for `FROM`, the rows of parallel arrays, given by the parameter's name and the type of its elements.

    Use it, not `unnest` alone, where the rows meet another batch and no index joins them. PostgreSQL expects ten rows
    of arrays that it does not know. If it expects few rows on the other side too, it compares each row with each:
    250,000 comparisons for 500 touches. It expects 1,000 rows of a series whose end it does not know; the sub-select
    hides that this one is empty. With 1,000 rows it makes a hash table.

    The series adds an empty column, so name the columns after `AS v`, and write no `v.*`.
    """
    columns = ", ".join(f"unnest(%({name})b::{kind}[])" for name, kind in arrays.items())
    return f"ROWS FROM ({columns}, generate_series(1, (SELECT 0)))"


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
    alias = choose_read_alias()
    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
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


class _ReplanningCursor(psycopg.Cursor[Any]):
    def execute(self, *args: Any, **options: Any) -> _ReplanningCursor:
        return super().execute(*args, **options | {"prepare": False})


def _open_cursor(alias: str, kind: type[psycopg.Cursor[Any]] = psycopg.Cursor) -> Any:
    database: Any = connection if alias == DEFAULT_DB_ALIAS else connections[alias]
    database.ensure_connection()
    cursor = kind(database.connection)
    cursor.format = Format.BINARY
    wrap = database.make_debug_cursor if database.queries_logged else database.make_cursor
    return wrap(cursor)
