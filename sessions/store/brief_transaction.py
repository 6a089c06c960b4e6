"""Bound the transactions of a watcher.

A watcher may freeze inside a transaction (stopped process, suspended machine). PostgreSQL then ends it after
`IDLE_MS`, so its row locks do not block other programs for longer. No time limit of PostgreSQL applies while a
`COPY` waits for its data. Another watcher ends such a transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import transaction

from scheduling import sql

IDLE_MS = 5_000  #: after this idle time in a transaction the server ends it and releases its locks
NAME = "aftertouch watcher"  #: `application_name` within the transaction


@contextmanager
def brief_transaction() -> Iterator[None]:
    with transaction.atomic():
        sql.rows(_LIMITS, {"limit": str(IDLE_MS), "name": NAME})
        yield


def end_frozen_transactions() -> int:
    """End brief transactions whose client has sent nothing for `IDLE_MS` within a statement. Return their number.

    A statement that waits for its client copies at most some hundred rows, which takes milliseconds.
    """
    return sum(row[0] for row in sql.rows(_END_FROZEN, {"limit": IDLE_MS, "name": NAME}))


_LIMITS = """
SELECT set_config('idle_in_transaction_session_timeout', %(limit)s, true),
       set_config('application_name', %(name)s, true)
"""

_END_FROZEN = """
SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND application_name = %(name)s
  AND state = 'active' AND wait_event = 'ClientRead'
  AND query_start < statement_timestamp() - %(limit)s * interval '1 millisecond'
"""
