"""Store the vendors' ids of sent messages, and find the delivery keys of these messages by them.

A receipt names a message by this id. The attempts of touches hold it too, but finding it there would read all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

from scheduling import sql
from scheduling.ids import new_id

VendorId = tuple[int, str]  #: channel id and the vendor's id


def store_vendor_ids(sent: Iterable[tuple[int, str, UUID]]) -> None:
    """Store channel id, vendor's id and delivery key of sent messages. A repeat has no effect."""
    rows = sorted(sent)  # one order for all writers prevents deadlocks
    if rows:
        sql.execute(
            _STORE,
            {
                "ids": [new_id() for _ in rows],
                "channels": [row[0] for row in rows],
                "vendor_ids": [row[1] for row in rows],
                "keys": [row[2] for row in rows],
            },
        )


def find_delivery_keys(wanted: Iterable[VendorId]) -> dict[VendorId, UUID]:
    """Return the delivery keys of the messages with these ids."""
    asked = sorted(set(wanted))
    if not asked:
        return {}
    given = {"channels": [each[0] for each in asked], "vendor_ids": [each[1] for each in asked]}
    return {(row[0], row[1]): row[2] for row in sql.rows(_FIND, given)}


def delete_vendor_ids(batch: list[UUID], before: datetime) -> int:
    """Delete rows of a batch whose ids are older than their retention time."""
    return sql.execute(_DELETE, {"ids": batch})


_STORE = """
INSERT INTO scheduling_vendormessage (id, channel_id, vendor_id, delivery_key)
SELECT * FROM unnest(%(ids)b::uuid[], %(channels)b::bigint[], %(vendor_ids)b::text[], %(keys)b::uuid[])
ON CONFLICT (channel_id, vendor_id) DO NOTHING
"""
_FIND = """
SELECT m.channel_id, m.vendor_id, m.delivery_key
FROM unnest(%(channels)b::bigint[], %(vendor_ids)b::text[]) AS v(channel_id, vendor_id)
JOIN scheduling_vendormessage AS m ON m.channel_id = v.channel_id AND m.vendor_id = v.vendor_id
"""
_DELETE = "DELETE FROM scheduling_vendormessage WHERE id = ANY(%(ids)b)"
