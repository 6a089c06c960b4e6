"""Measure how long it takes to pick the next job, with 500 shops of which 50 are busy or paused."""

from __future__ import annotations

import time
from datetime import timedelta

from django.db import connection

from benchmarks.environment import Bench
from benchmarks.results import percentile

WAITING = (100, 1_000, 10_000, 100_000)
SHOPS, BLOCKED, PICKS = 500, 50, 200
GOAL = 5.0


def pick(bench: Bench) -> None:
    from rpa_tasks.jobs.ledger import job_ledger
    from rpa_tasks.models import Flow, Job, Lane, Platform, Run, Shop
    from scheduling.ledger.transitions import Settlement

    def clear() -> None:
        for model in (Run, Job, Lane, Shop, Flow):
            model._default_manager.all().delete()

    for waiting in WAITING[: bench.size(4, 2)]:
        clear()
        platform, _ = Platform.objects.get_or_create(key="bench")
        flow = Flow.objects.create(platform=platform, task_type="sync_order", command=["true", "{param}"])
        shops = Shop.objects.bulk_create([Shop(platform=platform, shop_id=f"s{n}") for n in range(SHOPS)])
        Lane.objects.bulk_create([Lane(shop=shop) for shop in shops])
        _fill_jobs(flow.pk, waiting)
        Shop.objects.filter(pk__in=[shop.pk for shop in shops[: BLOCKED // 2]]).update(paused=True)
        for _ in range(BLOCKED // 2):
            job_ledger.pick(["high", "normal", "low"], node="busy", lease=timedelta(hours=1))
        took = []
        for _ in range(PICKS):
            began_at = time.perf_counter()
            found = job_ledger.pick(["high", "normal", "low"], node="bench", lease=timedelta(minutes=1))
            took.append((time.perf_counter() - began_at) * 1000)
            if found is None:
                break
            job_ledger.settle(found.claim, Settlement("succeeded"))
        for share in (50, 99):
            bench.figures.add(
                "pick", f"{waiting:,} waiting: p{share}", percentile(took, share), "ms",
                goal=GOAL if waiting == 10_000 else None, note=f"{SHOPS} shops, {BLOCKED} of them busy or paused",
            )  # fmt: skip
    clear()  # an execution worker of a later scenario would run the remaining jobs


def _fill_jobs(flow: int, count: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO rpa_tasks_job (
                task_id, root_id, state, priority, due_at, planned_at, attempt, lease_no, reason,
                created_at, shop_id, flow_id, payload, dedupe_key, fresh, requests, failures, source, node,
                progress_message)
            SELECT gen_random_uuid(), gen_random_uuid(), 'scheduled', n %% 3, now() - random() * interval '20 minutes',
                   now(), 0, 0, '', now(), shop.id, %s, '{}', n::text, true, 1, 0, '', '', ''
            FROM generate_series(1, %s) AS n
            JOIN (SELECT id, row_number() OVER (ORDER BY id) - 1 AS place FROM rpa_tasks_shop) AS shop
                ON shop.place = n %% 500
            """,
            [flow, count],
        )
        cursor.execute("ANALYZE rpa_tasks_job, rpa_tasks_lane, rpa_tasks_shop")
