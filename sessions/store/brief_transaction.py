"""Bound the transactions of a watcher.

A watcher may freeze inside a transaction (stopped process, suspended machine). PostgreSQL then ends it after
`IDLE_MS`, so its row locks do not block other programs for longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import transaction

from scheduling import sql

IDLE_MS = 5_000  #: after this idle time in a transaction the server ends it and releases its locks


@contextmanager
def brief_transaction() -> Iterator[None]:
    with transaction.atomic():
        sql.rows("SELECT set_config('idle_in_transaction_session_timeout', %(limit)s, true)", {"limit": str(IDLE_MS)})
        yield
