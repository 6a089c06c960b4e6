"""HTML pages of the demo marketplace, without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from examples.demo_shop.market import MarketOrder, MarketShop, Message

STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")


def login_page(problem: str = "") -> str:
    warning = f'<p class="problem" role="alert">{escape(problem)}</p>' if problem else ""
    return _render_page(
        "Log in",
        f"""
        <main class="narrow card">
          <h1>Log in</h1>
          <p class="quiet">This is a demo: any shop id will do, and there is no password.</p>
          {warning}
          <form method="post" action="/login">
            <label for="shop">Shop</label>
            <input id="shop" name="shop" required maxlength="64" autofocus>
            <button>Log in</button>
          </form>
        </main>
        """,
    )


def orders_page(shop: MarketShop, shown: Sequence[MarketOrder], *, page: int, pages: int) -> str:
    rows = "".join(_order_row(order) for order in shown)
    newer = f'<a rel="prev" href="/orders?page={page - 1}">Newer</a>' if page > 1 else "<span></span>"
    older = f'<a rel="next" href="/orders?page={page + 1}">Older</a>' if page < pages else "<span></span>"
    return _render_page(
        "Orders",
        f"""
        <main>
          <h1>Orders</h1>
          <p class="quiet">{len(shop.orders)} orders, the latest change first</p>
          <div class="card">
            <table>
              <thead><tr><th>Order</th><th>Buyer</th><th>Product</th><th class="figure">Amount</th><th>Status</th>
              <th class="figure">Version</th></tr></thead>
              <tbody>{rows}</tbody>
            </table>
          </div>
          <nav class="pager">{newer}<span class="quiet">Page {page} of {pages}</span>{older}</nav>
        </main>
        """,
        shop,
    )


def messages_page(shop: MarketShop) -> str:
    return _render_page(
        "Messages",
        f"""
        <main>
          <h1>Messages</h1>
          <p class="quiet">{sum(not each.replies for each in shop.messages.values())} wait for an answer</p>
          {"".join(_message_item(each) for each in shop.unanswered_first())}
        </main>
        """,
        shop,
    )


def notice_page(title: str, text: str, shop: MarketShop | None = None, *, kind: str = "notice") -> str:
    body = f'<main class="narrow card" id="{kind}"><h1>{escape(title)}</h1><p>{escape(text)}</p></main>'
    return _render_page(title, body, shop)


def _order_row(order: MarketOrder) -> str:
    status = order.status.replace(" ", "-")
    return f"""
    <tr data-order="{escape(order.order_no)}" data-version="{order.version}" data-change="{order.change}"
        data-status="{escape(order.status)}" data-buyer="{escape(order.buyer)}" data-amount="{order.amount:.2f}">
      <td>{escape(order.order_no)}</td><td>{escape(order.buyer)}</td><td>{escape(order.product)}</td>
      <td class="figure">¥ {order.amount:,.2f}</td><td><span class="badge {status}">{escape(order.status)}</span></td>
      <td class="figure">{order.version}</td>
    </tr>"""


def _message_item(message: Message) -> str:
    answers_html = "".join(f'<p class="reply">{escape(reply)}</p>' for reply in message.replies)
    key = escape(message.message_id)
    form = f"""
      <form method="post" action="/messages/reply">
        <input type="hidden" name="message" value="{key}"><input type="hidden" name="token" value="{key}">
        <label for="text-{key}">Your answer</label>
        <textarea id="text-{key}" name="text" required maxlength="1000" rows="2"></textarea>
        <button>Reply</button>
      </form>"""
    return f"""
    <article class="card message" data-message="{key}" data-user="{escape(message.user_id)}"
             data-answered="{int(bool(message.replies))}">
      <h2>{escape(message.buyer)} <span class="quiet">{escape(message.user_id)}</span></h2>
      <p>{escape(message.text)}</p>{answers_html if message.replies else form}
    </article>"""


def _render_page(title: str, body: str, shop: MarketShop | None = None) -> str:
    menu = ""
    if shop:
        menu = f"""
        <nav><a href="/orders">Orders</a><a href="/messages">Messages</a></nav>
        <form method="post" action="/logout" data-shop="{escape(shop.shop_id)}">
          <span>{escape(shop.shop_id)}</span><button class="plain">Log out</button>
        </form>"""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · Demo market</title><style>{STYLE}</style></head>
<body><header><strong>Demo market</strong>{menu}</header>{body}</body></html>"""
