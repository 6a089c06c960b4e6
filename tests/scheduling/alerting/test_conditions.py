"""What is asked for alerts alone; the rest is `tests/scheduling/metrics`."""

from __future__ import annotations

from datetime import timedelta

import pytest
import redis
from django.db import connection
from django.utils.timezone import now

from scheduling.models import AutomaticRollout, FailedTask, Touch
from scheduling.monitoring.alerting import conditions
from tests.scheduling.api.serving import eventually
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db


def read(name: str) -> dict[str, float]:
    """Asked again where the machine stalled for longer than a source may take."""
    found = eventually(lambda: name in (read := conditions.read_metrics(frozenset({name}))) and read)
    return {next(iter(labels.values())): value for labels, value in found[name]}


def test_failed_lately_counts_new_open_tasks() -> None:
    for minutes, state, origin in (
        (1, "open", "touch"),
        (9, "open", "touch"),
        (11, "open", "touch"),
        (1, "ignored", "rpa_job"),
    ):
        failed_at = now() - timedelta(minutes=minutes)
        FailedTask.objects.create(origin=origin, failure="failed", reason="x", state=state, failed_at=failed_at)
    assert read("failed_lately") == {"touch": 2}


def test_touches_unanswered_counts_receiver_failures(matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    matrix.node(delay=timedelta(minutes=5))
    ids = [record_event(user=f"u{number}").task_ids[0] for number in range(4)]
    for task_id, reason in zip(ids, ("target_down", "connect", "quota", ""), strict=True):
        Touch.objects.filter(pk=task_id).update(reason=reason)
    assert read("touches_unanswered") == {"log": 2}


def test_queue_unattended_lists_core_and_nonempty(valkey: redis.Redis) -> None:
    valkey.lpush("mq:low", "{}")
    assert read("queue_unattended") == dict.fromkeys(
        ["long", "low", "ticks", "touch.high", "touch.low", "touch.normal"], 1.0
    )


@pytest.mark.usefixtures("fresh_tables")
def test_alert_figures_scan_no_whole_table() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        for _name, _label, statement, parameters in conditions._COUNTED:
            cursor.execute("EXPLAIN " + statement.replace("%(dead)b", "%(dead)s"), parameters)
            plan = "\n".join(row[0] for row in cursor.fetchall())
            assert "Seq Scan on scheduling_touch" not in plan
            assert "Seq Scan on scheduling_failedtask" not in plan


def test_rollouts_stopped_counts_automatic_pauses(matrix: MatrixBuilder) -> None:
    for number, reason in enumerate(("limit:complaints", "unseen", "person", "edited")):
        canary = matrix.template(f"canary-{number}")
        node = matrix.node(f"node-{number}", canary_template=canary)
        AutomaticRollout.objects.create(
            node=node, stable=node.template, stable_version=1, canary=canary, canary_version=1, plan={},
            state="paused", reason=reason,
        )  # fmt: skip
    assert read("rollouts_stopped") == {"node-0": 1, "node-1": 1}
