"""Measure receivers with finite capacity: a slow webhook beside a fast one, and a robot with a quota.

Both parts run once: they mostly wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db import connection

from benchmarks import workload
from benchmarks.comparison import warm_up
from benchmarks.environment import Bench, wait_until
from benchmarks.peers.call import SECRET
from benchmarks.results import percentile
from benchmarks.scenarios.webhook import is_answering, read_counts
from config.local.processes import select_port
from scheduling.channels.robots import DingTalk
from scheduling.models import ChannelConfig, Community, Node

GOAL_FAST, GOAL_VERDICTS, GOAL_PLAN = 300.0, 1.05, 5.0
SLOW_SECONDS, FAST_SECONDS = 5.0, 0.005
FAST_EACH_SECOND = 20
SLOW_RATE = 2 * 200 / SLOW_SECONDS  #: calls a second of both processes
PLANNING = 12.0  #: seconds in which the rows are written


def receivers(bench: Bench) -> None:
    _measure_slow(bench, bench.size(20_000, 2_000))
    _measure_robot(bench, bench.size(3_000, 300), minutes=5 if not bench.quick else 2)


def _measure_slow(bench: Bench, count: int) -> None:
    slow_port, fast_port = select_port(), select_port()
    slow_url, fast_url = (f"http://127.0.0.1:{port}/" for port in (slow_port, fast_port))
    with (
        bench.running("benchmarks.receiver", str(slow_port), str(SLOW_SECONDS)),
        bench.running("benchmarks.receiver", str(fast_port), str(FAST_SECONDS)),
    ):
        wait_until(lambda: is_answering(slow_url) and is_answering(fast_url), 20, "the receivers")
        slow, fast = workload.create_matrix(
            nodes=2, channel="webhook", config={"url": f"{slow_url}hook", "secret": SECRET}
        )
        other = ChannelConfig.objects.create(
            key="fast", kind="webhook", config={"url": f"{fast_url}hook", "secret": SECRET}, idempotent=True
        )
        Node.objects.filter(pk=fast.pk).update(channel=other)
        with bench.core():
            warm_up(fast)
            workload.delete_all()
            seconds = 10 + count / SLOW_RATE
            quick = int(seconds * FAST_EACH_SECOND)
            workload.create_customers(count + quick)
            due_at = time.time() + PLANNING + settings.AFTERTOUCH_HORIZON.total_seconds()
            plans = [_plan(number, slow, due_at) for number in range(count)]
            plans += [_plan(count + number, fast, due_at - 5 + number / FAST_EACH_SECOND) for number in range(quick)]
            workload.plan_touches(plans)
            versions = _count_versions()
            time.sleep(max(due_at - time.time(), 0))
            wait_until(
                lambda: not workload.count_rows("state <> 'delivered'"), 3 * seconds + 120, "the slow receiver", 1
            )
            drained = time.time() - due_at
        found = read_counts(slow_url)
    if found["twice"] or found["count"] != count:
        raise AssertionError(f"{found['count']} received instead of {count:,}, {found['twice']} of them twice")
    lateness = _read_lateness(fast)
    add, note = bench.figures.add, f"{count:,} to a receiver of {SLOW_SECONDS:g} s, {FAST_EACH_SECOND}/s to a fast one"
    for share in (50, 99, 100):
        add("receivers", f"fast one: lateness p{share}", percentile(lateness, share) * 1000, "ms",
            goal=GOAL_FAST if share == 99 else None, note=note)  # fmt: skip
    add("receivers", "slow one: verdicts for each delivered touch", _count_verdicts(slow) / count, "",
        goal=GOAL_VERDICTS)  # fmt: skip
    add("receivers", "row versions for each delivered touch", (_count_versions() - versions) / len(plans), "")
    add("receivers", "slow one: time ÷ time at full capacity", drained / (count / SLOW_RATE), "×")


def _measure_robot(bench: Bench, count: int, *, minutes: int) -> None:
    """Measure the first minutes, and the end that the plan shows by then."""
    port = select_port()
    url = f"http://127.0.0.1:{port}/"
    quota = DingTalk.quotas[0]
    with bench.running("benchmarks.receiver", str(port), str(FAST_SECONDS)):
        wait_until(lambda: is_answering(url), 20, "the receiver")
        (node,) = workload.create_matrix(channel="dingtalk")
        Community.objects.all().delete()
        Community.objects.create(chat_id="robot", targets={"dingtalk": {"url": f"{url}robot/send"}})
        with bench.core():
            workload.delete_all()
            workload.create_customers(count)
            due_at = time.time() + PLANNING
            workload.plan_touches([_plan(number, node, due_at) for number in range(count)])
            with connection.cursor() as cursor:
                cursor.execute("UPDATE scheduling_touch SET chat_id = 'robot'")
                cursor.execute("UPDATE scheduling_event SET chat_id = 'robot'")
            time.sleep(max(due_at + minutes * quota.window.total_seconds() - 10 - time.time(), 0))
            ends_at = _read_last_due()
        received = read_counts(url)["count"]
    started_at = _read_starts(node)
    add, note = bench.figures.add, f"{count:,} to a robot of {quota.limit} a minute, {minutes} minutes"
    add("receivers", "robot: received", received, "touches", goal=minutes * quota.limit, at_least=True, note=note)
    add("receivers", "robot: most in a minute", _count_most(started_at, quota.window), "touches", goal=quota.limit)
    add("receivers", "robot: verdicts for each delivered touch", _count_verdicts(node) / received, "",
        goal=GOAL_VERDICTS)  # fmt: skip
    add("receivers", "robot: expired", workload.count_rows("reason = 'expired'"), "touches", goal=0)
    needed = (count // quota.limit - 1) * quota.window.total_seconds()
    add("receivers", "robot: planned end, deviation", abs(ends_at - due_at - needed) / needed * 100, "%",
        goal=GOAL_PLAN)  # fmt: skip


def _plan(number: int, node: Node, due_at: float) -> workload.Plan:
    return workload.Plan(number + 1, node, datetime.fromtimestamp(due_at, UTC))


def _read_lateness(node: Node) -> list[float]:
    return [
        row[0]
        for row in _rows(
            "SELECT extract(epoch FROM a.started_at - t.planned_at)::float8 FROM scheduling_touch AS t"
            " CROSS JOIN LATERAL touch_attempts(t.attempts) AS a WHERE a.number = 1 AND t.node_id = %s",
            node.pk,
        )
    ]


def _read_starts(node: Node) -> list[datetime]:
    return [
        row[0]
        for row in _rows(
            "SELECT a.started_at FROM scheduling_touch AS t CROSS JOIN LATERAL touch_attempts(t.attempts) AS a"
            " WHERE t.node_id = %s ORDER BY 1",
            node.pk,
        )
    ]


def _count_most(instants: Sequence[datetime], window: timedelta) -> int:
    """Return the most instants that lie in any window."""
    first = most = 0
    for number, at in enumerate(instants):
        while at - instants[first] >= window:
            first += 1
        most = max(most, number - first + 1)
    return most


def _count_verdicts(node: Node) -> int:
    return int(
        _rows(
            "SELECT sum(jsonb_array_length(verdicts)) FROM scheduling_touch WHERE node_id = %s",
            node.pk,
        )[0][0]
    )


def _read_last_due() -> float:
    return float(_rows("SELECT extract(epoch FROM max(due_at))::float8 FROM scheduling_touch")[0][0])


def _count_versions() -> int:
    """Return the updates of touches so far, once the server has published its counts."""
    time.sleep(2)
    return int(_rows("SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'scheduling_touch_live'")[0][0])


def _rows(statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
    with connection.cursor() as cursor:
        cursor.execute(statement, values or None)
        return list(cursor.fetchall())
