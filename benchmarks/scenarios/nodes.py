"""Measure webhooks from one core node and from two, to a slow receiver.

Both nodes run on this machine with their own processes and state folders. They share database and broker. A second
node on the same processors speeds up only waiting, so the receiver is slow.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

from benchmarks import comparison, workload
from benchmarks.environment import Bench, wait_until
from benchmarks.peers.call import SECRET
from benchmarks.scenarios.webhook import is_answering, read_counts, request_receiver
from config.local.processes import select_port

GOAL = 1.8
TAKES = 0.5
WITHIN = 1.0  #: seconds over which the calls fall due, so that there are messages to share


def nodes(bench: Bench) -> None:
    count = bench.size(8_000, 2_400)
    note = f"{count:,} to one receiver that takes {TAKES * 1000:.0f} ms, -c 2 each"
    add = bench.figures.add
    for _ in range(bench.repeat):
        port = select_port()
        url = f"http://127.0.0.1:{port}/"
        with bench.running("benchmarks.receiver", str(port), str(TAKES)):
            wait_until(lambda url=url: is_answering(url), 20, "the receiver")
            one, two = (_measure_received(bench, url, count, number) for number in (1, 2))
        add("nodes", "received, one node", one, "/s", note=note)
        add("nodes", "received, two nodes", two, "/s")
        add("nodes", "two nodes / one", two / one, "×", goal=GOAL, at_least=True)


def _measure_received(bench: Bench, url: str, count: int, number: int) -> float:
    cells = workload.create_matrix(channel="webhook", config={"url": f"{url}hook", "secret": SECRET})
    with bench.core_nodes(number):
        comparison.warm_up(cells[0])
        request_receiver(url, "DELETE")
        workload.delete_all()
        workload.create_customers(count)
        begins_at = time.time() + 14
        workload.plan_touches([
            workload.Plan(each + 1, cells[0], datetime.fromtimestamp(begins_at + WITHIN * each / count, UTC))
            for each in range(count)
        ])  # fmt: skip
        time.sleep(max(begins_at - time.time(), 0) + WITHIN)
        workload.await_finished(comparison.END_TIME_LIMIT)
        found = read_counts(url)
    if found["twice"] or found["count"] != count:
        raise AssertionError(f"{found['count']} received instead of {count:,}, {found['twice']} of them twice")
    return float(count / (found["last_at"] - found["first_at"]))
