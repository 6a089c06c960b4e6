"""Read the receipts of messages, and count those of a node."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from uuid import UUID

from scheduling import sql
from scheduling.models import DeliveryReceipt


def load_receipts(delivery_keys: Iterable[UUID]) -> dict[UUID, list[dict[str, Any]]]:
    """Return the receipts of messages by delivery key, each in order of time, for JSON."""
    found: dict[UUID, list[dict[str, Any]]] = {}
    rows = DeliveryReceipt.objects.filter(delivery_key__in=set(delivery_keys)).order_by("at", "id")
    for row in rows:
        receipt = {"type": row.kind, "time": row.at, "received_at": row.received_at, "detail": row.detail}
        found.setdefault(row.delivery_key, []).append(receipt)
    return found


def count_receipts(node_id: int, span: timedelta) -> dict[str, int]:
    """Return the number of receipts of a node by kind, received within the last `span`."""
    return dict(sql.rows(_COUNTS, {"node": node_id, "span": span}))


def count_delivered_touches(node_id: int, span: timedelta) -> int:
    """Return the number of touches of a node that were delivered within the last `span`."""
    ((count,),) = sql.rows(_DELIVERED, {"node": node_id, "span": span})
    return int(count)


_COUNTS = """
SELECT kind, count(*) FROM scheduling_deliveryreceipt
WHERE node_id = %(node)s AND received_at > statement_timestamp() - %(span)s::interval GROUP BY kind
"""
_DELIVERED = """
SELECT count(*) FROM scheduling_touch_ended
WHERE settled_at > statement_timestamp() - %(span)s::interval AND node_id = %(node)s AND state = 'delivered'
"""
