"""A proxy that asks for a password: `python proxy_process.py http|socks5 USER PASSWORD SOURCE`.

It prints its port, then one line for each accepted connection, `TARGET`, or `refused`. It connects from SOURCE.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from urllib.parse import urlsplit

KIND, USER, PASSWORD, SOURCE = sys.argv[1:]
Streams = tuple[StreamReader, StreamWriter]


def note(line: str) -> None:
    print(line, flush=True)


async def connect(host: str, port: int) -> Streams:
    found = await asyncio.open_connection(host, port, local_addr=(SOURCE, 0))
    note(f"{host}:{port}")
    return found


async def copy(reader: StreamReader, writer: StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await reader.read(65_536):
            writer.write(chunk)
            await writer.drain()
    with suppress(OSError):
        writer.write_eof()


async def exchange(reader: StreamReader, writer: StreamWriter, up: Streams) -> None:
    await asyncio.gather(copy(reader, up[1]), copy(up[0], writer))
    up[1].close()


async def serve_http(reader: StreamReader, writer: StreamWriter) -> None:
    """One plain request is answered on each connection; each has to bring the password."""
    wanted = b"Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    if b"Proxy-Authorization: " + wanted not in lines:
        note("refused")
        writer.write(b'HTTP/1.1 407 No\r\nProxy-Authenticate: Basic realm="x"\r\nContent-Length: 9\r\n\r\n127.0.0.9')
        return
    verb, target, version = first.decode().split()
    if verb == "CONNECT":
        host, _, port = target.rpartition(":")
        up = await connect(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    else:
        address = urlsplit(target)
        up = await connect(address.hostname or "", address.port or 80)
        kept = [each for each in lines if not each.lower().startswith((b"proxy-", b"connection:"))]
        path = f"{address.path or '/'}{'?' if address.query else ''}{address.query}"
        up[1].write(b"\r\n".join([f"{verb} {path} {version}".encode(), *kept, b"Connection: close"]) + b"\r\n\r\n")
    await exchange(reader, writer, up)


async def serve_socks(reader: StreamReader, writer: StreamWriter) -> None:
    _, count = await reader.readexactly(2)
    if 2 not in await reader.readexactly(count):
        note("refused")
        writer.write(b"\x05\xff")
        return
    writer.write(b"\x05\x02")
    await reader.readexactly(1)
    given = [(await reader.readexactly((await reader.readexactly(1))[0])).decode() for _ in range(2)]
    if given != [USER, PASSWORD]:
        note("refused")
        writer.write(b"\x01\x01")
        return
    writer.write(b"\x01\x00")
    kind = (await reader.readexactly(4))[3]
    if kind == 1:
        host = ".".join(map(str, await reader.readexactly(4)))
    else:
        host = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
    up = await connect(host, int.from_bytes(await reader.readexactly(2)))
    writer.write(b"\x05\x00\x00\x01" + bytes(6))
    await exchange(reader, writer, up)


async def serve(reader: StreamReader, writer: StreamWriter) -> None:
    with suppress(OSError, asyncio.IncompleteReadError):
        await (serve_http if KIND == "http" else serve_socks)(reader, writer)
        await writer.drain()
    writer.close()


async def main() -> None:
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        note(str(server.sockets[0].getsockname()[1]))
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
