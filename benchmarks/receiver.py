"""HTTP receiver: answers every POST after a delay and counts requests.

`GET /` returns the count, the times of the first and last request, and the number of repeated ids. `GET /arrivals`
returns the time of the first byte by id.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from functools import partial

import httptools
import uvloop

#: The code is the one with which robots accept a message.
OK = b'HTTP/1.1 200 OK\r\ncontent-length: 13\r\ncontent-type: application/json\r\n\r\n{"errcode":0}'


class RequestTally:
    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.reset()

    def reset(self) -> None:
        self.arrivals: dict[str, float] = {}
        self.count, self.first_at, self.last_at = 0, 0.0, 0.0

    def take(self, delivery_key: str, arrived_at: float) -> None:
        self.last_at = time.time()
        self.first_at = self.first_at or self.last_at
        self.count += 1
        self.arrivals.setdefault(delivery_key, arrived_at)

    def summary(self) -> bytes:
        twice = self.count - len(self.arrivals)
        return as_json({"count": self.count, "first_at": self.first_at, "last_at": self.last_at, "twice": twice})


def as_json(document: object) -> bytes:
    body = json.dumps(document).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


class Connection(asyncio.Protocol):
    def __init__(self, tally: RequestTally) -> None:
        self.tally = tally
        self.parser = httptools.HttpRequestParser(self)
        self.delivery_key = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.arrived_at = time.time()

    def on_url(self, url: bytes) -> None:
        self.path = url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"webhook-id":
            self.delivery_key = value.decode()

    def on_message_complete(self) -> None:
        method = self.parser.get_method()
        if method == b"POST":
            self.tally.take(self.delivery_key, self.arrived_at)
            asyncio.get_running_loop().call_later(self.tally.delay, self.answer, OK)
        elif method == b"DELETE":
            self.tally.reset()
            self.answer(OK)
        else:
            self.answer(as_json(self.tally.arrivals) if self.path == b"/arrivals" else self.tally.summary())

    def answer(self, reply: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(reply)


async def serve_receiver(port: int, delay: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(Connection, RequestTally(delay)), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve_receiver(int(sys.argv[1]), float(sys.argv[2])))
