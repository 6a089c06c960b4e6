"""Transactions of a watcher. A watcher that is frozen in one (a stopped process, a suspended machine) must not keep its
row locks for as long as other programs may be idle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import transaction

from scheduling import sql

IDLE_MS = 5_000  #: idle for so long in its transaction, the server ends it and with it its locks


@contextmanager
def brief_transaction() -> Iterator[None]:
    with transaction.atomic():
        sql.rows("SELECT set_config('idle_in_transaction_session_timeout', %(limit)s, true)", {"limit": str(IDLE_MS)})
        yield
