"""Send through any HTTP API that the settings describe: requests, token, condition of success, error table, quotas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from html import escape as escape_html
from typing import Any, ClassVar

from scheduling.channels import options
from scheduling.channels.answers import parse_answer, read_path, read_vendor_id
from scheduling.channels.base import Delivered, DestinationRefused, InvalidSetting, Message, Outcome, Transient, Unknown
from scheduling.channels.http_client import Response, Transport, excerpt, judge_status, parse_retry_after
from scheduling.channels.markup import BadContent, escape_markdown
from scheduling.channels.ssrf import PrivateHosts, check_url
from scheduling.channels.vendors.base import COMMON_KEYS, VendorChannel, VendorRequest, read_named_lines
from scheduling.channels.vendors.declared_settings import (
    REQUEST_KEYS,
    VARIABLES,
    format_scalar,
    read_condition,
    read_errors,
    read_request,
    render_request,
)
from scheduling.durations import parse_duration
from scheduling.error_text import ErrorText as _

TOKEN_KEYS = REQUEST_KEYS | {"field", "expires", "lifetime"}
TOKEN_VARIABLES = {"channel": frozenset({"secret"})}
ANSWER_FIELDS = ("code_field", "message_field", "id_field")
MARKUP: Mapping[str, Callable[[str], str]] = {"none": str, "markdown": escape_markdown, "html": escape_html}
OTHER_KEYS = frozenset(("address", "token", "markup", "success", "errors", *ANSWER_FIELDS, *COMMON_KEYS))


class DeclaredHttp(VendorChannel):
    """An HTTP channel without code of its own. `docs/how-to/declare-a-channel.md` lists the settings."""

    kind: ClassVar[str] = "http"
    needs_target: bool = False
    target_fields: ClassVar[frozenset[str]] = frozenset(
        {"address"}
    )  #: of a community, without `address` in the settings

    def __init__(self, config: Mapping[str, Any], timeout: timedelta, *, transport: Transport | None = None) -> None:
        options.check_known_keys(config, REQUEST_KEYS | OTHER_KEYS)
        self.secret = options.read_text(config, "secret")
        self.plan = read_request(config, VARIABLES)
        self.base = self.plan.url
        self._escape = MARKUP[options.read_choice(config, "markup", tuple(MARKUP))]
        self.fills_template = self.plan.reads_values
        self.proxy = options.read_proxy(config)
        self.address_key = options.read_text(config, "address")
        self.needs_target = bool(self.address_key)
        self._read_quotas(config)
        self._success = read_condition(config, "success")
        self._errors = read_errors(config)
        self._code_field = options.read_text(config, "code_field")
        self._message_field = options.read_text(config, "message_field")
        self.id_field = options.read_text(config, "id_field")
        if self._errors and not self._code_field:
            raise InvalidSetting("code_field", _("is missing; it leads to the code that “errors” lists"))
        self._read_token_settings(config)
        self._timeout = options.check_positive(timeout)
        self._transport = transport

    def _read_token_settings(self, config: Mapping[str, Any]) -> None:
        given = config.get("token")
        self._token_text = json.dumps(given, sort_keys=True, default=str)
        if given is None and self.plan.uses_token:
            raise InvalidSetting("token", _("is missing; the request uses {{ channel.token }}"))
        if given is None:
            self._token_plan = None
            return
        if not isinstance(given, Mapping):
            raise InvalidSetting("token", _("must be a mapping"))
        for name in given:
            if name not in TOKEN_KEYS:
                raise InvalidSetting(
                    f"token.{name}", _("is not known here; known are %(known)s", known=", ".join(sorted(TOKEN_KEYS)))
                )
        self._token_plan = read_request(given, TOKEN_VARIABLES, "token.")
        try:
            self.token_field = options.read_text(given, "field", self.token_field)
            self.lifetime_field = options.read_text(given, "expires", self.lifetime_field)
            self.lifetime = parse_duration(given["lifetime"]) if "lifetime" in given else self.lifetime
        except InvalidSetting as error:
            raise InvalidSetting(f"token.{error.field}", error.message) from None
        except ValueError as error:
            raise InvalidSetting("token.lifetime", str(error)) from None
        if self.lifetime <= timedelta(0):
            raise InvalidSetting("token.lifetime", _("must be above zero"))

    @classmethod
    def list_secret_hosts(cls, config: Mapping[str, Any]) -> frozenset[str]:
        """Return the hosts of `url` and `token.url`; a URL that may not be called is left out."""
        found = set()
        for request in (config, config.get("token")):
            with suppress(ValueError, DestinationRefused):
                if isinstance(request, Mapping):
                    url = check_url(options.read_text(request, "url"), PrivateHosts.from_settings())
                    found.add(f"{url.scheme}://{url.raw_host}:{url.port}")
        return frozenset(found)

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        """Check a target. It may be absent: a request may have no address.

        Raises:
            InvalidSetting: the address is not accepted.
        """
        if target:
            super().validate_target(target)

    def escape(self, value: str) -> str:
        return super().escape(self._escape(value))

    @property
    def account(self) -> str:
        """Return a text that differs between vendors, their credentials and their secrets."""
        return "\0".join((self.base, self._token_text, self.secret))

    def request(self, message: Message, token: str, now: datetime) -> VendorRequest:
        try:
            values = read_named_lines(message.body)
        except BadContent:
            values = {}
        names = {
            "message": {
                "id": str(message.delivery_key),
                "task_id": str(message.task_id),
                "user_id": message.user_id,
                "chat_id": message.chat_id,
                "address": str(message.target.get("address", "")),
                "subject": message.subject,
                "body": message.body,
                "node": message.node,
                "content_type": message.content_type,
                "category": message.category,
                "locale": message.locale,
                "timestamp": int(now.timestamp()),
            },
            "event": message.event,
            "values": values,
            "channel": {"secret": self.secret, "token": token},
        }
        return render_request(self.plan, names)

    def token_request(self, stale: str) -> VendorRequest | None:
        return render_request(self._token_plan, {"channel": {"secret": self.secret}}) if self._token_plan else None

    def judge_for(self, message: Message, response: Response) -> Outcome:
        """Judge by the error table, the status and the condition of success, in this order."""
        answer = parse_answer(response)
        code = read_path(answer, self._code_field) if self._code_field else None
        said = excerpt(str(read_path(answer, self._message_field) or "")) if self._message_field else ""
        if isinstance(code, (str, int)) and (refusal := self._errors.get(format_scalar(code))):
            return refusal.outcome(format_scalar(code)[:40], said, response)
        by_status = judge_status(response, repeatable=message.repeatable)
        if not isinstance(by_status, Delivered):
            return by_status
        if self._success is None or self._success.holds(answer):
            return replace(by_status, vendor_id=read_vendor_id(answer, self.id_field))
        if not answer:
            return Unknown("garbled", response.excerpt)
        # An unlisted code is a refusal too. The retry schedule determines whether a retry helps.
        return Transient("vendor_other", response.excerpt, parse_retry_after(response), response.status)
