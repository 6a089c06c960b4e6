"""A client without nginx before it: endless headers, half requests, bodies without a key. Over real sockets."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from select import select
from urllib.parse import urlsplit

import pytest

from config.http_protocol import DISCARD_LIMIT, HEAD_LIMIT
from tests.scheduling.api.serving import serving
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
HEAD_WITHIN, BODY_WITHIN = 5.0, 10.0  #: seconds, here


@pytest.fixture(scope="module")
def server(django_db_setup, django_db_blocker):
    limits = {"TEST_HEAD_WITHIN": str(HEAD_WITHIN), "TEST_BODY_WITHIN": str(BODY_WITHIN)}
    with django_db_blocker.unblock(), serving(**limits) as address:
        yield address


def connect_to(address):
    split = urlsplit(address)
    return socket.create_connection((split.hostname or "", split.port or 0), timeout=BODY_WITHIN + WAIT_LIMIT)


def read_rest(client):
    """What comes until the server closes the connection."""
    found = b""
    try:
        while part := client.recv(65_536):
            found += part
    except ConnectionResetError:
        pass
    return found


@each_row("part", [b"x" * 8192, b"x\r\nX-Long: " + b"y" * 4000])  # one header, and many
def test_endless_request_head_is_refused(server, part):
    sent, most = 0, 64 * HEAD_LIMIT  # buffers of the kernel take some of it
    with connect_to(server) as client:
        client.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        with suppress(OSError):
            while sent < most:
                client.sendall(part)
                sent += len(part)
    assert sent < most


INCOMPLETE = {
    "nothing": (b"", HEAD_WITHIN),
    "half a head": (b"GET /health/live HTTP/1.1\r\nHost: local", HEAD_WITHIN),
    "half a body": (b"POST /admin/login/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf", BODY_WITHIN),
}


def test_incomplete_request_is_closed_after_timeout(server):
    """Each of them, at the same time: every one takes its whole limit."""

    def await_close(begun):
        began = time.monotonic()
        with connect_to(server) as client:
            client.sendall(begun)
            read_rest(client)
        return time.monotonic() - began

    def send_slowly():
        """Return whether it is closed. A part of a head does not start the time again."""
        with connect_to(server) as client, suppress(OSError):
            client.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
            for _ in range(int(12 * HEAD_WITHIN)):
                client.sendall(b"x")
                time.sleep(1)
            return False
        return True

    with ThreadPoolExecutor(len(INCOMPLETE) + 1) as pool:
        slow_head = pool.submit(send_slowly)
        took = {name: pool.submit(await_close, begun) for name, (begun, _) in INCOMPLETE.items()}
        for name, (_, within) in INCOMPLETE.items():
            assert took[name].result() >= within - 1, f"{name}: a slow client gets its time"
        assert slow_head.result()


def test_request_head_limit_applies_to_each_request(server):
    client = HTTPConnection(urlsplit(server).netloc, timeout=WAIT_LIMIT)
    for _ in range(5):
        client.request("GET", "/health/live", headers={"X-Long": "z" * 40_000})
        answer = client.getresponse()
        assert (answer.status, answer.read()) == (200, b'{"status": "ok"}')
    client.close()


@each_row("given", [b"", b"Authorization: Bearer guess\r\n"])
@each_row("length", [b"Content-Length: 900000\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_request_body_without_key_is_refused_unread(server, given, length):
    with connect_to(server) as client:
        client.sendall(b"POST /api/v1/events HTTP/1.1\r\nHost: localhost\r\n" + given + length + b"\r\n")
        answer = read_rest(client)  # though not a byte of the body was sent
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"WWW-Authenticate" in answer or b"www-authenticate" in answer


@each_row("path", [b"/api/v1/events", b"/hooks/sms/x", b"/admin/login/"])
def test_client_that_sends_a_refused_body_reads_the_response(server, path):
    part, parts = b"x" * 65_536, 40
    with connect_to(server) as client:
        head = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        client.sendall(head % (len(part) * parts) + part)
        assert select([client], [], [], WAIT_LIMIT)[0]  # the server refused the body already
        for _ in range(parts - 1):
            client.sendall(part)
        answer = b""
        while received := client.recv(65_536):  # a reset would raise here
            answer += received
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.endswith((b"\r\n0\r\n\r\n", b"}"))


def test_endless_refused_body_is_closed(server):
    sent, most = 0, 4 * DISCARD_LIMIT
    with connect_to(server) as client, suppress(OSError):
        client.sendall(b"POST /admin/login/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n")
        while sent < most:
            sent += client.send(b"x" * 65_536)
    assert sent < most
