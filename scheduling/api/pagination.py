"""Page lists by key instead of counting rows, so that page 1000 costs as much as page 1."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any
from uuid import UUID

from django.conf import settings
from django.db import OperationalError
from ninja import Field, Schema
from psycopg.errors import QueryCanceled

from scheduling import sql
from scheduling.api.errors import Problem
from scheduling.api.schemas import Text
from scheduling.errors import InvalidInput

LIST_RETRY_AFTER = 30  #: seconds of `Retry-After` for a list that took too long
LONG_LIST = "This list takes too long to read. Ask for less: a user, an event, one more filter."


@contextmanager
def limit_list_time(seconds: float | None = None, detail: str = LONG_LIST) -> Iterator[None]:
    """Limit the time of a list's statements, by default to `TIMEOUTS.list_page`. `detail` explains the 503.

    A filter that matches few rows reads the whole table, which may take minutes. Repeated requests would occupy all
    threads.

    Raises:
        Problem: 503 if a statement exceeds its limit.
    """
    try:
        with sql.limit_statement_time(seconds or settings.TIMEOUTS.list_page):
            yield
    except OperationalError as error:
        if not isinstance(error.__cause__, QueryCanceled):
            raise
        raise Problem(503, detail, retry_after=LIST_RETRY_AFTER) from error


class Page(Schema):
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Text = ""

    def before(self) -> UUID | None:
        """Return the id after which the page starts.

        Raises:
            InvalidInput: the cursor is not the `next` value of a page.
        """
        if not self.cursor:
            return None
        try:
            return UUID(bytes=base64.b64decode(self.cursor + "==", altchars=b"-_", validate=True))
        except (ValueError, binascii.Error) as error:
            raise InvalidInput.of("cursor", "is not one that a list has given out") from error


def build_page(items: Sequence[Any], ids: Sequence[UUID], limit: int, last: UUID | None = None) -> dict[str, Any]:
    """Build a page from up to `limit` + 1 items.

    There is a next page if there is one item more than `limit`, or if `last` is set. `last` is the id up to which a
    bounded search has read.
    """
    if len(items) > limit:
        last = ids[limit - 1]
    return {"items": list(items[:limit]), "next": _encode_cursor(last) if last else None}


def _encode_cursor(last: UUID) -> str:
    return base64.urlsafe_b64encode(last.bytes).decode().rstrip("=")
