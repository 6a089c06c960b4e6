"""Read the demo shop's orders that changed since the last run, and store them.

Payload: {"site": "http://127.0.0.1:8765", "login": true}; `login` is optional if the shop is logged in.

Idempotent, also for concurrent or late runs: an order is overwritten only by a higher version. The shop's row in the
watermarks refuses a lease number lower than that of its last writer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, NamedTuple

import psycopg

from examples.demo_shop.visiting import visit
from rpa_tasks.flow_sdk import BusinessError, Flow

#: The list has the latest change first. An order that moves during the paging moves to pages already read. The next run
#: reads it, because its change is higher than any seen so far.
ROWS = "rows => rows.map(row => ({...row.dataset}))"

#: Returns no row if a later run has written. The transaction holds the row until its end.
CLAIM = """
    INSERT INTO rpa_tasks_demowatermark AS mark (shop_id, position, lease_no) VALUES (%(shop)s, 0, %(lease_no)s)
    ON CONFLICT (shop_id) DO UPDATE SET lease_no = excluded.lease_no WHERE mark.lease_no <= excluded.lease_no
    RETURNING position
"""
ADVANCE = "UPDATE rpa_tasks_demowatermark SET position = %(position)s WHERE shop_id = %(shop)s"
UPSERT = """
    INSERT INTO rpa_tasks_demoorder AS stored (shop_id, order_no, version, status, buyer, amount, writes)
    SELECT %(shop)s, read.*, 1
    FROM unnest(%(order_nos)s::text[], %(versions)s::int[], %(statuses)s::text[], %(buyers)s::text[],
                %(amounts)s::numeric[]) AS read
    ON CONFLICT (shop_id, order_no) DO UPDATE
    SET version = excluded.version, status = excluded.status, buyer = excluded.buyer, amount = excluded.amount,
        writes = stored.writes + 1
    WHERE excluded.version > stored.version
"""
#: A run that is stopped during the transaction must not block the shop's row for the next one.
LIMITS = """
    SELECT set_config('lock_timeout', '20s', true), set_config('statement_timeout', '30s', true),
           set_config('idle_in_transaction_session_timeout', '15s', true)
"""


class OrderRow(NamedTuple):
    order_no: str
    version: int
    change: int
    status: str
    buyer: str
    amount: Decimal


def run(flow: Flow) -> dict[str, Any]:
    with _lock_watermark(flow) as (_, position):  # from here on no run with a lower lease number writes
        pass
    orders = _read_orders_since(flow, position)
    flow.progress(0.8, f"{len(orders)} orders read")
    return _store_orders(flow, orders)


def _read_orders_since(flow: Flow, position: int) -> list[OrderRow]:
    """Return the orders that changed after `position`, each in its highest version: the pages may show one twice."""
    found: dict[str, OrderRow] = {}
    page_number = 0
    while True:
        page_number += 1
        page = visit(flow, f"/orders?page={page_number}")
        shown = [_parse_order(row) for row in page.eval_on_selector_all("tr[data-order]", ROWS)]
        for order in shown:
            known = found.get(order.order_no)
            if order.change > position and (known is None or order.version > known.version):
                found[order.order_no] = order
        flow.progress(min(0.1 * page_number, 0.7), f"page {page_number}")
        if any(order.change <= position for order in shown) or not page.locator("a[rel=next]").count():
            return list(found.values())


def _parse_order(row: dict[str, str]) -> OrderRow:
    try:
        return OrderRow(
            row["order"], int(row["version"]), int(row["change"]), row["status"], row["buyer"], Decimal(row["amount"])
        )
    except (KeyError, ValueError, ArithmeticError) as error:
        raise BusinessError(f"The order list does not look as it used to: {error!r}") from error


def _store_orders(flow: Flow, orders: list[OrderRow]) -> dict[str, Any]:
    """Store orders and watermark in one transaction, so that a crash cannot separate them."""
    with _lock_watermark(flow) as (connection, position):
        written = connection.execute(
            UPSERT,
            {
                "shop": flow.shop_id,
                "order_nos": [order.order_no for order in orders],
                "versions": [order.version for order in orders],
                "statuses": [order.status for order in orders],
                "buyers": [order.buyer for order in orders],
                "amounts": [order.amount for order in orders],
            },
        ).rowcount
        position = max([position, *(order.change for order in orders)])
        connection.execute(ADVANCE, {"shop": flow.shop_id, "position": position})
    return {"read": len(orders), "written": written, "position": position}


@contextmanager
def _lock_watermark(flow: Flow) -> Iterator[tuple[psycopg.Connection[Any], int]]:
    """Open a transaction that holds the shop's row, and yield it with the last position.

    Raises: `BusinessError` if a later run has written.
    """
    address = os.environ.get("DATABASE_URL")
    if not address:
        raise BusinessError("DATABASE_URL is not set: list it among the flow's environment variables.")
    with psycopg.connect(address, connect_timeout=10, application_name="demo_sync_order") as connection:
        connection.execute(LIMITS)
        row = connection.execute(CLAIM, {"shop": flow.shop_id, "lease_no": flow.lease_no}).fetchone()
        if row is None:
            raise BusinessError(f"stale lease: a later run than {flow.lease_no} wrote already")
        yield connection, row[0]
