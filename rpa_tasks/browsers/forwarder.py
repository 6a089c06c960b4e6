"""Forward the connections of a browser to a proxy that asks for a password, or a debug port to a browser elsewhere.

Usage: `python -I -S forwarder.py DESCRIPTOR [COMMAND…]`, of a listening socket, with an order as JSON on standard
input: {"kind" (http, socks5 or plain), "addresses", "port", "username", "password"}. The process becomes the command,
if there is one, and the forwarder a child of it. Chromium takes no password on its command line, and a flow that
attaches to the debug port may not answer the question for one. Only the forwarder has the password: in its memory,
which no other process of its user can read. It ends with the leader of its session, the browser.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import json
import os
import socket
import sys
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_DUMPABLE = 4
CONNECT_TIMEOUT = 10.0  #: seconds for connecting to the proxy, and for its answer to the password
LONGEST_HEAD = 262_144  #: bytes of a request line with headers
CHUNK = 65_536
REFUSED = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


async def _serve_forever(listener: socket.socket, order: dict[str, Any]) -> None:
    over = asyncio.Event()
    leader = os.getsid(0)
    if leader != os.getpid():
        asyncio.get_running_loop().add_reader(os.pidfd_open(leader), over.set)
        if os.getppid() != leader:
            return

    async def forward(reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(OSError, EOFError, asyncio.LimitOverrunError, TimeoutError, ValueError):
            await _forward_connection(reader, writer, order)
        writer.close()

    async with await asyncio.start_server(forward, sock=listener, limit=LONGEST_HEAD):
        await over.wait()


async def _forward_connection(reader: StreamReader, writer: StreamWriter, order: dict[str, Any]) -> None:
    try:
        up, upstream = await _connect_proxy(order)
    except (OSError, TimeoutError):
        if order["kind"] == "http":
            writer.write(REFUSED)
        raise
    try:
        if order["kind"] == "socks5":
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await _greet_socks(reader, writer, up, upstream, order)
        if order["kind"] == "http":
            send = _send_requests(reader, upstream, order)
        elif order["kind"] == "plain":
            send = _send_without_own_origin(reader, upstream, writer.get_extra_info("sockname")[1])
        else:
            send = _copy_stream(reader, upstream)
        tasks = [asyncio.create_task(send), asyncio.create_task(_copy_stream(up, writer))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        upstream.close()


async def _connect_proxy(order: dict[str, Any]) -> tuple[StreamReader, StreamWriter]:
    error: OSError = OSError("no address")
    for address in order["addresses"]:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                return await asyncio.open_connection(address, order["port"])
        except OSError as failed:
            error = failed
    raise error


async def _greet_socks(
    reader: StreamReader, writer: StreamWriter, up: StreamReader, upstream: StreamWriter, order: dict[str, Any]
) -> None:
    """Answer the browser's greeting without a password, and the proxy's with one (RFC 1928, RFC 1929)."""
    _version, methods = await reader.readexactly(2)
    await reader.readexactly(methods)
    names = [order["username"].encode(), order["password"].encode()]
    method = 2 if names[0] else 0
    upstream.write(bytes((5, 1, method)))
    if await up.readexactly(2) != bytes((5, method)):
        raise ValueError("the proxy accepts no such password")
    if method == 2:
        upstream.write(b"\x01" + b"".join(bytes((len(each),)) + each for each in names))
        if (await up.readexactly(2))[1] != 0:
            raise ValueError("the proxy refuses the password")
    writer.write(b"\x05\x00")


async def _send_requests(reader: StreamReader, upstream: StreamWriter, order: dict[str, Any]) -> None:
    """Add the password to each request of the connection. What follows a CONNECT is copied."""
    word = base64.b64encode(f"{order['username']}:{order['password']}".encode())
    added = b"\r\nProxy-Authorization: Basic " + word if order["username"] else b""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        names = {line.partition(b":")[0].strip().lower(): line.partition(b":")[2].strip() for line in lines}
        kept = [line for line in lines if not line.lower().startswith(b"proxy-authorization:")]
        upstream.write(b"\r\n".join([first, *kept]) + added + b"\r\n\r\n")
        if first.startswith(b"CONNECT ") or b"transfer-encoding" in names:
            await _copy_stream(reader, upstream)
            return
        left = int(names.get(b"content-length", b"0"))
        while left > 0 and (chunk := await reader.read(min(CHUNK, left))):
            left -= len(chunk)
            upstream.write(chunk)
            await upstream.drain()


async def _send_without_own_origin(reader: StreamReader, upstream: StreamWriter, port: int) -> None:
    """Send the first request without the origin that names the forwarder itself. The browser would refuse it.

    A connection to its WebSocket has no second request. Origins of pages stay, so it refuses them.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    own = (b"origin: http://127.0.0.1:%d" % port, b"origin: http://localhost:%d" % port)
    upstream.write(b"\r\n".join(line for line in head.split(b"\r\n") if line.lower() not in own))
    await _copy_stream(reader, upstream)


async def _copy_stream(reader: StreamReader, writer: StreamWriter) -> None:
    while chunk := await reader.read(CHUNK):
        writer.write(chunk)
        await writer.drain()


def main(descriptor: str, *command: str) -> None:
    if command and not command[0].startswith("--user-data-dir="):
        if os.fork():
            os.close(int(descriptor))
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvp(command[0], command)  # noqa: S606  (no shell is meant)
        # Again, because the words of a browser would make it one.
        os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, descriptor])  # noqa: S606
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    order = json.load(sys.stdin)
    if order["kind"] == "plain":  # no password; the pool reads its environment and its sockets
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    sys.stdin.close()
    asyncio.run(_serve_forever(socket.socket(fileno=int(descriptor)), order))


if __name__ == "__main__":
    main(*sys.argv[1:])
