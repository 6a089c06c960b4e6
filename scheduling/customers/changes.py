"""Find, create and change customers, a batch in one transaction, and store what changed.

Locks follow the order of all writers: known customers by id, then unknown ones are inserted in the order of their user
ids. Nothing waits for a customer's lock after an insert (see `planning.ingest`). The profile is covered by that lock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.db.models.expressions import RawSQL
from psycopg.types.json import Jsonb

from scheduling import sql
from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput, errors_within, join_path
from scheduling.ids import new_id
from scheduling.ledger import locks
from scheduling.models import Customer, CustomerChange
from scheduling.models.node import enable_targets
from scheduling.policy.profile import merge_attributes
from scheduling.strict_text import is_same_json

BATCH = 500  #: most customers per transaction
SAME_ACT = timedelta(minutes=1)  #: two opt-outs within it are one in the history
MAX_ADDRESSES = 20  #: of a customer
PLAIN_FIELDS = ("name", "level", "locale", "timezone", "addresses", "opted_out")
CONSENT_FIELDS = ("opted_out_at", "objected_at", "consent")
#: Values of a customer without any.
NO_VALUES: Mapping[str, Any] = {
    "name": "", "level": "", "locale": "", "timezone": "", "addresses": {}, "opted_out": False, "opted_out_at": None,
    "objected_at": None, "consent": {}, "attributes": {}, "tags": [],
}  # fmt: skip


class CustomersRefused(InvalidInput):
    """Customers of a batch are refused, each by one error. The errors name fields like `customers.3.attributes`."""

    def __init__(self, by_position: Mapping[int, FieldError]) -> None:
        super().__init__(
            *(FieldError(join_path(f"customers.{at}", each.field), each.message) for at, each in by_position.items())
        )
        self.by_position = by_position


@dataclass(frozen=True, slots=True)
class CustomerInput:
    """Valid values for a customer. Absent fields stay unchanged.

    `attributes`, in stored form, and `addresses` are merged by name; None removes one. `tags` replace the stored ones,
    sorted.

    `objection` is true if the person opts out: by the link, or through an operator. `consent` has `given_at`,
    an aware time, and `source`.
    """

    user_id: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class StoredCustomer:
    """A locked customer with its values, and what a batch changes about it."""

    id: int
    user_id: str
    values: dict[str, Any]
    created: bool = False
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    #: Given fields that must not change.
    ignored: list[str] = field(default_factory=list)

    def change(self, fields: Mapping[str, Any], at: datetime) -> None:
        """Apply the values that differ and note the old and the new ones.

        Raises:
            InvalidInput: there would be too many attributes or addresses.
        """
        for name, value in fields.items():
            if name == "attributes":
                stored = self.values["attributes"]
                with errors_within("attributes"):
                    merged = merge_attributes(stored, value)
                names = sorted(name for name in value if not is_same_json(stored.get(name), merged.get(name)))
                if names:
                    self.before["attributes"] = {name: stored.get(name) for name in names}
                    self.after["attributes"] = {name: merged.get(name) for name in names}
                    self.values["attributes"] = merged
            elif name == "addresses":
                merged = {**self.values["addresses"], **value}
                kept = {kind: address for kind, address in merged.items() if address is not None}
                if len(kept) > MAX_ADDRESSES:
                    raise InvalidInput.of(
                        "addresses", _("a customer has at most %(most)s addresses", most=MAX_ADDRESSES)
                    )
                self._set("addresses", kept)
            elif name not in ("opted_out", "objection", "consent"):
                self._set(name, value)
        if fields.keys() & {"opted_out", "objection"}:
            self._change_opt_out(fields, at)

    def _set(self, name: str, value: Any) -> None:
        stored = self.values[name]
        if stored != value:
            self.before[name], self.after[name] = _write_value(stored), _write_value(value)
            self.values[name] = value

    def _change_opt_out(self, fields: Mapping[str, Any], at: datetime) -> None:
        """Opt the customer out or in. A new, later consent alone lifts a person's own opt-out."""
        since, objected_at, stored = (self.values[name] for name in ("opted_out_at", "objected_at", "consent"))
        consent = fields.get("consent")
        if consent and stored and consent["given_at"] <= datetime.fromisoformat(stored["given_at"]):
            consent = None  # the repeat of an earlier one
        if fields.get("objection") or fields["opted_out"]:
            self._set("opted_out", True)
            self.values["opted_out_at"] = since or at
            if fields.get("objection") and not (objected_at and at - objected_at < SAME_ACT):
                self._set("objected_at", at)
        elif objected_at and not (consent and consent["given_at"] > objected_at):
            self.ignored.append("opted_out")
        else:
            self._set("opted_out", False)
            self._set("objected_at", None)
            self.values["opted_out_at"] = None
            if consent:
                self._set("consent", {"given_at": consent["given_at"].isoformat(), "source": consent["source"]})


def _write_value(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def change_customers(inputs: Sequence[CustomerInput], *, actor: str) -> list[StoredCustomer]:
    """Create or change up to `BATCH` customers, all or none. Return them in the order of the inputs.

    Each user id occurs once. A customer that the inputs do not change gets no entry in its history.

    Raises:
        CustomersRefused: a customer would have too many attributes or addresses.
    """
    while True:
        with suppress(_CustomersInserted), transaction.atomic():
            at = sql.now()
            stored = _lock_or_insert([each.user_id for each in inputs])
            _apply_inputs(inputs, stored, at)
            _write_customers([row for row in stored.values() if row.after])
            CustomerChange.objects.bulk_create(
                CustomerChange(
                    id=new_id(), customer_id=row.id, at=at, actor=actor[:160], created=row.created, before=row.before,
                    after=row.after,
                )
                for row in stored.values() if row.after or row.created
            )  # fmt: skip
            return [stored[each.user_id] for each in inputs]


def change_customer(user_id: str, fields: Mapping[str, Any], *, actor: str) -> StoredCustomer:
    """Create or change one customer (see `change_customers`). Fields in errors have no position."""
    try:
        return change_customers([CustomerInput(user_id, fields)], actor=actor)[0]
    except CustomersRefused as error:
        raise InvalidInput(*error.by_position.values()) from None


def predict_changes(inputs: Sequence[CustomerInput]) -> list[StoredCustomer]:
    """Return what `change_customers` would return now, and raise what it would raise. Locks and writes nothing."""
    stored = _read_stored([each.user_id for each in inputs])
    for each in inputs:
        if each.user_id not in stored:
            stored[each.user_id] = StoredCustomer(0, each.user_id, dict(NO_VALUES), created=True)
    _apply_inputs(inputs, stored, datetime.now(UTC))
    return [stored[each.user_id] for each in inputs]


class _CustomersInserted(Exception):
    """Another transaction inserted a customer after the locks. A later lock would break the order of locks."""


def _lock_or_insert(user_ids: Sequence[str]) -> dict[str, StoredCustomer]:
    known = locks.lock_customers_by_user_id(user_ids)
    unknown = [user_id for user_id in user_ids if user_id not in known]
    inserted = locks.insert_customers(dict.fromkeys(unknown, (None, None))) if unknown else {}
    if len(inserted) < len(unknown):
        raise _CustomersInserted
    stored = _read_stored(user_ids)
    for user_id in inserted:
        stored[user_id].created = True
    return stored


def _read_stored(user_ids: Sequence[str]) -> dict[str, StoredCustomer]:
    names = (*PLAIN_FIELDS, *CONSENT_FIELDS, "attributes", "tags")
    return {
        row[1]: StoredCustomer(row[0], row[1], dict(zip(names, row[2:], strict=True)))
        for row in sql.rows(_STORED, {"user_ids": user_ids})
    }


def _apply_inputs(inputs: Sequence[CustomerInput], stored: Mapping[str, StoredCustomer], at: datetime) -> None:
    errors: dict[int, FieldError] = {}
    for position, each in enumerate(inputs):
        try:
            stored[each.user_id].change(each.fields, at)
        except InvalidInput as error:
            errors[position] = error.errors[0]
    if errors:
        raise CustomersRefused(errors)


def _write_customers(changed: Sequence[StoredCustomer]) -> None:
    """Write the changed values of locked customers."""
    plain = [row for row in changed if not row.after.keys() <= {"attributes", "tags"}]
    if plain:
        values = {name: [row.values[name] for row in plain] for name in (*PLAIN_FIELDS, *CONSENT_FIELDS)}
        values |= {name: [Jsonb(each) for each in values[name]] for name in ("addresses", "consent")}
        sql.execute(_WRITE_PLAIN, values | {"ids": [row.id for row in plain]})
        differing: set[str] = set()  # old and new addresses (see `Addressed`)
        for row in plain:
            before, after = row.before.get("addresses", {}), row.after.get("addresses", {})
            differing |= {str(each) for each in before.values()} ^ {str(each) for each in after.values()}
        enable_targets(differing)
    with_profile = [row for row in changed if row.after.keys() & {"attributes", "tags"}]
    if with_profile:
        sql.execute(
            _WRITE_PROFILES,
            {
                "ids": [row.id for row in with_profile],
                "attributes": [Jsonb(row.values["attributes"]) for row in with_profile],
                "tags": [Jsonb(row.values["tags"]) for row in with_profile],
            },
        )


_STORED = """
SELECT c.id, c.user_id, c.name, c.level, c.locale, c.timezone, c.addresses, c.opted_out, c.opted_out_at,
       c.objected_at, c.consent, COALESCE(p.attributes, '{}'), COALESCE(p.tags, '{}')
FROM unnest(%(user_ids)b::text[]) AS v(user_id) JOIN scheduling_customer AS c ON c.user_id = v.user_id
LEFT JOIN scheduling_customerprofile AS p ON p.customer_id = c.id
"""

_WRITE_PLAIN = """
UPDATE scheduling_customer AS c
SET name = v.name, level = v.level, locale = v.locale, timezone = v.timezone, addresses = v.addresses,
    opted_out = v.opted_out, opted_out_at = v.opted_out_at, objected_at = v.objected_at, consent = v.consent
FROM unnest(%(ids)b::bigint[], %(name)b::text[], %(level)b::text[], %(locale)b::text[], %(timezone)b::text[],
            %(addresses)b::jsonb[], %(opted_out)b::bool[], %(opted_out_at)b::timestamptz[],
            %(objected_at)b::timestamptz[], %(consent)b::jsonb[])
    AS v(id, name, level, locale, timezone, addresses, opted_out, opted_out_at, objected_at, consent)
WHERE c.id = v.id
"""

_WRITE_PROFILES = """
INSERT INTO scheduling_customerprofile AS p (customer_id, attributes, tags, name)
SELECT v.id, v.attributes, ARRAY(SELECT jsonb_array_elements_text(v.tags)), ''
FROM unnest(%(ids)b::bigint[], %(attributes)b::jsonb[], %(tags)b::jsonb[]) AS v(id, attributes, tags)
ON CONFLICT (customer_id) DO UPDATE SET attributes = EXCLUDED.attributes, tags = EXCLUDED.tags
"""


MAX_TERM = 100  #: characters


def match_term(customers: QuerySet[Customer], term: str) -> QuerySet[Customer]:
    """Return those of the customers whose name contains the term, in either case, or whose user id starts with it."""
    term = term.strip()[:MAX_TERM]
    if not term:
        return customers
    return customers.filter(pk__in=RawSQL(_MATCHING, build_search_parameters(term)))  # noqa: S611 (a constant)


def find_first_customers(term: str, most: int) -> list[int]:
    """Return the ids of up to `most` customers by the start of their user id, and as many by name.

    A term may match each customer. So each way reads no more rows than it returns.
    """
    parts, name, user_id = build_search_parameters(term.strip()[:MAX_TERM])
    given = {"parts": parts, "name": name, "user_id": user_id, "most": most}
    return [row[0] for row in sql.rows(_FIRST, given, replan=True)]  # a kept plan cannot use the start of a pattern


def build_search_parameters(term: str) -> tuple[list[str], str, str]:
    """Return the parts of two letters, which the index finds, and the patterns for name and user id."""
    lower = term.lower()
    parts = sorted({lower[at : at + 2] for at in range(len(lower) - 1)} or {lower})
    return parts, f"%{_escape_pattern(lower)}%", f"{_escape_pattern(term)}%"


def _escape_pattern(text: str) -> str:
    return re.sub(r"([\\%_])", r"\\\1", text)


# The order is that of the index for LIKE, so a whole user id comes before longer ones.
_FIRST = """
(SELECT id FROM scheduling_customer WHERE user_id LIKE %(user_id)s ORDER BY user_id USING ~<~ LIMIT %(most)s)
UNION ALL
(SELECT customer_id FROM scheduling_customerprofile
 WHERE scheduling_name_parts(name) @> %(parts)s::text[] AND lower(name) LIKE %(name)s LIMIT %(most)s)
"""
_MATCHING = """
SELECT p.customer_id FROM scheduling_customerprofile AS p
WHERE scheduling_name_parts(p.name) @> %s::text[] AND lower(p.name) LIKE %s
UNION ALL
SELECT c.id FROM scheduling_customer AS c WHERE c.user_id LIKE %s
"""
