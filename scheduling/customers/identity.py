"""Collect what identifies a customer, now and in the past."""

from __future__ import annotations

from scheduling.ledger.anonymization import Identity
from scheduling.models import Customer, CustomerChange


def collect_identity(row: Customer) -> Identity:
    """Return the user id with the present and the former addresses and names."""
    addresses, names = row.stored_addresses(), {row.name}
    for change in CustomerChange.objects.filter(customer=row).values_list("before", "after"):
        for values in change:
            addresses |= Customer(addresses=values.get("addresses")).stored_addresses()
            names.add(values.get("name") or "")
    return Identity(row.user_id, tuple(sorted(addresses - {""})), tuple(sorted(names - {""})))
