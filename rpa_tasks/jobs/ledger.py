"""Ledger of jobs: claim one job together with its shop's lane, mark it started, settle it.

A job moves as every ledger row does (see `scheduling.ledger.transitions`). A shop runs one job at a time: `_pick` locks
its free lane, claims one job and stores it in the lane in one statement. The constraint `rpa_one_run_a_shop` refuses a
second running job. A pick reads free lanes instead of jobs. The fence `lease_no` is the lane's: a later run of a shop
has a higher number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from django.conf import settings
from django.db import connection, transaction

from scheduling import sql
from scheduling.ledger.transitions import (
    Claim,
    Settlement,
    WakeUp,
    lock_expired_runs,
)
from scheduling.queue_names import RPA_QUEUES

TIERS = dict(enumerate(RPA_QUEUES))  #: names of priorities, and the queues of their jobs
#: A node without a sign of life for this long counts as down. How long its shops wait for it is another setting,
#: `AFTERTOUCH_RPA_HOME_LEASE`.
NODE_SILENT = timedelta(minutes=2)

#: The start of the name of a shop's queue; the tier follows where it is empty or ends with a dot. Dots in keys and ids
#: are written “:”, which neither may contain, so no two shops or platforms share a queue (see `wakeups.queue_of`).
QUEUE_PREFIX = """
    CASE WHEN shop.dedicated_queue
         THEN 's.' || replace(platform.key, '.', ':') || '.' || replace(shop.shop_id, '.', ':')
         WHEN platform.dedicated_queue THEN 'p.' || replace(platform.key, '.', ':') || '.' ELSE '' END"""

#: The tiers of free lanes in which a job could start now, each with its oldest due job. A lane costs three index
#: probes, however many jobs wait. A busy, held, paused or logged-out shop costs none. `bound` is true for a tier
#: whose queue the shop's preferred node serves, if that is another node. Only jobs without a browser start here in
#: that case. Such a tier costs a walk over its jobs if the platform has flows without a browser, and nothing
#: otherwise. A draining node gets no lane. A logged-out shop has only the job that checks its login. `COALESCE` hides
#: the heads of its backlog from PostgreSQL, which would look for the check among them. Each `AFTERTOUCH_RPA_AGEING`
#: of waiting raises a job by one tier, at most to the highest. `chosen` can keep one tier of each lane.
_HEADS = f"""
    SELECT lane.shop_id, lane.lease_no, home.name AS home, home.queues AS home_queues, home.drains AS home_drains,
           platform.id AS platform_id, platform.probes, head.*
    FROM rpa_tasks_lane AS lane
    JOIN rpa_tasks_shop AS shop ON shop.id = lane.shop_id
    JOIN (
        SELECT platform.*, breaker.open_until IS NOT NULL AS probes,
               ARRAY(SELECT id FROM rpa_tasks_flow WHERE platform_id = platform.id AND NOT needs_browser) AS browserless
        FROM rpa_tasks_platform AS platform
        JOIN rpa_tasks_breaker AS breaker ON breaker.platform_id = platform.id
        WHERE NOT platform.paused AND platform.retired_at IS NULL
          AND (breaker.open_until IS NULL
               OR (breaker.open_until <= statement_timestamp() AND breaker.probe IS NULL))
        OFFSET 0 -- read once, not once per lane
    ) AS platform ON platform.id = shop.platform_id
    LEFT JOIN (
        SELECT name, queues, draining_at IS NOT NULL AS drains FROM rpa_tasks_executionnode
        WHERE seen_at > statement_timestamp() - %(home_lease)s
        OFFSET 0
    ) AS home ON home.name = lane.home AND platform.waits_for_home
    CROSS JOIN LATERAL (
        SELECT tier.priority, queue.name AS queue, job.task_id, job.due_at,
               GREATEST(0, tier.priority - floor( -- extract() is numeric: slow
                   date_part('epoch', statement_timestamp() - job.due_at) / %(ageing)s::float8)) AS rank
        FROM (VALUES {", ".join(f"({tier}, '{name}')" for tier, name in TIERS.items())}) AS tier(priority, name)
        CROSS JOIN LATERAL (
            SELECT {QUEUE_PREFIX} || CASE WHEN shop.dedicated_queue THEN '' ELSE tier.name END AS name
        ) AS queue
        CROSS JOIN LATERAL (
            SELECT (home.name <> %(node)s::text AND home.queues ? queue.name) IS TRUE AS bound
        ) AS elsewhere
        CROSS JOIN LATERAL (
            (
                SELECT job.task_id, job.due_at FROM rpa_tasks_job AS job
                WHERE shop.login_state = 'ok' AND job.shop_id = lane.shop_id AND job.priority = tier.priority
                  AND job.state IN ('scheduled', 'queued')
                  AND job.due_at <= statement_timestamp() + %(ahead)s
                  AND (NOT elsewhere.bound OR job.flow_id = ANY(platform.browserless))
                ORDER BY job.due_at LIMIT 1
            ) UNION ALL (
                SELECT job.task_id, job.due_at FROM rpa_tasks_job AS job
                WHERE shop.login_state <> 'ok' AND job.task_id = lane.check_id AND job.priority = tier.priority
                  AND COALESCE(job.state, '') IN ('scheduled', 'queued')
                  AND job.due_at <= statement_timestamp() + %(ahead)s
                  AND (NOT elsewhere.bound OR job.flow_id = ANY(platform.browserless))
            )
        ) AS job
        WHERE (%(queues)b::text[] IS NULL OR queue.name = ANY(%(queues)b::text[]))
          AND (NOT elsewhere.bound OR platform.browserless <> '{{{{}}}}')
        {{chosen}}
    ) AS head
    WHERE lane.task_id IS NULL AND (lane.held_until IS NULL OR lane.held_until <= statement_timestamp())
      AND NOT shop.paused AND (shop.login_state = 'ok' OR lane.check_id IS NOT NULL) AND shop.retired_at IS NULL
      AND NOT EXISTS (SELECT FROM scheduling_pause WHERE scope = 'all')
      AND NOT EXISTS (
          SELECT FROM rpa_tasks_executionnode WHERE name = %(node)s::text AND draining_at IS NOT NULL
      )
"""
HEADS = _HEADS.format(chosen="")
_AT_PREFERRED_NODE = """
    CASE WHEN NOT home_drains AND home_queues ? queue THEN 'n.' || replace(home, '.', ':') || '.' || queue END
"""
#: The best job has the lowest rank. Among equals the shop that was served longest ago wins.
_PICK = f"""
WITH head AS MATERIALIZED (
    {_HEADS.format(chosen="ORDER BY rank, job.due_at LIMIT 1")}
    ORDER BY head.rank, lane.last_served_at NULLS FIRST LIMIT 1
    FOR UPDATE OF lane SKIP LOCKED
), startable AS MATERIALIZED (
    SELECT row.task_id FROM head JOIN rpa_tasks_job AS row USING (task_id)
    WHERE row.state IN ('scheduled', 'queued')
      AND row.due_at <= statement_timestamp() -- another may have run it and put it off since the look
    FOR NO KEY UPDATE OF row SKIP LOCKED
), claimed AS (
    UPDATE rpa_tasks_job AS row
    SET state = 'running', lease_no = GREATEST(head.lease_no, row.lease_no) + 1, sending_at = NULL,
        lease_until = statement_timestamp() + %(lease)s, fresh = false, node = %(node)s::text,
        progress = NULL, progress_message = ''
    FROM head JOIN startable USING (task_id)
    WHERE row.task_id = head.task_id
    RETURNING row.task_id, row.lease_no, row.shop_id
), taken AS (
    UPDATE rpa_tasks_lane AS lane
    SET task_id = claimed.task_id, lease_no = claimed.lease_no, last_served_at = statement_timestamp()
    FROM claimed WHERE lane.shop_id = claimed.shop_id
)
SELECT claimed.task_id, claimed.lease_no, head.shop_id, head.platform_id, head.probes, head.task_id
FROM head LEFT JOIN claimed USING (task_id)
"""
_AWAIT = "SELECT FROM rpa_tasks_job WHERE task_id = %(id)s FOR NO KEY UPDATE"


@dataclass(frozen=True, slots=True)
class Pick:
    """A claimed job with its lane."""

    claim: Claim
    shop_id: int  #: the shop's primary key


class JobLedger:
    def dispatch_due(self, *, horizon: timedelta, limit: int = 1000) -> list[WakeUp]:
        """Mark up to `limit` jobs due within `horizon` as dispatched and return them for publishing.

        Safe to run concurrently on any node: only one caller gets a job.
        """
        return [WakeUp(*row) for row in sql.rows(_DISPATCH_DUE, {"horizon": horizon, "limit": limit})]

    def pick(self, queues: Sequence[str], *, node: str, lease: timedelta) -> Pick | None:
        """Claim the best startable job of these queues together with its lane. Returns None if no job can start.

        The best job has the lowest tier after ageing. Among equals the shop that was served longest ago wins.
        Concurrent picks get different lanes.
        """
        while True:
            with transaction.atomic():
                found = sql.rows(_PICK, _lane_parameters(queues, node) | {"lease": lease})
                if not found:
                    return None
                task_id, lease_no, shop_id, platform_id, probes, head = found[0]
                if task_id and (not probes or _claim_half_open_trial(task_id, platform_id)):
                    return Pick(Claim(task_id, lease_no), shop_id)
                # The rollback frees the lane, and those that another pick took since the look: they stay locked.
                transaction.set_rollback(True)
            if task_id is None:
                # Another transaction has or had the job. It may wait for a run whose end waits for one of the lanes.
                sql.rows(_AWAIT, {"id": head})

    def pin_to_node(self, pick: Pick, *, node: str) -> None:
        """Pin the shop to this node, which has its browser profile. No effect if the claim has lost the lane."""
        sql.execute(
            """
            UPDATE rpa_tasks_lane SET home = %(node)s
            WHERE shop_id = %(shop)s AND task_id = %(task_id)s AND lease_no = %(lease_no)s AND home <> %(node)s
            """,
            {**pick.claim._asdict(), "node": node, "shop": pick.shop_id},
        )

    def startable(self) -> dict[str, int]:
        """Count the lanes on which a job could start now, by queue.

        A lane that waits for its preferred node counts for that node's queue, unless the node drains. It counts for the
        shared queue with its jobs that need no browser.
        """
        lanes: dict[str, int] = {}
        for queue, node in (("queue", ""), (_AT_PREFERRED_NODE, None)):
            counts = f"SELECT {queue}, count(*) FROM ({HEADS}) AS heads GROUP BY 1"
            lanes |= dict(sql.rows(counts, _lane_parameters(None, node)))
        return {name: count for name, count in lanes.items() if name}

    def next_shops(self, queues: Sequence[str], *, node: str, within: timedelta, most: int) -> list[int]:
        """Return the shops with a job that needs a browser and may start on this node `within` this time, the earliest
        first.
        """
        found = sql.rows(
            f"""
            SELECT heads.shop_id FROM ({HEADS}) AS heads
            JOIN rpa_tasks_job AS job USING (task_id) JOIN rpa_tasks_flow AS flow ON flow.id = job.flow_id
            WHERE flow.needs_browser GROUP BY heads.shop_id ORDER BY min(heads.due_at) LIMIT %(most)s
            """,
            _lane_parameters(queues, node) | {"ahead": within, "most": most},
        )
        return [shop for (shop,) in found]

    def count_startable(self, queues: Sequence[str]) -> list[int]:
        """Return for each priority the lanes of these queues whose most urgent due job has it. A lane that waits for
        its preferred node counts only without a browser.
        """
        found = sql.rows(
            f"""
            SELECT priority, count(*) FROM (
                SELECT min(priority) AS priority FROM ({HEADS}) AS heads GROUP BY shop_id
            ) AS lanes GROUP BY 1
            """,
            _lane_parameters(queues, ""),
        )
        lanes: dict[int, int] = dict(found)
        return [lanes.get(tier, 0) for tier in TIERS]

    def mark_sending(self, claim: Claim) -> bool:
        """Record that the command of a job starts now. Return False if it must not start.

        Then the claim is lost, or the job was cancelled while it waited for a browser.
        """
        marked = sql.execute(
            """
            UPDATE rpa_tasks_job SET sending_at = statement_timestamp(), attempt = attempt + 1
            WHERE task_id = %(task_id)s AND COALESCE(state, '') = 'running' AND lease_no = %(lease_no)s
              AND sending_at IS NULL AND lease_until > statement_timestamp() AND cancel_requested_at IS NULL
            """,
            claim._asdict(),
        )
        return marked == 1

    def note_progress(self, claim: Claim, fraction: float | None = None, message: str | None = None) -> bool | None:
        """Store the progress of a run, if given, and return whether the run was cancelled.

        Return None if the claim is stale.
        """
        where = "WHERE task_id = %(task_id)s AND COALESCE(state, '') = 'running' AND lease_no = %(lease_no)s"
        found = sql.rows(
            f"SELECT cancel_requested_at IS NOT NULL FROM rpa_tasks_job {where}"
            if message is None
            else f"""
            UPDATE rpa_tasks_job SET progress = %(progress)s, progress_message = %(message)s {where}
            RETURNING cancel_requested_at IS NOT NULL
            """,
            {**claim._asdict(), "progress": fraction, "message": message},
        )
        return bool(found[0][0]) if found else None

    def renew(self, claim: Claim, *, lease: timedelta) -> bool:
        """Extend the lease of a claim. Return False if the claim is lost; the caller must then stop."""
        renewed = sql.execute(
            """
            UPDATE rpa_tasks_job SET lease_until = statement_timestamp() + %(lease)s
            WHERE task_id = %(task_id)s AND COALESCE(state, '') = 'running' AND lease_no = %(lease_no)s
            """,
            {**claim._asdict(), "lease": lease},
        )
        return renewed == 1

    def expired_runs(self, *, limit: int = 500) -> list[tuple[Claim, bool]]:
        return lock_expired_runs("rpa_tasks_job", limit=limit)

    def cancel(self, task_ids: Sequence[UUID], *, reason: str) -> set[UUID]:
        """Cancel jobs that do not run yet. Return the ids of the cancelled jobs."""
        return {row[0] for row in sql.rows(_CANCEL, {"ids": list(task_ids), "reason": reason[:64]})}

    def settle(self, claim: Claim, settlement: Settlement) -> bool:
        """End this run and free its lane, with the login check that ended. Return False if the claim is lost."""
        given = {**claim._asdict(), "state": settlement.state, "reason": settlement.reason[:64]}
        with transaction.atomic():
            if not sql.execute(_SETTLE, given | {"due_at": settlement.due_at}):
                return False
            sql.execute(_FREE_LANE, given)
        return True


_DISPATCH_DUE = """
WITH due AS MATERIALIZED (
    SELECT task_id FROM rpa_tasks_job
    WHERE state = 'scheduled' AND due_at <= statement_timestamp() + %(horizon)s
    ORDER BY due_at LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
UPDATE rpa_tasks_job AS row
SET state = 'queued'
WHERE row.task_id = ANY(ARRAY(SELECT task_id FROM due))
RETURNING row.task_id, row.due_at, row.priority, row.shop_id
"""
_SETTLE = """
UPDATE rpa_tasks_job
SET state = %(state)s::text, reason = %(reason)s::text, lease_until = NULL,
    due_at = COALESCE(%(due_at)s::timestamptz, due_at),
    settled_at = CASE WHEN %(state)s::text <> 'scheduled' THEN statement_timestamp() END
WHERE task_id = %(task_id)s AND COALESCE(state, '') = 'running' AND lease_no = %(lease_no)s
"""
_FREE_LANE = """
UPDATE rpa_tasks_lane
SET task_id = NULL,
    last_success_at = CASE WHEN %(state)s::text = 'succeeded' THEN statement_timestamp() ELSE last_success_at END,
    check_id = CASE WHEN check_id = task_id AND %(state)s::text <> 'scheduled' THEN NULL ELSE check_id END,
    check_reason = CASE WHEN check_id = task_id AND %(state)s::text = 'cancelled' THEN %(reason)s::text
                        ELSE check_reason END
WHERE task_id = %(task_id)s
"""
_CANCEL = """
WITH locked AS MATERIALIZED (
    SELECT task_id FROM rpa_tasks_job
    WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') IN ('scheduled', 'queued')
    ORDER BY task_id FOR UPDATE
)
UPDATE rpa_tasks_job AS row
SET state = 'cancelled', reason = %(reason)s, settled_at = statement_timestamp()
WHERE row.task_id = ANY(ARRAY(SELECT task_id FROM locked))
RETURNING row.task_id
"""


def _claim_half_open_trial(task_id: UUID, platform_id: int) -> bool:
    """Make this run the trial of a half-open platform. Returns False if another run is the trial."""
    return (
        sql.execute(
            "UPDATE rpa_tasks_breaker SET probe = %(task_id)s WHERE platform_id = %(platform)s AND probe IS NULL",
            {"task_id": task_id, "platform": platform_id},
        )
        == 1
    )


def _lane_parameters(queues: Sequence[str] | None, node: str | None) -> dict[str, object]:
    """Return the parameters of `HEADS`. No queues: all. No node: the shops count at their preferred nodes."""
    return {
        "queues": None if queues is None else list(queues), "node": node, "ahead": timedelta(0),
        "ageing": settings.AFTERTOUCH_RPA_AGEING.total_seconds(), "home_lease": settings.AFTERTOUCH_RPA_HOME_LEASE,
    }  # fmt: skip


job_ledger = JobLedger()


@contextmanager
def renew_in_background(renew: Callable[[], bool], *, interval: float) -> Iterator[None]:
    """Call `renew` every `interval` seconds until the block ends.

    Args:
        renew: return whether the lease can be renewed again. It uses a database connection of its own.
    """
    over = threading.Event()

    def renew_until_over() -> None:
        while not over.wait(interval) and renew():
            pass
        connection.close()

    keeper = threading.Thread(target=renew_until_over, name="lease", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
