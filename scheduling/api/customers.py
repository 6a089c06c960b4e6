"""Create, change and read customers."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from typing import Annotated, Any
from zoneinfo import available_timezones

from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.http import HttpRequest
from ninja import Field, Path, Router, Schema
from pydantic import AfterValidator

from scheduling import sql
from scheduling.api.auth import ApiKeyAuth
from scheduling.api.cloudevents import FORBIDDEN
from scheduling.api.schemas import ProblemOut, Request
from scheduling.errors import InvalidInput, NotFound
from scheduling.models import Customer
from scheduling.operations import commands

router = Router(tags=["customers"], auth=ApiKeyAuth("customers"))
PROBLEMS = (400, 401, 403, 404, 413, 422, 429, 503)
SAME = (
    "user_id", "level", "name", "locale", "timezone", "opted_out", "opted_out_at", "addresses", "last_active_at",
)  # fmt: skip
ADDRESSES = 20


@cache
def _list_timezones() -> frozenset[str]:
    return frozenset(available_timezones())


def _check_characters(text: str) -> str:
    if found := FORBIDDEN.search(text):
        raise ValueError(f"contains U+{ord(found[0]):04X}")
    return text


def _check_timezone(name: str) -> str:
    if name and name not in _list_timezones():
        raise ValueError("must be a name of the IANA time zone database, such as Asia/Shanghai")
    return name


UserId = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_check_characters)]
AddressKind = Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,64}$"), AfterValidator(_check_characters)]
Address = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_check_characters)]


class CustomerIn(Request):
    level: Annotated[str, Field(max_length=40), AfterValidator(_check_characters)] = ""
    name: Annotated[str, Field(max_length=200), AfterValidator(_check_characters)] = ""
    locale: Annotated[str, Field(max_length=20), AfterValidator(_check_characters)] = ""
    timezone: Annotated[str, Field(max_length=60), AfterValidator(_check_timezone)] = ""
    opted_out: bool = False
    addresses: Annotated[dict[AddressKind, Address], Field(max_length=ADDRESSES)] = {}


class CustomerOut(Schema):
    user_id: str
    level: str
    name: str
    locale: str
    timezone: str
    opted_out: bool
    opted_out_at: datetime | None
    addresses: dict[str, Any]
    last_active_at: datetime | None


@router.put("/customers/{path:user_id}", response={200: CustomerOut, PROBLEMS: ProblemOut})
def put_customer(request: HttpRequest, user_id: Path[UserId], customer: CustomerIn) -> dict[str, Any]:
    """Create a customer or change the given fields. Other fields stay unchanged."""
    changes = customer.model_dump(exclude_unset=True)
    if "email" in changes.get("addresses", {}):
        _check_email(changes["addresses"]["email"])
    with sql.brief_lock_waits():
        return _serialize_customer(commands.update_customer(user_id, changes))


@router.get("/customers/{path:user_id}", response={200: CustomerOut, PROBLEMS: ProblemOut})
def get_customer(request: HttpRequest, user_id: Path[UserId]) -> dict[str, Any]:
    """Return one customer."""
    row = Customer.objects.filter(user_id=user_id).first()
    if row is None:
        raise NotFound(f"There is no customer {user_id}.")
    return _serialize_customer(row)


def _check_email(address: str) -> None:
    try:
        validate_email(address)
    except ValidationError as error:
        raise InvalidInput.of("addresses.email", "is not an e-mail address") from error


def _serialize_customer(row: Customer) -> dict[str, Any]:
    return {name: getattr(row, name) for name in SAME}
