import asyncio
import itertools
import socket
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest

from config.local.processes import select_port
from scheduling.channels.base import DestinationRefused, NoAnswer, NotSent, Transient
from scheduling.channels.http_client import BODY_CAP, before_first_byte
from tests.scheduling.channels.http_receivers import (
    LONG,
    Receiver,
    always,
    end_time_limits,
    hang_up,
    never,
    post,
    read_request,
    reply,
    reset,
    time_out,
    transport,
)
from tests.support.tables import each_row

SHORT = timedelta(seconds=1)


async def post_to(receiver, scheme="", **options):
    async with receiver, transport("127.0.0.1") as out:
        return await post(out, f"{scheme}:{receiver.url.partition(':')[2]}" if scheme else receiver.url, **options)


async def test_post_returns_response_and_sends_request():
    async with Receiver(always(reply(201, b"made", {"X-B": "2"}))) as receiver, transport("127.0.0.1") as out:
        response = await post(out, receiver.url + "?sign=%2F")

    assert (response.status, response.body, response.headers["x-b"], response.complete) == (201, b"made", "2", True)
    (request,) = receiver.requests
    assert (request.method, request.target, request.body) == ("POST", "/hook?sign=%2F", b"{}")
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert request.headers["x-a"] == "1"
    assert request.headers["accept-encoding"] == "identity"


async def drip_forever(writer, piece=b"a", *, ends_at=20, pause=0.01):
    """Write pieces without an end. The time limits end at piece `ends_at`."""
    for number in itertools.count():
        if number == ends_at:
            end_time_limits()
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(pause)


async def drip_headers(request, writer):
    writer.write(b"HTTP/1.1 200 OK\r\nx-drip: ")
    await drip_forever(writer)


async def go_on(request, writer):
    await drip_forever(writer, b"HTTP/1.1 100 Continue\r\n\r\n", ends_at=1000, pause=0)


@each_row(
    "answer, reasons",
    [
        (drip_headers, {"timeout"}),
        (hang_up, {"disconnected"}),
        (always(b"220 smtp.example.com ESMTP\r\n\r\n"), {"garbled"}),
        (always(b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 100_000), {"garbled", "disconnected"}),
        (go_on, {"garbled", "timeout", "disconnected"}),
    ],
)
async def test_post_without_a_whole_reply_is_no_answer(answer, reasons):
    async with Receiver(answer) as receiver, transport("127.0.0.1") as out:
        with pytest.raises(NoAnswer) as failure:
            await post(out, receiver.url)

        await receiver.gone.wait()  # the connection is not kept
    assert failure.value.reason in reasons
    assert "127.0.0.1" not in str(failure.value)


@each_row("method, repeatable", [("GET", False), ("PUT", False), ("POST", False), ("POST", True)])
async def test_request_without_answer_on_a_new_connection_is_not_repeated(method, repeatable):
    """The library repeats some methods by itself."""
    async with Receiver(hang_up) as receiver, transport("127.0.0.1") as out:
        with pytest.raises(NoAnswer):
            await out.request(method, receiver.url, b"", {}, timeout=LONG, repeatable=repeatable)

    assert len(receiver.requests) == 1


async def test_post_dripping_body_is_incomplete():
    async def drip(request, writer):
        writer.write(b"HTTP/1.1 503 X\r\ncontent-length: 1000\r\nretry-after: 7\r\n\r\n")
        await drip_forever(writer)

    response = await post_to(Receiver(drip))

    assert (response.status, response.complete, response.headers["retry-after"]) == (503, False, "7")
    assert 0 < len(response.body) < 1000


async def test_post_reads_at_most_64_kilobytes():
    written = 0

    async def flood(request, writer):
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1073741824\r\n\r\n")
        while True:
            writer.write(b"a" * 65536)
            written += 65536
            await writer.drain()

    async with Receiver(flood) as receiver, transport("127.0.0.1") as out:
        response = await post(out, receiver.url)
        await receiver.gone.wait()

    assert (len(response.body), response.complete) == (BODY_CAP, False)
    assert written < 32 * 1024 * 1024
    assert len((await post_to(Receiver(always(reply(200, b"a" * BODY_CAP))))).body) == BODY_CAP


async def test_post_does_not_decompress_reply():
    response = await post_to(Receiver(always(reply(200, b"\x1f\x8bxx", {"content-encoding": "gzip"}))))

    assert response.body == b"\x1f\x8bxx"


async def test_post_reset_after_headers_is_a_response():
    def wait_until_read(writer):
        """Until the client's kernel has acknowledged all of it."""
        raw = writer.get_extra_info("socket")
        while raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[24:28] != b"\0\0\0\0":
            pass

    async def reset_connection(request, writer):
        writer.write(b"HTTP/1.1 400 X\r\ncontent-length: 1000\r\n\r\npart")
        await writer.drain()
        await asyncio.to_thread(wait_until_read, writer)
        reset(writer)

    response = await post_to(Receiver(reset_connection))

    assert (response.status, response.complete) == (400, False)


async def test_post_reset_after_first_byte_is_no_answer():
    async def shut(reader, writer):
        await reader.readexactly(1)
        reset(writer)

    with pytest.raises(NoAnswer):
        await post_to(Receiver(on_connect=shut))


@each_row("close", [False, True])
async def test_post_early_refusal_is_a_response(close):
    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply(413, b"too large", {"connection": "close"}))
        if close:  # with unread bytes in the socket this is a reset
            writer.close()
        await never()

    response = await post_to(Receiver(on_connect=refuse), body=b"a" * (64_000 if close else 1_000_000))

    assert (response.status, response.body) == (413, b"too large")


async def test_post_without_a_host_is_not_sent():
    def unknown(host, port):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async with transport("127.0.0.1", lookup=unknown) as out:
        for url, reason in (
            (f"http://127.0.0.1:{select_port()}/", "connect"),
            ("https://no-such-name.example.com/secret-path", "dns"),
        ):
            with pytest.raises(NotSent) as failure:
                await post(out, url)
            assert failure.value.reason == reason
            assert "secret-path" not in str(failure.value)


async def test_post_without_trusted_tls_is_not_sent(certificate):
    async def bad_request(reader, writer):
        await reader.read(1)
        writer.write(reply(400, b"plain HTTP request expected"))

    for receiver in (Receiver(context=certificate[0]), Receiver(on_connect=bad_request)):
        with pytest.raises(NotSent) as failure:
            await post_to(receiver, "https")
        assert failure.value.reason == "tls"
        assert receiver.requests == []


async def test_post_hanging_handshake_is_not_sent():
    # The kernel accepts into the backlog; no process speaks TLS.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with transport("127.0.0.1") as out:
            with pytest.raises(NotSent) as failure:
                await post(out, f"https://127.0.0.1:{silent.getsockname()[1]}/", SHORT)

    assert failure.value.reason == "connect_timeout"


async def test_post_connects_to_the_checked_address(certificate):
    server, client = certificate
    names = []
    server.sni_callback = lambda connection, name, context: names.append(name)

    async with (
        Receiver(context=server) as receiver,
        transport("touch.test", context=client, lookup=lambda *_: [_found("127.0.0.1")]) as out,
    ):
        response = await post(out, f"https://touch.test:{receiver.port}/")

    assert response.status == 200
    assert names == ["touch.test"]
    assert receiver.requests[0].headers["host"] == f"touch.test:{receiver.port}"


@each_row(
    "addresses",
    [
        ["192.0.0.1", "127.0.0.1", "127.0.0.1"],
        *([each] * 2 for each in ("10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1", "fe80::1%lo")),
    ],
)
async def test_post_rebinding_name_is_refused(addresses):
    answers = iter(addresses)
    async with Receiver() as receiver, transport(lookup=lambda *_: [_found(next(answers))]) as out:
        for _ in range(2):
            with pytest.raises(DestinationRefused) as failure:
                await post(out, f"https://rebind.example.com:{receiver.port}/")
            assert failure.value.reason == "private_address"

        assert receiver.connections == 0


async def test_post_opened_network_needs_https_for_names(certificate):
    server, client = certificate
    async with (
        Receiver(context=server) as receiver,
        transport("127.0.0.0/8", context=client, lookup=lambda *_: [_found("127.0.0.1")]) as out,
    ):
        assert (await post(out, f"https://touch.test:{receiver.port}/")).status == 200
        with pytest.raises(DestinationRefused) as failure:
            await post(out, f"http://touch.test:{receiver.port}/")

    assert failure.value.reason == "scheme"


async def test_post_ignores_environment_proxies(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{select_port()}")
    async with Receiver() as receiver, transport("127.0.0.1") as out:
        assert (await post(out, receiver.url)).status == 200


async def test_post_shares_connections_if_repeatable_only_and_keeps_no_cookies():
    async with Receiver(always(reply(200, b"", {"set-cookie": "a=b"}))) as receiver, transport("127.0.0.1") as out:
        for _ in range(3):
            await post(out, receiver.url, repeatable=True)
        assert receiver.connections == 1
        for _ in range(3):
            await post(out, receiver.url, repeatable=False)

        assert receiver.connections == 4
    assert receiver.requests[-1].headers["connection"] == "close"
    assert not [request for request in receiver.requests if "cookie" in request.headers]


async def test_post_retries_on_dead_idle_connection():
    """The server closes each connection after one reply, and takes a second request on it without an answer."""

    async def once(reader, writer):
        receiver.requests.append(await read_request(reader))
        writer.write(reply())
        if receiver.connections == 1:
            receiver.requests.append(await read_request(reader))
            reset(writer)

    async with Receiver(on_connect=once) as receiver, transport("127.0.0.1") as out:
        first = await post(out, receiver.url, repeatable=True)
        second = await post(out, receiver.url, repeatable=True)

        assert (first.status, second.status) == (200, 200)
        assert receiver.connections == 2


async def test_post_retry_without_connection_is_no_answer():
    async def once(reader, writer):
        await read_request(reader)
        writer.write(reply())
        await read_request(reader)
        receiver._server.close()
        reset(writer)

    async with Receiver(on_connect=once) as receiver, transport("127.0.0.1") as out:
        await post(out, receiver.url, repeatable=True)
        with pytest.raises(NoAnswer):
            await post(out, receiver.url, repeatable=True)


async def test_post_retry_to_refused_address_is_no_answer(certificate):
    server, client = certificate
    answers = iter(["127.0.0.1", "10.0.0.1"])

    async def once(reader, writer):
        await read_request(reader)
        writer.write(reply())
        receiver.requests.append(await read_request(reader))
        reset(writer)

    async with (
        Receiver(on_connect=once, context=server) as receiver,
        transport("127.0.0.0/8", context=client, lookup=lambda *_: [_found(next(answers))]) as out,
    ):
        url = f"https://touch.test:{receiver.port}/"
        await post(out, url, repeatable=True)
        with pytest.raises(NoAnswer):
            await post(out, url, repeatable=True)

    assert len(receiver.requests) == 1


async def test_post_busy_host_is_not_sent(monkeypatch):
    monkeypatch.setattr("scheduling.channels.http_client.PER_HOST", 1)
    arrived = asyncio.Event()

    async def hold(request, writer):
        arrived.set()
        await never()

    async with Receiver(hold) as receiver, transport("127.0.0.1") as out:
        first = asyncio.create_task(post(out, receiver.url))
        await arrived.wait()
        with pytest.raises(NotSent) as failure:
            await post(out, receiver.url, SHORT)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

    assert failure.value.reason == "busy"


async def test_post_that_waits_for_its_slot_is_not_sent_and_blames_no_receiver():
    async def wait():
        await time_out()

    async with Receiver() as receiver, transport("127.0.0.1") as out:
        with acting_before_first_byte(wait), pytest.raises(NotSent) as failure:
            await post(out, receiver.url)

        assert receiver.requests == []
    assert failure.value.reason == "busy"
    assert failure.value.outcome() == Transient("busy", failure.value.detail, asked=False)


@each_row("repeatable", [False, True])
async def test_post_whose_connection_closes_while_it_waits_for_its_slot_is_not_sent(repeatable):
    """A repeatable one goes on another connection, if it had an idle one before."""
    close, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader, writer):
        if repeatable:
            receiver.requests.append(await read_request(reader))
            writer.write(reply())
        if receiver.connections == 1:
            await close.wait()
            reset(writer)
            closed.set()
        await never()

    async def wait():
        close.set()
        await closed.wait()
        await asyncio.sleep(0.05)  # until the loop has read the reset

    async with Receiver(on_connect=serve) as receiver, transport("127.0.0.1") as out:
        if repeatable:
            await post(out, receiver.url, repeatable=True)
        with acting_before_first_byte(wait):
            if repeatable:
                assert (await post(out, receiver.url, repeatable=True)).status == 200
            else:
                with pytest.raises(NotSent) as failure:
                    await post(out, receiver.url)
                assert failure.value.reason == "connect"

        assert len(receiver.requests) == (2 if repeatable else 0)


@contextmanager
def acting_before_first_byte(act):
    outer = before_first_byte.set(act)
    try:
        yield
    finally:
        before_first_byte.reset(outer)


async def test_post_slow_lookup_does_not_block_others():
    release = threading.Event()

    def lookup(host, port):
        if host.startswith("slow"):
            release.wait(10)
        return [_found("127.0.0.1")]

    async with Receiver() as receiver, transport("slow.test", "fast.test", lookup=lookup) as out:
        slow = asyncio.create_task(post(out, f"http://slow.test:{receiver.port}/", SHORT))
        assert (await post(out, f"http://fast.test:{receiver.port}/")).status == 200
        with pytest.raises(NotSent) as failure:
            await slow
        release.set()

    assert failure.value.reason == "connect_timeout"


async def test_post_cancelled_closes_its_connection():
    arrived = asyncio.Event()

    async def hang(request, writer):
        arrived.set()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
        while not writer.transport.is_closing():
            writer.write(b"")
            await asyncio.sleep(0)

    async with Receiver(hang) as receiver, transport("127.0.0.1") as out:
        task = asyncio.create_task(post(out, receiver.url, repeatable=True))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def _found(address):
    return (socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
