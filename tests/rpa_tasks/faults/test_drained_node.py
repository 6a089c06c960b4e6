"""A draining node is killed: after its restart it still drains, and its shop keeps its node."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.rpa_tasks.faults.effect_log import find_overlaps
from tests.rpa_tasks.faults.rpa_cluster import PATIENT, RpaCluster


def test_killed_draining_node_starts_nothing_after_its_restart(
    rpa_cluster: RpaCluster, report_line: Callable[[str], None]
) -> None:
    market = rpa_cluster.market(2, again={"idempotent": True})
    pinned, free = market.shops
    go = market.folder / "go"

    def change_drain(value: str) -> None:
        rpa_cluster.sql(f"UPDATE rpa_tasks_executionnode SET draining_at = {value} WHERE name = 'drained'")

    with rpa_cluster.node("drained", times=PATIENT) as drained:
        running = market.publish(pinned, "again", payload={"until": str(go)})
        rpa_cluster.await_effects(market.log, [running])
        rpa_cluster.wait(
            lambda: rpa_cluster.sql("SELECT FROM rpa_tasks_executionnode WHERE name = 'drained'"), "report"
        )
        change_drain("now()")
        # As a flow with a browser would have pinned it.
        rpa_cluster.sql("UPDATE rpa_tasks_lane SET home = 'drained' WHERE task_id = %s", [running])
        for victim in drained.family():
            victim.send_signal(signal.SIGKILL)
    rpa_cluster.await_end_of_commands(running)
    go.touch()
    rpa_cluster.expire_leases(running)
    reported = rpa_cluster.sql("SELECT seen_at FROM rpa_tasks_executionnode WHERE name = 'drained'")[0]["seen_at"]
    with rpa_cluster.node("drained", times=PATIENT):
        rpa_cluster.await_state(running, "scheduled", "queued")
        rpa_cluster.sql("UPDATE rpa_tasks_job SET due_at = now() WHERE task_id = %s", [running])
        later = market.publish(free, "again", payload={})
        # It has reported after its restart, and the passes have woken it: it does not take the due jobs.
        rpa_cluster.wait(
            lambda: rpa_cluster.sql(
                "SELECT FROM rpa_tasks_executionnode WHERE name = 'drained' AND seen_at > %s"
                " AND draining_at IS NOT NULL AND seen_at > (SELECT due_at + interval '6 s' FROM rpa_tasks_job"
                " WHERE task_id = %s)",
                [reported, later],
            ),
            "it reports",
        )
        assert [rpa_cluster.job(task)["state"] in ("scheduled", "queued") for task in (running, later)] == [True, True]
        assert len(market.log.of(running)) == 1
        assert market.log.of(later) == []
        with rpa_cluster.node("other", times=PATIENT):
            assert rpa_cluster.await_state(later, "succeeded", "unknown")["state"] == "succeeded"
            # This job needs no browser, so the other node takes it too. The profile stays where it is.
            assert rpa_cluster.await_state(running, "succeeded", "unknown")["state"] == "succeeded"
        assert rpa_cluster.lane(pinned)["home"] == "drained"
        assert rpa_cluster.job(later)["node"] == "other"
        change_drain("NULL")
        after = market.publish(free, "again", payload={})
        assert rpa_cluster.await_state(after, "succeeded", "unknown")["state"] == "succeeded"
    assert not find_overlaps(market.log.effects())
    report_line("kill -9 of a draining node · it drains after its restart, starts nothing; no profile moved")
