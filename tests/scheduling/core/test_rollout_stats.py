"""The figures of an automatic roll-out, counted a stretch at a time, beside one count of everything."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from scheduling import sql
from scheduling.experiments import rollout_runs, rollout_stats
from scheduling.experiments.rollout_stats import count_next_part, count_version_results
from scheduling.models import AutomaticRollout, Node
from scheduling.operations.failed_tasks import Actor
from scheduling.policy.rollout import VersionCounts
from tests.scheduling.core.conftest import pass_time
from tests.support.matrix import MatrixBuilder

TOUCHES = 600
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
PLAN = {"steps": [30, 60, 100], "time": 3600, "touches": 10, "judged_from": 10}

pytestmark = pytest.mark.django_db


@pytest.fixture
def rollout(matrix: MatrixBuilder) -> AutomaticRollout:
    """Started three hours ago, at its second step for an hour, with `TOUCHES` that ended over five hours."""
    node = matrix.node(canary_template=matrix.template("guide-v2", content_type="guide"))
    other = matrix.node("other", template=matrix.template("guide"))
    _fill(node, other)
    row = rollout_runs.start_rollout(node.pk, PLAN, Actor("ops"))
    at = sql.now()
    row.step, row.started_at, row.step_at, row.judged_at = 1, at - 3 * HOUR, at - HOUR, at
    row.save()
    Node.objects.filter(pk=node.pk).update(canary_percent=row.percent)
    return row


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_stats, "PART_SIZE", 40)
    monkeypatch.setattr(rollout_stats, "PERSIST_SECONDS", 600.0)  # a slow machine stores all of them, too


def _fill(node: Node, other: Node) -> None:
    """Some of each state, node, template, age and number of decisions; complaints, opt-outs, some published again."""
    given = {"count": TOUCHES, "node": node.pk, "other": other.pk}
    given |= {"stable": node.template_id, "canary": node.canary_template_id}
    for statement in _FILL.split(";"):
        sql.execute(statement, given)


def count_everything(rollout: AutomaticRollout) -> tuple[VersionCounts, VersionCounts]:
    """As the figures are meant, over all there is."""
    stable_since = rollout.started_at if rollout.percent >= 100 else rollout.step_at
    given = {
        "node": rollout.node_id, "canary": rollout.canary_id, "stable": rollout.stable_id, "since": rollout.step_at,
        "stable_since": stable_since,
    }  # fmt: skip
    found = {canary: VersionCounts(*counts) for canary, *counts in sql.rows(_IN_ONE, given)}
    return found.get(True, VersionCounts()), found.get(False, VersionCounts())


def until(rollout: AutomaticRollout) -> datetime:
    return datetime.fromisoformat((rollout.counted or {})["until"])


def test_sample_data_covers_every_count(rollout: AutomaticRollout) -> None:
    assert all(min(each.ended, each.failed, each.complained, each.opted_out) > 0 for each in count_everything(rollout))


@pytest.mark.parametrize("step", [1, 2])
def test_partial_counts_equal_one_full_count(rollout: AutomaticRollout, step: int) -> None:
    rollout.step = step
    expected, stretches = count_everything(rollout), 0
    assert count_version_results(rollout) == expected, "nothing is counted for good yet"
    while count_next_part(rollout):
        stretches += 1
        assert count_version_results(rollout) == expected
    assert stretches > 5
    assert count_version_results(rollout) == expected
    assert sql.now() - until(rollout) >= rollout_stats.MIN_STORED_AGE


def test_next_step_restarts_counts_and_last_uses_all(
    rollout: AutomaticRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_stats, "MIN_STORED_AGE", 40 * MINUTE)
    while count_next_part(rollout):
        pass
    kept, before = until(rollout), count_everything(rollout)
    rollout.step, rollout.step_at = 2, sql.now() - 30 * MINUTE
    assert count_version_results(rollout) == count_everything(rollout) != before
    assert count_version_results(rollout)[1].ended > 100, "those of the steps before"
    monkeypatch.setattr(rollout_stats, "MIN_STORED_AGE", 20 * MINUTE)
    count_next_part(rollout)
    assert until(rollout) > kept, "it went on where it was"
    assert count_version_results(rollout) == count_everything(rollout)


def test_stored_counts_of_other_step_are_ignored(rollout: AutomaticRollout) -> None:
    """A program of the version before, which knows nothing of what is kept, brought it to another step."""
    while count_next_part(rollout):
        pass
    rollout.step_at = sql.now() - 2 * HOUR
    assert count_version_results(rollout) == count_everything(rollout)


def test_later_complaints_and_opt_outs_are_counted(rollout: AutomaticRollout) -> None:
    while count_next_part(rollout):
        pass
    before = count_version_results(rollout)
    sql.execute("UPDATE scheduling_customer SET opted_out = true, opted_out_at = now()", {})
    sql.execute(f"{_COMPLAIN} WHERE t.state = 'delivered' AND n %% 4 = 2", {})
    after = count_version_results(rollout)
    assert after == count_everything(rollout)
    assert [each.ended for each in after] == [each.ended for each in before]
    for old, new in zip(before, after, strict=True):
        assert new.complained > old.complained
        assert new.opted_out > old.opted_out


@pytest.mark.usefixtures("fresh_tables")
def test_rollout_counts_scan_no_whole_table(rollout: AutomaticRollout, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[str] = []
    rows = sql.rows

    def explained(statement: str, given: Any) -> Any:
        plans.append("\n".join(str(row[0]) for row in rows(f"EXPLAIN {statement}", given)))
        return rows(statement, given)

    with connection.cursor() as cursor:
        cursor.execute("ANALYZE scheduling_touch, scheduling_complaint, scheduling_customer")
        cursor.execute("SET LOCAL enable_seqscan = off")
    with monkeypatch.context() as patch:
        patch.setattr(rollout_stats.sql, "rows", explained)
        count_next_part(rollout)
        count_version_results(rollout)
    stretch, for_good, complained, opted_out, lately = plans
    assert all("Seq Scan on scheduling_touch" not in plan for plan in plans)
    assert all("touch_ended" in plan for plan in (stretch, for_good, lately))
    assert "_task_id_idx" in complained
    assert "customer_opted_out" in opted_out
    assert "_customer_id_reserved_at_idx" in opted_out


# --- the pass -------------------------------------------------------------------------------------------------------


def test_pass_stores_its_counts(rollout: AutomaticRollout) -> None:
    expected = count_everything(rollout)
    rollout_runs.advance_all_rollouts()
    rollout.refresh_from_db()
    assert until(rollout) > rollout.started_at
    assert (rollout.figures["canary"]["ended"], rollout.figures["stable"]["ended"]) == tuple(
        each.ended for each in expected
    )


@pytest.mark.django_db(transaction=True)
def test_interrupted_count_is_resumed_by_next_pass(rollout: AutomaticRollout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_stats, "PERSIST_SECONDS", -1.0)
    judged_at, reached = rollout.judged_at, []
    for _ in range(3):
        assert rollout_runs.advance_all_rollouts() == 0
        rollout.refresh_from_db()
        assert rollout.judged_at == judged_at, "half of the figures say nothing"
        reached.append(until(rollout))
    assert reached == sorted(set(reached))
    monkeypatch.setattr(rollout_stats, "PERSIST_SECONDS", 600.0)
    expected = count_everything(rollout)
    rollout_runs.advance_all_rollouts()
    rollout.refresh_from_db()
    assert rollout.figures["stable"]["ended"] == expected[1].ended


@pytest.mark.django_db(transaction=True)
def test_rollout_count_too_slow_pauses_it(rollout: AutomaticRollout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_stats, "PERSIST_SECONDS", -1.0)
    assert rollout_runs.advance_all_rollouts() == 0
    pass_time(minutes=6)
    assert rollout_runs.advance_all_rollouts() == 1
    rollout.refresh_from_db()
    assert (rollout.state, rollout.reason) == ("paused", "unseen")


@pytest.mark.django_db(transaction=True)
def test_rollout_paused_during_count_stays_paused(
    rollout: AutomaticRollout, second_connection: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person who pauses never waits for a count, nor a count for a person."""
    count = count_next_part

    def pause_during_count(row: AutomaticRollout) -> bool:
        more = count(row)
        second_connection(lambda: rollout_runs.pause_rollout(row.pk, Actor("ops")))
        return more

    monkeypatch.setattr(rollout_stats, "count_next_part", pause_during_count)
    assert rollout_runs.advance_all_rollouts() == 0
    rollout.refresh_from_db()
    assert (rollout.state, rollout.counted) == ("paused", None)


_NUMBERED = "SELECT *, row_number() OVER (ORDER BY task_id) AS n FROM scheduling_touch"
_COMPLAIN = f"""
INSERT INTO scheduling_complaint (event_id, customer_id, touch_id, complained_at)
SELECT t.event_id, t.customer_id, t.task_id, now() FROM ({_NUMBERED}) AS t
"""

_FILL = f"""
INSERT INTO scheduling_customer (user_id, name, level, locale, timezone, addresses, opted_out, opted_out_at, created_at)
SELECT 'c' || n, '', '', '', '', '{{}}', n %% 4 = 0,
    CASE WHEN n %% 4 = 0 THEN now() - n * interval '10 seconds' END, now()
FROM generate_series(1, %(count)s / 3) AS n
;
INSERT INTO scheduling_event (id, source, event_id, type, occurred_at, received_at, customer_id, user_id, chat_id, data)
SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' || substr(md5(n::text), 1, 19))::uuid,
    'fill', n, 'x', at, at, c.id, c.user_id, '', '{{}}'
FROM generate_series(1, %(count)s) AS n
CROSS JOIN LATERAL (SELECT now() - n * interval '5 hours' / %(count)s AS at) AS ended
JOIN scheduling_customer AS c ON c.user_id = 'c' || n %% (%(count)s / 3) + 1
;
INSERT INTO scheduling_touch (task_id, root_id, retry_of, state, priority, due_at, planned_at, paused_by, attempt,
    lease_no, wakeups, reason, created_at, event_id, node_id, node_version, customer_id, chat_id, expires_at,
    content_type, counts_toward_cap, template_id, template_version, reserved_at, settled_at)
SELECT id, id, CASE WHEN n %% 29 = 0 THEN gen_random_uuid() END, state, 1, at, at, '', 1, 1, 0, '', at, id,
    CASE WHEN n %% 5 = 0 THEN %(other)s ELSE %(node)s END, 1, customer_id, '', at, 'guide', true,
    CASE WHEN n %% 23 = 0 THEN NULL WHEN n %% 3 = 0 THEN %(canary)s ELSE %(stable)s END, 1,
    CASE WHEN state = 'delivered' THEN at - interval '1 second' END, CASE WHEN state <> 'scheduled' THEN at END
FROM (SELECT *, event_id::int AS n, received_at AS at FROM scheduling_event WHERE source = 'fill') AS e
CROSS JOIN LATERAL (SELECT CASE n %% 13 WHEN 0 THEN 'failed' WHEN 1 THEN 'unknown' WHEN 2 THEN 'suppressed'
    WHEN 3 THEN 'scheduled' ELSE 'delivered' END AS state) AS stands
;
UPDATE scheduling_touch AS row SET verdicts = judged.verdicts
FROM (
    SELECT task_id, jsonb_agg(jsonb_build_array(
        (extract(epoch FROM due_at - length * n %% 7 * interval '9 minutes') * 1000000)::bigint,
        CASE WHEN length = 2 THEN 'hold' ELSE 'send' END
    )) AS verdicts
    FROM ({_NUMBERED}) AS t CROSS JOIN generate_series(0, 2) AS length WHERE state <> 'scheduled' GROUP BY task_id
) AS judged
WHERE row.task_id = judged.task_id
;
{_COMPLAIN} WHERE t.state = 'delivered' AND n %% 4 = 0
;
{_COMPLAIN} WHERE t.state <> 'delivered' AND n %% 2 = 0
"""

_IN_ONE = """
WITH ended AS MATERIALIZED (
    SELECT t.task_id, t.customer_id, t.state, t.reserved_at, t.template_id = %(canary)s AS canary
    FROM scheduling_touch AS t
    WHERE t.node_id = %(node)s AND t.retry_of IS NULL
      AND t.template_id IN (%(canary)s, %(stable)s) AND t.state IN ('delivered', 'failed', 'unknown')
      AND CASE WHEN t.template_id = %(canary)s THEN %(since)s ELSE %(stable_since)s END <= (
          SELECT min(v.at) FROM touch_verdicts(t.verdicts) AS v WHERE v.decision = 'send'
      )
)
SELECT e.canary, count(*), count(*) FILTER (WHERE e.state <> 'delivered'),
    count(*) FILTER (WHERE e.state = 'delivered' AND EXISTS (
        SELECT FROM scheduling_complaint AS c WHERE c.touch_id = e.task_id
    )),
    count(*) FILTER (WHERE e.state = 'delivered' AND EXISTS (
        SELECT FROM scheduling_customer AS c
        WHERE c.id = e.customer_id AND c.opted_out AND c.opted_out_at >= e.reserved_at AND NOT EXISTS (
            SELECT FROM scheduling_touch AS later
            WHERE later.customer_id = e.customer_id AND later.state = 'delivered'
              AND later.reserved_at > e.reserved_at AND later.reserved_at <= c.opted_out_at
        )
    ))
FROM ended AS e GROUP BY e.canary
"""
