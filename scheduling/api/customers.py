"""Create, change, search, export and erase customers."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Annotated, Any, Self
from uuid import UUID

from django.conf import settings
from django.http import HttpRequest
from ninja import Field, Path, Query, Router, Schema
from pydantic import AfterValidator, model_validator

from scheduling import sql
from scheduling.api.auth import ApiKeyAuth, build_api_key_actor, charge_in_thread, get_principal
from scheduling.api.schemas import (
    Page,
    PastInstant,
    ProblemOut,
    Request,
    Text,
    build_page,
    check_storable,
    limit_list_time,
)
from scheduling.audit import record_action
from scheduling.customers.changes import BATCH, CustomerInput, change_customer, change_customers, match_term
from scheduling.customers.erasure import export_customer, request_erasure
from scheduling.customers.inputs import CustomerFields, UserId, refuse_member
from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput, NotFound
from scheduling.models import Customer
from scheduling.policy.profile import check_characters

router = Router(tags=["customers"], auth=ApiKeyAuth("customers"))
ERASE = ApiKeyAuth("customers.erase")
PROBLEMS = (400, 401, 403, 404, 413, 422, 429, 503)
SAME = (
    "user_id", "level", "name", "locale", "timezone", "opted_out", "opted_out_at", "objected_at", "addresses",
    "last_active_at",
)  # fmt: skip


#: Live chats accept more characters than a new customer here may have.
StoredUserId = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(check_storable)]


class ConsentIn(Request):
    """A person's consent to marketing. `source`: where it was given, such as `checkout`."""

    given_at: PastInstant
    source: Annotated[str, Field(min_length=1, max_length=200), AfterValidator(check_characters)]


class CustomerIn(CustomerFields):
    consent: ConsentIn | None = None

    @model_validator(mode="after")
    def check_consent(self) -> Self:
        if self.consent and ("opted_out" not in self.model_fields_set or self.opted_out):
            raise refuse_member("consent", "is given with “opted_out: false” only")
        return self

    def list_given(self) -> dict[str, Any]:
        given = super().list_given()
        return given | {"consent": given["consent"].model_dump()} if given.get("consent") else given


class NamedCustomerIn(CustomerIn):
    user_id: UserId


class CustomersIn(Request):
    customers: Annotated[list[NamedCustomerIn], Field(min_length=1, max_length=BATCH)]


class CustomerReceiptOut(Schema):
    """`ignored`: given fields that did not change, because only a later consent lifts a person's own opt-out."""

    user_id: str
    created: bool
    changed: list[str]
    ignored: list[str]


class CustomerReceiptsOut(Schema):
    customers: list[CustomerReceiptOut]


class ConsentOut(Schema):
    given_at: datetime
    source: str


class CustomerOut(Schema):
    user_id: str
    level: str
    name: str
    locale: str
    timezone: str
    opted_out: bool
    opted_out_at: datetime | None
    objected_at: datetime | None  #: of the person's own opt-out
    consent: ConsentOut | None
    addresses: dict[str, Any]
    last_active_at: datetime | None
    attributes: dict[str, str | bool | int | float]
    tags: list[str]


class StoredCustomerOut(CustomerOut):
    ignored: list[str]  #: as in `CustomerReceiptOut`


class CustomersOut(Schema):
    items: list[CustomerOut]
    next: str | None


class CustomerExportOut(Schema):
    customer: CustomerOut
    events: list[dict[str, Any]]
    touches: list[dict[str, Any]]
    changes: list[dict[str, Any]]
    complaints: list[datetime]
    failed_tasks: list[dict[str, Any]]
    disabled_addresses: list[dict[str, Any]]
    webhook_messages: list[dict[str, Any]]
    rpa_jobs: list[dict[str, Any]]
    live_chats: list[dict[str, Any]]
    complete: bool  #: false: a list holds the latest 10,000 entries only, or Redis did not answer for live chats


class ErasureOut(Schema):
    erasure_id: UUID
    state: str


class CustomersPage(Page):
    q: Text = ""
    tag: Text = ""


@router.post("/customers", response={200: CustomerReceiptsOut, PROBLEMS: ProblemOut})
def post_customers(request: HttpRequest, batch: CustomersIn) -> dict[str, Any]:
    """Create or change up to 500 customers, all or none, like a `PUT` for each. The answer has one entry for each."""
    given = Counter(each.user_id for each in batch.customers)
    errors = [
        FieldError(f"customers.{position}.user_id", _("is given twice"))
        for position, each in enumerate(batch.customers)
        if given[each.user_id] > 1
    ]
    if errors:
        raise InvalidInput(*errors)
    charge_in_thread(get_principal(request), "customers", len(batch.customers))
    inputs = [CustomerInput(each.user_id, each.list_given()) for each in batch.customers]
    with sql.brief_lock_waits():
        stored = change_customers(inputs, actor=build_api_key_actor(request).name)
    return {
        "customers": [
            {"user_id": row.user_id, "created": row.created, "changed": sorted(row.after), "ignored": row.ignored}
            for row in stored
        ]
    }


@router.get("/customers", response={200: CustomersOut, PROBLEMS: ProblemOut})
def list_customers(request: HttpRequest, page: Query[CustomersPage]) -> dict[str, Any]:
    """Return customers, the newest first. `q` is a part of the name or the start of the user id."""
    before = page.before()
    found = match_term(Customer.objects.all(), page.q)
    if page.tag:
        found = found.filter(profile__tags__contains=[page.tag])
    if before:
        found = found.filter(pk__lt=min(before.int, 2**63 - 1))
    with limit_list_time():
        rows = list(found.select_related("profile").order_by("-pk")[: page.limit + 1])
    return build_page([serialize_customer(row) for row in rows], [UUID(int=row.pk) for row in rows], page.limit)


@router.get("/customers/{path:user_id}/export", auth=ERASE, response={200: CustomerExportOut, PROBLEMS: ProblemOut})
def get_customer_export(request: HttpRequest, user_id: Path[StoredUserId]) -> dict[str, Any]:
    """Return all stored data of a customer.

    Fields, events, touches with texts and verdicts, changes, complaints, failed tasks, disabled addresses, messages of
    webhooks, RPA jobs with their runs and the live chat.
    """
    with limit_list_time(
        settings.TIMEOUTS.export, "The data of this customer takes too long to read. Try again later."
    ):
        row = _find_customer(user_id)
        record_action("exported", row, actor=build_api_key_actor(request).name)
        return {"customer": serialize_customer(row)} | export_customer(row)


@router.delete("/customers/{path:user_id}", auth=ERASE, response={202: ErasureOut, PROBLEMS: ProblemOut})
def delete_customer(request: HttpRequest, user_id: Path[StoredUserId]) -> tuple[int, dict[str, Any]]:
    """Erase a customer: its personal data leaves every table, its history stays anonymous.

    Reads answer 404 at once. A pass removes the rest within a minute. Idempotent.
    """
    with sql.brief_lock_waits():
        row = request_erasure(user_id, actor=build_api_key_actor(request).name)
    return 202, {"erasure_id": row.pk, "state": row.state}


@router.put("/customers/{path:user_id}", response={200: StoredCustomerOut, PROBLEMS: ProblemOut})
def put_customer(request: HttpRequest, user_id: Path[UserId], customer: CustomerIn) -> dict[str, Any]:
    """Create a customer or change the given fields. Other fields stay unchanged.

    `attributes` and `addresses` are merged by name; null removes one. `tags` replace the stored ones.
    `opted_out: false` lifts a person's own opt-out only with a later `consent`; else `ignored` names it.
    """
    with sql.brief_lock_waits():
        actor = build_api_key_actor(request).name
        stored = change_customer(user_id, customer.list_given(), actor=actor)
        return serialize_customer(_find_customer(user_id)) | {"ignored": stored.ignored}


@router.get("/customers/{path:user_id}", response={200: CustomerOut, PROBLEMS: ProblemOut})
def get_customer(request: HttpRequest, user_id: Path[StoredUserId]) -> dict[str, Any]:
    """Return one customer."""
    return serialize_customer(_find_customer(user_id))


def _find_customer(user_id: str) -> Customer:
    row = Customer.objects.filter(user_id=user_id).select_related("profile").first()
    if row is None:
        raise NotFound(f"There is no customer {user_id}.")
    return row


def serialize_customer(row: Customer) -> dict[str, Any]:
    """Return the fields of a customer with its profile."""
    stored = getattr(row, "profile", None)
    profile = {"attributes": stored.attributes, "tags": stored.tags} if stored else {"attributes": {}, "tags": []}
    return {name: getattr(row, name) for name in SAME} | {"consent": row.consent or None} | profile
