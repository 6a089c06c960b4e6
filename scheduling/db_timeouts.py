"""One end for all that somebody asks of the database, who has other things to tell whether it answers or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any

import psycopg
from django.db import OperationalError, connection

from scheduling import sql

CONNECTED_WITHIN = 2  #: seconds; PostgreSQL's library takes less for as much
ENOUGH = 0.05  #: seconds, below which it is not worth asking


class Deadline:
    """Of this thread. Once the connection did not come about, or broke, nothing more is asked: to wait anew for each
    question would take longer than anybody listens."""

    def __init__(self, seconds: float) -> None:
        self._ends_at = monotonic() + seconds
        self._away = False

    @contextmanager
    def asking(self, patience: float) -> Iterator[None]:
        """A transaction each statement of which may take so many seconds, and none longer than to the end: by our own
        clock, because a server that hangs keeps no `statement_timeout`. Raises what the database's client does."""
        left = self._left()
        if self._away or left < ENOUGH:
            raise OperationalError("the database was waited for long enough")
        try:
            with self._bound(), sql.within(f"{round(min(patience, left) * 1000)}ms"):
                yield
        except Exception:
            self._away = connection.connection is None or connection.connection.closed
            raise

    def _left(self) -> float:
        return max(0.0, self._ends_at - monotonic())

    @contextmanager
    def _bound(self) -> Iterator[None]:
        usual = connection.settings_dict
        hasty = {**usual["OPTIONS"], "connect_timeout": CONNECTED_WITHIN}
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
                raw.pgconn.finish()  # its answer would be taken for that of the next question
            raise
