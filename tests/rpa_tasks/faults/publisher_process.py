"""A publisher: reads one JSON list of orders a line, responds with one JSON list a line.

Orders are [what, {…}]: `platform`, `shop` and `flow` make one, `publish` is the product's own. `race` has lists of
orders, each given to a process of its own, all at the same moment. `publish_batch` has the contents of many `publish`.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from datetime import timedelta
from typing import Any

import django

from config.celery.application import app

django.setup()

from django.db import connection  # noqa: E402

from rpa_tasks.jobs.publish import (  # noqa: E402
    BacklogFull,
    PublishRequest,
    Receipt,
    publish_job,
    publish_many,
)
from rpa_tasks.models import Flow, Platform, Shop  # noqa: E402
from scheduling.errors import AftertouchError  # noqa: E402


def create_row(what: str, given: dict[str, Any]) -> Any:
    if what == "platform":
        return Platform.objects.create(**given).pk
    platform = Platform.objects.get(key=given.pop("platform"))
    if what == "shop":
        return Shop.objects.create(platform=platform, **given).pk
    return Flow.objects.create(platform=platform, needs_browser=given.pop("needs_browser", False), **given).pk


def publish_until_accepted(given: dict[str, Any]) -> dict[str, Any]:
    delay = timedelta(seconds=given.pop("delay", 0))
    asked_at = time.monotonic()
    while True:
        try:
            receipt = publish_job(PublishRequest(**given, delay=delay))
        except BacklogFull:
            time.sleep(0.05)
            continue
        return {
            "task": str(receipt.task_id), "duplicate": receipt.duplicate, "shop": given["shop_id"],
            "asked_at": asked_at, "answered_at": time.monotonic(),
        }  # fmt: skip


def publish_batch(orders: list[dict[str, Any]]) -> list[str]:
    receipts = publish_many([PublishRequest(**given) for given in orders])
    assert all(isinstance(receipt, Receipt) for receipt in receipts), receipts
    return [str(receipt.task_id) for receipt in receipts if isinstance(receipt, Receipt)]


def race(orders: list[list[Any]]) -> list[Any]:
    """Before anything is published here: a broker connection is not for two processes."""
    connection.close()
    with multiprocessing.get_context("fork").Pool(len(orders), _await_all, [barrier(len(orders))]) as pool:
        return pool.map(answer_all, orders, chunksize=1)


def barrier(parties: int) -> Any:
    return multiprocessing.get_context("fork").Barrier(parties, timeout=180)


def _await_all(all_there: Any) -> None:
    all_there.wait()


def answer_all(orders: list[Any]) -> list[Any]:
    return [answer(what, given) for what, given in orders]


def answer(what: str, given: dict[str, Any]) -> Any:
    try:
        if what == "race":
            return race(given["orders"])
        if what == "publish":
            return publish_until_accepted(given)
        if what == "publish_batch":
            return publish_batch(given["orders"])
        return create_row(what, given)
    except AftertouchError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    app.set_current()
    for line in sys.stdin:
        print(json.dumps(answer_all(json.loads(line))), flush=True)
