"""Measure signed webhooks to a receiver that takes 50 ms, from one core node with two processes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.request import Request, urlopen

from benchmarks import comparison, measurements, workload
from benchmarks.environment import Bench, wait_until
from benchmarks.peers.call import SECRET
from config.local.processes import select_port
from scheduling.models import Touch

GOAL = 1_500.0
ANSWER_SECONDS = 0.05


def webhook(bench: Bench) -> None:
    count = bench.size(15_000, 3_000)
    for _ in range(bench.repeat):
        port = select_port()
        url = f"http://127.0.0.1:{port}/"
        with bench.running("benchmarks.receiver", str(port), str(ANSWER_SECONDS)):
            wait_until(lambda url=url: is_answering(url), 20, "the receiver")
            _measure_webhooks(bench, url, count)


def _measure_webhooks(bench: Bench, url: str, count: int) -> None:
    cells = workload.create_matrix(channel="webhook", config={"url": f"{url}hook", "secret": SECRET})
    with bench.core():
        comparison.warm_up(cells[0])
        request_receiver(url, "DELETE")
        workload.delete_all()
        workload.create_customers(count)
        due_at = datetime.fromtimestamp(time.time() + 14, UTC)
        workload.plan_touches([workload.Plan(number + 1, cells[0], due_at) for number in range(count)])
        time.sleep(max(due_at.timestamp() - time.time(), 0) + 1)
        workload.await_finished(comparison.END_TIME_LIMIT)
        found = read_counts(url)
        settled = measurements.settled_per_second()
    add = bench.figures.add
    note = f"{count:,} to one receiver that takes {ANSWER_SECONDS * 1000:.0f} ms, one node, -c 2"
    add("webhook", "received", found["count"] / (found["last_at"] - found["first_at"]), "/s",
        goal=GOAL, at_least=True, note=note)  # fmt: skip
    add("webhook", "delivered, from the due time to the last settled", settled, "/s")
    add("webhook", "received twice", found["twice"], "touches", goal=0)
    add("webhook", "not received", count - found["count"] + found["twice"], "touches", goal=0)


def is_answering(url: str) -> bool:
    try:
        return bool(request_receiver(url, "GET"))
    except OSError:
        return False


def read_counts(url: str) -> dict[str, Any]:
    """Return the receiver's counts."""
    return dict(json.loads(request_receiver(url, "GET")))


@dataclass(frozen=True)
class Arrival:
    due_at: float  #: seconds since the epoch
    late: float  #: milliseconds from the due instant to the first byte


@dataclass(frozen=True)
class Arrivals:
    arrivals: list[Arrival]
    missing: int  #: planned touches that the receiver does not know
    twice: int  #: calls beyond the first of a touch


def read_arrivals(url: str) -> Arrivals:
    """Return when the receiver saw each touch of the database."""
    found = json.loads(request_receiver(f"{url}arrivals", "GET"))
    planned = {str(key): at.timestamp() for key, at in Touch.objects.values_list("root_id", "planned_at")}
    arrivals = [Arrival(at, (found[key] - at) * 1000) for key, at in planned.items() if key in found]
    return Arrivals(arrivals, len(planned) - len(arrivals), read_counts(url)["twice"])


def request_receiver(url: str, method: str) -> bytes:
    with urlopen(Request(url, method=method), timeout=5) as reply:
        return bytes(reply.read())
