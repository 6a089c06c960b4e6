"""A node that vanishes in the middle of a transaction: its locks would keep the rescue from its jobs."""

from __future__ import annotations

import psycopg
import pytest
from django.db import connection, transaction

from rpa_tasks.jobs import dispatch
from rpa_tasks.models import Job
from scheduling import sql
from tests.rpa_tasks.core.conftest import Market

pytestmark = pytest.mark.django_db(transaction=True)


def test_locks_of_lost_node_are_released_by_timeout(market: Market) -> None:
    """The rescue passes over rows that are locked, so a vanished node must not keep them."""
    market.flow()
    market.shop()
    market.publish()
    assert market.pick()
    sql.execute("UPDATE rpa_tasks_job SET lease_until = now() - interval '1 s'", {})
    with psycopg.connect(**connection.get_connection_params() | {"cursor_factory": psycopg.ClientCursor}) as gone:
        ((given,),) = gone.execute("SHOW idle_in_transaction_session_timeout").fetchall()
        assert given == "1min"
        gone.execute("SELECT FROM rpa_tasks_job FOR NO KEY UPDATE")
        assert dispatch.rescue_expired_runs() == 0
        gone.execute("SET LOCAL idle_in_transaction_session_timeout = '1s'")  # all that this test shortens
        with transaction.atomic():
            Job.objects.select_for_update(no_key=True).get()  # waits until the database has ended it
        assert dispatch.rescue_expired_runs() == 1
        gone.close()
    assert Job.objects.get().state == "scheduled"
