"""What the conditions are about: the metrics that Prometheus would scrape, and figures that only alerts need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import structlog
from celery import current_app

from scheduling import sql
from scheduling.channels.circuit_breaker import DEAD
from scheduling.db_timeouts import Deadline
from scheduling.dispatch.publisher import TOUCH_QUEUES
from scheduling.monitoring import collectors
from scheduling.monitoring.alerting.rules import Figures

log = structlog.get_logger(__name__)

ALWAYS = frozenset({"ticks", *TOUCH_QUEUES.values()})  #: queues that somebody has to consume even while they are empty
PATIENCE = 1.0  #: seconds after the last answer of a worker
BURST = timedelta(minutes=10)
SOON = timedelta(minutes=10)
MOST = 10_000
Samples = Sequence[tuple[Mapping[str, str], float]]


def read(wanted: frozenset[str]) -> Figures:
    """What is known now. What is asked for alerts alone is asked where it is `wanted`."""
    deadline = Deadline(collectors.DEADLINE)
    found: dict[str, Samples] = {
        family.name: [(each.labels, each.value) for each in family.samples]
        for families in collectors.told(deadline)
        for family in families
    }
    for name, label, statement, parameters in _COUNTED:
        if name in wanted:
            found |= _counted(deadline, name, label, statement, parameters)
    if "queue_unattended" in wanted and "celery_queue_length" in found:
        found |= _unattended(found["celery_queue_length"])
    return found


def _counted(
    deadline: Deadline, name: str, label: str, statement: str, parameters: Mapping[str, Any]
) -> dict[str, Samples]:
    try:
        with deadline.asking(collectors.PATIENCE):
            return {name: [({label: key}, float(count)) for key, count in sql.rows(statement, parameters)]}
    except Exception as error:
        log.warning("alert_figure_missing", figure=name, error=str(error))
        return {}


def _unattended(lengths: Samples) -> dict[str, Samples]:
    """Queues in which something waits, or always might, and that no worker says it consumes. Asked of the workers
    themselves: what they count is known on their own node only."""
    try:
        consumed = _consumed()
    except Exception as error:  # whatever the broker's client raises
        log.warning("alert_figure_missing", figure="queue_unattended", error=str(error))
        return {}
    needed = ALWAYS | {labels["queue_name"] for labels, length in lengths if length}
    return {"queue_unattended": [({"queue": name}, 1.0) for name in sorted(needed - consumed)]}


def _consumed() -> set[str]:
    with current_app.connection_for_read() as connection:
        connection.ensure_connection(max_retries=1, timeout=PATIENCE)
        answers = current_app.control.inspect(timeout=PATIENCE, connection=connection).active_queues() or {}
    return {queue["name"] for queues in answers.values() for queue in queues}


_FAILED_LATELY = """
SELECT origin, count(*) FROM (
    SELECT origin FROM scheduling_failedtask
    WHERE state = 'open' AND failed_at > statement_timestamp() - %(burst)s LIMIT %(most)s
) AS lately GROUP BY 1
"""

# What was held back or put off because nobody was there, by the channel that would have been called.
_UNANSWERED = """
SELECT channel.key, count(*) FROM (
    SELECT node_id, reason FROM scheduling_touch
    WHERE state = 'scheduled' AND parked = '' AND due_at <= statement_timestamp() + %(soon)s
    ORDER BY due_at LIMIT %(most)s
) AS soon
JOIN scheduling_node AS node ON node.id = soon.node_id
JOIN scheduling_channelconfig AS channel ON channel.id = node.channel_id
WHERE soon.reason = ANY(%(dead)b) GROUP BY 1
"""

_ROLLOUTS = """
SELECT node.key, count(*) FROM scheduling_guardedrollout AS rollout
JOIN scheduling_node AS node ON node.id = rollout.node_id
WHERE rollout.state = 'paused' AND (starts_with(rollout.reason, 'limit:') OR rollout.reason = 'unseen') GROUP BY 1
"""

_COUNTED: tuple[tuple[str, str, str, Mapping[str, Any]], ...] = (
    ("failed_lately", "origin", _FAILED_LATELY, {"most": MOST, "burst": BURST}),
    (
        "touches_unanswered", "channel", _UNANSWERED,
        {"most": MOST, "soon": SOON, "dead": sorted({*DEAD, "target_down"})},
    ),
    ("rollouts_stopped", "node", _ROLLOUTS, {}),
)  # fmt: skip
