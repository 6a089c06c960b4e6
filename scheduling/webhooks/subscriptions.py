"""Create, change and retire subscriptions for API clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.utils.timezone import now

from scheduling.configuration.webhook_validation import check_webhook
from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput, NotFound
from scheduling.models import WebhookSubscription
from scheduling.models.encrypted import Sealed
from scheduling.models.versioned import lock_for_write

SECRET_SETTINGS = ("url", "secret")


def find_subscription(key: str) -> WebhookSubscription:
    """Return the subscription. Raises `NotFound`."""
    row = WebhookSubscription.objects.filter(key=key, retired_at=None).select_related("endpoint").first()
    if row is None:
        raise NotFound(_("There is no webhook %(key)s.", key=key))
    return row


def put_subscription(key: str, given: Mapping[str, Any], *, actor: str) -> None:
    """Create a subscription or change the given fields. Others stay.

    Raises:
        InvalidInput: with all errors by field.
    """
    with transaction.atomic():
        row = lock_for_write(WebhookSubscription.objects.all()).filter(key=key).first()
        row = row or WebhookSubscription(key=key)
        if row.retired_at:
            row = WebhookSubscription(pk=row.pk, key=key, version=row.version)
        stored = {} if isinstance(row.config, Sealed) else row.config
        config = stored | {name: given[name] for name in SECRET_SETTINGS if name in given}
        values = {name: given.get(name, getattr(row, name)) for name in ("events", "filter", "enabled")}
        try:
            check_webhook({"key": key, "config": config, **values})
        except InvalidInput as error:
            raise InvalidInput(
                *(FieldError(each.field.removeprefix("config."), each.message) for each in error.errors)
            ) from None
        for name, value in (*values.items(), ("config", config), ("retired_at", None)):
            setattr(row, name, value)
        row._change_reason = actor[:100]  # type: ignore[attr-defined]
        row.save()


def retire_subscription(key: str, *, actor: str) -> None:
    """Send nothing more. Waiting messages are deleted at the end of their retention. Raises `NotFound`."""
    with transaction.atomic():
        row = lock_for_write(WebhookSubscription.objects.all()).filter(key=key, retired_at=None).first()
        if row is None:
            raise NotFound(_("There is no webhook %(key)s.", key=key))
        row.retired_at = now()
        row._change_reason = actor[:100]  # type: ignore[attr-defined]
        row.save()
