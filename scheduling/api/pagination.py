"""Lists a page at a time: from a key on, never by counting rows, so that page 1000 costs what page 1 does."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any
from uuid import UUID

from django.db import OperationalError
from ninja import Field, Schema
from psycopg.errors import QueryCanceled

from scheduling import sql
from scheduling.api.errors import Problem
from scheduling.api.schemas import Text
from scheduling.errors import InvalidInput

PATIENCE = "5s"  #: for a statement of a list
COME_BACK = 30  #: seconds; what a client is told to wait whose list took longer


@contextmanager
def reading() -> Iterator[None]:
    """A list is read within. What few rows match, or none, is looked for among all there are: that may take minutes,
    and whoever asks again and again would soon hold all threads."""
    try:
        with sql.within(PATIENCE):
            yield
    except OperationalError as error:
        if not isinstance(error.__cause__, QueryCanceled):
            raise
        detail = "This list takes too long to read. Ask for less: a user, an event, one more filter."
        raise Problem(503, detail, retry_after=COME_BACK) from error


class Page(Schema):
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Text = ""

    def before(self) -> UUID | None:
        """The id after which the page begins. Raises `InvalidInput` for a cursor that was not given out."""
        if not self.cursor:
            return None
        try:
            return UUID(bytes=base64.b64decode(self.cursor + "==", altchars=b"-_", validate=True))
        except (ValueError, binascii.Error) as error:
            raise InvalidInput.of("cursor", "is not one that a list has given out") from error


def page_of(items: Sequence[Any], ids: Sequence[UUID], limit: int, last: UUID | None = None) -> dict[str, Any]:
    """The answer for up to `limit` + 1 items; the one too many says that there is a next page. So does `last`, the id
    up to which a bounded search has looked."""
    if len(items) > limit:
        last = ids[limit - 1]
    return {"items": list(items[:limit]), "next": _cursor(last) if last else None}


def _cursor(last: UUID) -> str:
    return base64.urlsafe_b64encode(last.bytes).decode().rstrip("=")
