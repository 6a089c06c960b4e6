"""`POST /receipts`: record what receivers report about sent messages."""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

from django.http import HttpRequest
from ninja import Field, Router, Schema
from pydantic import AfterValidator

from scheduling.api.auth import ApiKeyAuth, charge_in_thread, get_principal
from scheduling.api.schemas import PastInstant, ProblemOut, Request, Text, check_storable
from scheduling.channels.base import Report
from scheduling.errors import FieldError, InvalidInput
from scheduling.receipts import BATCH, DETAIL, RecordingResult, record_bounce, record_reports

router = Router(tags=["receipts"], auth=ApiKeyAuth("receipts"))
PROBLEMS = (400, 401, 403, 413, 422, 429, 503)


VendorId = Annotated[str, Field(max_length=120), AfterValidator(check_storable)]
Detail = Annotated[str, Field(max_length=DETAIL), AfterValidator(check_storable)]


class ReceiptIn(Request):
    """`delivery_key`, or `channel` and `vendor_id`, name the message. `permanent` disables the bounced address."""

    kind: Literal["delivered", "read", "clicked", "replied", "bounced", "complained"] = Field(alias="type")
    delivery_key: Annotated[UUID, Field(strict=False)] | None = None
    channel: Text = ""
    vendor_id: VendorId = ""
    at: PastInstant | None = Field(None, alias="time")
    detail: Detail = ""
    permanent: bool = False
    address: Text = ""


class ReceiptsIn(Request):
    receipts: Annotated[list[ReceiptIn], Field(min_length=1, max_length=BATCH)]


class RefusedReceiptOut(Schema):
    position: int
    field: str
    message: str


class ReceiptsOut(Schema):
    accepted: int
    duplicates: int
    refused: list[RefusedReceiptOut]


@router.post("/receipts", response={200: ReceiptsOut, PROBLEMS: ProblemOut})
def post_receipts(request: HttpRequest, batch: ReceiptsIn) -> RecordingResult:
    """Record up to 500 receipts, in any order. Idempotent by message and type.

    Receipts about unknown messages are listed in `refused`; the others are stored. A malformed receipt refuses the
    request.
    """
    errors = [
        FieldError(f"receipts.{position}.{field}", message)
        for position, each in enumerate(batch.receipts)
        for field, message in _list_receipt_errors(each)
    ]
    if errors:
        raise InvalidInput(*errors)
    charge_in_thread(get_principal(request), "receipts", len(batch.receipts))
    return record_reports([Report(**each.model_dump()) for each in batch.receipts])


@router.post(
    "/bounces",
    response={200: ReceiptsOut, PROBLEMS: ProblemOut},
    openapi_extra={"requestBody": {"required": True, "content": {"message/rfc822": {"schema": {"type": "string"}}}}},
)
def post_bounce(request: HttpRequest) -> RecordingResult:
    """Record one bounce mail, as received. 422 for a mail that reports nothing about a mail of Aftertouch."""
    try:
        return record_bounce(request.body)
    except ValueError as error:
        raise InvalidInput.of("", str(error)) from None


def _list_receipt_errors(each: ReceiptIn) -> list[tuple[str, str]]:
    errors = []
    if each.delivery_key is None and not (each.channel and each.vendor_id):
        errors.append(("delivery_key", "is required, or channel and vendor_id"))
    elif each.delivery_key is not None and (each.channel or each.vendor_id):
        errors.append(("delivery_key", "must not be given together with channel or vendor_id"))
    if each.permanent and each.kind != "bounced":
        errors.append(("permanent", "is for bounced only"))
    if each.address and each.kind != "bounced":
        errors.append(("address", "is for bounced only"))
    return errors
