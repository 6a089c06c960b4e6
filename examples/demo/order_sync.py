"""Demo scene of RPA: real browsers read the orders of three shops, each requested twice at once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.rows import dict_row

from config.environment import ROOT
from config.local.processes import select_port

SHOPS = ("s1", "s2", "s3")
JOB_TIME_LIMIT = 120.0
END_STATES = ("succeeded", "failed", "unknown", "cancelled")
#: Prints the reason if no browser is found.
CHROMIUM_TEST = """
from rpa_tasks.browsers.chromium import find_chromium
from rpa_tasks.browsers.launch import NoBrowser
try:
    find_chromium()
except NoBrowser as error:
    print(error.detail)
"""


def order_sync(demo: Any, print_line: Any) -> None:
    print_line("\nThree shops' orders, read in Chromium; each requested twice:")
    if why := demo.stack.manage("shell", "--no-imports", "-c", CHROMIUM_TEST).strip():
        print_line(f"  Not shown. {why} Debian: apt-get install chromium libatomic1")
        return
    demo.stack.manage("apply_config", str(ROOT / "examples" / "demo_shop" / "shops.yaml"))
    with demo_shop() as site:
        # Both requests of all shops are concurrent.
        with ThreadPoolExecutor(2 * len(SHOPS)) as clicks:
            receipts = list(clicks.map(lambda shop: _publish_sync(demo, site, shop), [*SHOPS, *SHOPS]))
        for shop in SHOPS:
            _print_receipts(
                demo,
                print_line,
                shop,
                [receipt for name, receipt in zip([*SHOPS, *SHOPS], receipts, strict=True) if name == shop],
            )
    _check_orders(demo, print_line)


@contextmanager
def demo_shop() -> Iterator[str]:
    """Run the site of the demo's shops on a free port. Yields its address."""
    # `select_port` avoids the ports that browsers use and that a flow may not connect to.
    words = [sys.executable, "-m", "examples.demo_shop", "--port", str(select_port())]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as site:  # noqa: S603
        try:
            assert site.stdout is not None
            yield next(word for word in site.stdout.readline().split() if word.startswith("http"))
        finally:
            site.terminate()


def _publish_sync(demo: Any, site: str, shop: str) -> dict[str, Any]:
    order = {
        "platform": "demo", "shop_id": shop, "task_type": "sync_order", "priority": "high",
        "payload": {"site": site, "login": True},
    }  # fmt: skip
    receipt: dict[str, Any] = demo.call("POST", "/api/v1/rpa/jobs", order)
    return receipt


def _print_receipts(demo: Any, print_line: Any, shop: str, receipts: list[dict[str, Any]]) -> None:
    jobs = {receipt["task_id"]: None for receipt in receipts}
    merged = "the second click joined the first" if len(jobs) == 1 else "the second run came behind the first"
    for task_id in jobs:
        job = _await_job(demo, task_id)
        result = job.get("result") or {}
        print_line(
            f"  {shop:<6} {'sync_order':<22} {job['state']:<11} {_format_counts(result) or job['reason']}; {merged}"
        )
        if job["state"] != "succeeded":
            demo.problems.append(f"{shop}: its orders should be read, the job is {job['state']} ({job['reason']})")


def _await_job(demo: Any, task_id: str) -> dict[str, Any]:
    waiting_until = time.monotonic() + JOB_TIME_LIMIT
    while True:
        job: dict[str, Any] = demo.call("GET", f"/api/v1/rpa/jobs/{task_id}")
        if job["state"] in END_STATES or time.monotonic() > waiting_until:
            return job
        time.sleep(0.2)


def _format_counts(result: dict[str, Any]) -> str:
    return f"{result['read']} read, {result['written']} written" if "read" in result else ""


def _check_orders(demo: Any, print_line: Any) -> None:
    """Check that every order is stored and was written once."""
    with psycopg.connect(demo.stack.endpoints.database_url, row_factory=dict_row) as connection:
        row = connection.execute(
            "SELECT count(*) AS orders, count(DISTINCT shop_id) AS shops, coalesce(max(writes), 0) AS writes"
            " FROM rpa_tasks_demoorder"
        ).fetchone()
    assert row is not None
    print_line(f"  {row['orders']} orders of {row['shops']} shops are stored, each written {row['writes']} time.")
    if row["shops"] != len(SHOPS) or row["writes"] != 1:
        demo.problems.append(f"each order of each shop should be stored once: {row}")
