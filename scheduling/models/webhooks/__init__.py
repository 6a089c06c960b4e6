"""Store the subscriptions of outgoing webhooks and the outbox of their messages."""

from __future__ import annotations

from scheduling.models.webhooks.message import WebhookFact, WebhookMessage
from scheduling.models.webhooks.subscription import WebhookEndpoint, WebhookEvent, WebhookSubscription

__all__ = ["WebhookEndpoint", "WebhookEvent", "WebhookFact", "WebhookMessage", "WebhookSubscription"]
