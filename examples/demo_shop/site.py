"""HTTP server of the demo marketplace.

`handle_request` runs in many threads. It holds the market's lock during the work, but not during the delay of a slow
page.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from examples.demo_shop import pages
from examples.demo_shop.market import Market, MarketShop

HOST = "127.0.0.1"
FORM_LIMIT = 65_536
PER_PAGE = 20
COOKIE = "demo_market_session"
SHOP_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
TEXT_LIMIT = 1000
MAX_DELAY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class SiteRequest:
    method: str
    path: str
    fields: Mapping[str, str]  #: of the URL and of the form
    session: str = ""


@dataclass(frozen=True, slots=True)
class SiteResponse:
    body: str
    status: int = HTTPStatus.OK
    kind: str = "text/html; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


class InvalidRequest(Exception):
    """The request is invalid; the message has the reason."""


def handle_request(market: Market, request: SiteRequest) -> SiteResponse:
    try:
        if tool := TOOLS.get((request.method, request.path)):
            with market.lock:
                return tool(market, request)
        time.sleep(market.slow)
        with market.lock:
            return _serve_page(market, request)
    except InvalidRequest as refusal:
        return SiteResponse(pages.bad_request_page(str(refusal)), HTTPStatus.BAD_REQUEST)


def _serve_page(market: Market, request: SiteRequest) -> SiteResponse:
    shop = market.logged_in(request.session)
    if market.captcha:
        if shop:
            shop.counts["turned_away"] += 1
        return SiteResponse(pages.captcha_page(), HTTPStatus.TOO_MANY_REQUESTS)
    match request.method, request.path:
        case "GET", "/login":
            return SiteResponse(pages.login_page())
        case "POST", "/login":
            return _handle_login(market, request)
    if (page := PAGES.get((request.method, request.path))) is None:
        return SiteResponse(pages.missing_page(), HTTPStatus.NOT_FOUND)
    return page(market, shop, request) if shop else _redirect("/login")


def _handle_login(market: Market, request: SiteRequest) -> SiteResponse:
    shop_id = request.fields.get("shop", "")
    if not SHOP_ID.fullmatch(shop_id):
        return SiteResponse(
            pages.login_page("A shop id has letters, digits, “-”, “_” and “.”."), HTTPStatus.BAD_REQUEST
        )
    return _redirect("/orders", f"{COOKIE}={market.log_in(shop_id)}; Path=/; Max-Age=2592000; HttpOnly; SameSite=Lax")


def _handle_logout(market: Market, shop: MarketShop, request: SiteRequest) -> SiteResponse:
    market.log_out(request.session)
    return _redirect("/login", f"{COOKIE}=; Path=/; Max-Age=0")


def _show_home(market: Market, shop: MarketShop, request: SiteRequest) -> SiteResponse:
    return _redirect("/orders")


def _show_orders(market: Market, shop: MarketShop, request: SiteRequest) -> SiteResponse:
    shop.counts["order_pages"] += 1
    last = max(1, -(-len(shop.orders) // PER_PAGE))
    page = min(max(1, int(_parse_number(request, "page", 1))), last)
    shown = shop.newest_first()[(page - 1) * PER_PAGE : page * PER_PAGE]
    return SiteResponse(pages.orders_page(shop, shown, page=page, pages=last))


def _show_messages(market: Market, shop: MarketShop, request: SiteRequest) -> SiteResponse:
    shop.counts["message_pages"] += 1
    return SiteResponse(pages.messages_page(shop))


def _handle_reply(market: Market, shop: MarketShop, request: SiteRequest) -> SiteResponse:
    """Store a reply. Idempotent: a token is accepted once."""
    message = shop.messages.get(request.fields.get("message", ""))
    if message is None:
        raise InvalidRequest("There is no such message.")
    text = request.fields.get("text", "").strip()
    if not 0 < len(text) <= TEXT_LIMIT:
        raise InvalidRequest(f"An answer has 1 to {TEXT_LIMIT} characters.")
    if not shop.reply(message, text, request.fields.get("token", "")):
        return SiteResponse(pages.refused_page(shop), HTTPStatus.CONFLICT)
    return _redirect("/messages")


# --- what tests and demonstrations turn -------------------------------------------------------------------------------


def _show_effects(market: Market, request: SiteRequest) -> SiteResponse:
    return _json_response(market.effects())


def _set_switches(market: Market, request: SiteRequest) -> SiteResponse:
    """Set switches: `captcha=0|1`, `slow=<seconds per page>`, `expire_sessions=1` (with `shop=` only of that shop)."""
    if unknown := set(request.fields) - {"captcha", "slow", "expire_sessions", "shop"}:
        raise InvalidRequest(f"There is no switch {', '.join(sorted(unknown))}.")
    market.captcha = bool(_parse_number(request, "captcha", market.captcha))
    market.slow = min(max(0.0, _parse_number(request, "slow", market.slow)), MAX_DELAY_SECONDS)
    if _parse_number(request, "expire_sessions", 0):
        market.expire_sessions(request.fields.get("shop", ""))
    return _json_response(market.switches())


def _ship_orders(market: Market, request: SiteRequest) -> SiteResponse:
    shipped = _find_shop(market, request).ship(
        request.fields.get("order", "").split(",") if "order" in request.fields else []
    )
    return _json_response({"shipped": [order.order_no for order in shipped]})


def _create_order(market: Market, request: SiteRequest) -> SiteResponse:
    return _json_response({"order": _find_shop(market, request).add_order().order_no})


def _create_message(market: Market, request: SiteRequest) -> SiteResponse:
    message = _find_shop(market, request).add_message(request.fields.get("text", "")[:TEXT_LIMIT])
    return _json_response({"message": message.message_id, "user": message.user_id})


# --- reading the request ----------------------------------------------------------------------------------------------


def _find_shop(market: Market, request: SiteRequest) -> MarketShop:
    shop_id = request.fields.get("shop", "")
    if not SHOP_ID.fullmatch(shop_id):
        raise InvalidRequest("The parameter shop is missing: ?shop=s1")
    return market.shop(shop_id)


def _parse_number(request: SiteRequest, name: str, otherwise: float) -> float:
    try:
        number = float(request.fields.get(name, otherwise))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} must be a number.")
    return number


def _json_response(value: object) -> SiteResponse:
    return SiteResponse(json.dumps(value, ensure_ascii=False, indent=2) + "\n", kind="application/json")


def _redirect(path: str, cookie: str = "") -> SiteResponse:
    headers = {"Location": path} | ({"Set-Cookie": cookie} if cookie else {})
    return SiteResponse("", HTTPStatus.SEE_OTHER, headers=headers)


PAGES: dict[tuple[str, str], Callable[[Market, MarketShop, SiteRequest], SiteResponse]] = {
    ("GET", "/"): _show_home,
    ("GET", "/orders"): _show_orders,
    ("GET", "/messages"): _show_messages,
    ("POST", "/messages/reply"): _handle_reply,
    ("POST", "/logout"): _handle_logout,
}
TOOLS: dict[tuple[str, str], Callable[[Market, SiteRequest], SiteResponse]] = {
    ("GET", "/effects.json"): _show_effects,
    ("GET", "/switch"): _set_switches,
    ("POST", "/switch"): _set_switches,
    ("POST", "/admin/ship"): _ship_orders,
    ("POST", "/admin/order"): _create_order,
    ("POST", "/admin/message"): _create_message,
}


class Server(ThreadingHTTPServer):
    """HTTP server on the loopback address only. Serves until `shutdown`. Port 0 selects a free one."""

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
