"""Send HTTP requests: protected against SSRF, bounded in time and size, exact about what may have been sent.

`send_once` sends a message without the ledger and its guards, for tests of a channel and alerts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import aiohttp
import structlog
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from django.conf import settings
from yarl import URL

from scheduling.channels.base import (
    Channel,
    Delivered,
    DestinationRefused,
    Message,
    NoAnswer,
    NotSent,
    Outcome,
    Permanent,
    Transient,
    Unknown,
)
from scheduling.channels.ssrf import DIRECT, PrivateHosts, Proxy, append_query, check_proxy, check_url
from scheduling.strict_text import storable_text

log = structlog.get_logger(__name__)

REPLY_LENGTH = 1_000  # characters
LONGEST_RETRY_AFTER = timedelta(days=1)
GATEWAY_ERRORS = frozenset({502, 504})
NOT_PROCESSED = frozenset({408, 425, 429, 503})  #: statuses of a receiver that has not started processing
FINAL_STATUSES = frozenset({410, 413, 422})  #: statuses that no retry changes


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response. Names of `headers` match in any case; `complete` is False if the body was cut."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = True

    @property
    def excerpt(self) -> str:
        return excerpt(self.body)


def excerpt(said: bytes | str) -> str:
    """Return the first 1,000 characters, without NUL and lone surrogates: JSON may contain escaped ones."""
    start = said[: REPLY_LENGTH * 5]
    return storable_text(start.decode(errors="replace") if isinstance(start, bytes) else start)[:REPLY_LENGTH]


def judge_status(response: Response, *, repeatable: bool) -> Outcome:
    """Return the outcome by the status code. `repeatable`: a repeat has no second effect."""
    status, said = response.status, response.excerpt
    match status:
        case _ if 200 <= status < 300:
            return Delivered(said, status)
        case _ if 300 <= status < 400:
            return Permanent("redirect", "redirects are not followed", status)
        case 410:
            return Permanent("gone", said, status, disable_target=True)
        case 429:
            return Transient("throttled", said, parse_retry_after(response), status)
        case _ if status in GATEWAY_ERRORS:
            return Unknown(f"http_{status}", said)
        case _ if status in NOT_PROCESSED or (400 <= status < 600 and repeatable and status not in FINAL_STATUSES):
            return Transient(f"http_{status}", said, parse_retry_after(response), status)
        case _ if 500 <= status < 600:
            return Unknown(f"http_{status}", said)
        case _ if 400 <= status < 500:
            return Permanent(f"http_{status}", said, status)
    return Permanent("http_other", said, status)


def parse_retry_after(response: Response) -> timedelta | None:
    """Return `Retry-After`, in seconds or as HTTP date (RFC 9110, 10.2.3), limited to 0 to one day.

    None if absent or invalid.
    """
    value = response.headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return min(timedelta(seconds=int(value[:10])), LONGEST_RETRY_AFTER)
    try:
        until = parsedate_to_datetime(value)
        wait = (until if until.tzinfo else until.replace(tzinfo=UTC)) - datetime.now(UTC)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return max(timedelta(0), min(wait, LONGEST_RETRY_AFTER))


BODY_CAP = 64 * 1024  # bytes
CONNECT_TIMEOUT = 5.0  # seconds for TCP and TLS to one host
IDLE_TIMEOUT = 1.5  # seconds; below the idle timeout of common servers (gunicorn 2 s, Node and uvicorn 5 s)
PER_HOST = 200  # connections; a robot vendor is one host for hundreds of robots
LOOKUP_THREADS = 32  # separate threads: hanging lookups must not exhaust the loop's default executor
HEADERS = {"User-Agent": "Aftertouch", "Accept-Encoding": "identity"}
JSON_HEADERS = {"content-type": "application/json; charset=utf-8"}

PROXY_AUTH_REQUIRED = 407
UNRESOLVED_BEHIND_PROXY = (
    "the name is resolved here too, to check the address; AFTERTOUCH_ALLOWED_PRIVATE_HOSTS names hosts that only the "
    "proxy resolves"
)
Lookup = Callable[[str, int], list[tuple[Any, ...]]]


def resolve_host(host: str, port: int) -> list[tuple[Any, ...]]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


class PublicResolver(AbstractResolver):
    """Resolve names to public addresses only, unless the host or its network is allowed."""

    def __init__(self, private: PrivateHosts, lookup: Lookup = resolve_host) -> None:
        self._private = private
        self._lookup = lookup
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="lookup")
        self._running: dict[tuple[str, int], asyncio.Future[list[tuple[Any, ...]]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the usable addresses.

        Raises:
            DestinationRefused: the host has addresses, and none may be used.
            OSError: the host has no address.
        """
        key = host, port
        if key not in self._running:  # a name server that does not answer holds one thread, not one for each request
            running = asyncio.get_running_loop().run_in_executor(self._threads, self._lookup, host, port)

            def forget(done: asyncio.Future[Any]) -> None:
                del self._running[key]
                if not done.cancelled():
                    done.exception()  # the requests have it, unless all of them have timed out

            running.add_done_callback(forget)
            self._running[key] = running
        found = await asyncio.shield(self._running[key])
        usable = self._private.usable(host, port, (str(sockaddr[0]) for *_, sockaddr in found))
        return [
            ResolveResult(
                hostname=host, host=text, port=port, family=socket.AF_INET6 if ":" in text else socket.AF_INET, proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for text in usable
        ]  # fmt: skip

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Request(NamedTuple):
    method: str
    url: URL
    body: bytes
    headers: Mapping[str, str]
    proxying: Mapping[str, Any] = {}  #: arguments of aiohttp that lead the request through a proxy


class Transport:
    """HTTP requests of one event loop. Sessions open on first use; `close` ends them.

    - A name is resolved once. Addresses that are not public are dropped. The connection uses exactly the checked
      addresses with the original Host and SNI, so DNS rebinding has no effect. Redirects, environment proxies and
      cookies are off.
    - A proxy gets the checked address too, because it would resolve the name again: `CONNECT 203.0.113.7:443`. Only a
      host that is allowed by its name may have any address, so the proxy resolves it. Plain http shows the proxy the
      whole request. Therefore it goes only through a proxy that the administrator allows.
    - One deadline covers the whole request, so a slowly dripping server ends too. At most 64 KB of a reply are read.
    - Only repeatable messages reuse a connection. A server that closes an idle connection looks like one that took
      the request and died. In that case the message is sent once more at once, on its own connection.
    """

    def __init__(
        self,
        private: PrivateHosts,
        *,
        proxy: str = "",
        ssl_context: ssl.SSLContext | None = None,
        lookup: Lookup = resolve_host,
    ) -> None:
        self._private = private
        self._proxy = proxy
        self._proxies = private.with_proxy(proxy)
        self._resolver = PublicResolver(private, lookup)
        self._proxy_resolver = PublicResolver(self._proxies, lookup)
        self._ssl: ssl.SSLContext | bool = ssl_context or True
        self._sessions: dict[tuple[bool, bool], aiohttp.ClientSession] = {}
        self._places: WeakValueDictionary[URL, asyncio.Semaphore] = WeakValueDictionary()

    async def request(
        self,
        method: str,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        timeout: timedelta,
        repeatable: bool,
        proxy: str = "",
        query: str = "",
    ) -> Response:
        """Send a request and return its response, within `timeout` in all.

        `query` is appended to the query of `url` as it is, and may have 8,192 characters: it may hold a message.
        A repeatable message may be sent twice (see the class). A response with a late, broken or larger body than 64 KB
        is returned with `complete=False`. `proxy` is that of `options.read_proxy`: "" leads through the proxy of the
        transport, if it has one.

        Raises:
            DestinationRefused: the URL, the proxy or their addresses are not allowed.
            NotSent: no byte of the request was written, or the proxy asked for a password instead of passing it on.
                The reason is "busy" if the time ended while this process let it wait.
            NoAnswer: the request may have been written, and no response came.
        """
        request = _Request(method, append_query(check_url(url, self._private), query), body, headers)
        chosen = proxy or self._proxy
        through: Proxy | None = None
        if chosen not in ("", DIRECT):
            through = check_proxy(chosen, self._proxies)
            if request.url.scheme == "http" and not self._proxies.open(through.url):
                raise DestinationRefused("scheme", "plain http goes only through a proxy that the administrator allows")
        flight = Flight(proxied=through is not None)
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                calls = [request] if through is None else await self._lead_through(through, request)
                origin = request.url.origin()
                places = self._places.setdefault(origin, asyncio.Semaphore(PER_HOST))
                flight.waits_for = "a connection to the host: all are in use" if places.locked() else ""
                async with places:
                    flight.waits_for = ""
                    await self._send_request(flight, calls, repeatable=repeatable)
        except (aiohttp.ClientError, OSError) as error:
            if flight.status is None:
                raise flight.explain(error) from error
        if flight.proxied and flight.status == PROXY_AUTH_REQUIRED and request.url.scheme == "http":
            raise NotSent("proxy", f"the proxy answered {PROXY_AUTH_REQUIRED}")
        assert flight.status is not None
        return Response(flight.status, flight.headers, bytes(flight.body), flight.complete)

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()
        await self._resolver.close()
        await self._proxy_resolver.close()

    async def _lead_through(self, proxy: Proxy, request: _Request) -> list[_Request]:
        """Return the request to each checked address of its host, with the host's name in SNI and `Host`.

        If any address is allowed, the proxy resolves the name. Raises `DestinationRefused`, and `NotSent` without one.
        """
        headers = {**request.headers, "Host": request.url.host_port_subcomponent or ""}
        proxying: dict[str, Any] = {"proxy": proxy.url}
        if request.url.scheme == "http":
            headers |= proxy.headers
        else:
            host = (request.url.raw_host or "").removesuffix(".")
            proxying |= {"proxy_headers": proxy.headers, "server_hostname": host}
        urls = [request.url]
        if not self._private.open(request.url):
            try:
                found = await self._resolver.resolve(request.url.raw_host or "", request.url.port or 0)
            except OSError as error:
                raise NotSent("dns", f"{error_text(error)}: {UNRESOLVED_BEHIND_PROXY}") from error
            urls = [request.url.with_host(each["host"]) for each in found]
        return [request._replace(url=url, headers=headers, proxying=proxying) for url in urls]

    async def _send_request(self, flight: Flight, calls: list[_Request], *, repeatable: bool) -> None:
        try:
            await self._exchange(flight, calls, reuse=repeatable)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not (repeatable and flight.reused and flight.status is None):
                raise
            try:
                await self._exchange(flight, calls, reuse=False)
            except DestinationRefused as refused:  # by now; the first request may have arrived
                raise NoAnswer("disconnected", refused.detail) from None

    async def _exchange(self, flight: Flight, calls: list[_Request], *, reuse: bool) -> None:
        """Make the first call for which the proxy opens a connection; without a proxy there is one call."""
        session = self._session(reuse=reuse, proxied=flight.proxied)
        for number, each in enumerate(calls, 1):
            try:
                await _call(session, flight, each)
                return
            except aiohttp.ClientHttpProxyError as error:
                if number == len(calls) or error.status < 500:
                    raise
            except DestinationRefused as refused:
                if not flight.proxied:
                    raise
                raise DestinationRefused(refused.reason, f"the proxy: {refused.detail}") from None

    def _session(self, *, reuse: bool, proxied: bool) -> aiohttp.ClientSession:
        if session := self._sessions.get((reuse, proxied)):
            return session
        connector = _Connector(
            resolver=self._proxy_resolver if proxied else self._resolver,
            ssl=self._ssl,
            limit=0,
            **({"keepalive_timeout": IDLE_TIMEOUT} if reuse else {"force_close": True}),
        )
        session = aiohttp.ClientSession(
            connector=connector,
            headers=HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
            auto_decompress=False,
            trust_env=False,
        )
        session._retry_connection = False  # it would send a GET or PUT without an answer once more
        self._sessions[reuse, proxied] = session
        return session


async def _call(session: aiohttp.ClientSession, flight: Flight, request: _Request) -> None:
    _flight.set(flight)
    response = await session.request(
        request.method,
        request.url,
        data=request.body or None,
        headers=request.headers,
        allow_redirects=False,
        **request.proxying,
    )
    try:
        flight.status = response.status
        flight.headers = response.headers
        while len(flight.body) < BODY_CAP and (chunk := await response.content.read(BODY_CAP - len(flight.body))):
            flight.body += chunk
        flight.complete = response.content.at_eof()
    finally:
        response.close()  # a connection whose reply was read to its end is already back in the pool


_transports: WeakKeyDictionary[asyncio.AbstractEventLoop, Transport] = WeakKeyDictionary()


def shared_transport() -> Transport:
    """Return the transport of the running loop, with the private hosts and the proxy of the settings.

    Close it before the loop ends.
    """
    loop = asyncio.get_running_loop()
    if loop not in _transports:
        _transports[loop] = Transport(PrivateHosts.from_settings(), proxy=settings.AFTERTOUCH_HTTP_PROXY)
    return _transports[loop]


async def close_shared_transport() -> None:
    transport = _transports.pop(asyncio.get_running_loop(), None)
    if transport is not None:
        await transport.close()


def encode_json(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


# --- a request in flight ----------------------------------------------------------------------------------------------


#: Awaited before the first byte of each request of a task. It may wait, within the time limit of the request.
before_first_byte: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("before_first_byte", default=None)


@dataclass(slots=True)
class Flight:
    """The state of one request in flight."""

    proxied: bool = False  #: goes through a proxy
    sent: bool = False  #: a byte of it may have been written
    reused: bool = False  #: sent on a connection that served before
    waits_for: str = ""  #: what this process keeps it waiting for; the receiver has no part in it
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False

    def explain(self, error: Exception) -> NotSent | NoAnswer:
        """Return what an error of aiohttp or of the system means, if no status line has arrived."""
        said = error_text(error)
        if self.sent:
            if isinstance(error, TimeoutError):
                return NoAnswer("timeout", "no answer within the time limit")
            return NoAnswer("garbled" if isinstance(error, aiohttp.ClientResponseError) else "disconnected", said)
        if self.waits_for and isinstance(error, TimeoutError):
            return NotSent("busy", f"waited until the time limit for {self.waits_for}")
        if isinstance(error, (aiohttp.ClientSSLError, ssl.SSLError)):
            return NotSent("tls", said)
        if isinstance(error, TimeoutError):
            return NotSent("connect_timeout", "no connection within the time limit")
        if isinstance(error, aiohttp.ClientHttpProxyError):
            return NotSent("proxy", f"the proxy answered {error.status}")
        if self.proxied:
            return NotSent("proxy", f"the proxy: {said}")
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return NotSent("dns", said)
        return NotSent("connect", said)


def error_text(error: BaseException) -> str:
    """Return the system's error text without the URL, which aiohttp's own messages contain."""
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    return getattr(cause, "verify_message", None) or getattr(cause, "strerror", None) or type(cause).__name__


_flight: ContextVar[Flight] = ContextVar("flight")


class _Connector(aiohttp.TCPConnector):
    """Note in the flight of a request what its connection does. Traces of aiohttp would cost a quarter of a request."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._served: WeakSet[ResponseHandler] = WeakSet()

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        flight = _flight.get()
        flight.waits_for = ""
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        assert protocol is not None
        flight.reused = protocol in self._served
        self._served.add(protocol)
        if act := before_first_byte.get():
            flight.waits_for = "a place within the receiver's limit of messages"
            try:
                await act()
                flight.waits_for = ""
                if not protocol.is_connected():
                    raise aiohttp.ServerDisconnectedError  # by now; nothing was written
            except BaseException:
                connection.close()
                raise
        flight.sent = True  # the caller writes the first byte next
        return connection


# --- one message ------------------------------------------------------------------------------------------------------


def send_once(channel: Channel, message: Message) -> Outcome:
    """Send and block until there is an outcome. The calling thread must not run an event loop."""

    async def send_and_close() -> Outcome:
        try:
            return await channel.send(message)
        finally:
            await close_shared_transport()

    return asyncio.run(send_and_close())
