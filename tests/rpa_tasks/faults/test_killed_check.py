"""The worker is killed while it checks a login: the shop stays logged out until another check succeeds."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.rpa_tasks.faults.rpa_cluster import PATIENT, RpaCluster

#: Waits for the file that its variable GO names.
CHECK = ["sh", "-c", 'until [ -e "$GO" ]; do sleep 0.1; done', "_", "{param}"]


def test_killed_check_leaves_the_login_needed_and_the_next_one_lets_the_run_go_on(
    rpa_cluster: RpaCluster, report_line: Callable[[str], None]
) -> None:
    go = rpa_cluster.folder / "check-go"
    market = rpa_cluster.market(1, act={"idempotent": True}, check={"command": CHECK, "env": {"GO": str(go)}})
    (shop,) = market.shops
    rpa_cluster.sql("UPDATE rpa_tasks_platform SET check_task_type = 'check' WHERE key = %s", [market.platform])
    rpa_cluster.sql("UPDATE rpa_tasks_shop SET login_state = 'needed' WHERE shop_id = %s", [shop])
    waiting = market.publish(shop, "act")

    def start_check() -> str:
        assert rpa_cluster.publisher.ask(("check_login", {"shop_id": shop})) == [True]
        return str(rpa_cluster.lane(shop)["check_id"])

    def login_state() -> str:
        return str(
            rpa_cluster.sql("SELECT login_state FROM rpa_tasks_shop WHERE shop_id = %s", [shop])[0]["login_state"]
        )

    with rpa_cluster.node("checking", times=PATIENT) as node:
        first = start_check()
        rpa_cluster.wait(lambda: rpa_cluster.list_running_commands(first), "the check runs")
        assert rpa_cluster.publisher.ask(("check_login", {"shop_id": shop})) == [False]
        for victim in node.family():
            victim.send_signal(signal.SIGKILL)
    rpa_cluster.await_end_of_commands(first)
    rpa_cluster.expire_leases(first)
    lost = rpa_cluster.await_state(first, "cancelled", "unknown", "failed", "succeeded")
    assert (lost["state"], lost["reason"]) == ("cancelled", "worker_lost")
    assert (login_state(), rpa_cluster.lane(shop)["check_id"]) == ("needed", None)
    assert rpa_cluster.failed_tasks(first) == []
    assert rpa_cluster.job(waiting)["attempt"] == 0
    go.touch()
    with rpa_cluster.node("checking", times=PATIENT):
        second = start_check()
        assert rpa_cluster.await_state(second, "cancelled", "unknown", "failed", "succeeded")["state"] == "succeeded"
        assert rpa_cluster.await_state(waiting, "succeeded", "unknown", "failed")["state"] == "succeeded"
    assert login_state() == "ok"
    report_line(
        "kill -9 of the worker in a login check · login still needed, no failed task; the next check frees the run"
    )
