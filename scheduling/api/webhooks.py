"""Edit subscriptions of outgoing webhooks, list their messages and send them again."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Field, Path, Query, Router, Schema

from scheduling import sql
from scheduling.api.auth import ApiKeyAuth, build_api_key_actor
from scheduling.api.schemas import Instant, Page, ProblemOut, Request, Text, build_page, limit_list_time
from scheduling.models import WebhookMessage, WebhookSubscription
from scheduling.monitoring.collectors import read_webhook_backlogs
from scheduling.webhooks import (
    find_subscription,
    put_subscription,
    replay_messages,
    retire_subscription,
    write_test_message,
)

router = Router(tags=["webhooks"], auth=ApiKeyAuth("webhooks"))
PROBLEMS = (400, 401, 403, 404, 413, 422, 429, 503)


class WebhookIn(Request):
    """`secret`: `whsec_…`; several during a rotation, with spaces between them. All of them sign."""

    url: str | None = None
    secret: str | None = None
    events: list[Text] | None = None
    filter: dict[str, list[Text]] | None = None
    enabled: bool | None = None


class WebhookOut(Schema):
    """Address and secret are never shown. `state`: `ok`, `resting`, `paused` or `disabled`. `waiting` counts 10,000
    messages at most."""

    key: str
    events: list[str]
    filter: dict[str, list[str]]
    enabled: bool
    state: str = Field(alias="endpoint.state")
    rest_until: datetime | None
    waiting: int
    problem: str = Field(alias="endpoint.problem")
    problem_at: datetime | None = Field(alias="endpoint.problem_at")
    delivered_at: datetime | None = Field(alias="endpoint.delivered_at")

    @staticmethod
    def resolve_rest_until(row: WebhookSubscription) -> datetime | None:
        return row.endpoint.rest_until if row.endpoint.state == "resting" else None


class WebhooksOut(Schema):
    items: list[WebhookOut]


class MessageOut(Schema):
    id: UUID = Field(alias="message_id")
    type: str
    object: str = Field(alias="object_key")
    timestamp: datetime = Field(alias="occurred_at")
    state: str
    attempts: int = Field(alias="attempt")
    due_at: datetime
    ended_at: datetime | None
    status: int | None
    problem: str
    data: dict[str, Any]


class MessagesOut(Schema):
    items: list[MessageOut]
    next: str | None


class MessagesPage(Page):
    state: WebhookMessage.State | None = None


class ReplayIn(Request):
    since: Instant = Field(alias="from")
    until: Instant = Field(alias="to")


class ReplayOut(Schema):
    count: int


class TestOut(Schema):
    written: bool


@router.get("/webhooks", response={200: WebhooksOut, PROBLEMS: ProblemOut})
def list_webhooks(request: HttpRequest) -> dict[str, Any]:
    """Return all outgoing webhooks with the state of their receivers."""
    with limit_list_time():
        rows = WebhookSubscription.objects.filter(retired_at=None).select_related("endpoint")
        return {"items": _count_waiting(*rows)}


@router.get("/webhooks/{key}", response={200: WebhookOut, PROBLEMS: ProblemOut})
def get_webhook(request: HttpRequest, key: Path[Text]) -> WebhookSubscription:
    """Return one outgoing webhook."""
    return _count_waiting(find_subscription(key))[0]


@router.put("/webhooks/{key}", response={200: WebhookOut, PROBLEMS: ProblemOut})
def put_webhook(request: HttpRequest, key: Path[Text], webhook: WebhookIn) -> WebhookSubscription:
    """Create an outgoing webhook or change the given fields. It gets what happens from now on."""
    given = {name: value for name, value in webhook.model_dump(exclude_unset=True).items() if value is not None}
    with sql.brief_lock_waits():
        put_subscription(key, given, actor=build_api_key_actor(request).name)
    return _count_waiting(find_subscription(key))[0]


@router.delete("/webhooks/{key}", response={204: None, PROBLEMS: ProblemOut})
def delete_webhook(request: HttpRequest, key: Path[Text]) -> tuple[int, None]:
    """Retire an outgoing webhook. Nothing more is sent."""
    with sql.brief_lock_waits():
        retire_subscription(key, actor=build_api_key_actor(request).name)
    return 204, None


@router.get("/webhooks/{key}/deliveries", response={200: MessagesOut, PROBLEMS: ProblemOut})
def list_deliveries(request: HttpRequest, key: Path[Text], page: Query[MessagesPage]) -> dict[str, Any]:
    """Return the messages of a webhook, the newest first. `state`: `waiting`, `delivered` or `given_up`."""
    found = WebhookMessage.objects.filter(subscription=find_subscription(key))
    if page.state:
        found = found.filter(state=page.state)
    if before := page.before():
        found = found.filter(pk__lt=min(before.int, 2**63 - 1))
    with limit_list_time():
        rows = list(found.order_by("-pk")[: page.limit + 1])
    return build_page(rows, [UUID(int=row.pk) for row in rows], page.limit)


@router.post("/webhooks/{key}/replay", response={200: ReplayOut, PROBLEMS: ProblemOut})
def replay_webhook(request: HttpRequest, key: Path[Text], wish: ReplayIn) -> dict[str, Any]:
    """Send again what happened from `from` to `to` and was delivered or given up. `webhook-id` stays, so a receiver
    knows what it has."""
    hook = find_subscription(key)
    with sql.limit_statement_time(20):
        count = replay_messages(hook, wish.since, wish.until, by=build_api_key_actor(request).name)
    return {"count": count}


@router.post("/webhooks/{key}/test", response={200: TestOut, PROBLEMS: ProblemOut})
def test_webhook(request: HttpRequest, key: Path[Text]) -> dict[str, Any]:
    """Send a message of type `webhook.test`. The list of deliveries shows its result."""
    write_test_message(find_subscription(key))
    return {"written": True}


def _count_waiting(*rows: Any) -> list[WebhookSubscription]:
    """Return the rows with the number of their waiting messages as `waiting`."""
    backlogs = read_webhook_backlogs()
    for row in rows:
        row.waiting = backlogs[row.pk].waiting if row.pk in backlogs else 0
    return list(rows)
