"""List the receivers that touches wait for or are sent to. Read how many processes the load needs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from ninja import Field, Query, Router, Schema

from scheduling.api.auth import ApiKeyAuth
from scheduling.api.schemas import Page, ProblemOut, limit_list_time
from scheduling.db_timeouts import Deadline
from scheduling.errors import InvalidInput
from scheduling.monitoring.receivers import ReceiverStatus, list_receivers
from scheduling.monitoring.wanted_numbers import Scale, read_scaling

router = Router(tags=["receivers"], auth=ApiKeyAuth("metrics"))
PROBLEMS = (401, 403, 422, 429, 503)


class ReceiverPageIn(Page):
    def offset(self) -> int:
        """Return how many receivers precede the page.

        Raises:
            InvalidInput: the cursor is not the `next` value of a page.
        """
        if self.cursor and not (self.cursor.isascii() and self.cursor.isdecimal() and len(self.cursor) <= 6):
            raise InvalidInput.of("cursor", "is not one that a list has given out")
        return int(self.cursor or 0)


class RestOut(Schema):
    """`reason`: `paused` (by an operator), `throttled` (by the vendor), `target_down` (it does not answer), `day` or
    `month` (the limit is used up). `until` is null for a pause."""

    reason: str
    until: datetime | None


class LimitOut(Schema):
    period: str
    used: int
    limit: int


class ReceiverOut(Schema):
    """`chat_id` is empty for the address of the channel or of customers. `rate` is in touches a second."""

    channel: str = Field(alias="channel.key")
    kind: str = Field(alias="channel.kind")
    chat_id: str
    waiting: int
    waiting_complete: bool = Field(alias="counted_all")
    in_flight: int
    rate: float | None
    resting: RestOut | None
    ends_at: datetime | None
    limits: list[LimitOut] = Field(alias="uses")

    @staticmethod
    def resolve_resting(row: ReceiverStatus) -> dict[str, Any] | None:
        return {"reason": row.resting_reason, "until": row.resting_until} if row.resting_reason else None


class ReceiversOut(Schema):
    """`complete` is false while Redis does not answer: figures of calls, rests and limits are missing then."""

    items: list[ReceiverOut]
    next: str | None
    complete: bool


class ScaleOut(Schema):
    """`running` and `wanted` are null while a source does not answer: keep what runs then."""

    running: int | None
    wanted: int | None


class ScalingOut(Schema):
    workers: ScaleOut
    execution_nodes: ScaleOut
    watchers: ScaleOut


@router.get("/scaling", tags=["scaling"], response={200: ScalingOut, (401, 403, 429, 503): ProblemOut})
def show_scaling(request: HttpRequest) -> dict[str, Scale]:
    """Return how many processes the present load needs. The numbers are not smoothed: KEDA and the HPA do that."""
    return read_scaling(Deadline(settings.TIMEOUTS.metrics))


@router.get("/receivers", response={200: ReceiversOut, PROBLEMS: ProblemOut})
def show_receivers(request: HttpRequest, page: Query[ReceiverPageIn]) -> dict[str, Any]:
    """List receivers with touches that wait for them or are sent to them now; those that end last come first.

    A page counts 200,000 waiting touches at most. Where more wait, `waiting_complete` is false."""
    offset = page.offset()
    with limit_list_time():
        found = list_receivers(offset, page.limit)
    return {
        "items": found.rows,
        "next": str(offset + page.limit) if found.more else None,
        "complete": not found.incomplete,
    }
