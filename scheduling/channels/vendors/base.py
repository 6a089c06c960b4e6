"""Share the code of channels to one person: settings, tokens, one JSON call, and the table of codes.

A vendor whose answer is lost may have delivered, so the outcome is unknown. A request that the vendor refused because
of its token had no effect: it is repeated once with a fresh token.

All processes share the access tokens of vendor accounts. Redis holds a token encrypted, for a shorter time than the
vendor does. The process that takes the lock fetches; the others wait for its result. A failed fetch is shared for some
seconds too, so that a wrong secret does not become a request for each message.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import quote, quote_plus
from weakref import WeakKeyDictionary

from django.conf import settings

from scheduling.channels import options
from scheduling.channels.answers import TOKEN_EXPIRED, CodedAnswers, parse_answer, read_path
from scheduling.channels.base import (
    Channel,
    Failure,
    InvalidSetting,
    Message,
    NotSent,
    Outcome,
    Transient,
    thread_pool,
)
from scheduling.channels.http_client import JSON_HEADERS, Response, before_first_byte, excerpt, shared_transport
from scheduling.channels.markup import BadContent
from scheduling.channels.ssrf import PrivateHosts, check_url
from scheduling.error_text import ErrorText as _
from scheduling.models.encrypted import Unreadable, decrypt_text, encrypt_text
from scheduling.redis_client import LockError, Redis, RedisError, connect_redis
from scheduling.templating import escape_line

# --- access tokens ----------------------------------------------------------------------------------------------------


FAILURE_KEPT = timedelta(seconds=10)  #: a failed fetch is not repeated within this time
YOUNGEST_REFRESHED = timedelta(seconds=10)  #: a refused token that is younger is not fetched again
EARLY = timedelta(minutes=5)  #: a token is replaced this long before its end, or after nine tenths of its life
FORGOTTEN_AFTER = timedelta(minutes=1)  #: time that a process uses a token without asking Redis
POLL = 0.05  # seconds between two looks for the token that another process fetches
LOCK_MARGIN = timedelta(seconds=2)  #: the lock outlasts the fetch, which ends at the deadline
THREADS = 4

Answer = TypeVar("Answer")


class Token(NamedTuple):
    """An access token and how long the vendor accepts it."""

    text: str
    lifetime: timedelta


#: Fetch a token. Raises `Failure`.
Fetch = Callable[[], Awaitable[Token]]


class TokenRefused(Failure):
    """The vendor gave no token. The message was not sent; it may be sent once the account is in order."""

    def outcome(self) -> Transient:
        return Transient(self.reason, self.detail, FAILURE_KEPT)


class TokenCache:
    """The tokens of all accounts. Methods run in one event loop; Redis is called in threads."""

    def __init__(self, client: Redis) -> None:
        self._redis = client
        self._known: dict[str, tuple[str, float]] = {}  # token, monotonic time until which Redis is not asked
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, defaultdict[str, asyncio.Lock]] = WeakKeyDictionary()

    async def get(self, account: str, fetch: Fetch, limit: timedelta, stale: str = "") -> str:
        """Return the token of an account within `limit`. `stale` is a token that the vendor has refused.

        One process fetches, once. The result of a fetch is never the `stale` token.

        Raises:
            TokenRefused: the vendor gives no token, or refused a token of less than ten seconds.
            NotSent: Redis does not answer, or another process fetches for longer than `limit`.
        """
        loop = asyncio.get_running_loop()
        local = self._locks.setdefault(loop, defaultdict(asyncio.Lock))[account]
        try:
            async with asyncio.timeout(limit.total_seconds()), local:
                text, until = self._known.get(account, ("", 0.0))
                if text and text != stale and time.monotonic() < until:
                    return text
                return await self._share(account, fetch, limit, stale)
        except TimeoutError:
            raise NotSent("token_unavailable", "no access token within the time limit") from None
        except RedisError as error:
            raise NotSent("token_unavailable", f"Redis: {type(error).__name__}") from None

    async def _share(self, account: str, fetch: Fetch, limit: timedelta, stale: str) -> str:
        name = f"at:token:{{{sha256(account.encode()).hexdigest()[:32]}}}"
        seconds = (limit + LOCK_MARGIN).total_seconds()
        lock = self._redis.lock(f"{name}:lock", seconds, blocking=False, thread_local=False)
        while not (text := await self._run(self._read, account, name, stale)):
            if await self._run(lock.acquire):
                try:
                    # Another process may have stored its token between the read and the lock.
                    return await self._run(self._read, account, name, stale) or await self._fetch(
                        account, name, fetch, stale
                    )
                finally:
                    with suppress(LockError):  # it has expired; another process may hold it
                        await asyncio.shield(self._run(lock.release))
            await asyncio.sleep(POLL)
        return text

    async def _fetch(self, account: str, name: str, fetch: Fetch, stale: str) -> str:
        try:
            token = await fetch()
            if token.text == stale:
                raise TokenRefused("token_refused", "the vendor refuses the token that it gives")
        except Failure as failure:
            refused = failure if isinstance(failure, TokenRefused) else TokenRefused("token_failed", str(failure))
            kept = json.dumps({"reason": refused.reason, "detail": refused.detail})
            await self._run(self._store, f"{name}:failed", kept, FAILURE_KEPT)
            raise refused from None
        lifetime = token.lifetime - min(EARLY, token.lifetime / 10)
        stored = json.dumps({"token": token.text, "milliseconds": lifetime // timedelta(milliseconds=1)})
        await self._run(self._store, name, stored, lifetime)
        self._remember(account, token.text, lifetime)
        return token.text

    def _remember(self, account: str, text: str, lifetime: timedelta) -> None:
        self._known[account] = (text, time.monotonic() + min(lifetime, FORGOTTEN_AFTER).total_seconds())

    # --- in a thread ----------------------------------------------------------------------------------------------

    def _read(self, account: str, name: str, stale: str) -> str:
        """Return the shared token, or "" if a process must fetch one. Raises `TokenRefused`."""
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.get(name)
            pipe.pttl(name)
            pipe.get(f"{name}:failed")
            kept, left, failed = pipe.execute()
        found = _decrypt_entry(kept)
        text = str(found.get("token", ""))
        if text and text != stale and left > 0:
            self._remember(account, text, timedelta(milliseconds=left))
            return text
        if failure := _decrypt_entry(failed):
            raise TokenRefused(failure["reason"], failure["detail"])
        if text and left > 0 and found["milliseconds"] - left < YOUNGEST_REFRESHED // timedelta(milliseconds=1):
            raise TokenRefused("token_refused", "the vendor refuses a token that it has just given")
        return ""

    def _store(self, name: str, text: str, kept: timedelta) -> None:
        self._redis.set(name, encrypt_text(text), px=max(1, kept // timedelta(milliseconds=1)))

    @staticmethod
    async def _run(act: Callable[..., Answer], *arguments: Any) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(thread_pool("tokens", THREADS), act, *arguments)


def _decrypt_entry(stored: bytes | None) -> dict[str, Any]:
    """Return a stored entry. One of a key that was replaced counts as absent."""
    try:
        return json.loads(decrypt_text(stored)) if stored else {}
    except (Unreadable, ValueError):
        return {}


@cache
def shared_tokens() -> TokenCache:
    """Return the token cache of this process. After a fork redis-py opens a connection of its own."""
    return TokenCache(connect_redis(settings.REDIS_URL, timeout=settings.TIMEOUTS.redis_quota))


# --- channels ---------------------------------------------------------------------------------------------------------


COMMON_KEYS, QUOTA_BY = ("secret", "proxy", "quotas", "quota_by"), ("address", "account")
HIDDEN = "****"
SHORTEST_HIDDEN = 8  # characters; shorter secrets would hide ordinary words
ADDRESS_LENGTH = 500
MAX_TOKEN = 4_096  # characters
LONGEST_LIFE = timedelta(days=30)
NAMED_LINE = re.compile(r"\s*([A-Za-z0-9_][\w.]{0,63})\s*[:：]\s*(.*?)\s*")
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class VendorRequest:
    """One HTTP request to a vendor."""

    url: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=lambda: JSON_HEADERS)
    method: str = "POST"
    query: str = ""  #: encoded


class VendorChannel(CodedAnswers, Channel):
    """Base of the vendors.

    Config: `url` (another address of the API), `secret`, `proxy`, `quotas`, `quota_by`, and the texts of the kind.
    """

    needs_target = True
    own_quotas = True  #: `quotas` in the settings replaces those of the kind
    secret_fields = frozenset({"url", "secret", "proxy"})
    fills_template: bool = False  #: the text is a list of values for a template at the vendor

    api: ClassVar[str]  #: address of the vendor's API, without path
    required: ClassVar[tuple[str, ...]]  #: settings that must have a text
    optional: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        super().__init__(config, timeout)
        options.check_known_keys(config, {"url", *COMMON_KEYS, *self.required, *self.optional})
        self.settings = {name: options.read_word(config, name) for name in (*self.required, *self.optional)}
        for name in self.required:
            if not self.settings[name]:
                raise InvalidSetting(name, _("is missing"))
        self.secret = options.read_text(config, "secret")
        self.base = self._read_base(config)
        self.proxy = options.read_proxy(config)
        self._read_quotas(config)

    def _read_quotas(self, config: Mapping[str, Any]) -> None:
        """Take the limits of the settings. Those of the kind apply to each address only."""
        self.counts_addresses = options.read_choice(config, "quota_by", QUOTA_BY) == "address"
        self.quotas = options.read_quotas(config, self.quotas if self.counts_addresses else ())

    def _read_base(self, config: Mapping[str, Any]) -> str:
        given = options.read_text(config, "url")
        if not given:
            return self.api
        private = PrivateHosts.from_settings()
        url = check_url(options.read_url(config), private)
        if f"https://{url.raw_host}" != self.api and not private.open(url):
            raise InvalidSetting(
                "url", _("must start with %(start)s, or the host must be allowed as a private host", start=self.api)
            )
        return given.rstrip("/")

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        """Check that `address` is one printable text."""
        options.check_known_keys(target, {"address"})
        address = options.read_word(target, "address")
        if not 0 < len(address) <= ADDRESS_LENGTH or UNPRINTABLE.search(address):
            raise InvalidSetting("address", _("must have 1 to %(most)s printable characters", most=ADDRESS_LENGTH))

    def escape(self, value: str) -> str:
        """Keep a value on the line that has its name."""
        return escape_line(value) if self.fills_template else value

    def target_key(self, message: Message) -> str:
        """Return the account: a slow or dead vendor concerns all its receivers."""
        return options.opaque_key(self.kind, self.account)

    def quota_key(self, message: Message) -> str:
        """Return what the vendor counts by: the receiver within the account, or the account."""
        if not self.counts_addresses:
            return self.target_key(message)
        return options.opaque_key(self.kind, f"{self.account}\0{message.target.get('address', '')}")

    @property
    def account(self) -> str:
        """Return a text that differs between accounts and between secrets."""
        return "\0".join((self.base, *(self.settings[name] for name in self.required), self.secret))

    async def attempt(self, message: Message) -> Outcome:
        self.validate_target(message.target)
        _, outcome = await self.call_vendor(
            lambda token: self.request(message, token, datetime.now(UTC)), partial(self.judge_for, message),
            self.timeout, repeatable=message.repeatable,
        )  # fmt: skip
        return outcome

    async def call_vendor(
        self, build: Callable[[str], VendorRequest], judge: Callable[[Response], Outcome], limit: timedelta, *,
        repeatable: bool,
    ) -> tuple[Response, Outcome]:  # fmt: skip
        """Send the request that `build` makes of an access token, within `limit`. Raises `Failure` and `BadContent`.

        It is sent once more if the vendor refuses the first token.
        """
        ends_at, stale = time.monotonic() + limit.total_seconds(), ""
        while True:
            token = await self.get_token(_left(ends_at), stale)
            request = build(token)
            response = await shared_transport().request(
                request.method, request.url, request.body, request.headers,
                timeout=_left(ends_at), repeatable=repeatable, proxy=self.proxy, query=request.query,
            )  # fmt: skip
            # The body first: the outcome has its start, which can end within a secret.
            response = replace(response, body=_hide_in_body(response.body, token, self.secret))
            outcome = hide_in_outcome(judge(response), token, self.secret)
            is_expired = isinstance(outcome, Transient) and outcome.reason == TOKEN_EXPIRED
            if stale or not (token and is_expired):
                return response, outcome
            stale = token

    def judge_for(self, message: Message, response: Response) -> Outcome:
        return self.judge(response)

    def request(self, message: Message, token: str, now: datetime) -> VendorRequest:
        """Return the request of this message. Raises `BadContent`."""
        raise NotImplementedError

    def read_template(self, body: str, *reserved: str) -> tuple[dict[str, str], dict[str, str]]:
        """Return the reserved lines of a text, and its values. Raises `BadContent`.

        Reserved are `template_id`, for which the setting stands in, and the names of `reserved`. They come first: a
        line break in a customer's data can set none.
        """
        own: dict[str, str] = {}
        values: dict[str, str] = {}
        for name, value in read_named_lines(body).items():
            is_own = name in ("template_id", *reserved)
            if is_own and values:
                raise BadContent(f"“{name}” must stand before the values")
            (own if is_own else values)[name] = value
        own["template_id"] = own.get("template_id") or self.settings["template_id"]
        if not own["template_id"]:
            raise BadContent("template_id: the text and the channel name no template")
        return own, values

    # --- tokens ---------------------------------------------------------------------------------------------------

    def token_request(self, stale: str) -> VendorRequest | None:
        """Return the request for an access token, or None if the vendor has no tokens."""
        return None

    async def get_token(self, left: timedelta, stale: str) -> str:
        """Return an access token other than `stale`; "" if the vendor has none. Raises `Failure`."""
        request = self.token_request(stale)
        if request is None:
            return ""

        # The fetch ends before the caller's limit, so that its failure is shared.
        fetch_limit = max(left - timedelta(milliseconds=500), left / 2)

        async def fetch() -> Token:
            outer = before_first_byte.set(None)  # the slot of the message counts from its own request
            try:
                response = await shared_transport().request(
                    request.method, request.url, request.body, request.headers,
                    timeout=fetch_limit, repeatable=True, proxy=self.proxy, query=request.query,
                )  # fmt: skip
            finally:
                before_first_byte.reset(outer)
            return self.read_token(response)

        return await shared_tokens().get(f"{self.kind}\0{self.account}", fetch, left, stale)

    #: Paths of the token and of its lifetime in seconds in the answer, and the lifetime of an answer without one.
    token_field: str = "access_token"  # noqa: S105
    lifetime_field: str = "expires_in"
    lifetime: timedelta = timedelta(hours=2)

    def read_token(self, response: Response) -> Token:
        """Return the token of an answer. Raises `TokenRefused`."""
        answer = parse_answer(response) or {}
        text = read_path(answer, self.token_field)
        if not isinstance(text, str) or not 0 < len(text) <= MAX_TOKEN or not text.isascii() or not text.isprintable():
            # The detail shows no other values: one may be the token, under another name.
            said = [f"{name} {answer[name]}" for name in (*self.code_fields, *self.text_fields) if name in answer]
            names = ", ".join(sorted(map(str, answer))[:20])
            detail = f"HTTP {response.status}: no {self.token_field} among: {names or 'nothing'}. {' '.join(said)}"
            raise TokenRefused("token_refused", hide_in_text(excerpt(detail), self.secret)[:300])
        try:
            seconds = float(read_path(answer, self.lifetime_field))
            lifetime = timedelta(seconds=seconds) if 0 < seconds <= LONGEST_LIFE.total_seconds() else self.lifetime
        except (TypeError, ValueError, OverflowError):
            lifetime = self.lifetime
        return Token(text, lifetime)


def _left(ends_at: float) -> timedelta:
    """Return the time until an instant of the monotonic clock, at least 1 ms."""
    return timedelta(seconds=max(ends_at - time.monotonic(), 0.001))


def read_named_lines(body: str) -> dict[str, str]:
    """Return the values of a text with one “name: value” a line, in order.

    Raises:
        BadContent: a line is something else, or has a name again.
    """
    values: dict[str, str] = {}
    for line in filter(str.strip, body.splitlines()):
        named = NAMED_LINE.fullmatch(line)
        if not named:
            raise BadContent(f"each line must be “name: value”: {line[:80]}")
        if named[1] in values:
            raise BadContent(_("“%(name)s” is given twice", name=named[1]))
        values[named[1]] = named[2]
    return values


def hide_in_text(text: str, *secret: str) -> str:
    """Return the text without the secrets, as they are or encoded for an address, JSON or a header."""
    for form in _list_forms(secret):
        text = text.replace(form, HIDDEN)
    return text


def _hide_in_body(body: bytes, *secret: str) -> bytes:
    for form in _list_forms(secret):
        body = body.replace(form.encode("utf-8", "replace"), HIDDEN.encode())
    return body


def _list_forms(secrets: Iterable[str]) -> Iterator[str]:
    for each in secrets:
        if len(each) >= SHORTEST_HIDDEN:
            yield from (
                each,
                quote(each, safe=""),
                quote_plus(each),
                json.dumps(each)[1:-1],
                b64encode(each.encode()).decode().rstrip("="),
            )


def hide_in_outcome(outcome: Outcome, *secret: str) -> Outcome:
    """Return the outcome without tokens and secrets, which an answer may repeat."""
    name = "reply" if hasattr(outcome, "reply") else "detail"
    text = getattr(outcome, name)
    hidden = hide_in_text(text, *secret)
    return outcome if hidden == text else replace(outcome, **{name: hidden})  # type: ignore[arg-type]
