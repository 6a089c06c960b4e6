"""Claim messages of the outbox and store the results of their attempts.

A claim is a lease of a minute: a killed sender's messages return after it. `attempt` fences every result. Of an object
only the first waiting message can be claimed, so the next one waits until it is confirmed or given up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from scheduling import sql

LEASE = timedelta(seconds=60)
GIVE_UP_AFTER = timedelta(hours=24)  #: from the first attempt
FIRST_DELAY = timedelta(seconds=5)  #: each further delay is as long as the time since the first attempt
LONGEST_REST = timedelta(minutes=10)
FAILURES_TO_REST = 5  #: failures without a success in between, after which a receiver rests


class ClaimedMessage(NamedTuple):
    id: int
    attempt: int
    message_id: UUID
    type: str
    occurred_at: datetime
    data: str  #: JSON text


class AttemptResult(NamedTuple):
    id: int
    attempt: int
    outcome: str  #: delivered | failed | released (not attempted)
    problem: str = ""
    status: int | None = None
    retry_after: timedelta | None = None
    gone: bool = False


class SendableHook(NamedTuple):
    id: int
    probing: bool  #: it failed before: one message shows whether it answers again


def find_sendable(hooks: Sequence[int]) -> list[SendableHook]:
    """Return those of the subscriptions that have due messages and whose receiver does not rest."""
    rows = sql.rows(_SENDABLE, {"hooks": list(hooks), "failures": FAILURES_TO_REST})
    return [SendableHook(*row) for row in rows]


def claim_messages(hook: int, version: int, most: int) -> list[ClaimedMessage]:
    """Claim due messages, at most `most`, for `LEASE`. Any number of processes may claim at once.

    Nothing is claimed while the receiver rests, is paused or is disabled, nor for another version of the subscription:
    the caller knows an old address or an old secret.
    """
    rows = sql.rows(_CLAIM_MESSAGES, {"hook": hook, "version": version, "most": most, "lease": LEASE})
    return sorted((ClaimedMessage(*row) for row in rows), key=lambda each: each.id)


def settle_attempts(hook: int, version: int, results: Sequence[AttemptResult]) -> None:
    """Store results, and what they show about the receiver. A result of an expired lease changes nothing.

    A failed message waits as long again as since its first attempt, at least `FIRST_DELAY`, and at least as long as the
    receiver asks. The last attempt is a day after the first. Results of another `version` of the subscription than the
    stored one may be from another receiver.
    """
    columns = {
        "ids": [each.id for each in results],
        "attempts": [each.attempt for each in results],
        "outcomes": [each.outcome for each in results],
        "problems": [each.problem[:300] for each in results],
        "statuses": [each.status or 0 for each in results],
        "waits": [(each.retry_after or timedelta(0)).total_seconds() for each in results],
    }
    spans = {"day": GIVE_UP_AFTER, "first": FIRST_DELAY}
    sql.execute(_SETTLE_ATTEMPTS, columns | spans)
    _note_endpoint({"hook": hook, "version": version}, [each for each in results if each.outcome != "released"])


def _note_endpoint(of: Mapping[str, int], results: Sequence[AttemptResult]) -> None:
    failed = [each for each in results if each.outcome == "failed"]
    asked = max((each.retry_after for each in failed if each.retry_after), default=None)
    if len(failed) < len(results):
        sql.execute(_NOTE_SUCCESS, of)
    elif failed:
        given = {"count": len(failed), "enough": FAILURES_TO_REST, "first": FIRST_DELAY, "longest": LONGEST_REST}
        sql.execute(_NOTE_FAILURES, {**given, **of})
    if failed:
        problem = next((each.problem for each in failed if each.gone), failed[-1].problem)
        gone = any(each.gone for each in failed)
        sql.execute(_NOTE_PROBLEM, {**of, "problem": problem[:300], "gone": gone, "asked": asked})


_TAKES_MESSAGES = """
e.disabled_at IS NULL AND e.paused_at IS NULL AND (e.rest_until IS NULL OR e.rest_until <= statement_timestamp())
"""

_SENDABLE = f"""
SELECT e.subscription_id, e.failures >= %(failures)s FROM scheduling_webhookendpoint AS e
WHERE e.subscription_id = ANY(%(hooks)b) AND {_TAKES_MESSAGES}
  AND EXISTS (SELECT FROM scheduling_webhookmessage AS m WHERE m.state = 'waiting'
              AND m.subscription_id = e.subscription_id AND m.due_at <= statement_timestamp())
"""  # noqa: S608  (only our own words)

# The scalar subquery is an index look-up for each row. NOT EXISTS may read all waiting messages into a hash table.
# The EXISTS names no column of a message, so PostgreSQL evaluates it once.
_CLAIM_MESSAGES = f"""
WITH head AS MATERIALIZED (
    SELECT m.id FROM scheduling_webhookmessage AS m
    WHERE m.state = 'waiting' AND m.subscription_id = %(hook)s AND m.due_at <= statement_timestamp()
      AND m.id = (
          SELECT o.id FROM scheduling_webhookmessage AS o
          WHERE o.state = 'waiting' AND o.subscription_id = m.subscription_id AND o.object_key = m.object_key
          ORDER BY o.id LIMIT 1)
      AND EXISTS (
          SELECT FROM scheduling_webhookendpoint AS e
          JOIN scheduling_webhooksubscription AS s ON s.id = e.subscription_id
          WHERE e.subscription_id = %(hook)s AND {_TAKES_MESSAGES}
            AND s.version = %(version)s AND s.enabled AND s.retired_at IS NULL)
    ORDER BY m.due_at, m.id LIMIT %(most)s FOR UPDATE OF m SKIP LOCKED
)
UPDATE scheduling_webhookmessage AS m SET attempt = m.attempt + 1, due_at = statement_timestamp() + %(lease)s
FROM head WHERE m.id = head.id
RETURNING m.id, m.attempt, m.message_id, m.type, m.occurred_at, m.data::text
"""  # noqa: S608  (only our own words)

_SETTLE_ATTEMPTS = """
UPDATE scheduling_webhookmessage AS m
SET state = v.state, status = NULLIF(v.status, 0), problem = v.problem, first_tried_at = v.first_tried_at,
    ended_at = CASE WHEN v.state <> 'waiting' THEN statement_timestamp() END,
    due_at = CASE v.outcome WHEN 'failed' THEN GREATEST(
        LEAST(statement_timestamp() + GREATEST(%(first)s::interval, statement_timestamp() - v.first_tried_at)
              * (0.9 + 0.2 * random()), GREATEST(v.first_tried_at + %(day)s, statement_timestamp() + %(first)s)),
        statement_timestamp() + v.wait * interval '1 second')
        ELSE statement_timestamp() END
FROM (
    SELECT given.*, CASE outcome WHEN 'released' THEN o.first_tried_at
                    ELSE COALESCE(o.first_tried_at, statement_timestamp()) END AS first_tried_at,
           CASE WHEN outcome = 'delivered' THEN 'delivered'
                WHEN outcome = 'failed' AND o.first_tried_at <= statement_timestamp() - %(day)s::interval
                THEN 'given_up' ELSE 'waiting' END AS state
    FROM unnest(%(ids)b::bigint[], %(attempts)b::int[], %(outcomes)b::text[], %(problems)b::text[],
                %(statuses)b::smallint[], %(waits)b::float8[]) AS given(id, attempt, outcome, problem, status, wait)
    JOIN scheduling_webhookmessage AS o ON o.id = given.id
) AS v
WHERE m.id = v.id AND m.attempt = v.attempt AND m.state = 'waiting'
"""

_OF_VERSION = """
subscription_id = %(hook)s
  AND EXISTS (SELECT FROM scheduling_webhooksubscription WHERE id = %(hook)s AND version = %(version)s)
"""

# Nothing is claimed during a rest. A success within it is of an earlier request and does not end it: the receiver may
# have named its end.
_NOTE_SUCCESS = f"""
UPDATE scheduling_webhookendpoint
SET failures = 0, failing_since = NULL, delivered_at = statement_timestamp()
WHERE {_OF_VERSION}
  AND (failures > 0 OR COALESCE(delivered_at, '-infinity') < statement_timestamp() - interval '10 seconds')
"""  # noqa: S608  (only our own words)

# The rest is as long as the receiver has failed, so it doubles. It shortens no rest that the receiver asked for.
_NOTE_FAILURES = f"""
UPDATE scheduling_webhookendpoint
SET failures = failures + %(count)s, failing_since = COALESCE(failing_since, statement_timestamp()),
    rest_until = CASE WHEN failures + %(count)s >= %(enough)s THEN GREATEST(
        rest_until, statement_timestamp() + LEAST(%(longest)s::interval,
        GREATEST(%(first)s::interval, statement_timestamp() - COALESCE(failing_since, statement_timestamp()))))
        ELSE rest_until END
WHERE {_OF_VERSION}
"""  # noqa: S608  (only our own words)

_NOTE_PROBLEM = f"""
UPDATE scheduling_webhookendpoint
SET problem = %(problem)s, problem_at = statement_timestamp(),
    disabled_at = CASE WHEN %(gone)s THEN COALESCE(disabled_at, statement_timestamp()) ELSE disabled_at END,
    rest_until = GREATEST(rest_until, statement_timestamp() + %(asked)s::interval)
WHERE {_OF_VERSION}
"""  # noqa: S608  (only our own words)
