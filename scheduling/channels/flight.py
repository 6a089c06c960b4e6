"""Follow one HTTP request: what of it was sent, and what its failure means."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace

import aiohttp

from scheduling.channels.base import NoAnswer, NotSent

#: Awaited before the first byte of each request of a task. It may wait, within the time limit of the request.
before_first_byte: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("before_first_byte", default=None)


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
