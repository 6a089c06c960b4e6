"""Bound the total time of several queries in this thread by one deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any

import psycopg
from django.db import DEFAULT_DB_ALIAS, OperationalError, connections

from scheduling import sql

CONNECT_TIMEOUT = 2  #: seconds; libpq treats smaller values as 2
MIN_TIME_LEFT = 0.05  #: seconds; with less left no query starts


class Deadline:
    """One deadline for the database queries of a thread.

    After a connection fails, every later query fails at once. Waiting for a connection again for each query would
    exceed the caller's deadline.
    """

    def __init__(self, seconds: float, alias: str = DEFAULT_DB_ALIAS) -> None:
        self._alias = alias
        self._ends_at = monotonic() + seconds
        self._unavailable = False

    @contextmanager
    def limit_queries(self, time_limit: float) -> Iterator[None]:
        """Open a transaction whose statements take at most the given seconds each and end by the deadline.

        The client's clock enforces the deadline, because a server that hangs keeps no `statement_timeout`.

        Raises:
            OperationalError: less than `MIN_TIME_LEFT` is left, or the connection failed before. Errors of the client
            pass
                through.
        """
        left = self._left()
        if self._unavailable or left < MIN_TIME_LEFT:
            raise OperationalError("the database was waited for long enough")
        try:
            with self._bound(), sql.limit_statement_time(min(time_limit, left)):
                yield
        except Exception:
            raw = connections[self._alias].connection
            self._unavailable = raw is None or raw.closed
            raise

    def is_over(self) -> bool:
        return not self._left()

    def _left(self) -> float:
        return max(0.0, self._ends_at - monotonic())

    @contextmanager
    def _bound(self) -> Iterator[None]:
        connection = connections[self._alias]
        usual = connection.settings_dict
        hasty = {**usual["OPTIONS"], "connect_timeout": CONNECT_TIMEOUT}
        connection.settings_dict = {**usual, "OPTIONS": hasty}
        try:
            connection.ensure_connection()
        finally:
            connection.settings_dict = usual
        raw: Any = connection.connection
        wait = raw.wait
        raw.wait = partial(self._wait, raw, wait)
        try:
            yield
        finally:
            raw.wait = wait

    def _wait(
        self, raw: Any, wait: Callable[..., Any], question: Any, interval: float = 0.1, timeout: float | None = None
    ) -> Any:
        try:
            return wait(question, interval=interval, timeout=min(self._left(), timeout or self._left()))
        except psycopg.Error:
            if not self._left():
                raw.pgconn.finish()  # otherwise the next query reads this query's result
            raise
