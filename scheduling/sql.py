"""Set-based statements, where a query or an object a touch would cost an order of magnitude."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import connection


def rows(sql: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What the statement returns."""
    with connection.cursor() as cursor:
        cursor.execute(sql, dict(parameters))
        found: list[tuple[Any, ...]] = cursor.fetchall()
        return found


def count(sql: str, parameters: Mapping[str, Any]) -> int:
    """How many rows the statement changed."""
    with connection.cursor() as cursor:
        cursor.execute(sql, dict(parameters))
        return int(cursor.rowcount)


def copy(sql: str, records: list[tuple[Any, ...]]) -> None:
    """COPY … FROM STDIN, the fastest way to insert many rows."""
    if not records:
        return
    with connection.cursor() as cursor, cursor.copy(sql) as stream:
        for record in records:
            stream.write_row(record)
