"""Send through any HTTP API that the settings describe: requests, token, condition of success, error table, quotas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from html import escape as escape_html
from typing import Any, ClassVar
from urllib.parse import urlencode

from scheduling.channels import options
from scheduling.channels.answers import Refusal, parse_answer, read_path, read_vendor_id
from scheduling.channels.base import (
    Channel,
    Delivered,
    DestinationRefused,
    InvalidSetting,
    Message,
    Outcome,
    Transient,
    Unknown,
)
from scheduling.channels.http_client import (
    JSON_HEADERS,
    Response,
    encode_json,
    excerpt,
    judge_status,
    parse_retry_after,
)
from scheduling.channels.markup import BadContent, escape_markdown
from scheduling.channels.ssrf import PrivateHosts, check_url
from scheduling.channels.vendors.base import COMMON_KEYS, VendorChannel, VendorRequest, read_named_lines
from scheduling.durations import parse_duration
from scheduling.error_text import ErrorText as _
from scheduling.templating import CannotRender, InvalidTemplate, Run, Text, escape_line

#: Variables of the templates and their fields; an empty set allows any field.
VARIABLES: Mapping[str, frozenset[str]] = {
    "message": frozenset(
        ("id", "task_id", "user_id", "chat_id", "address", "subject", "body", "node", "content_type", "category",
         "locale", "timestamp")
    ),
    "event": frozenset(("id", "source", "type", "time")),
    "values": frozenset(),
    "channel": frozenset(("secret", "token")),
}  # fmt: skip
METHODS, FORMATS = ("POST", "GET", "PUT", "PATCH"), ("json", "form", "text")
CONTENT_TYPES = {
    "json": JSON_HEADERS["content-type"],
    "form": "application/x-www-form-urlencoded",
    "text": "text/plain; charset=utf-8",
}
BODIES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "json": ((dict, list), _("must be a mapping or a list")),
    "form": ((dict,), _("must be a mapping")),
    "text": ((str,), _("must be text")),
}
#: Headers that the HTTP client sets itself.
FIXED_HEADERS = frozenset(
    ("host", "content-length", "transfer-encoding", "connection", "accept-encoding", "upgrade", "expect")
)
HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
MAX_ENTRIES = 200  # templates and values of one request
MAX_DEPTH = 8
MAX_ERRORS = 200
ACTIONS = ("permanent", "retry", "quota", "address_invalid", "refresh_token", "unknown")
QUOTA_REST = timedelta(minutes=1)  #: how long a receiver rests after “quota”, unless the row has `after`
REQUEST_KEYS = frozenset(("url", "method", "query", "headers", "format", "body"))

Render = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A request whose texts are templates."""

    url: str
    method: str
    form: str
    query: Render
    headers: Render
    body: Render | None
    uses_token: bool
    reads_values: bool  #: the body of a message is a list of values

    def build(self, names: Mapping[str, Any]) -> VendorRequest:
        """Render the request. Raises `BadContent`, also if data is missing."""
        try:
            query = self.query(names)
            rendered = self.headers(names)
            document = self.body(names) if self.body and self.method != "GET" else None
        except CannotRender as error:
            raise BadContent(str(error)) from None
        headers = {"content-type": CONTENT_TYPES[self.form]}
        headers |= {name.lower(): value for name, value in rendered.items()}
        for name, value in headers.items():
            if not value.isprintable():
                raise BadContent(f"header {name}: must be one printable line")
        if document is None:
            body = b""
        elif self.form == "json":
            body = encode_json(document)
        else:
            text = urlencode(document) if self.form == "form" else str(document)
            body = text.encode("utf-8", "replace")
        return VendorRequest(self.url, body, headers, self.method, urlencode(query))


def read_request(settings: Mapping[str, Any], variables: Mapping[str, frozenset[str]], path: str = "") -> RequestPlan:
    """Return the request in `settings`.

    Raises:
        InvalidSetting: the field starts with `path`.
    """
    try:
        form = options.read_choice(settings, "format", FORMATS)
        compiler = _PlanCompiler(variables)
        query = compiler.compile_texts(settings.get("query"), "query")
        headers = compiler.compile_texts(settings.get("headers"), "headers", escape_line)
        for name in settings.get("headers") or {}:
            if not HEADER_NAME.fullmatch(name) or name.lower() in FIXED_HEADERS:
                raise InvalidSetting(f"headers.{name}", _("is not a header that can be set"))
        body = settings.get("body")
        types, problem = BODIES[form]
        if body is not None and not isinstance(body, types):
            raise InvalidSetting("body", problem)
        compiled = compiler.compile_texts(body, "body") if form == "form" else compiler.compile(body, "body")
        url = options.read_url(settings).partition("#")[0]  # a query after a fragment would be lost
        method = options.read_choice(settings, "method", METHODS)
        return RequestPlan(
            url, method, form, query, headers, compiled if body is not None else None, compiler.uses_token,
            "values" in compiler.roots,
        )  # fmt: skip
    except InvalidSetting as error:
        raise InvalidSetting(f"{path}{error.field}", error.message) from None


class _PlanCompiler:
    """Compile the texts inside a value as templates. Other values stay as they are."""

    def __init__(self, variables: Mapping[str, frozenset[str]]) -> None:
        self._variables = variables
        self._entries = 0
        self.uses_token = False
        self.roots: set[str] = set()

    def compile_texts(self, value: Any, path: str, escape: Callable[[str], str] = str) -> Render:
        """Compile a mapping of names to texts or numbers; their results are texts."""
        if value is not None and not isinstance(value, Mapping):
            raise InvalidSetting(path, _("must be a mapping"))
        for name, each in (value or {}).items():
            if not isinstance(name, str) or not isinstance(each, (str, int, float)):
                raise InvalidSetting(f"{path}.{name}", _("must be text or a number"))
        render = self.compile(dict(value or {}), path, escape)
        return lambda names: {name: format_scalar(each) for name, each in render(names).items()}

    def compile(self, value: Any, path: str, escape: Callable[[str], str] = str, depth: int = 0) -> Render:
        self._entries += 1
        if depth > MAX_DEPTH or self._entries > MAX_ENTRIES:
            raise InvalidSetting(
                path, _("has more than %(levels)s levels or %(most)s entries", levels=MAX_DEPTH, most=MAX_ENTRIES)
            )
        match value:
            case str():
                text = self._compile_text(value, path)
                return lambda names: text.render(Run(names, escape))
            case dict():
                parts = {
                    str(name): self.compile(each, f"{path}.{name}", escape, depth + 1) for name, each in value.items()
                }
                return lambda names: {name: part(names) for name, part in parts.items()}
            case list():
                entries = [self.compile(each, f"{path}.{place}", escape, depth + 1) for place, each in enumerate(value)]
                return lambda names: [entry(names) for entry in entries]
            case int() | float() | None:
                return lambda names: value
        raise InvalidSetting(path, _("must be text, a number, true, false, null, a list or a mapping"))

    def _compile_text(self, source: str, path: str) -> Text:
        self.uses_token = self.uses_token or re.search(r"channel\s*\.\s*token", source) is not None
        try:
            text = Text(source, self._variables)
        except InvalidTemplate as error:
            raise InvalidSetting(path, str(error)) from None
        self.roots |= text.roots
        return text


def format_scalar(value: Any) -> str:
    """Return the text of a value. `true` and `false` are those of JSON."""
    if isinstance(value, datetime):
        return options.write_instant(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- answers ------------------------------------------------------------------------------------------------------


def _is_among(found: Any, value: Any) -> bool:
    return any(_is_equal_text(found, each) for each in value)


def _is_equal_text(found: Any, value: Any) -> bool:
    """Compare as texts: vendors write the same code as number and as text."""
    return found is not None and not isinstance(found, dict | list) and format_scalar(found) == format_scalar(value)


OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "eq": _is_equal_text,
    "ne": lambda found, value: found is not None and not _is_equal_text(found, value),
    "in": _is_among,
    "not_in": lambda found, value: found is not None and not _is_among(found, value),
    "exists": lambda found, value: found is not None,
    "absent": lambda found, value: found is None,
}


@dataclass(frozen=True, slots=True)
class AnswerCondition:
    """A comparison of a field of an answer with a value."""

    field: str
    op: str
    value: Any = None

    def holds(self, answer: Mapping[str, Any]) -> bool:
        return OPERATORS[self.op](read_path(answer, self.field), self.value)


def read_condition(settings: Mapping[str, Any], key: str) -> AnswerCondition | None:
    """Return the condition under `key`, or None if it is absent.

    Raises:
        InvalidSetting: a part under `key` is not accepted.
    """
    given = settings.get(key)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidSetting(key, _("must be a mapping of field, op and value"))
    options.check_known_keys(given, {"field", "op", "value"}, key)
    field, op = given.get("field"), given.get("op", "eq")
    if not isinstance(field, str) or not field:
        raise InvalidSetting(f"{key}.field", _("is missing"))
    if not isinstance(op, str) or op not in OPERATORS:
        raise InvalidSetting(f"{key}.op", _("must be one of %(known)s", known=", ".join(OPERATORS)))
    if op in ("in", "not_in") and not isinstance(given.get("value"), list):
        raise InvalidSetting(f"{key}.value", _("must be a list"))
    if op in ("eq", "ne") and not isinstance(given.get("value"), (str, int, float)):
        raise InvalidSetting(f"{key}.value", _("must be text or a number"))
    return AnswerCondition(field, op, given.get("value"))


def read_errors(settings: Mapping[str, Any]) -> dict[str, Refusal]:
    """Return the error table by code.

    Raises:
        InvalidSetting: a part of a row is not accepted.
    """
    rows = settings.get("errors", [])
    rows = [] if rows is None else rows
    if not isinstance(rows, list) or len(rows) > MAX_ERRORS:
        raise InvalidSetting("errors", _("must be a list of at most %(most)s rows", most=MAX_ERRORS))
    table: dict[str, Refusal] = {}
    for place, row in enumerate(rows):
        path = f"errors.{place}"
        if not isinstance(row, Mapping):
            raise InvalidSetting(path, _("must be a mapping of code, then, after and meaning"))
        options.check_known_keys(row, {"code", "then", "after", "meaning"}, path)
        codes = row.get("code")
        for code in codes if isinstance(codes, list) else [codes]:
            if not isinstance(code, (str, int)) or code == "":
                raise InvalidSetting(f"{path}.code", _("must be a code or a list of codes"))
            if format_scalar(code) in table:
                raise InvalidSetting(f"{path}.code", _("“%(name)s” is listed twice", name=code))
            table[format_scalar(code)] = _read_refusal(row, path)
    return table


def _read_refusal(row: Mapping[str, Any], path: str) -> Refusal:
    action, meaning = row.get("then"), row.get("meaning", "")
    if action not in ACTIONS:
        raise InvalidSetting(f"{path}.then", _("must be one of %(known)s", known=", ".join(ACTIONS)))
    if not isinstance(meaning, str) or len(meaning) > 200:
        raise InvalidSetting(f"{path}.meaning", _("must be text of at most %(most)s characters", most=200))
    after = None
    if row.get("after") is not None:
        try:
            after = parse_duration(row["after"])
        except ValueError as error:
            raise InvalidSetting(f"{path}.after", str(error)) from None
    return Refusal(
        meaning,
        retry_after={"retry": after or timedelta(0), "quota": after or QUOTA_REST}.get(str(action)),
        gone=action == "address_invalid",
        stale_token=action == "refresh_token",
        unclear=action == "unknown",
    )


TOKEN_KEYS = REQUEST_KEYS | {"field", "expires", "lifetime"}
TOKEN_VARIABLES = {"channel": frozenset({"secret"})}
ANSWER_FIELDS = ("code_field", "message_field", "id_field")
MARKUP: Mapping[str, Callable[[str], str]] = {"none": str, "markdown": escape_markdown, "html": escape_html}
OTHER_KEYS = frozenset(("address", "token", "markup", "success", "errors", *ANSWER_FIELDS, *COMMON_KEYS))


class DeclaredHttp(VendorChannel):
    """An HTTP channel without code of its own. `docs/how-to/declare-a-channel.md` lists the settings."""

    kind: ClassVar[str] = "http"
    target_fields = frozenset({"address"})  #: without `address` in the settings

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        Channel.__init__(self, config, timeout)  # the settings of vendors are others
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
        options.check_known_keys(given, TOKEN_KEYS, "token")
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
        """Check a target. It may be absent: a request may have no address."""
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
        return self.plan.build(names)

    def token_request(self, stale: str) -> VendorRequest | None:
        return self._token_plan.build({"channel": {"secret": self.secret}}) if self._token_plan else None

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
        # The condition is not asked about an unreadable answer: `absent` would hold there.
        if self._success is None or (answer is not None and self._success.holds(answer)):
            return replace(by_status, vendor_id=read_vendor_id(answer or {}, self.id_field))
        if not answer:
            return Unknown("garbled", response.excerpt)
        # An unlisted code is a refusal too. The retry schedule determines whether a retry helps.
        return Transient("vendor_other", response.excerpt, parse_retry_after(response), response.status)
