"""Bound the total time a thread waits for the database, by its own clock.

A server that hangs does not apply `statement_timeout`. Its kernel still acknowledges packets, so TCP does not detect it
either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic
from typing import Any

import psycopg


class DatabaseTimeLimit:
    """Limit the total wait of all queries between two resets. A query beyond the limit fails immediately."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._left = seconds
        self._bound: Any = None

    def begin(self, database: Any) -> None:
        """Reset the limit for Django's connection of this thread. The limit also applies after a reconnect."""
        self._left = self.seconds
        if self._bound is not database:
            self._bound = database
            database.get_new_connection = partial(self._connect, database.get_new_connection)

    def _connect(self, connect: Callable[..., Any], parameters: dict[str, Any]) -> Any:
        if self._left <= 0:
            raise psycopg.OperationalError("the database was waited for long enough")
        began = monotonic()
        try:
            raw = connect(parameters)
        finally:
            self._left -= monotonic() - began
        raw.wait = partial(self._wait, raw, raw.wait)
        return raw

    def _wait(
        self, raw: Any, wait: Callable[..., Any], question: Any, interval: float = 0.1, timeout: float = inf
    ) -> Any:
        began = monotonic()
        try:
            return wait(question, interval=interval, timeout=min(max(self._left, 0.0), timeout))
        finally:
            self._left -= monotonic() - began
            if self._left <= 0:
                raw.pgconn.finish()  # a late response would be taken for that of the next query
