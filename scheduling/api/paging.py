"""Lists a page at a time: from a key on, never by counting rows, so that page 1000 costs what page 1 does."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any
from uuid import UUID

from ninja import Field, Schema

from scheduling.api.schemas import Text
from scheduling.errors import InvalidInput


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


def page_of(items: Sequence[Any], ids: Sequence[UUID], limit: int) -> dict[str, Any]:
    """The answer for up to `limit` + 1 items; the one too many says that there is a next page."""
    more = len(items) > limit
    return {"items": list(items[:limit]), "next": _cursor(ids[limit - 1]) if more else None}


def _cursor(last: UUID) -> str:
    return base64.urlsafe_b64encode(last.bytes).decode().rstrip("=")
