"""HTTP server of the demo marketplace, on the loopback address only."""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from examples.demo_shop.market import Market
from examples.demo_shop.site import COOKIE, SiteRequest, SiteResponse, handle_request

HOST = "127.0.0.1"
FORM_LIMIT = 65_536


class Server(ThreadingHTTPServer):
    """Serves until `shutdown`. Port 0 selects a free one."""

    daemon_threads = True

    def __init__(self, market: Market, port: int = 0) -> None:
        super().__init__((HOST, port), _Handler)
        self.market = market

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    server: Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            length = -1
        if not 0 <= length <= FORM_LIMIT:
            self.close_connection = True
            self._send(SiteResponse("", HTTPStatus.REQUEST_ENTITY_TOO_LARGE))
            return
        form = self.rfile.read(length).decode(errors="replace")
        address = urlsplit(self.path)
        fields = dict(parse_qsl(address.query, keep_blank_values=True)) | dict(parse_qsl(form, keep_blank_values=True))
        self._send(handle_request(self.server.market, SiteRequest(self.command, address.path, fields, self._session())))

    def _session(self) -> str:
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return ""
        return cookies[COOKIE].value if COOKIE in cookies else ""

    def _send(self, given: SiteResponse) -> None:
        body = given.body.encode()
        self.send_response(given.status)
        self.send_header("Content-Type", given.kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in given.headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):  # the browser left the page
            self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Log nothing, so that the terminal keeps showing the address."""
