"""A node is cut off from database and broker while its commands run. The times are the product's own."""

import signal
import time
from contextlib import contextmanager

import psutil
import redis

from config.local.processes import is_alive, send_signal
from examples.demo_shop.market import Market as DemoMarket
from examples.demo_shop.site import build_site
from tests.rpa_tasks.faults.partition import links_to
from tests.support.chromium import find_chromium
from tests.support.thread_servers import application_in_thread

RENEWED, GUARDED = 12.0, 45.0  #: seconds between renewals at most, and until a guard has ended a command
SYNC = ["{python}", "-m", "rpa_tasks.flow_sdk", "run", "--flow", "demo_sync_order"]
SYNC += ["--param", "{param}", "--timeout", "{timeout}"]
CODES = {"business": [65], "session": [77], "platform": [75]}


def test_partitioned_node_writes_nothing_late(rpa_cluster, report_line):
    """One command ignores SIGTERM, and its supervisor ends it before another node starts. Another supervisor is
    stopped, so its command outlives the lease: two run at once, and the tables refuse the later write of the earlier
    run.
    """
    market = rpa_cluster.market(2, held={"idempotent": True}, loose={"idempotent": True})
    endpoints = rpa_cluster.stack.endpoints
    with (
        links_to(endpoints.database_url, endpoints.redis_url) as links,
        rpa_cluster.node("island", env=_through(links, endpoints)) as island,
        rpa_cluster.node("mainland", slots=2, ready=False) as mainland,
    ):
        _suspend(rpa_cluster, mainland)  # so that the island gets the jobs
        tasks = _publish(market)
        first = rpa_cluster.await_effects(market.log, tasks)
        guard = psutil.Process(first[1].pid).parent()
        assert guard
        send_signal(guard, signal.SIGSTOP)
        cut_at = _await_renewal(rpa_cluster, tasks)
        links.cut()
        for process in mainland.family():
            process.resume()
        try:
            rpa_cluster.wait(
                lambda: not rpa_cluster.list_running_commands(tasks[0]), "its guard ends the command", pause=0.1
            )
            ended_after = time.monotonic() - cut_at
            second = rpa_cluster.await_effects(market.log, tasks, 2)
            taken_after = time.monotonic() - cut_at
            (market.folder / "go").touch()
            for task in tasks:
                assert rpa_cluster.await_state(task, "succeeded")["node"] == "mainland"
            settled = [_stored_rows(rpa_cluster, task) for task in tasks]
            marks = rpa_cluster.sql(_MARKS, [market.shops])
            links.restore()
            rpa_cluster.wait(lambda: market.log.of(tasks[1])[0].stored is not None, "the late command writes")
            send_signal(guard, signal.SIGCONT)
            rpa_cluster.wait(lambda: island.log("stale_run_dropped") == 2, "both late results are dropped")
        finally:
            send_signal(guard, signal.SIGKILL)
            links.restore()
        _check(market, tasks, first[0], second[0])
        assert settled == [_stored_rows(rpa_cluster, task) for task in tasks]
        assert marks == rpa_cluster.sql(_MARKS, [market.shops])
        after = market.publish(market.shops[0], "held")
        assert rpa_cluster.await_state(after, "succeeded")["lease_no"] == second[0].lease + 1
    report_line(
        f"cut off from database and broker · SIGTERM ignored, ended by its guard {ended_after:.1f} s after the cut, "
        f"taken over after {taken_after:.1f} s, late result refused by lease {first[0].lease} < {second[0].lease} · "
        f"guard stopped too: the command's own late write refused by its table"
    )
    assert GUARDED - RENEWED - 3 <= ended_after < taken_after


def test_late_demo_flow_write_is_refused(rpa_cluster, report_line):
    """`demo_sync_order` in real Chromium: its node is cut off as it reads, and neither it nor its guard moves until
    another node has read and stored the orders."""
    find_chromium()
    market = rpa_cluster.market(
        1, sync={"command": SYNC, "needs_browser": True, "idempotent": True, "exit_codes": CODES}
    )
    (shop,) = market.shops
    endpoints = rpa_cluster.stack.endpoints
    with (
        links_to(endpoints.database_url, endpoints.redis_url) as links,
        site() as (address, pages),
        rpa_cluster.node("isle", slots=1, env=_through(links, endpoints)) as isle,
    ):
        pages.slow = 6.0  # what is stored of its progress is old: it must not be over by then
        task = market.publish(shop, "sync", payload={"site": address, "login": True})
        rpa_cluster.wait(lambda: (rpa_cluster.job(task)["progress"] or 0) > 0, "the flow reads")
        flow = next(each for each in rpa_cluster.list_running_commands(task) if "rpa_tasks.flow_sdk" in each.cmdline())
        guard, worker = psutil.Process(flow.ppid()), isle.family()
        try:
            # The worker too: it gives a guard up that does not answer for 45 s, and ends the flow.
            for process in (guard, flow, *worker):
                send_signal(process, signal.SIGSTOP)
            links.cut()
            pages.slow = 0.0
            with rpa_cluster.node("coast", slots=1):
                rpa_cluster.sql(
                    "UPDATE rpa_tasks_executionnode SET seen_at = now() - interval '1 day' WHERE name = 'isle'"
                )
                rpa_cluster.expire_leases(task)
                settled = rpa_cluster.await_state(task, "succeeded", "failed", "unknown")
                assert (settled["state"], settled["node"]) == ("succeeded", "coast")
                before = (
                    _stored_rows(rpa_cluster, task),
                    rpa_cluster.sql(_MARKS, [[shop]]),
                    rpa_cluster.sql(_ORDERS, [shop]),
                )
                assert is_alive(flow)  # else this test shows nothing
                links.restore()
                send_signal(flow, signal.SIGCONT)
                rpa_cluster.wait(lambda: not is_alive(flow), "the late flow ends by itself")
                for process in (guard, *worker):
                    send_signal(process, signal.SIGCONT)
                rpa_cluster.wait(lambda: isle.log("stale_run_dropped") == 1, "the late result is dropped")
        finally:
            for process in (flow, guard):
                send_signal(process, signal.SIGKILL)
        said = (isle.state_dir / "rpa" / "logs" / f"{task}-1.log").read_text()
        assert "stale lease: a later run than 1 wrote already" in said
        assert before == (
            _stored_rows(rpa_cluster, task),
            rpa_cluster.sql(_MARKS, [[shop]]),
            rpa_cluster.sql(_ORDERS, [shop]),
        )
        assert {row["writes"] for row in before[2]} == {1}
        assert before[1][0]["lease_no"] == settled["lease_no"] > 1
    report_line(
        f"demo_sync_order in Chromium, cut off and overtaken · {len(before[2])} orders stored once by lease "
        f"{settled['lease_no']}, the late run of lease 1 refused by its own tables"
    )


@contextmanager
def site():
    """The demo shop, and its switches."""
    pages = DemoMarket()
    with application_in_thread(build_site(pages)) as address:
        yield address, pages


def _through(links, endpoints):
    return {"DATABASE_URL": links.through(endpoints.database_url), "REDIS_URL": links.through(endpoints.redis_url)}


def _publish(market):
    payload = {"until": str(market.folder / "go"), "write": True}
    held = market.publish(market.shops[0], "held", payload={**payload, "stubborn": True})
    return [held, market.publish(market.shops[1], "loose", payload=payload)]


def _suspend(cluster, node):
    """Let the broker drop the connection. It sends a wake-up to the longest waiting consumer, stopped or not."""
    node.program.await_ready()
    family = list(node.family())
    for process in family:
        process.suspend()
    ports = {str(each.laddr.port) for process in family for each in process.net_connections("tcp")}
    with redis.Redis.from_url(cluster.stack.endpoints.redis_url, decode_responses=True) as broker:

        def is_waited_for():
            return any("b" in each["flags"] and each["addr"].split(":")[-1] in ports for each in broker.client_list())

        assert any(each["addr"].split(":")[-1] in ports for each in broker.client_list())
        cluster.wait(lambda: not is_waited_for(), "the broker waits for nobody who is stopped")


def _await_renewal(cluster, tasks):
    """So that the guard has all of its time."""
    before = [cluster.job(task)["lease_until"] for task in tasks]
    cluster.wait(lambda: cluster.job(tasks[0])["lease_until"] != before[0], "a renewal")
    return time.monotonic()


def _stored_rows(cluster, task):
    return cluster.job(task), cluster.runs(task)


def _check(market, tasks, first, second):
    held, loose = (market.log.of(task) for task in tasks)
    assert (held[0].ended, held[0].stored) == (None, None)
    assert not held[1].met
    assert loose[1].met  # else this test shows nothing
    assert [run.stored for run in loose] == [False, True]
    for runs in (held, loose):
        assert len(runs) == 2
        assert runs[0].key == runs[1].key
        assert runs[0].lease < runs[1].lease


_MARKS = "SELECT * FROM rpa_tasks_demowatermark WHERE shop_id = ANY(%s) ORDER BY shop_id"
_ORDERS = "SELECT * FROM rpa_tasks_demoorder WHERE shop_id = %s ORDER BY order_no"
