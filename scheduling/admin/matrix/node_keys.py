"""Derive the key of a new node."""

from __future__ import annotations

import re

from django.utils.text import slugify

from scheduling import sql
from scheduling.models import Node

LONGEST = 58  #: characters; a number of up to five digits follows
_LOCK = "SELECT pg_advisory_xact_lock(hashtext('scheduling_node.key'))"


def derive_node_key(name: str, stage: str, trigger: str) -> str:
    """Return a free key from the name, or from stage and trigger if the name has other letters than a to z.

    The transaction of the caller keeps a lock until its end: concurrent forms derive different keys.
    """
    sql.execute(_LOCK, {})
    base = _shorten(slugify(name)) if name.isascii() else ""
    base = base or _shorten(re.sub(r"[^a-z0-9]+", "-", f"{stage}-{trigger}".lower())) or "node"
    taken = set(Node.objects.filter(key__startswith=base).values_list("key", flat=True))
    keys = (base if number == 1 else f"{base}-{number}" for number in range(1, len(taken) + 2))
    return next(key for key in keys if key not in taken)


def _shorten(text: str) -> str:
    return text[:LONGEST].strip("-_")
