"""Measure the disk and log space of a touch, and the cost of work beside millions of ended and waiting touches.

`--ended` sets the number of ended touches. They end evenly over the last ten days; a quarter as many, at most 500,000,
wait. The cost of work is the processor time of this process and of PostgreSQL, relative to the same work before the
touches exist.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection
from django.test import Client
from django.urls import reverse

from benchmarks import workload
from benchmarks.comparison import warm_up
from benchmarks.environment import Bench, processor_seconds, wait_until
from benchmarks.peers.call import SECRET
from benchmarks.scenarios.webhook import is_answering
from config.local.processes import select_port
from scheduling.models import Customer, Node

GOAL_DISK, GOAL_LOG, GOAL_RATIO = 0.9, 4.0, 1.2
MOST_WAITING = 500_000
DAYS = 10
PART = 250_000  #: rows of one statement that fills
BATCH = 500
PAGES = 20  #: requests for each page
STILL = 200_000  #: bytes of log in two seconds, below which no pass moves rows

Costs = dict[str, float]  #: microseconds of each unit of work


def volume(bench: Bench) -> None:
    for _ in range(bench.repeat):
        _measure_space(bench, "log", bench.size(20_000, 2_000))
        _measure_space(bench, "webhook", bench.size(20_000, 2_000))
        _measure_costs(bench)


# --- space ----------------------------------------------------------------------------------------------------------


def _measure_space(bench: Bench, channel: str, count: int) -> None:
    """Send events of as many customers through intake, dispatch, worker and channel. Measure what a touch takes."""
    port = select_port()
    url = f"http://127.0.0.1:{port}/"
    with bench.running("benchmarks.receiver", str(port), "0.005"):
        wait_until(lambda: is_answering(url), 20, "the receiver")
        config = {"url": f"{url}hook", "secret": SECRET} if channel == "webhook" else None
        (node,) = workload.create_matrix(channel=channel, config=config)
        Node.objects.filter(pk=node.pk).update(delay=timedelta(seconds=40))
        with bench.core() as (worker, ticks):
            warm_up(node)
            workload.delete_all()
            workload.create_customers(2 * count)
            programs = [worker, ticks, *bench.servers.values()]
            for first in (1, count + 1):  # the second round measures: its rows reuse the space of the first
                _vacuum()
                size, position = _read_size(), _read_position()
                spent = time.process_time() + processor_seconds(programs)
                with _silence_log():
                    _ingest(node, first, count)
                wait_until(lambda: not workload.count_rows("state NOT IN ('delivered')"), 300, "the touches", 1)
                spent = time.process_time() + processor_seconds(programs) - spent
                wait_until(_is_still, 60, "the passes", 0)
                log = _read_position() - position
    _vacuum()
    add, note = bench.figures.add, f"event and ended touch with indexes; {count:,} of each"
    add("volume", f"{channel}: disk for each touch", (_read_size() - size) / count / 1000, "KB",
        goal=GOAL_DISK, note=note)  # fmt: skip
    add("volume", f"{channel}: write-ahead log for each touch", log / count / 1000, "KB",
        goal=GOAL_LOG, note="from a checkpoint on, with its full pages")  # fmt: skip
    add("volume", f"{channel}: processor time for each touch", spent / count * 1e6, "µs",
        note="intake, dispatch, delivery, PostgreSQL, Valkey; passes included")  # fmt: skip


def _ingest(node: Node, first: int, count: int) -> None:
    """Record events `first` to `first + count - 1`, each of the customer of its number."""
    from scheduling.planning.ingest import NewEvent, record_events

    for start in range(first, first + count, BATCH):
        record_events([
            NewEvent("bench", str(number), node.trigger, f"user-{number}", data={"item": "Aftertouch", "order": number})
            for number in range(start, min(start + BATCH, first + count))
        ])  # fmt: skip


def _vacuum() -> None:
    with connection.cursor() as cursor:
        cursor.execute("VACUUM")
        cursor.execute("CHECKPOINT")


def _read_size() -> int:
    """Return the bytes of events and ended touches with their indexes. Other tables reuse the space of their rows."""
    names = "relname = 'scheduling_event' OR relname LIKE 'scheduling\\_touch\\_ended%'"
    return int(_ask(f"SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relkind = 'r' AND ({names})"))


def _read_position() -> int:
    return int(_ask("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::int8"))


def _is_still() -> bool:
    before = _read_position()
    time.sleep(2)
    return _read_position() - before < STILL


def _ask(statement: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]


# --- processor time -------------------------------------------------------------------------------------------------


def _measure_costs(bench: Bench) -> None:
    worked = bench.size(10_000, 1_000)
    customers = max(bench.ended // 10, worked)
    old, new = workload.create_matrix(nodes=2)
    workload.create_customers(customers)
    # The visited customer has as many ended touches as later.
    workload.fill_ended(10, old, customers=1, oldest=timedelta(days=DAYS), newest=timedelta(0))
    alone = _measure_work(bench, new, worked)
    workload.delete_all()
    workload.create_customers(customers)
    for first in range(0, bench.ended, PART):
        count = min(PART, bench.ended - first)
        ages = [timedelta(days=DAYS) * (1 - part / bench.ended) for part in (first, first + count)]
        workload.fill_ended(count, old, customers=customers, first=first, oldest=ages[0], newest=ages[1], analyze=False)
    waiting = min(bench.ended // 4, MOST_WAITING)
    workload.plan_over_a_week(waiting, old, customers=customers)
    size = int(_ask("SELECT pg_database_size(current_database())"))
    beside = _measure_work(bench, new, worked)
    add, note = bench.figures.add, f"beside {bench.ended:,} ended and {waiting:,} waiting touches"
    add("volume", "database", size / 1e9, "GB", note=note)
    for name, cost in beside.items():
        add("volume", f"{name}: alone", alone[name], "µs")
        add("volume", f"{name}: beside them", cost, "µs")
        goal = None if name.endswith("without cache") else GOAL_RATIO
        add("volume", f"{name}: ratio", cost / alone[name], "×", goal=goal, note=note)


def _measure_work(bench: Bench, node: Node, count: int) -> Costs:
    from scheduling.delivery import pipeline
    from scheduling.experiments.replay import choose_window
    from scheduling.ledger.touches import touch_ledger
    from scheduling.monitoring.statistics import HourlyCache

    now = datetime.now(UTC)
    workload.plan_touches([workload.Plan(number + 1, node, now) for number in range(count)])
    found: list[UUID] = []

    def dispatch() -> None:
        while wakeups := touch_ledger.dispatch_due(horizon=timedelta(0), limit=1000, window=count):
            found.extend(each.task_id for each in wakeups)

    def deliver() -> None:
        with _silence_log():
            for first in range(0, len(found), BATCH):
                pipeline.deliver_touches(found[first : first + BATCH])

    costs = {
        "dispatch of a touch": _spend(bench, dispatch, count),
        "delivery of a touch": _spend(bench, deliver, count),
    }
    if left := workload.count_rows(f"node_id = {node.pk} AND state <> 'delivered'"):
        raise AssertionError(f"{left} touches were not delivered")
    client = log_in()
    for name, path in _list_pages().items():
        costs[name] = _spend(bench, lambda path=path: _visit(client, path), PAGES)  # type: ignore[misc]
        if name == "overview":
            costs["overview without cache"] = _spend(
                bench, lambda path=path: (HourlyCache.clear_all(), _visit(client, path, 1)), 1
            )  # fmt: skip
    for most in (10, count):  # the first replay loads its modules
        within = choose_window(now - timedelta(days=7), datetime.now(UTC), most)
        replay = _spend(bench, lambda within=within: _replay(within), len(within.arrivals))  # type: ignore[misc]
    return costs | {"what-if, for each event": replay}


@contextmanager
def _silence_log() -> Iterator[None]:
    """Discard the lines that this process logs about single touches."""
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        yield


def _list_pages() -> dict[str, str]:
    customer = Customer.objects.get(user_id="user-1")
    return {
        "list of touches": reverse("admin:scheduling_touch_changelist"),
        "search of a customer's touches": reverse("admin:scheduling_touch_changelist") + "?q=user-1",
        "customer page": reverse("admin:scheduling_customer_change", args=[customer.pk]),
        "overview": reverse("admin:index"),
    }


def log_in() -> Client:
    from django.contrib.auth.models import User

    user = User.objects.filter(username="bench").first() or User.objects.create_superuser("bench", password="unused")
    client = Client(headers={"host": "127.0.0.1"})
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def _visit(client: Client, path: str, times: int = PAGES) -> None:
    for _ in range(times):
        answer = client.get(path, secure=True)
        if answer.status_code != 200:
            raise AssertionError(f"{path} answers {answer.status_code}")


def _replay(within: Any) -> None:
    from scheduling.configuration import snapshot
    from scheduling.experiments.replay import replay_events

    replay_events({"live": snapshot.current()}, within)


def _spend(bench: Bench, work: Callable[[], object], count: int) -> float:
    """Return microseconds of processor time of this process and PostgreSQL, for each of `count`."""
    server = [bench.servers["PostgreSQL"]]
    before = time.process_time() + processor_seconds(server)
    work()
    return (time.process_time() + processor_seconds(server) - before) / count * 1e6
