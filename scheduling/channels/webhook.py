"""Send a touch as a signed HTTP request to an external system (Standard Webhooks, standardwebhooks.com).

`webhook-id` is the delivery key, constant over retries. A receiver that stores ids can drop repeated requests.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

from pydantic_core import to_json
from standardwebhooks.webhooks import Webhook as Signer

from scheduling.channels import options
from scheduling.channels.base import Channel, InvalidSetting, Message, Outcome
from scheduling.channels.http_client import JSON_HEADERS, judge_status, shared_transport
from scheduling.error_text import ErrorText as _
from scheduling.tracing import build_traceparent

EVENT_TYPE = "touch.due"
SECRET_PREFIX = "whsec_"  # noqa: S105  a prefix, not a secret
MOST_SECRETS = 10  # each adds a signature to the headers of a request
SECRET_BYTES = (24, 64)  # Standard Webhooks, "Signature scheme"


class Webhook(Channel):
    """A webhook. Config: `url`, `proxy`, `secret` (`whsec_…`; in a rotation several, in a list or separated by spaces).

    A community's target `{"url", "secret"}` overrides the channel's. Without a secret of its own, the channel's secret
    signs the request. Without any secret the request is unsigned but carries its id and timestamp.
    """

    kind: ClassVar[str] = "webhook"
    target_fields = frozenset({"url", "secret"})
    secret_fields = target_fields | {"proxy"}
    default_idempotent = True

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        super().__init__(config, timeout)
        options.check_known_keys(config, {"url", "secret", "proxy"})
        self._url = options.read_url(config)
        self._proxy = options.read_proxy(config)
        self._secrets = read_secrets(config)

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        """Check a target. An empty target means the channel's own URL."""
        options.check_known_keys(target, {"url", "secret"})
        if target:
            options.read_url(target)
            read_secrets(target)

    def target_key(self, message: Message) -> str:
        return options.opaque_key(self.kind, str(message.target.get("url") or self._url))

    async def attempt(self, message: Message) -> Outcome:
        """Try once. A refused connection never gives `Unknown`; a request without an answer always does."""
        self.validate_target(message.target)
        now = datetime.now(UTC)
        body = build_payload(message, now)
        headers = sign_request(message.delivery_key, body, now, read_secrets(message.target) or self._secrets)
        if message.trace_id:
            headers["traceparent"] = build_traceparent(message.trace_id, message.task_id)
        url = str(message.target.get("url") or self._url)
        response = await shared_transport().request(
            "POST", url, body, headers, timeout=self.timeout, repeatable=message.repeatable, proxy=self._proxy
        )
        return judge_status(response, repeatable=message.repeatable)


def build_payload(message: Message, now: datetime) -> bytes:
    """Return the request body, UTF-8 JSON. `timestamp` is the time of this attempt."""
    document = {
        "type": EVENT_TYPE,
        "timestamp": options.write_instant(now, "milliseconds"),
        "data": {
            "task_id": message.task_id,
            "user_id": message.user_id,
            "chat_id": message.chat_id,
            "node": message.node,
            "content_type": message.content_type,
            "body": message.body,
            "event": {**message.event, "time": options.write_instant(message.event["time"])},
        },
    }
    return to_json(document)  # a quarter of the time of Python's encoder


def sign_request(message_id: UUID, body: bytes, now: datetime, secrets: tuple[str, ...]) -> dict[str, str]:
    """Return the headers with one signature per secret, separated by spaces. Receivers can then rotate one by one."""
    # The library uses `timestamp.replace(tzinfo=utc)`: another zone would shift the time by its offset.
    now = now.astimezone(UTC)
    headers = JSON_HEADERS | {"webhook-id": str(message_id), "webhook-timestamp": str(int(now.timestamp()))}
    signatures = [Signer(secret).sign(headers["webhook-id"], now, body.decode()) for secret in secrets]
    return headers | ({"webhook-signature": " ".join(signatures)} if signatures else {})


def read_secrets(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the `whsec_…` secrets of a config or target.

    Raises:
        InvalidSetting: a secret is not accepted.
    """
    value = settings.get("secret")
    secrets = (value or "").split() if value is None or isinstance(value, str) else value
    is_list = isinstance(secrets, (list, tuple)) and all(isinstance(secret, str) for secret in secrets)
    if not is_list or len(secrets) > MOST_SECRETS:
        raise InvalidSetting("secret", _("must be text, or a list of at most %(most)s texts", most=MOST_SECRETS))
    for secret in secrets:
        _check_secret(secret)
    return tuple(secrets)


def _check_secret(secret: str) -> None:
    encoded = secret.removeprefix(SECRET_PREFIX)
    try:
        size = len(base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True))
    except (binascii.Error, ValueError):
        size = 0
    shortest, longest = SECRET_BYTES
    if encoded == secret or not shortest <= size <= longest:
        raise InvalidSetting(
            "secret",
            _(
                "must be %(prefix)s and %(shortest)s to %(longest)s bytes in base64",
                prefix=SECRET_PREFIX,
                shortest=shortest,
                longest=longest,
            ),
        )
