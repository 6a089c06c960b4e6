"""Lead a browser to its proxy, and prove that it goes there."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from django.conf import settings

from rpa_tasks.browsers import devtools
from rpa_tasks.browsers.browser_errors import PROXY_FAILED, NoBrowser
from rpa_tasks.browsers.launch_settings import LaunchSettings
from scheduling.channels.base import DestinationRefused
from scheduling.channels.http_client import PrivateHosts

PROOF_TIMEOUT = 15.0  #: seconds for the echo page through the proxy
DIRECT_TIMEOUT = 5.0  #: seconds for the echo page without the proxy
ADDRESS = re.compile(r"[0-9A-Fa-f:.]{3,45}")


@dataclass(frozen=True, slots=True)
class Forwarding:
    """A socket for the forwarder of one browser, and its order, which has the password."""

    listener: socket.socket
    port: int
    flags: tuple[str, ...]
    order: dict[str, Any] = field(repr=False)


def open_forwarding(launch: LaunchSettings) -> Forwarding | None:
    """Open the socket to which the browser connects; None without a proxy. Raises `NoBrowser`."""
    if not launch.proxy_url:
        return None
    secrets = {"username": launch.username, "password": launch.password}
    try:
        made = forward_to(launch.proxy_url, {"kind": launch.proxy_kind, **secrets})
    except OSError as error:
        raise NoBrowser(PROXY_FAILED, f"Proxy {launch.proxy_url}: {error}") from error
    return replace(
        made,
        flags=(
            f"--proxy-server={launch.proxy_kind}://127.0.0.1:{made.port}",
            "--proxy-bypass-list=<-loopback>",  # otherwise pages of this machine bypass the proxy
            "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
            "--disable-quic",
        ),
    )


def forward_to(url: str, order: dict[str, Any]) -> Forwarding:
    """Open a socket of the loopback for a forwarder to this host and port. Raises `OSError`."""
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 0
    found = [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    try:
        usable = PrivateHosts.from_settings().usable(host, port, found)
    except DestinationRefused as error:
        raise OSError(f"{error}. AFTERTOUCH_ALLOWED_PRIVATE_HOSTS of this node can allow it.") from error
    listener = socket.create_server(("127.0.0.1", 0))
    own = int(listener.getsockname()[1])
    return Forwarding(listener=listener, port=own, flags=(), order=order | {"addresses": usable, "port": port})


def prove_proxy(port: int) -> str:
    """Return the address that the echo page sees of this browser.

    Raises: `NoBrowser` if the page is not shown, or sees the address of this node.
    """
    url = settings.AFTERTOUCH_RPA_ECHO_URL
    try:
        status, text = devtools.read_page(port, url, timeout=PROOF_TIMEOUT)
    except devtools.NoAnswer as error:
        raise NoBrowser(PROXY_FAILED, f"The echo page {url} was not shown through the proxy: {error}") from error
    seen = _find_address(text)
    if status != 200 or not seen:
        raise NoBrowser(PROXY_FAILED, f"The echo page {url} gave no address through the proxy: {status} {text[:300]}")
    if seen == _direct_address(url):
        raise NoBrowser(PROXY_FAILED, f"The proxy is not used: the echo page {url} sees this node's address {seen}.")
    return seen


def _direct_address(url: str) -> str:
    """Return the address that the echo page sees of this node, or "" if the page is only reachable by proxy."""
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=DIRECT_TIMEOUT) as answer:
            return _find_address(answer.read(10_000).decode(errors="replace"))
    except (OSError, HTTPException, ValueError):
        return ""


def _find_address(text: str) -> str:
    """Return the first IP address in the text, or ""."""
    for word in ADDRESS.findall(text[:10_000]):
        try:
            return str(ip_address(word.strip(".:") if word.count(":") < 2 else word))
        except ValueError:
            continue
    return ""
