"""Remove personal data from the receipts of an erased customer. Their kinds and times stay for the statistics."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from scheduling import sql


def erase_receipts(delivery_keys: Sequence[UUID]) -> int:
    """Empty the details of the receipts of these messages and delete the vendors' ids. Return the number of receipts.

    Call it while the customer is locked. Idempotent.
    """
    keys = {"keys": sql.UuidArray(sorted(set(delivery_keys)))}
    sql.execute("DELETE FROM scheduling_vendormessage WHERE delivery_key = ANY(%(keys)b)", keys)
    return sql.execute("UPDATE scheduling_deliveryreceipt SET detail = '' WHERE delivery_key = ANY(%(keys)b)", keys)
