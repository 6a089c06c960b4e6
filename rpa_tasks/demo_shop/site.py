"""Request handlers of the demo marketplace.

`answer` runs in many threads. It holds the market's lock during the work, but not during the delay of a slow page.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from rpa_tasks.demo_shop import pages
from rpa_tasks.demo_shop.market import Market, Message, Shop

PER_PAGE = 20
COOKIE = "demo_market_session"
SHOP_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
TEXT_LIMIT = 1000
SLOWEST = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    fields: Mapping[str, str]  #: of the URL and of the form
    session: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    body: str
    status: int = HTTPStatus.OK
    kind: str = "text/html; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


class Refused(Exception):
    """The request is invalid; the message has the reason."""


def answer(market: Market, request: Request) -> Answer:
    try:
        if tool := TOOLS.get((request.method, request.path)):
            with market.lock:
                return tool(market, request)
        time.sleep(market.slow)
        with market.lock:
            return _page(market, request)
    except Refused as refusal:
        return Answer(pages.bad(str(refusal)), HTTPStatus.BAD_REQUEST)


def _page(market: Market, request: Request) -> Answer:
    shop = market.logged_in(request.session)
    if market.captcha:
        if shop:
            shop.counts["turned_away"] += 1
        return Answer(pages.captcha(), HTTPStatus.TOO_MANY_REQUESTS)
    match request.method, request.path:
        case "GET", "/login":
            return Answer(pages.login())
        case "POST", "/login":
            return _log_in(market, request)
    if (page := PAGES.get((request.method, request.path))) is None:
        return Answer(pages.missing(), HTTPStatus.NOT_FOUND)
    return page(market, shop, request) if shop else _go("/login")


def _log_in(market: Market, request: Request) -> Answer:
    shop_id = request.fields.get("shop", "")
    if not SHOP_ID.fullmatch(shop_id):
        return Answer(pages.login("A shop id has letters, digits, “-”, “_” and “.”."), HTTPStatus.BAD_REQUEST)
    return _go("/orders", f"{COOKIE}={market.log_in(shop_id)}; Path=/; Max-Age=2592000; HttpOnly; SameSite=Lax")


def _log_out(market: Market, shop: Shop, request: Request) -> Answer:
    market.log_out(request.session)
    return _go("/login", f"{COOKIE}=; Path=/; Max-Age=0")


def _home(market: Market, shop: Shop, request: Request) -> Answer:
    return _go("/orders")


def _orders(market: Market, shop: Shop, request: Request) -> Answer:
    shop.counts["order_pages"] += 1
    last = max(1, -(-len(shop.orders) // PER_PAGE))
    page = min(max(1, int(_number(request, "page", 1))), last)
    shown = shop.newest_first()[(page - 1) * PER_PAGE : page * PER_PAGE]
    return Answer(pages.orders(shop, shown, page=page, pages=last))


def _messages(market: Market, shop: Shop, request: Request) -> Answer:
    shop.counts["message_pages"] += 1
    return Answer(pages.messages(shop))


def _reply(market: Market, shop: Shop, request: Request) -> Answer:
    """Store a reply. Idempotent: a token is accepted once."""
    message = _message(shop, request)
    text = request.fields.get("text", "").strip()
    if not 0 < len(text) <= TEXT_LIMIT:
        raise Refused(f"An answer has 1 to {TEXT_LIMIT} characters.")
    if not shop.reply(message, text, request.fields.get("token", "")):
        return Answer(pages.refused(shop), HTTPStatus.CONFLICT)
    return _go("/messages")


# --- what tests and demonstrations turn -------------------------------------------------------------------------------


def _effects(market: Market, request: Request) -> Answer:
    return _json(market.effects())


def _switch(market: Market, request: Request) -> Answer:
    """Set switches: `captcha=0|1`, `slow=<seconds per page>`, `expire_sessions=1` (with `shop=` only of that shop)."""
    if unknown := set(request.fields) - {"captcha", "slow", "expire_sessions", "shop"}:
        raise Refused(f"There is no switch {', '.join(sorted(unknown))}.")
    market.captcha = bool(_number(request, "captcha", market.captcha))
    market.slow = min(max(0.0, _number(request, "slow", market.slow)), SLOWEST)
    if _number(request, "expire_sessions", 0):
        market.expire_sessions(request.fields.get("shop", ""))
    return _json(market.switches())


def _ship(market: Market, request: Request) -> Answer:
    shipped = _shop(market, request).ship(
        request.fields.get("order", "").split(",") if "order" in request.fields else []
    )
    return _json({"shipped": [order.order_no for order in shipped]})


def _new_order(market: Market, request: Request) -> Answer:
    return _json({"order": _shop(market, request).add_order().order_no})


def _new_message(market: Market, request: Request) -> Answer:
    message = _shop(market, request).add_message(request.fields.get("text", "")[:TEXT_LIMIT])
    return _json({"message": message.message_id, "user": message.user_id})


# --- reading the request ----------------------------------------------------------------------------------------------


def _shop(market: Market, request: Request) -> Shop:
    shop_id = request.fields.get("shop", "")
    if not SHOP_ID.fullmatch(shop_id):
        raise Refused("Say which shop: ?shop=s1")
    return market.shop(shop_id)


def _message(shop: Shop, request: Request) -> Message:
    if (message := shop.messages.get(request.fields.get("message", ""))) is None:
        raise Refused("There is no such message.")
    return message


def _number(request: Request, name: str, otherwise: float) -> float:
    try:
        number = float(request.fields.get(name, otherwise))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise Refused(f"{name} must be a number.")
    return number


def _json(value: object) -> Answer:
    return Answer(json.dumps(value, ensure_ascii=False, indent=2) + "\n", kind="application/json")


def _go(path: str, cookie: str = "") -> Answer:
    headers = {"Location": path} | ({"Set-Cookie": cookie} if cookie else {})
    return Answer("", HTTPStatus.SEE_OTHER, headers=headers)


PAGES: dict[tuple[str, str], Callable[[Market, Shop, Request], Answer]] = {
    ("GET", "/"): _home,
    ("GET", "/orders"): _orders,
    ("GET", "/messages"): _messages,
    ("POST", "/messages/reply"): _reply,
    ("POST", "/logout"): _log_out,
}
TOOLS: dict[tuple[str, str], Callable[[Market, Request], Answer]] = {
    ("GET", "/effects.json"): _effects,
    ("GET", "/switch"): _switch,
    ("POST", "/switch"): _switch,
    ("POST", "/admin/ship"): _ship,
    ("POST", "/admin/order"): _new_order,
    ("POST", "/admin/message"): _new_message,
}
