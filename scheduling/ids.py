"""Ids that sort by the time they were made, so that an index grows at its end."""

from __future__ import annotations

from uuid import UUID

from uuid_utils.compat import uuid7


def new_id() -> UUID:
    return uuid7()
