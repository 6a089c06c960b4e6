"""A client without nginx before it: endless headers, half requests, bodies without a key. Over real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from config.http_protocol import BODY_WITHIN, HEAD_LIMIT, HEAD_WITHIN
from tests.scheduling.api.serving import Client, serving

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(scope="module")
def address(django_db_setup: None, django_db_blocker: Any) -> Iterator[str]:
    with django_db_blocker.unblock(), serving(DJANGO_SETTINGS_MODULE="config.settings.test") as address:
        yield address


def connect_to(address: str) -> socket.socket:
    split = urlsplit(address)
    return socket.create_connection((split.hostname or "", split.port or 0), timeout=BODY_WITHIN + 60)


def read_rest(client: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    found = b""
    try:
        while part := client.recv(65_536):
            found += part
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("part", [b"x" * 8192, b"x\r\nX-Long: " + b"y" * 4000], ids=["one header", "many headers"])
def test_endless_request_head_is_refused(address: str, part: bytes) -> None:
    sent, most = 0, 64 * HEAD_LIMIT  # buffers of the kernel take some of it
    with connect_to(address) as client:
        client.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        with suppress(OSError):
            while sent < most:
                client.sendall(part)
                sent += len(part)
    assert sent < most


@pytest.mark.parametrize(
    ("begun", "within"),
    [
        (b"", HEAD_WITHIN),
        (b"GET /health/live HTTP/1.1\r\nHost: local", HEAD_WITHIN),
        (b"POST /admin/login/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf", BODY_WITHIN),
    ],
    ids=["nothing", "half a head", "half a body"],
)
def test_incomplete_request_is_closed_after_timeout(address: str, begun: bytes, within: float) -> None:
    began = time.monotonic()
    with connect_to(address) as client:
        client.sendall(begun)
        read_rest(client)
    assert time.monotonic() - began >= within - 1  # a slow client gets its time


def test_slow_request_head_is_closed_after_timeout(address: str) -> None:
    """The limit is for the whole head: a part of it does not start the time again."""
    sent, most = 0, int(4 * HEAD_WITHIN)
    with connect_to(address) as client, suppress(OSError):
        client.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        while sent < most:
            client.sendall(b"x")
            sent += 1
            time.sleep(1)
    assert sent < most


def test_request_head_limit_applies_to_each_request(address: str) -> None:
    client = HTTPConnection(urlsplit(address).netloc, timeout=60)
    for _ in range(5):
        client.request("GET", "/health/live", headers={"X-Long": "z" * 40_000})
        answer = client.getresponse()
        assert (answer.status, answer.read()) == (200, b'{"status": "ok"}')
    client.close()


@pytest.mark.parametrize("given", [b"", b"Authorization: Bearer guess\r\n"], ids=["no key", "unknown key"])
@pytest.mark.parametrize(
    "length", [b"Content-Length: 900000\r\n", b"Transfer-Encoding: chunked\r\n"], ids=["length", "chunked"]
)
def test_request_body_without_key_is_refused_unread(address: str, given: bytes, length: bytes) -> None:
    with connect_to(address) as client:
        client.sendall(b"POST /api/v1/events HTTP/1.1\r\nHost: localhost\r\n" + given + length + b"\r\n")
        answer = read_rest(client)  # though not a byte of the body was sent
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"WWW-Authenticate" in answer or b"www-authenticate" in answer


def test_request_body_with_key_is_read(address: str) -> None:
    from scheduling.operations.commands import create_api_key

    client = Client(address, str(create_api_key("shop", ["customers"])))
    assert client("PUT", "/customers/ann", {"name": "Ann"}).status_code == 200
