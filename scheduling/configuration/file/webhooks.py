"""Read and write section `webhooks`: subscriptions of outgoing webhooks. Address and secret are secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduling.configuration.file.channels import Channels
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.schema import FLAG, KEY, Choice, Field, ListOf, MapOf, Text
from scheduling.configuration.webhook_validation import check_webhook
from scheduling.models import WebhookEvent, WebhookSubscription


class Webhooks(Channels):
    name = "webhooks"
    noun = "webhook"
    scope = "webhooks"
    tables = (WebhookSubscription,)
    model = WebhookSubscription
    fields = (
        Field("key", KEY),
        Field("events", ListOf(Choice(WebhookEvent.values))),
        Field("filter", MapOf(ListOf(Text(140))), default={}),
        Field("enabled", FLAG, default=True),
    )

    def defaults(self, values: Mapping[str, Any], position: int) -> dict[str, Any]:
        return {}

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        check_webhook(values)

    def _stored_config(self, values: Mapping[str, Any], draft: Draft) -> Mapping[str, Any]:
        row = self.row_of((values.get("key"),), draft)
        return row.config if row is not None else {}
