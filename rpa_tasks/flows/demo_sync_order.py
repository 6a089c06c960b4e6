"""Read the demo shop's order list since the last time, and store what changed.

Payload: {"site": "http://127.0.0.1:8765", "login": true}; `login` may be left out where the shop is logged in.

Running it twice, at the same time or late, changes nothing that is newer: an order is written only by a higher
version, and the shop's row in the watermarks refuses whoever has a lower lease number than its last writer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, NamedTuple

import psycopg

from rpa_tasks.demo_shop.visiting import visit
from rpa_tasks.flow_sdk import BusinessError, Flow

#: The list has the latest change on top, so an order that moves while we turn pages moves to where we were: it comes
#: again next time, its change being higher than any we have seen.
ROWS = "rows => rows.map(row => ({...row.dataset}))"

#: No row comes back where a later run wrote already. Until the transaction ends the row is ours.
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
#: A run that is stopped in the middle must not keep the shop's row from the next one.
LIMITS = """
    SELECT set_config('lock_timeout', '20s', true), set_config('statement_timeout', '30s', true),
           set_config('idle_in_transaction_session_timeout', '15s', true)
"""


class Order(NamedTuple):
    order_no: str
    version: int
    change: int
    status: str
    buyer: str
    amount: Decimal


def run(flow: Flow) -> dict[str, Any]:
    with _claimed(flow) as (_, position):  # from here on nobody with a lower lease number writes
        pass
    orders = _read_since(flow, position)
    flow.progress(0.8, f"{len(orders)} orders read")
    return _store(flow, orders)


def _read_since(flow: Flow, position: int) -> list[Order]:
    """What changed after `position`, each order in its highest version: one that moved down is seen twice."""
    found: dict[str, Order] = {}
    page_number = 0
    while True:
        page_number += 1
        page = visit(flow, f"/orders?page={page_number}")
        shown = [_order(row) for row in page.eval_on_selector_all("tr[data-order]", ROWS)]
        for order in shown:
            known = found.get(order.order_no)
            if order.change > position and (known is None or order.version > known.version):
                found[order.order_no] = order
        flow.progress(min(0.1 * page_number, 0.7), f"page {page_number}")
        if any(order.change <= position for order in shown) or not page.locator("a[rel=next]").count():
            return list(found.values())


def _order(row: dict[str, str]) -> Order:
    try:
        return Order(
            row["order"], int(row["version"]), int(row["change"]), row["status"], row["buyer"], Decimal(row["amount"])
        )
    except (KeyError, ValueError, ArithmeticError) as error:
        raise BusinessError(f"The order list does not look as it used to: {error!r}") from error


def _store(flow: Flow, orders: list[Order]) -> dict[str, Any]:
    """Orders and watermark in one transaction: after a crash between them there is no telling what was read."""
    with _claimed(flow) as (connection, position):
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
def _claimed(flow: Flow) -> Iterator[tuple[psycopg.Connection[Any], int]]:
    """A transaction that has the shop's row, and how far was read. BusinessError: a later run wrote already."""
    address = os.environ.get("DATABASE_URL")
    if not address:
        raise BusinessError("DATABASE_URL is not set: list it among the flow's environment variables.")
    with psycopg.connect(address, connect_timeout=10, application_name="demo_sync_order") as connection:
        connection.execute(LIMITS)
        row = connection.execute(CLAIM, {"shop": flow.shop_id, "lease_no": flow.lease_no}).fetchone()
        if row is None:
            raise BusinessError(f"stale lease: a later run than {flow.lease_no} wrote already")
        yield connection, row[0]
