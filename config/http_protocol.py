"""uvicorn's HTTP protocol with limits, so that an incomplete request holds neither memory nor a connection.

nginx has such limits too. These apply where clients reach uvicorn directly. httptools stores a header of any length.
uvicorn's keep-alive timeout does not cover a connection without a request.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_LIMIT = 65_536  #: bytes of a request line with all headers; one further socket read may be held
HEAD_WITHIN = 15.0  #: seconds for the head, from the connect or the first byte
BODY_WITHIN = 60.0  #: seconds for the body; the API itself waits 30
DISCARD_LIMIT = 16 * 1024 * 1024  #: bytes of a refused body that are read and dropped
DISCARD_WITHIN = 5.0  #: seconds for them
IDLE, HEAD, BODY, REFUSED = range(4)


class DiscardingTransport:
    """The transport of one response. `close` first lets the client finish the body that the response refused.

    A close with unread data resets the connection. The client then loses the response (RFC 9112, section 9.6).
    """

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write

    def is_closing(self) -> bool:
        return self._protocol.transport.is_closing()

    def close(self) -> None:
        self._protocol.close_after_body()


class BoundedHttpProtocol(HttpToolsProtocol):
    """Select with `uvicorn --http config.http_protocol:BoundedHttpProtocol`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._part = IDLE
        self._received = 0  #: bytes of the incomplete request
        self._end: asyncio.TimerHandle | None = None
        self._end_of = IDLE

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_time(HEAD, HEAD_WITHIN)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lift_limit()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._part == REFUSED:
            self._received += len(data)
            if self._received > DISCARD_LIMIT:
                self.transport.close()
            return
        super().data_received(data)
        if self._part == IDLE:
            self._received = 0
            self._lift_limit()
        elif self._part == HEAD:
            self._received += len(data)
            if self._received > HEAD_LIMIT:
                self._refuse()
            else:
                self._limit_time(HEAD, HEAD_WITHIN)
        else:
            self._received = 0
            self._limit_time(BODY, BODY_WITHIN)

    def handle_websocket_upgrade(self) -> None:
        self._part = IDLE
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        self._part = HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._part = BODY
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = DiscardingTransport(self)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        self._part = IDLE
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._part == REFUSED:
            self.server_state.total_requests += 1
            self.flow.resume_reading()
        else:
            super().on_response_complete()

    def close_after_body(self) -> None:
        """Close the connection. Send the end of the response first if the client still sends a body."""
        if self._part != BODY or self.transport.is_closing():
            self.transport.close()
            return
        self._part, self._received = REFUSED, 0
        self.transport.write_eof()
        self._limit_time(REFUSED, DISCARD_WITHIN)

    def _limit_time(self, part: int, seconds: float) -> None:
        if self._end is None or self._end_of != part:
            self._lift_limit()
            self._end_of = part
            self._end = self.loop.call_later(seconds, self.transport.close)

    def _lift_limit(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def _refuse(self) -> None:
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        )
        self.transport.close()
        self._lift_limit()
