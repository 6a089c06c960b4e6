"""Create ids that sort by their creation time, so that an index grows at its end."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from uuid_utils.compat import uuid7


def new_id() -> UUID:
    return uuid7()


def first_id_at(instant: datetime) -> UUID:
    """Return the lowest id that can be created at an instant, to the millisecond."""
    return UUID(int=int(instant.timestamp() * 1000) << 80)
