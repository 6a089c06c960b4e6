"""Send HTTP requests: protected against SSRF, bounded in time and size, exact about what may have been sent.

Channel editors set URLs, so a URL must not reach hosts that only this machine can reach (OWASP A10). Two checks are
both needed: `check_url` checks the text first, `is_public` checks every resolved address. The checked text is the text
that is sent; no second parser reads the URL. A proxy of a channel is checked in the same way, by `check_proxy`.

`send_once` sends a message without the ledger and its guards, for tests of a channel and alerts.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cache, lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from types import SimpleNamespace
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import aiohttp
import structlog
from aiohttp.abc import AbstractResolver, ResolveResult
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
from scheduling.error_text import ErrorText as _
from scheduling.strict_text import storable_text

log = structlog.get_logger(__name__)

REPLY_LENGTH = 1_000  # characters
LONGEST_RETRY_AFTER = timedelta(days=1)
GATEWAY_ERRORS = frozenset({502, 504})
NOT_PROCESSED = frozenset({408, 425, 429, 503})  #: statuses of a receiver that has not started processing
FINAL_STATUSES = frozenset({410, 413, 422})  #: statuses that no retry changes


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response. `headers` have lower-case names; `complete` is False if the body was cut."""

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


def parse_retry_after(response: Response, now: datetime | None = None) -> timedelta | None:
    """Return `Retry-After`, in seconds or as HTTP date (RFC 9110, 10.2.3), limited to 0 to one day.

    None if absent or invalid.
    """
    value = response.headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return min(timedelta(seconds=int(value[:10])), LONGEST_RETRY_AFTER)
    try:
        until = parsedate_to_datetime(value)
        wait = (until if until.tzinfo else until.replace(tzinfo=UTC)) - (now or datetime.now(UTC))
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return max(timedelta(0), min(wait, LONGEST_RETRY_AFTER))


BODY_CAP = 64 * 1024  # bytes
CONNECT_TIMEOUT = 5.0  # seconds for TCP and TLS to one host
IDLE_TIMEOUT = 1.5  # seconds; below the idle timeout of common servers (gunicorn 2 s, Node and uvicorn 5 s)
PER_HOST = 200  # connections; a robot vendor is one host for hundreds of robots
LOOKUP_THREADS = 32  # separate threads: hanging lookups must not exhaust the loop's default executor
HEADERS = {"User-Agent": "Aftertouch", "Accept-Encoding": "identity"}

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

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the usable addresses.

        Raises:
            Refused: the host has addresses, and none may be used.
            OSError: the host has no address.
        """
        found = await asyncio.get_running_loop().run_in_executor(self._threads, self._lookup, host, port)
        usable = self._private.usable(host, port, (str(sockaddr[0]) for *_, sockaddr in found))
        return [self._result(host, text, port) for text in usable]

    @staticmethod
    def _result(host: str, text: str, port: int) -> ResolveResult:
        family = socket.AF_INET6 if ":" in text else socket.AF_INET
        return ResolveResult(hostname=host, host=text, port=port, family=family, proto=0, flags=socket.AI_NUMERICHOST)

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

    @classmethod
    def from_settings(cls) -> Transport:
        """Return a transport with the private hosts and the proxy of the settings."""
        return cls(PrivateHosts.from_settings(), proxy=settings.AFTERTOUCH_HTTP_PROXY)

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
    ) -> Response:
        """Send a request and return its response, within `timeout` in all.

        A repeatable message may be sent twice (see the class). A response with a late, broken or larger body than 64 KB
        is returned with `complete=False`. `proxy` is that of `options.read_proxy`: "" leads through the proxy of the
        transport, if it has one.

        Raises:
            Refused: the URL, the proxy or their addresses are not allowed.
            NotSent: no byte of the request was written, or the proxy asked for a password instead of passing it on.
            NoAnswer: the request may have been written, and no response came.
        """
        request = _Request(method, check_url(url, self._private), body, headers)
        through = self._find_proxy(proxy or self._proxy, request.url)
        flight = Flight(proxied=through is not None)
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                calls = [request] if through is None else await self._lead_through(through, request)
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

    def _find_proxy(self, proxy: str, url: URL) -> Proxy | None:
        """Return the proxy for a request; None: there is none. Raises `Refused`."""
        if proxy in ("", DIRECT):
            return None
        found = check_proxy(proxy, self._proxies)
        if url.scheme == "http" and not self._proxies.open(found.url):
            raise DestinationRefused("scheme", "plain http goes only through a proxy that the administrator allows")
        return found

    async def _lead_through(self, proxy: Proxy, request: _Request) -> list[_Request]:
        """Return the request to each address of its host, with the host's name in SNI and `Host`."""
        headers = {**request.headers, "Host": request.url.host_port_subcomponent or ""}
        proxying: dict[str, Any] = {"proxy": proxy.url}
        if request.url.scheme == "http":
            headers |= proxy.headers
        else:
            host = (request.url.raw_host or "").removesuffix(".")
            proxying |= {"proxy_headers": proxy.headers, "server_hostname": host}
        urls = await self._resolve_target(request.url)
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

    async def _resolve_target(self, url: URL) -> list[URL]:
        """Return the URL with each checked address of its host, or unchanged if any address is allowed.

        Raises:
            Refused: the host has addresses, and none may be used.
            NotSent: the host has no address.
        """
        if self._private.open(url):
            return [url]
        try:
            found = await self._resolver.resolve(url.raw_host or "", url.port or 0)
        except OSError as error:
            raise NotSent("dns", f"{error_text(error)}: {UNRESOLVED_BEHIND_PROXY}") from error
        return [url.with_host(each["host"]) for each in found]

    def _session(self, *, reuse: bool, proxied: bool) -> aiohttp.ClientSession:
        if (reuse, proxied) not in self._sessions:
            self._sessions[reuse, proxied] = self._new_session(reuse=reuse, proxied=proxied)
        return self._sessions[reuse, proxied]

    def _new_session(self, *, reuse: bool, proxied: bool) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            resolver=self._proxy_resolver if proxied else self._resolver,
            ssl=self._ssl,
            limit=0,
            limit_per_host=PER_HOST,
            **({"keepalive_timeout": IDLE_TIMEOUT} if reuse else {"force_close": True}),
        )
        session = aiohttp.ClientSession(
            connector=connector,
            headers=HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
            auto_decompress=False,
            trust_env=False,
            trace_configs=[trace_flights()],
        )
        session._retry_connection = False  # it would send a GET or PUT without an answer once more
        return session


async def _call(session: aiohttp.ClientSession, flight: Flight, request: _Request) -> None:
    response = await session.request(
        request.method,
        request.url,
        data=request.body or None,
        headers=request.headers,
        allow_redirects=False,
        trace_request_ctx=flight,
        **request.proxying,
    )
    try:
        flight.status = response.status
        flight.headers = {name.lower(): value for name, value in reversed(list(response.headers.items()))}
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
        _transports[loop] = Transport.from_settings()
    return _transports[loop]


async def close_shared_transport() -> None:
    transport = _transports.pop(asyncio.get_running_loop(), None)
    if transport is not None:
        await transport.close()


# --- destinations -----------------------------------------------------------------------------------------------------


Address = IPv4Address | IPv6Address
MAX_URL = 2_048  # characters
HOST_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")
NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")  # the WHATWG URL standard's "ends in a number"

# The IANA special-purpose registry, and addresses that `ipaddress.is_global` of Python 3.11 accepts (multicast, the
# 6to4 relay).
NOT_PUBLIC_V4 = (
    IPv4Network("0.0.0.0/8"),  # this network
    IPv4Network("10.0.0.0/8"),  # private
    IPv4Network("100.64.0.0/10"),  # carrier NAT; Alibaba Cloud's metadata
    IPv4Network("127.0.0.0/8"),  # loopback
    IPv4Network("169.254.0.0/16"),  # link local; cloud metadata
    IPv4Network("172.16.0.0/12"),  # private
    IPv4Network("192.0.0.0/24"),  # IETF assignments
    IPv4Network("192.0.2.0/24"),  # documentation
    IPv4Network("192.88.99.0/24"),  # 6to4 relay
    IPv4Network("192.168.0.0/16"),  # private
    IPv4Network("198.18.0.0/15"),  # benchmarks
    IPv4Network("198.51.100.0/24"),  # documentation
    IPv4Network("203.0.113.0/24"),  # documentation
    IPv4Network("224.0.0.0/4"),  # multicast
    IPv4Network("240.0.0.0/4"),  # reserved, broadcast
    IPv4Network("168.63.129.16/32"),  # the Azure host agent
)
NAT64 = IPv6Network("64:ff9b::/96")  # the rest of such an address is the IPv4 address that is reached
# Only 2000::/3 is allocated as global unicast, so all other addresses are refused without a list: mapped and compatible
# addresses, unique local, link local, multicast. Inside it these are refused: IETF assignments
# with Teredo and ORCHID, documentation, 6to4.
GLOBAL_UNICAST_V6 = IPv6Network("2000::/3")
NOT_PUBLIC_V6 = tuple(IPv6Network(network) for network in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))


def is_public(address: Address) -> bool:
    """Return whether an address is reachable from the public internet."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in NOT_PUBLIC_V4)
    if address in NAT64:
        return is_public(IPv4Address(address.packed[-4:]))
    return address in GLOBAL_UNICAST_V6 and not any(address in network for network in NOT_PUBLIC_V6)


@dataclass(frozen=True, slots=True)
class PrivateHosts:
    """The private destinations that an administrator allows: host names or `host:port`, and networks.

    A named host may resolve to any address and may use plain http. A network allows literal addresses in it, and names
    that resolve into it. Such names still need https: only an allowed host name permits plain http.
    """

    hosts: frozenset[tuple[str, int | None]] = frozenset()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """Parse the setting's entries.

        Raises:
            ValueError: an entry is no host, `host:port`, address or network; the message contains it.
        """
        hosts: set[tuple[str, int | None]] = set()
        networks: list[IPv4Network | IPv6Network] = []
        for entry in entries:
            try:
                networks.append(ip_network(entry.strip("[]"), strict=False))
            except ValueError:
                hosts.add(_host_and_port(entry))
        return cls(frozenset(hosts), tuple(networks))

    @staticmethod
    def from_settings() -> PrivateHosts:
        return _private_hosts(tuple(settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS))

    def with_proxy(self, proxy: str) -> PrivateHosts:
        """Return these destinations and the installation's proxy, for checks of proxies. "": there is none."""
        if not proxy:
            return self
        url = parse_proxy(proxy).url
        return replace(self, hosts=self.hosts | {(_canonical_host(url), url.port)})

    def open(self, url: URL) -> bool:
        """Return whether the host of an admitted URL is allowed by its own name or literal address."""
        host, port = _canonical_host(url), url.port or 0
        literal = _parse_address(host)
        return self.name(host, port) or (literal is not None and self.cover(literal))

    def name(self, host: str, port: int) -> bool:
        return (host, None) in self.hosts or (host, port) in self.hosts

    def cover(self, address: Address) -> bool:
        return any(address in network for network in self.networks)

    def usable(self, host: str, port: int, addresses: Iterable[str]) -> list[str]:
        """Return the addresses of `host` that a connection may use.

        Raises:
            Refused: the host has addresses, and none may be used.
        """
        found = list(dict.fromkeys(addresses))
        opened = self.name(host.removesuffix(".").lower(), port)
        usable = [text for text in found if opened or self._may_use(text)]
        if found and not usable:
            raise DestinationRefused("private_address", "the name resolves to addresses that are not public")
        return usable

    def _may_use(self, text: str) -> bool:
        if "%" in text:
            return False
        address = ip_address(text)
        return is_public(address) or self.cover(address)


@cache
def _private_hosts(entries: tuple[str, ...]) -> PrivateHosts:
    return PrivateHosts.parse(entries)


def _host_and_port(entry: str) -> tuple[str, int | None]:
    try:
        parsed = URL(f"//{entry}")
    except ValueError:
        parsed = URL()
    host = (parsed.raw_host or "").rstrip(".").lower()
    literal = _parse_address(host)
    if not host or parsed.raw_path not in {"", "/"} or parsed.user or not (literal or HOST_NAME.fullmatch(host)):
        raise ValueError(f"AFTERTOUCH_ALLOWED_PRIVATE_HOSTS: not a host, host:port or network: {entry!r}")
    return str(literal or host), parsed.explicit_port


@lru_cache(maxsize=4096)
def check_url(url: str, private: PrivateHosts) -> URL:
    """Return the URL, to be sent byte for byte.

    Refused are: schemes other than http(s), http to a host that is not allowed, user names, port 0, zone ids, unusual
    spellings of addresses (`2130706433`, `0x7f.1`, `0177.0.0.1`), literal addresses that are not public, localhost.

    Raises:
        Refused: with the code "bad_url", "scheme" or "private_address".
    """
    parsed = _parse_url(url)
    _checked_host(parsed)
    if not parsed.port:
        raise DestinationRefused("bad_url", _("the port is missing or 0"))
    if parsed.scheme != "https" and not (parsed.scheme == "http" and private.open(parsed)):
        raise DestinationRefused("scheme", _("only https is allowed here"))
    _check_reach(parsed, private)
    return parsed


def _check_reach(url: URL, private: PrivateHosts) -> None:
    host = _checked_host(url)
    literal, opened = _parse_address(host), private.open(url)
    if not opened and (literal is not None and not is_public(literal)):
        raise DestinationRefused("private_address", _("the address is not public"))
    if not opened and (host == "localhost" or host.endswith(".localhost")):
        raise DestinationRefused("private_address", _("localhost is not public"))


DIRECT = "direct"  #: a channel's word against the installation's proxy
PROXY_FORM = _(
    "must be http://user:password@host:port or https://…, with nothing after the port; in a password write @ as %40, "
    "# as %23 and / as %2F"
)


@dataclass(frozen=True, slots=True)
class Proxy:
    """A forward proxy of HTTP. `url` has no user name and password; `headers` have them."""

    url: URL
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@lru_cache(maxsize=256)
def parse_proxy(text: str) -> Proxy:
    """Parse the address of a proxy, with or without user name and password.

    Raises:
        ValueError: its message has no part of the text, which may contain a password.
    """
    try:
        parsed = URL(text) if not any(character <= " " for character in text) else URL()
        user, password, port = parsed.user or "", parsed.password or "", parsed.explicit_port
        _checked_host(parsed)
    except (ValueError, DestinationRefused):
        raise ValueError(PROXY_FORM) from None
    whole = parsed.raw_path in {"", "/"} and not parsed.raw_query_string and not parsed.raw_fragment
    if parsed.scheme not in {"http", "https"} or not port or not whole or ":" in user or len(text) > MAX_URL:
        raise ValueError(PROXY_FORM)
    pair = b64encode(f"{user}:{password}".encode()).decode()
    return Proxy(parsed.with_user(None).origin(), {"Proxy-Authorization": f"Basic {pair}"} if user or password else {})


@lru_cache(maxsize=256)
def check_proxy(text: str, private: PrivateHosts) -> Proxy:
    """Return the proxy of a channel. Its name is checked when it is resolved.

    Raises:
        Refused: with the code "bad_url" or "private_address".
    """
    try:
        proxy = parse_proxy(text)
    except ValueError as error:
        raise DestinationRefused("bad_url", str(error)) from None
    _check_reach(proxy.url, private)
    return proxy


def _parse_url(url: str) -> URL:
    if not isinstance(url, str) or not 0 < len(url) <= MAX_URL:
        raise DestinationRefused("bad_url", _("a URL has 1 to %(most)s characters", most=MAX_URL))
    if any(character <= " " or character in "\\\x7f" for character in url):
        raise DestinationRefused("bad_url", _("spaces, control characters and backslashes are not allowed"))
    try:
        # An ASCII URL is kept byte for byte (%2F of a signature must not change). Other URLs are encoded once, here.
        parsed = URL(url if url.isascii() else str(URL(url)), encoded=True)
        if parsed.raw_fragment:
            parsed = parsed.with_fragment(None)
        _port = parsed.port
    except (ValueError, UnicodeError):
        raise DestinationRefused("bad_url", _("cannot be parsed")) from None
    if parsed.raw_user is not None or parsed.raw_password is not None:
        raise DestinationRefused("bad_url", _("user names and passwords are not allowed"))
    return parsed


def _checked_host(parsed: URL) -> str:
    """Return the host in lower case without the root dot.

    Raises:
        Refused: it is neither a valid name nor a plain address.
    """
    raw = (parsed.raw_host or "").lower()
    host = raw.removesuffix(".")
    if _parse_address(raw) is not None:
        return raw
    numeric = NUMERIC_LABEL.fullmatch(host.rpartition(".")[2])
    if numeric or not HOST_NAME.fullmatch(host):
        raise DestinationRefused("bad_url", _("the host is neither a name nor a plainly written address"))
    return host


def _canonical_host(url: URL) -> str:
    """Return the host as `PrivateHosts` keeps it."""
    host = _checked_host(url)
    return str(_parse_address(host) or host)


def _parse_address(host: str) -> Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return None if "%" in host else address


#: Awaited before the first byte of each request of a task. It may wait, within the time limit of the request.
before_first_byte: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("before_first_byte", default=None)


# --- a request in flight ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Flight:
    """The state of one request in flight."""

    proxied: bool = False  #: goes through a proxy
    sent: bool = False  #: a byte of it may have been written
    reused: bool = False  #: sent on a connection that served before
    queued: bool = False  #: waits for one of the host's connections
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
        if self.queued:
            return NotSent("busy", "all connections to the host are in use")
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


def trace_flights() -> aiohttp.TraceConfig:
    """Return a trace of requests whose `trace_request_ctx` is their flight."""

    async def reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        context.trace_request_ctx.reused = True

    async def queued(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        context.trace_request_ctx.queued = True

    async def dequeued(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        context.trace_request_ctx.queued = False

    async def writing(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        if act := before_first_byte.get():
            await act()
        context.trace_request_ctx.sent = True  # called before the first byte goes to the socket

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(reused)
    trace.on_connection_queued_start.append(queued)
    trace.on_connection_queued_end.append(dequeued)
    trace.on_request_headers_sent.append(writing)
    return trace


# --- one message ------------------------------------------------------------------------------------------------------


def send_once(channel: Channel, message: Message, timeout: timedelta) -> Outcome:
    """Send and block until there is an outcome. The calling thread must not run an event loop.

    A defect of the channel counts as `Unknown`, as in delivery.
    """
    try:
        return asyncio.run(_send_and_close(channel, message, timeout))
    except TimeoutError:
        return Unknown("timeout", f"no end after {timeout.total_seconds():g} s")
    except Exception as error:
        log.exception("channel_call_failed", channel=channel.kind)
        return Unknown("channel_error", f"{type(error).__name__}: {error}"[:500])


async def _send_and_close(channel: Channel, message: Message, timeout: timedelta) -> Outcome:
    try:
        # The channel enforces the deadline itself. This timeout covers one that does not.
        return await asyncio.wait_for(channel.send(message, datetime.now(UTC) + timeout), timeout.total_seconds() + 1)
    finally:
        await close_shared_transport()
