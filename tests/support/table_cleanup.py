"""Empty the tables after a test that commits, at the cost of the rows that it left, and restore what migrations made.

Django truncates all tables, with several files each, and makes content types and permissions again. Most tests leave a
few rows in a few tables. Pages, statistics and dead rows stay behind: a test of plans, of read blocks or of read rows
uses `fresh_tables`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection
from django.test import TransactionTestCase
from psycopg.errors import DeadlockDetected

#: Left as they are, since no test changes them. If one does, Django empties the database and makes them again.
KEPT = ("django_content_type", "auth_permission")
BLOATED = 1_000_000  #: bytes of a table from which truncation is quicker than deletion, and removes dead rows too

# The lock waits for what another process still writes, as truncation does. No trigger fires, as for truncation.
EMPTY = """
DO $$
DECLARE
    each regclass;
BEGIN
    LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE;
    IF EXISTS (SELECT FROM {parts} WHERE pg_relation_size(relid) > {bloated}) THEN
        TRUNCATE {tables};
        RETURN;
    END IF;
    PERFORM set_config('session_replication_role', 'replica', true);
    FOR each IN SELECT relid FROM {parts} WHERE pg_relation_size(relid) > 0 LOOP
        EXECUTE format('DELETE FROM %s', each);
    END LOOP;
END $$
"""
PERMITTED = "SELECT has_parameter_privilege('session_replication_role', 'SET')"  #: not on a server of another owner

CLEAR_STATISTICS = """
SELECT pg_clear_attribute_stats(schemaname, tablename, attname, inherited)
FROM pg_stats WHERE schemaname = 'public' AND tablename <> ALL(%s)
"""

_kept_rows: list[Any] = []
_migrated_rows: dict[str, str] = {}  #: what migrations made in other tables, as JSON by table


def pytest_configure(config: pytest.Config) -> None:
    from_django = TransactionTestCase._fixture_teardown

    def empty_tables(test_case: TransactionTestCase) -> None:
        """Delete all rows but the kept ones; as Django does if those have changed or triggers cannot be passed."""
        if can_pass_triggers() and read_kept_rows() == _kept_rows:
            delete_rows()
        else:
            from_django(test_case)
            _kept_rows[:] = read_kept_rows()
        with connection.cursor() as cursor:
            restore_rows(cursor)

    TransactionTestCase._fixture_teardown = empty_tables


def delete_rows() -> None:
    """Run again after a deadlock: a program of the test may hold one table and ask for another."""
    for _ in range(10):
        try:
            with connection.cursor() as cursor:
                cursor.execute(build_statement())
            return
        except OperationalError as error:
            if not isinstance(error.__cause__, DeadlockDetected):
                raise
    pytest.fail("the tables are still locked after ten deadlocks")


def note_rows() -> None:
    """Note what the migrations made. Called once the test database is ready."""
    _kept_rows[:] = read_kept_rows()
    with connection.cursor() as cursor:
        for table in list_tables():
            cursor.execute(f'SELECT json_agg(t)::text FROM "{table}" AS t')
            (rows,) = cursor.fetchone()
            if rows is not None:
                _migrated_rows[table] = rows


def restore_rows(cursor: Any) -> None:
    for table, rows in _migrated_rows.items():
        cursor.execute(f'INSERT INTO "{table}" SELECT * FROM json_populate_recordset(NULL::"{table}", %s)', [rows])


def read_kept_rows() -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(
            " UNION ALL ".join(f"SELECT md5(string_agg(t::text, ',' ORDER BY id)) FROM {t} AS t" for t in KEPT)
        )
        return cursor.fetchall()


@cache
def can_pass_triggers() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(PERMITTED)
        return bool(cursor.fetchone()[0])


@cache
def list_tables() -> list[str]:
    names = connection.introspection.django_table_names(only_existing=True, include_views=False)
    return sorted(set(names) - set(KEPT))


@cache
def build_statement() -> str:
    tables = list_tables()
    names = ", ".join(f"'\"{table}\"'" for table in tables)
    return EMPTY.format(
        tables=", ".join(f'"{table}"' for table in tables),
        # A partitioned table stores nothing itself.
        parts=f"(SELECT COALESCE(p.relid, t) AS relid FROM unnest(ARRAY[{names}]::regclass[]) AS t"
        " LEFT JOIN LATERAL pg_partition_tree(t) AS p ON true) AS part",
        bloated=BLOATED,
    )


@pytest.fixture
def fresh_tables(db) -> None:
    """Start with tables as after their migration: without pages, dead rows and statistics of earlier tests.

    Must come before fixtures that make rows: another connection truncates the tables.
    """
    parameters = connection.get_connection_params()
    given = {name: parameters[name] for name in ("host", "port", "user", "password", "dbname")}
    with psycopg.connect(**given, autocommit=True, options="-c lock_timeout=20s") as other:
        other.execute("TRUNCATE " + ", ".join(f'"{table}"' for table in list_tables()))
        other.execute(CLEAR_STATISTICS, [list(KEPT)])
        restore_rows(other)
