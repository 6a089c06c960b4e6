"""Find customers by a part of their name, the start of their user id, or a tag."""

from __future__ import annotations

import re

from django.db.models import QuerySet
from django.db.models.expressions import RawSQL

from scheduling import sql
from scheduling.models import Customer

MAX_TERM = 100  #: characters


def filter_customers(term: str = "", tag: str = "") -> QuerySet[Customer]:
    """Return the customers that match all given conditions. Letters match in either case."""
    found = match_term(Customer.objects.all(), term)
    return found.filter(profile__tags__contains=[tag]) if tag else found


def match_term(customers: QuerySet[Customer], term: str) -> QuerySet[Customer]:
    """Return those of the customers whose name contains the term or whose user id starts with it."""
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
