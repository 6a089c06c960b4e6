"""Measure the search of every page beside a million customers, touches and events, for each kind of question.

A figure is the time of a whole request as an administrator: all finders run for each question.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta

from django.db import connection
from django.test import Client

from benchmarks import workload
from benchmarks.environment import Bench, processor_seconds
from benchmarks.scenarios.volume import log_in
from scheduling.models import Event, Touch

GOAL = 200.0  #: ms
ASKED = 20  #: different questions of each kind in one repetition
DAYS = 10
SURNAMES, GIVEN = (
    "王李张刘陈杨黄赵吴周徐孙马朱胡郭何高林罗",
    "伟芳娜敏静丽强磊军洋勇艳杰娟涛明超兰霞平刚桂英华玉萍红玲芬燕彬健俊帆雪荣琴云莲真",
)


def search(bench: Bench) -> None:
    rows = bench.size(1_000_000, 20_000)
    (node,) = workload.create_matrix()
    _create_named_customers(rows)
    workload.fill_ended(rows, node, customers=rows, oldest=timedelta(days=DAYS), newest=timedelta(0))
    _name_orders()
    client, chance, server = log_in(), bench.random, [bench.servers["PostgreSQL"]]
    _ask(client, "warm up")
    for _ in range(bench.repeat):
        for kind, make_term in _list_questions(chance, rows).items():
            spent, found = time.process_time() + processor_seconds(server), 0
            for _ in range(ASKED):
                started_at = time.perf_counter()
                found += _ask(client, make_term())
                took = (time.perf_counter() - started_at) * 1000
                bench.figures.add("search", kind, took, "ms", goal=GOAL, note=f"{rows:,} of each")
            spent = (time.process_time() + processor_seconds(server) - spent) / ASKED * 1000
            note = f"this process and PostgreSQL; {found / ASKED:g} results each"
            bench.figures.add("search", f"{kind}: processor time", spent, "ms", note=note)


def _list_questions(chance: random.Random, rows: int) -> dict[str, Callable[[], str]]:
    touches = list(Touch.objects.values_list("pk", "event_id")[:ASKED])
    sources = list(Event.objects.order_by("id").values_list("event_id", flat=True)[:ASKED])
    return {
        "customer: whole name": lambda: _choose_name(chance, 2),
        "customer: two characters of the name": lambda: _choose_name(chance, 1),
        "customer: one character of the name": lambda: chance.choice(GIVEN),
        "customer: whole user id": lambda: f"user-{chance.randint(1, rows)}",
        "customer: start of every user id": lambda: "user-",
        "touch: task id": lambda: str(chance.choice(touches)[0]),
        "event: id": lambda: str(chance.choice(touches)[1]),
        "event: id of its source": lambda: chance.choice(sources),
        "order: latest event": lambda: f"NO-{chance.randint(1, 1_000)}",
        "order: absent": lambda: f"NO-{chance.randint(10**8, 10**9)}",
        "shop, node or channel": lambda: chance.choice(("guide", "log", "presale")),
        "page or action": lambda: chance.choice(("暂停", "pause", "触达", "failed", "add")),
        "nothing": lambda: f"{chance.random():.9f} nothing",
    }


def _choose_name(chance: random.Random, given: int) -> str:
    return chance.choice(SURNAMES) + "".join(chance.choices(GIVEN, k=given))


def _ask(client: Client, term: str) -> int:
    """Search. Return the number of results."""
    answer = client.get("/admin/search/", {"s": term}, secure=True)
    assert answer.status_code == 200, answer.status_code
    if not answer.context_data["complete"]:
        raise AssertionError(f"“{term}” did not end within the time limit")
    return len(answer.context_data["results"])


def _create_named_customers(count: int) -> None:
    """Create customers with Chinese names of three characters, in parts: the index of names is large."""
    with connection.cursor() as cursor:
        for first in range(1, count + 1, 100_000):
            cursor.execute(_CUSTOMERS, {
                "first": first, "last": min(first + 99_999, count), "surnames": SURNAMES, "given": GIVEN,
            })  # fmt: skip
        cursor.execute("VACUUM ANALYZE scheduling_customer, scheduling_customerprofile")


def _name_orders() -> None:
    """Give the latest events an order, as far back as the search reads."""
    with connection.cursor() as cursor:
        cursor.execute(_ORDERS)
        cursor.execute("VACUUM ANALYZE scheduling_event")


_CUSTOMERS = """
INSERT INTO scheduling_customer (id, user_id, name, level, locale, timezone, addresses, opted_out, created_at)
SELECT n, 'user-' || n,
    substr(%(surnames)s, n %% length(%(surnames)s) + 1, 1)
        || substr(%(given)s, n / 20 %% length(%(given)s) + 1, 1)
        || substr(%(given)s, n / 800 %% length(%(given)s) + 1, 1),
    'normal', 'zh-hans', '', '{}', false, now()
FROM generate_series(%(first)s, %(last)s) AS n
"""
_ORDERS = """
UPDATE scheduling_event AS event
SET data = jsonb_build_object('item', 'Aftertouch', 'order_no', 'NO-' || latest.n, 'note', repeat('x', 500))
FROM (SELECT id, row_number() OVER (ORDER BY id DESC) AS n FROM scheduling_event ORDER BY id DESC LIMIT 20000) AS latest
WHERE event.id = latest.id
"""
