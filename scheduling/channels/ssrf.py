"""Decide which URLs and addresses a request may use (protection against SSRF, OWASP A10).

Channel editors set URLs, so a URL must not reach hosts that only this machine can reach. Two checks are both needed:
`check_url` checks the text first, `is_public` checks every resolved address. The checked text is the text that is sent;
no second parser reads the URL. A proxy of a channel is checked in the same way, by `check_proxy`.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self

from django.conf import settings
from yarl import URL

from scheduling.channels.base import DestinationRefused
from scheduling.error_text import ErrorText as _

Address = IPv4Address | IPv6Address
MAX_URL = 2_048  # characters
MAX_QUERY = 8_192  # characters
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
            DestinationRefused: the host has addresses, and none may be used.
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
        DestinationRefused: with the code "bad_url", "scheme" or "private_address".
    """
    parsed = _parse_url(url)
    _checked_host(parsed)
    if not parsed.port:
        raise DestinationRefused("bad_url", _("the port is missing or 0"))
    if parsed.scheme != "https" and not (parsed.scheme == "http" and private.open(parsed)):
        raise DestinationRefused("scheme", _("only https is allowed here"))
    _check_reach(parsed, private)
    return parsed


def append_query(url: URL, query: str) -> URL:
    """Return the checked URL with an encoded query behind its own.

    Raises:
        DestinationRefused: the query is too long.
    """
    if len(query) > MAX_QUERY:
        raise DestinationRefused("bad_url", _("a query has at most %(most)s characters", most=MAX_QUERY))
    return URL(f"{url}{'&' if url.raw_query_string else '?'}{query}", encoded=True) if query else url


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
        DestinationRefused: with the code "bad_url" or "private_address".
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
        DestinationRefused: it is neither a valid name nor a plain address.
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
