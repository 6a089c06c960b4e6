"""State of the demo marketplace: shops, orders, messages, sessions and counts of effects."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

BUYERS = ("林晓", "陈宇航", "Anna Weber", "王思远", "Liam O'Neil", "赵敏", "Sofía Ruiz", "黄子轩", "Noah Kim", "刘倩")
PRODUCTS = ("Desk lamp", "Tea set", "Rain jacket", "Bamboo shelf", "Phone stand", "Wool scarf", "Running belt")
STATUSES = ("to pay", "to ship", "to ship", "shipped", "delivered")
QUESTIONS = (
    "When will my order be shipped?",
    "Can I still change the colour to green?",
    "The invoice is missing, please send it.",
    "Is the larger size in stock again?",
    "Where is my parcel?",
)


@dataclass(frozen=True, slots=True)
class MarketOrder:
    order_no: str
    buyer: str
    product: str
    amount: Decimal
    status: str
    version: int
    change: int  #: increased by every change of an order of the shop; the list has the latest change first


@dataclass(slots=True)
class Message:
    message_id: str
    user_id: str
    buyer: str
    text: str
    replies: list[str] = field(default_factory=list)


@dataclass(slots=True)
class MarketShop:
    shop_id: str
    change: int
    orders: dict[str, MarketOrder] = field(default_factory=dict)
    messages: dict[str, Message] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)  #: of the accepted replies
    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  #: repeated replies by message

    def newest_first(self) -> list[MarketOrder]:
        return sorted(self.orders.values(), key=lambda order: -order.change)

    def unanswered_first(self) -> list[Message]:
        return sorted(self.messages.values(), key=lambda message: bool(message.replies))

    def add_order(self) -> MarketOrder:
        number = len(self.orders)
        self.change += 1
        order = MarketOrder(
            order_no=f"{self.shop_id}-{10001 + number}",
            buyer=BUYERS[number % len(BUYERS)],
            product=PRODUCTS[number % len(PRODUCTS)],
            amount=Decimal(1990 + number * 1730 % 24000) / 100,
            status=STATUSES[number % len(STATUSES)],
            version=1,
            change=self.change,
        )
        self.orders[order.order_no] = order
        return order

    def add_message(self, text: str = "") -> Message:
        number = len(self.messages)
        message = Message(
            message_id=f"{self.shop_id}-m{number + 1}",
            user_id=f"u{number + 1}",
            buyer=BUYERS[number % len(BUYERS)],
            text=text or QUESTIONS[number % len(QUESTIONS)],
        )
        self.messages[message.message_id] = message
        return message

    def ship(self, order_nos: list[str]) -> list[MarketOrder]:
        """Ship the listed orders that wait for it; without a list, all of them."""
        shipped = []
        for order in list(self.orders.values()):
            if order.status == "to ship" and (not order_nos or order.order_no in order_nos):
                self.change += 1
                order = replace(order, status="shipped", version=order.version + 1, change=self.change)
                self.orders[order.order_no] = order
                shipped.append(order)
        return shipped

    def reply(self, message: Message, text: str, token: str) -> bool:
        """Store the reply. Returns False if a reply with this token was accepted before."""
        if token and token in self.tokens:
            self.refused[message.message_id] += 1
            return False
        if token:
            self.tokens.add(token)
        message.replies.append(text)
        return True

    def effects(self) -> dict[str, Any]:
        counts = {name: self.counts[name] for name in ("logins", "order_pages", "message_pages", "turned_away")}
        return counts | {
            "orders": len(self.orders),
            "position": self.change,
            "replies": {each.message_id: len(each.replies) for each in self.messages.values()},
            "refused_replies": {each: self.refused[each] for each in self.messages},
        }


class Market:
    """All shops."""

    def __init__(self, *, orders: int = 45, messages: int = 5, first_change: int | None = None) -> None:
        """Create the market. A shop is created with this many orders and messages at its first login."""
        self.captcha = False  #: robots are rejected
        self.slow = 0.0  #: seconds per page
        self._orders, self._messages = orders, messages
        # After a restart the site must not look older than the data that was read from it before.
        self._first_change = int(time.time()) if first_change is None else first_change
        self._shops: dict[str, MarketShop] = {}
        self._sessions: dict[str, str] = {}

    def shop(self, shop_id: str) -> MarketShop:
        if shop_id not in self._shops:
            shop = self._shops[shop_id] = MarketShop(shop_id, self._first_change)
            for _ in range(self._orders):
                shop.add_order()
            for _ in range(self._messages):
                shop.add_message()
        return self._shops[shop_id]

    def log_in(self, shop_id: str) -> str:
        """Log in and return the session's secret."""
        self.shop(shop_id).counts["logins"] += 1
        session = secrets.token_urlsafe(16)
        self._sessions[session] = shop_id
        return session

    def log_out(self, session: str) -> None:
        self._sessions.pop(session, None)

    def logged_in(self, session: str) -> MarketShop | None:
        shop_id = self._sessions.get(session)
        return self._shops[shop_id] if shop_id else None

    def expire_sessions(self, shop_id: str = "") -> None:
        """End the sessions of one shop; without a shop, all."""
        self._sessions = {key: shop for key, shop in self._sessions.items() if shop_id and shop != shop_id}

    def switches(self) -> dict[str, Any]:
        return {"captcha": self.captcha, "slow": self.slow, "sessions": len(self._sessions)}

    def effects(self) -> dict[str, Any]:
        return {
            "switches": self.switches(),
            "shops": {shop_id: shop.effects() for shop_id, shop in self._shops.items()},
        }
