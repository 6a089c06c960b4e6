"""HTTP server of the demo marketplace. Captcha and slowness concern its pages, not the tools of tests and demos."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web

from examples.demo_shop import pages
from examples.demo_shop.market import Market, MarketShop

HOST = "127.0.0.1"
FORM_LIMIT = 65_536
PER_PAGE = 20
COOKIE = "demo_market_session"
SHOP_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
TEXT_LIMIT = 1000
MAX_DELAY_SECONDS = 60.0
MARKET = web.AppKey("market", Market)
SHOP = web.RequestKey("shop", MarketShop)
FIELDS = web.RequestKey("fields", dict[str, str])  #: of URL and form

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class InvalidRequest(Exception):
    """The request is invalid; the message has the reason."""


def build_site(market: Market) -> web.Application:
    site = web.Application(middlewares=[answer_request], client_max_size=FORM_LIMIT)
    site[MARKET] = market
    site.add_routes([
        web.get("/login", show_login),
        web.post("/login", log_in),
        web.post("/logout", log_out),
        web.get("/", show_home),
        web.get("/orders", show_orders),
        web.get("/messages", show_messages),
        web.post("/messages/reply", store_reply),
        *(web.route(method, path, tool) for (method, path), tool in TOOLS.items()),
    ])  # fmt: skip
    return site


@web.middleware
async def answer_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Read the fields and the shop of the session. Show the page of an error."""
    market = request.app[MARKET]
    request[FIELDS] = {name: str(value) for name, value in {**request.query, **await request.post()}.items()}
    try:
        if (request.method, request.path) not in TOOLS:
            await asyncio.sleep(market.slow)
            shop = market.logged_in(request.cookies.get(COOKIE, ""))
            if market.captcha:
                if shop:
                    shop.counts["turned_away"] += 1
                text = "Too much happened from your address. Come back later."
                page = pages.notice_page("Are you a robot?", text, kind="captcha")
                return _html(page, HTTPStatus.TOO_MANY_REQUESTS)
            if shop:
                request[SHOP] = shop
            elif request.match_info.http_exception is None and request.path != "/login":
                raise web.HTTPSeeOther("/login")
        answer = await handler(request)
    except InvalidRequest as refusal:
        answer = _html(pages.notice_page("That was not understood", str(refusal)), HTTPStatus.BAD_REQUEST)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
        answer = _html(pages.notice_page("Not found", "There is nothing here."), HTTPStatus.NOT_FOUND)
    answer.headers["Cache-Control"] = "no-store"
    return answer


async def show_login(request: web.Request) -> web.Response:
    return _html(pages.login_page())


async def log_in(request: web.Request) -> web.Response:
    shop_id = request[FIELDS].get("shop", "")
    if not SHOP_ID.fullmatch(shop_id):
        return _html(pages.login_page("A shop id has letters, digits, “-”, “_” and “.”."), HTTPStatus.BAD_REQUEST)
    answer = web.HTTPSeeOther("/orders")
    session = request.app[MARKET].log_in(shop_id)
    answer.set_cookie(COOKIE, session, max_age=2_592_000, httponly=True, samesite="Lax")
    raise answer


async def log_out(request: web.Request) -> web.Response:
    request.app[MARKET].log_out(request.cookies[COOKIE])
    answer = web.HTTPSeeOther("/login")
    answer.del_cookie(COOKIE)
    raise answer


async def show_home(request: web.Request) -> web.Response:
    raise web.HTTPSeeOther("/orders")


async def show_orders(request: web.Request) -> web.Response:
    shop = request[SHOP]
    shop.counts["order_pages"] += 1
    last = max(1, -(-len(shop.orders) // PER_PAGE))
    page = min(max(1, int(_parse_number(request, "page", 1))), last)
    shown = shop.newest_first()[(page - 1) * PER_PAGE : page * PER_PAGE]
    return _html(pages.orders_page(shop, shown, page=page, pages=last))


async def show_messages(request: web.Request) -> web.Response:
    shop = request[SHOP]
    shop.counts["message_pages"] += 1
    return _html(pages.messages_page(shop))


async def store_reply(request: web.Request) -> web.Response:
    """Store a reply. Idempotent: a token is accepted once."""
    shop = request[SHOP]
    fields = request[FIELDS]
    message = shop.messages.get(fields.get("message", ""))
    if message is None:
        raise InvalidRequest("There is no such message.")
    text = fields.get("text", "").strip()
    if not 0 < len(text) <= TEXT_LIMIT:
        raise InvalidRequest(f"An answer has 1 to {TEXT_LIMIT} characters.")
    if not shop.reply(message, text, fields.get("token", "")):
        text = "This very answer was accepted before. Nothing was sent again."
        return _html(pages.notice_page("Answered already", text, shop), HTTPStatus.CONFLICT)
    raise web.HTTPSeeOther("/messages")


# --- tools of tests and demos -----------------------------------------------------------------------------------------


async def show_effects(request: web.Request) -> web.Response:
    return web.json_response(request.app[MARKET].effects())


async def set_switches(request: web.Request) -> web.Response:
    """Set switches: `captcha=0|1`, `slow=<seconds per page>`, `expire_sessions=1` (with `shop=` only of that shop)."""
    market, fields = request.app[MARKET], request[FIELDS]
    if unknown := set(fields) - {"captcha", "slow", "expire_sessions", "shop"}:
        raise InvalidRequest(f"There is no switch {', '.join(sorted(unknown))}.")
    market.captcha = bool(_parse_number(request, "captcha", market.captcha))
    market.slow = min(max(0.0, _parse_number(request, "slow", market.slow)), MAX_DELAY_SECONDS)
    if _parse_number(request, "expire_sessions", 0):
        market.expire_sessions(fields.get("shop", ""))
    return web.json_response(market.switches())


async def ship_orders(request: web.Request) -> web.Response:
    fields = request[FIELDS]
    shipped = _find_shop(request).ship(fields["order"].split(",") if "order" in fields else [])
    return web.json_response({"shipped": [order.order_no for order in shipped]})


async def create_order(request: web.Request) -> web.Response:
    return web.json_response({"order": _find_shop(request).add_order().order_no})


async def create_message(request: web.Request) -> web.Response:
    message = _find_shop(request).add_message(request[FIELDS].get("text", "")[:TEXT_LIMIT])
    return web.json_response({"message": message.message_id, "user": message.user_id})


TOOLS: dict[tuple[str, str], Handler] = {
    ("GET", "/effects.json"): show_effects,
    ("GET", "/switch"): set_switches,
    ("POST", "/switch"): set_switches,
    ("POST", "/admin/ship"): ship_orders,
    ("POST", "/admin/order"): create_order,
    ("POST", "/admin/message"): create_message,
}


def _html(body: str, status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(text=body, status=status, content_type="text/html")


def _find_shop(request: web.Request) -> MarketShop:
    shop_id = request[FIELDS].get("shop", "")
    if not SHOP_ID.fullmatch(shop_id):
        raise InvalidRequest("The parameter shop is missing: ?shop=s1")
    return request.app[MARKET].shop(shop_id)


def _parse_number(request: web.Request, name: str, otherwise: float) -> float:
    try:
        number = float(request[FIELDS].get(name, otherwise))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} must be a number.")
    return number
