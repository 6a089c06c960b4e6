"""Load the texts that operators edited before they published failed touches again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from scheduling import sql


class EditedText(NamedTuple):
    """What an operator wrote in place of the rendered template."""

    subject: str
    body: str


def load_edited_texts(root_ids: Sequence[UUID]) -> dict[UUID, EditedText]:
    """Return the edited texts by delivery key. All retries under that key send the same text."""
    rows = sql.rows(_EDITED, {"roots": sql.UuidArray(root_ids)})
    return {root_id: EditedText(subject or "", body) for root_id, subject, body in rows if body}


# An edited touch has a delivery key of its own: the id under which it was published again.
_EDITED = """
SELECT retried_as, difference -> 'after' ->> 'subject', difference -> 'after' ->> 'body'
FROM scheduling_failedtask
WHERE retried_as = ANY(%(roots)b) AND difference IS NOT NULL
"""
