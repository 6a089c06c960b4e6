"""Restore the values from before an import, except those that another writer has changed since.

Changes are undone from the latest to the first, so that a customer on several lines gets its first values. Each value
is compared with the one that the import wrote, and the history is searched for later changes of the same field.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from scheduling import sql
from scheduling.customers.changes import (
    BATCH,
    CONSENT_FIELDS,
    StoredCustomer,
    read_locked,
    store_changes,
    write_customers,
)
from scheduling.error_text import ErrorText as _
from scheduling.ledger import locks
from scheduling.models import CustomerChange, CustomerImport
from scheduling.policy.profile import InvalidValue
from scheduling.strict_text import is_same_json

#: A field, and the kind of an address or the name of an attribute.
Place = tuple[str, str]
#: Customer, field and message.
KeptValue = tuple[int, str, str]


def undo_changes(row: CustomerImport) -> tuple[Counter[str], list[KeptValue], bool]:
    """Undo the next changes of an import. Return counts, the values that stay, and whether none are left."""
    changes = _read_changes(row)
    users = {each.customer_id: each.customer.user_id for each in changes}
    locked = {spec.id for spec in locks.lock_users(list(users.values())).values()}  # without erased customers
    at = sql.now()
    stored = {each.id: each for each in read_locked([key for key in users if key in locked])}
    later = _read_later_changes(row, changes)
    kept: list[KeptValue] = []
    wanted = {key: _flatten_values(each.values) for key, each in stored.items()}
    for change in changes:
        if change.customer_id in stored:
            kept += _restore_values(change, wanted[change.customer_id], later[change.customer_id])
    for key, each in stored.items():
        since = wanted[key]["opted_out_at", ""]
        opted_out_at = datetime.fromisoformat(since) if isinstance(since, str) else at
        kept += _change_back(each, _list_restored_fields(each, wanted[key]), opted_out_at)
    restored = [each for each in stored.values() if each.after]
    write_customers(restored)
    store_changes(restored, at, f"{row.ended_by} (CSV …{str(row.pk)[-8:]})", row.pk, is_undo=True)
    if changes:
        row.undo_position = changes[-1].pk
    counts = Counter(changes=len(changes), restored=len(restored), kept=len(kept))
    return counts, kept, len(changes) < BATCH


def _change_back(row: StoredCustomer, fields: Mapping[str, Any], at: datetime) -> list[KeptValue]:
    """Change a locked customer. Return the fields that stay, because it would have too many attributes or addresses."""
    kept = []
    for name, value in fields.items():
        try:
            row.change({name: value}, at)
        except InvalidValue as error:
            kept.append((row.id, name, str(error)))
    return kept


def _read_changes(row: CustomerImport) -> list[CustomerChange]:
    found = CustomerChange.objects.filter(import_id=row.pk, is_undo=False).select_related("customer")
    if row.undo_position:
        found = found.filter(pk__lt=row.undo_position)
    return list(found.order_by("-pk")[:BATCH])


def _read_later_changes(row: CustomerImport, changes: Sequence[CustomerChange]) -> Mapping[int, list[CustomerChange]]:
    """Return changes by others by customer. Call it after the locks."""
    later: dict[int, list[CustomerChange]] = defaultdict(list)
    if changes:
        found = CustomerChange.objects.filter(
            customer__in={each.customer_id for each in changes}, pk__gt=min(each.pk for each in changes)
        )
        for each in found.exclude(import_id=row.pk).order_by("pk"):
            later[each.customer_id].append(each)
    return later


def _restore_values(
    change: CustomerChange, wanted: dict[Place, Any], later: Sequence[CustomerChange]
) -> list[KeptValue]:
    """Set the values from before the change. Return those that stay."""
    kept: list[KeptValue] = []
    taken = {place: each.actor for each in later if each.pk > change.pk for place in _list_changed_places(each)}
    before, after = _flatten_values(change.before), _flatten_values(change.after)
    for place in _list_changed_places(change):
        if place == ("opted_out", "") and after[place]:
            message = _("an opt-out stays: the customer may have confirmed it since")
        elif place in taken:
            message = _("was changed later by %(name)s", name=taken[place])
        elif not is_same_json(wanted.get(place), after.get(place)):
            message = _("was changed later")
        else:
            wanted[place] = before.get(place)
            if place == ("opted_out", ""):  # an opt-out keeps its time; without it, it counts from now
                wanted["opted_out_at", ""] = before.get(("opted_out_at", ""))
            continue
        kept.append((change.customer_id, ".".join(filter(None, place)), message))
    return kept


def _list_changed_places(change: CustomerChange) -> list[Place]:
    before, after = _flatten_values(change.before), _flatten_values(change.after)
    places = (before.keys() | after.keys()) - {("opted_out_at", "")}
    return sorted(place for place in places if not is_same_json(before.get(place), after.get(place)))


def _flatten_values(values: Mapping[str, Any]) -> dict[Place, Any]:
    found: dict[Place, Any] = {}
    for name, value in values.items():
        if name in ("addresses", "attributes") and isinstance(value, Mapping):
            found |= {(name, key): each for key, each in value.items()}
        else:
            found[name, ""] = value
    return found


def _list_restored_fields(row: StoredCustomer, wanted: Mapping[Place, Any]) -> dict[str, Any]:
    """Return the fields that lead from the stored values to the wanted ones."""
    stored = _flatten_values(row.values)
    fields: dict[str, Any] = {}
    for (name, key), value in wanted.items():
        if name in CONSENT_FIELDS or is_same_json(value, stored.get((name, key))):
            continue
        if key:
            fields.setdefault("address_kinds" if name == "addresses" else name, {})[key] = value
        else:
            fields[name] = value
    return fields
