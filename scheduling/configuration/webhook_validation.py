"""Validate subscriptions of outgoing webhooks, as `scheduling.configuration.validation` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scheduling.channels.options import check_known_keys, read_url
from scheduling.channels.webhook import read_secrets
from scheduling.configuration.validation import split_message
from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector, FieldError
from scheduling.models import WebhookEvent, WebhookSubscription
from scheduling.models.versioned import rules_of

WEBHOOK_FILTERS = {"node", "platform", "shop"}


@rules_of(WebhookSubscription)
def check_webhook(values: Mapping[str, Any]) -> None:
    """Check a subscription of outgoing webhooks."""
    found = ErrorCollector()
    found.key(values)
    events = values.get("events", [])
    if "events" in values and not events:
        found.add("events", _("is missing"))
    elif not isinstance(events, list) or not set(events) <= set(WebhookEvent.values):
        found.add("events", _("must be one of %(known)s", known=", ".join(WebhookEvent.values)))
    filters = values.get("filter", {})
    if not isinstance(filters, dict) or not filters.keys() <= WEBHOOK_FILTERS:
        found.add("filter", _("must be a mapping of %(parts)s", parts=", ".join(sorted(WEBHOOK_FILTERS))))
        filters = {}
    for name in filters:
        fields = ErrorCollector()
        fields.texts(filters, name, longest=140)
        found.errors += [FieldError(f"filter.{name}", each.message) for each in fields.errors]
    if "config" in values:
        _check_webhook_config(values["config"], found)
    found.raise_if_any()


def _check_webhook_config(config: Mapping[str, Any], found: ErrorCollector) -> None:
    checks: tuple[Callable[[Mapping[str, Any]], object], ...] = (
        lambda given: check_known_keys(given, {"url", "secret"}), read_url, read_secrets,
    )  # fmt: skip
    for check in checks:
        try:
            check(config)
        except ValueError as error:
            field, message = split_message(error)
            found.add(f"config.{field}", message)
    if not config.get("secret"):
        found.add("config.secret", _("is missing"))
