"""Measure the time from the due instant of a touch to the first byte of its webhook at the receiver."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from django.conf import settings

from benchmarks import workload
from benchmarks.comparison import LEAD, warm_up
from benchmarks.environment import Bench, processor_seconds, wait_until
from benchmarks.peers.call import SECRET
from benchmarks.results import percentile
from benchmarks.scenarios.webhook import is_answering, read_arrivals, request_receiver
from config.local.processes import select_port

GOAL_P50, GOAL_P99 = 20.0, 60.0
GROUP, EACH_SECOND = 100, 300
ANSWER_SECONDS = 0.005
PLANNING = 8.0  #: seconds in which the rows are written


def arrival(bench: Bench) -> None:
    groups = bench.size(90, 15)
    for _ in range(bench.repeat):
        port = select_port()
        url = f"http://127.0.0.1:{port}/"
        with bench.running("benchmarks.receiver", str(port), str(ANSWER_SECONDS)):
            wait_until(lambda url=url: is_answering(url), 20, "the receiver")
            _measure_arrivals(bench, url, groups)


def _measure_arrivals(bench: Bench, url: str, groups: int) -> None:
    (node,) = workload.create_matrix(channel="webhook", config={"url": f"{url}hook", "secret": SECRET})
    count = groups * GROUP
    with bench.core() as (worker, _):
        warm_up(node)
        request_receiver(url, "DELETE")
        workload.delete_all()
        workload.create_customers(count)
        begins_at = time.time() + PLANNING + settings.AFTERTOUCH_HORIZON.total_seconds()
        due_at = [datetime.fromtimestamp(begins_at + group * GROUP / EACH_SECOND, UTC) for group in range(groups)]
        workload.plan_touches([workload.Plan(number + 1, node, due_at[number // GROUP]) for number in range(count)])
        time.sleep(max(begins_at - LEAD - time.time(), 0))
        programs = [worker, bench.servers["PostgreSQL"], bench.servers["Valkey"]]
        before = processor_seconds(programs)
        time.sleep(max(due_at[-1].timestamp() - time.time(), 0))
        wait_until(workload.all_calls_ended, 120, "the calls")
        spent = processor_seconds(programs) - before
        received = read_arrivals(url)
    late = [each.late for each in received.arrivals]
    add, note = bench.figures.add, f"{EACH_SECOND} a second in groups of {GROUP}, measured at the receiver"
    add("arrival", "due → first byte: p50", percentile(late, 50), "ms", goal=GOAL_P50, note=note)
    add("arrival", "due → first byte: p99", percentile(late, 99), "ms", goal=GOAL_P99)
    for share in (0, 90, 100):
        add("arrival", f"due → first byte: p{share}", percentile(late, share), "ms")
    add("arrival", "early", sum(each < 0 for each in late), "calls", goal=0)
    add("arrival", "not received, or twice", received.missing + received.twice, "calls", goal=0)
    add("arrival", "processor time each", spent / count * 1e6, "µs")
