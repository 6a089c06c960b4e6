"""Measure ten minutes of a day of 500,000 touches on three core nodes, from the due instant to the first byte.

All nodes run on this machine with their own processes and state folders. They share database and broker. The mean rate
never stops; a peak of ten seconds in each minute comes on top of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime

from django.conf import settings

from benchmarks import workload
from benchmarks.comparison import LEAD, warm_up
from benchmarks.environment import Bench, processor_seconds, wait_until
from benchmarks.peers.call import SECRET
from benchmarks.results import percentile
from benchmarks.scenarios.webhook import is_answering, read_arrivals, request_receiver
from config.local.processes import select_port

GOAL_P99 = 500.0
NODES = 3
EACH_SECOND = 500_000 / 86_400
PEAK = 20  #: times the mean rate
PEAK_FROM, PEAK_SECONDS = 30.0, 10.0  #: of each minute
ANSWER_SECONDS = 0.005
PLANNING = 8.0  #: seconds in which the rows are written


def day(bench: Bench) -> None:
    """Run once, whatever the number of repetitions: the run is long and has many peaks."""
    port = select_port()
    url = f"http://127.0.0.1:{port}/"
    with bench.running("benchmarks.receiver", str(port), str(ANSWER_SECONDS)):
        wait_until(lambda: is_answering(url), 20, "the receiver")
        _measure_day(bench, url, minutes=bench.size(10, 1))


def _measure_day(bench: Bench, url: str, minutes: int) -> None:
    (node,) = workload.create_matrix(channel="webhook", config={"url": f"{url}hook", "secret": SECRET})
    offsets = list(_spread(minutes))
    with bench.core_nodes(NODES) as (workers, ticks):
        warm_up(node)
        request_receiver(url, "DELETE")
        workload.delete_all()
        workload.create_customers(len(offsets))
        begins_at = time.time() + PLANNING + settings.AFTERTOUCH_HORIZON.total_seconds()
        due_at = [datetime.fromtimestamp(begins_at + offset, UTC) for offset in offsets]
        workload.plan_touches([workload.Plan(number + 1, node, each) for number, each in enumerate(due_at)])
        time.sleep(max(begins_at - LEAD - time.time(), 0))
        programs = {"workers": workers, "passes": [ticks], **{name: [each] for name, each in bench.servers.items()}}
        before = {name: processor_seconds(each) for name, each in programs.items()}
        time.sleep(max(max(due_at).timestamp() - time.time(), 0))
        wait_until(workload.all_calls_ended, 120, "the calls")
        spent = {name: processor_seconds(each) - before[name] for name, each in programs.items()}
        received = read_arrivals(url)
    add, note = bench.figures.add, f"{len(offsets):,} in {minutes} min to one receiver, {NODES} nodes with -c 2"
    late = [each.late for each in received.arrivals]
    in_peaks = [each.late for each in received.arrivals if _is_in_peak(each.due_at - begins_at)]
    add("day", "due → first byte: p50", percentile(late, 50), "ms", note=note)
    add("day", "due → first byte: p99", percentile(late, 99), "ms", goal=GOAL_P99)
    add("day", "due → first byte: p99 in the peaks", percentile(in_peaks, 99), "ms")
    add("day", "due → first byte: max", percentile(late, 100), "ms")
    add("day", "early", sum(each < 0 for each in late), "touches", goal=0)
    add("day", "lost", received.missing, "touches", goal=0)
    add("day", "doubled", received.twice, "touches", goal=0)
    for name, seconds in spent.items():
        add("day", f"processor time for each touch: {name}", seconds / len(offsets) * 1e6, "µs")


def _spread(minutes: int) -> Iterator[float]:
    """Yield the seconds from the start to each due time, the mean rate first."""
    seconds = minutes * 60
    for number in range(int(EACH_SECOND * seconds)):
        yield number / EACH_SECOND
    above = (PEAK - 1) * EACH_SECOND
    for minute in range(minutes):
        for number in range(int(above * PEAK_SECONDS)):
            yield minute * 60 + PEAK_FROM + number / above


def _is_in_peak(offset: float) -> bool:
    return PEAK_FROM <= offset % 60 < PEAK_FROM + PEAK_SECONDS
