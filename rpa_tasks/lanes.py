"""The ledger of jobs: one lane a shop, and a pick that goes through free lanes, never through jobs.

A job moves as every ledger row does (see `scheduling.ledger`), but it is claimed together with its shop's lane, in one
statement, and the number that fences it is the lane's: whatever the job, a later run of a shop has a higher number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from django.db import transaction

from rpa_tasks.models import Job
from scheduling import sql
from scheduling.ledger import Claim, Ledger, Settlement

TIERS = {0: "high", 1: "normal", 2: "low"}
#: A node that has not described itself for so long does not keep its shops to itself any more.
HOME_LEASE = timedelta(minutes=2)

# The lanes on which something could start now, each with its best job. A lane without work costs three probes of an
# index. Where all of a shop's jobs are for later, or it is busy, paused or logged out, nothing of it is read at all.
_HEADS = """
    SELECT lane.shop_id, lane.lease_no, platform.id AS platform_id, breaker.open_until IS NOT NULL AS probes,
           lane.last_served_at, head.task_id, head.rank, head.queue, head.needs_browser
    FROM rpa_tasks_lane AS lane
    JOIN rpa_tasks_shop AS shop ON shop.id = lane.shop_id
    JOIN rpa_tasks_platform AS platform ON platform.id = shop.platform_id
    JOIN rpa_tasks_breaker AS breaker ON breaker.platform_id = platform.id
    CROSS JOIN LATERAL (
        SELECT here.* FROM (
            {tiers}
        ) AS here
        ORDER BY here.rank, here.due_at LIMIT 1
    ) AS head
    WHERE lane.task_id IS NULL
      AND NOT shop.paused AND shop.login_state = 'ok' AND shop.retired_at IS NULL
      AND NOT platform.paused AND platform.retired_at IS NULL
      AND (breaker.open_until IS NULL
           OR (breaker.open_until <= statement_timestamp() AND breaker.probe IS NULL))
      AND NOT EXISTS (SELECT FROM scheduling_pause WHERE scope = 'all')
"""
_TIER = """
            (SELECT job.task_id, job.due_at, flow.needs_browser, queue.name AS queue,
                    GREATEST(0, {tier} - floor(extract(epoch FROM statement_timestamp() - job.due_at) / %(ageing)s))
                        AS rank
             FROM (SELECT CASE WHEN shop.dedicated_queue THEN 's.' || platform.key || '.' || shop.shop_id
                               WHEN platform.dedicated_queue THEN 'p.' || platform.key || '.{name}'
                               ELSE '{name}' END AS name) AS queue
             CROSS JOIN rpa_tasks_job AS job
             JOIN rpa_tasks_flow AS flow ON flow.id = job.flow_id
             WHERE (%(queues)b::text[] IS NULL OR queue.name = ANY(%(queues)b::text[]))
               AND job.shop_id = lane.shop_id AND job.priority = {tier}
               AND job.state IN ('scheduled', 'queued') AND job.parked = '' AND job.due_at <= statement_timestamp()
               AND flow.retired_at IS NULL
               AND (NOT flow.needs_browser OR %(node)s::text IS NULL OR lane.home IN ('', %(node)s::text)
                    OR lane.home NOT IN (SELECT name FROM rpa_tasks_executionnode
                                         WHERE seen_at > statement_timestamp() - %(home_lease)s))
             ORDER BY job.due_at LIMIT 1)
"""
HEADS = _HEADS.format(
    tiers="            UNION ALL".join(_TIER.format(tier=tier, name=name) for tier, name in TIERS.items())
)


@dataclass(frozen=True, slots=True)
class Pick:
    """A claimed job with its lane."""

    claim: Claim
    shop_id: int  #: the shop's primary key
    platform_id: int
    queue: str
    probes: bool  #: it is the one run that tries whether its platform is back


class JobLedger(Ledger):
    def pick(self, queues: Sequence[str], *, node: str, lease: timedelta, ageing: timedelta) -> Pick | None:
        """Claim the best job that could start now and that one of `queues` carries, and its lane with it.

        The best: the lowest tier, to which waiting adds one level each `ageing`; among equals the shop that was served
        longest ago. None: nothing can start. Of two who pick at once each gets another lane, or nothing.
        """
        while True:
            with transaction.atomic():
                pick = self._pick(queues, node, lease, ageing)
                if pick is None or not pick.probes or _becomes_probe(pick):
                    return pick
                transaction.set_rollback(True)

    def _pick(self, queues: Sequence[str], node: str, lease: timedelta, ageing: timedelta) -> Pick | None:
        found = sql.rows(
            f"""
            WITH head AS MATERIALIZED (
                {HEADS}
                ORDER BY head.rank, lane.last_served_at NULLS FIRST LIMIT 1
                FOR UPDATE OF lane SKIP LOCKED
            ), claimed AS (
                UPDATE {self.table} AS row
                SET state = 'running', lease_no = GREATEST(head.lease_no, row.lease_no) + 1, sending_at = NULL,
                    lease_until = statement_timestamp() + %(lease)s, fresh = false, node = %(node)s::text,
                    progress = NULL, progress_message = ''
                FROM head WHERE row.task_id = head.task_id AND row.state IN ('scheduled', 'queued') AND row.parked = ''
                RETURNING row.task_id, row.lease_no, row.shop_id
            ), taken AS (
                UPDATE rpa_tasks_lane AS lane
                SET task_id = claimed.task_id, lease_no = claimed.lease_no, last_served_at = statement_timestamp(),
                    home = CASE WHEN head.needs_browser THEN %(node)s::text ELSE lane.home END
                FROM claimed JOIN head USING (task_id) WHERE lane.shop_id = claimed.shop_id
            )
            SELECT claimed.task_id, claimed.lease_no, head.shop_id, head.platform_id, head.queue, head.probes
            FROM head LEFT JOIN claimed USING (task_id)
            """,
            {"queues": list(queues), "node": node, "lease": lease} | _figures(ageing),
        )
        if not found:
            return None
        task_id, lease_no, shop_id, platform_id, queue, probes = found[0]
        if task_id is None:  # it was called off between the look and the claim
            return self._pick(queues, node, lease, ageing)
        return Pick(Claim(task_id, lease_no), shop_id, platform_id, queue, probes)

    def startable(self, *, ageing: timedelta) -> dict[str, int]:
        """On how many lanes something could start now, by queue: for each somebody should be awake."""
        found = sql.rows(
            f"SELECT heads.queue, count(*) FROM ({HEADS}) AS heads GROUP BY heads.queue",
            {"queues": None, "node": None} | _figures(ageing),
        )
        return dict(found)

    def settle(self, settlements: Sequence[Settlement]) -> set[UUID]:
        """End these runs and free their lanes."""
        with transaction.atomic():
            stood = super().settle(settlements)
            if stood:
                sql.count(
                    """
                    UPDATE rpa_tasks_lane AS lane
                    SET task_id = NULL,
                        last_success_at = CASE WHEN v.state = 'succeeded' THEN statement_timestamp()
                                               ELSE lane.last_success_at END
                    FROM unnest(%(ids)b::uuid[], %(states)b::text[]) AS v(task_id, state)
                    WHERE lane.task_id = v.task_id
                    """,
                    {
                        "ids": [each.task_id for each in settlements if each.task_id in stood],
                        "states": [each.state for each in settlements if each.task_id in stood],
                    },
                )
        return stood


def _becomes_probe(pick: Pick) -> bool:
    """Of several shops of a platform that is half open, one may try."""
    return (
        sql.count(
            "UPDATE rpa_tasks_breaker SET probe = %(task_id)s WHERE platform_id = %(platform)s AND probe IS NULL",
            {"task_id": pick.claim.task_id, "platform": pick.platform_id},
        )
        == 1
    )


def _figures(ageing: timedelta) -> dict[str, object]:
    return {"ageing": ageing.total_seconds(), "home_lease": HOME_LEASE}


jobs = JobLedger(Job, route="shop_id")
