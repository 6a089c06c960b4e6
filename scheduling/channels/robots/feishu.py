"""Send to Feishu (飞书) and Lark group robots. Source: open.feishu.cn/document/client-docs/bot-v3/add-custom-bot.

The limits are 100 messages a minute and 5 a second. At full and half hours the vendor applies lower limits (code
11232).
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar

from scheduling.channels.answers import Refusal
from scheduling.channels.base import Message, Quota
from scheduling.channels.markup import Card, Mentions, read_card
from scheduling.channels.robots.base import CARD, TEXT, Robot, clip_text, encode_json

LIMIT = 20_000  # bytes of the whole request; the vendor documents 20 KB
MINUTE = timedelta(minutes=1)
RATE_LIMITED = Refusal("发送过于频繁：每个机器人每分钟最多 100 条、每秒最多 5 条，整点半点更易被限流", MINUTE)


class Feishu(Robot):
    """A Feishu or Lark robot.

    Target: `url`, and `secret` if the robot checks signatures. Markdown is sent as a card.
    """

    kind: ClassVar[str] = "feishu"
    quotas: ClassVar[tuple[Quota, ...]] = (Quota(100, MINUTE), Quota(5, timedelta(seconds=1)))
    hosts: ClassVar[frozenset[str]] = frozenset({"open.feishu.cn", "open.larksuite.com"})
    path: ClassVar[str] = "/open-apis/bot/"
    code_fields: ClassVar[tuple[str, ...]] = ("code", "StatusCode")  # refusals carry StatusCode 0 beside `code`
    text_fields: ClassVar[tuple[str, ...]] = ("msg", "StatusMessage")
    refusals: ClassVar[Mapping[int, Refusal]] = {
        9499: Refusal("请求格式错误"),
        11232: RATE_LIMITED,
        11233: RATE_LIMITED,
        19001: Refusal("机器人地址无效", gone=True),
        19002: Refusal("请求参数错误：缺少 msg_type 或内容"),
        19007: Refusal("机器人未启用"),
        19021: Refusal("签名校验失败，或时间戳与当前时间相差超过 1 小时"),
        19022: Refusal("发送方 IP 不在白名单"),
        19024: Refusal("消息不含机器人设置的关键词"),
        19036: Refusal("机器人已被停用或删除", gone=True),
        99991400: RATE_LIMITED,
    }

    def request(self, message: Message, now: datetime) -> tuple[str, dict[str, Any]]:
        secret = str(message.target.get("secret") or "")
        signature = signature_fields(secret, now) if secret else {}
        body, mentions = self.split_body(message)
        card = read_card(message.subject, body, fewest_buttons=0) if self.format == CARD else None
        build = partial(self._document, card, self._write_mentions(mentions))
        clipped = clip_text(card.text if card else body, LIMIT, lambda text: len(encode_json(signature | build(text))))
        return str(message.target["url"]), signature | build(clipped)

    def _write_mentions(self, mentions: Mentions) -> str:
        """Return the marks of members. The vendor knows user ids (`ou_…`) and “all”, no phone numbers."""
        mark = '<at user_id="{}"></at>' if self.format == TEXT else "<at id={}></at>"
        names = [*(["all"] if mentions.everyone else []), *mentions.users]
        return "".join(f" {mark.format(name)}" for name in names)

    def _document(self, card: Card | None, mentions: str, text: str) -> dict[str, Any]:
        if self.format == TEXT:
            return {"msg_type": "text", "content": {"text": text + mentions}}
        found: dict[str, Any] = {"config": {"wide_screen_mode": True}}
        found["elements"] = [{"tag": "markdown", "content": text + mentions}]
        if card:
            found["header"] = {"title": {"tag": "plain_text", "content": card.title}, "template": "blue"}
            found["elements"] += [{"tag": "action", "actions": _build_buttons(card)}] if card.buttons else []
        return {"msg_type": "interactive", "card": found}

    def refusal(self, code: int, said: str) -> Refusal | None:
        # 9499 means a bad request, unless its text contains "too many request".
        if code == 9499 and "too many" in said.lower():
            return RATE_LIMITED
        return super().refusal(code, said)


def _build_buttons(card: Card) -> list[dict[str, Any]]:
    return [
        {"tag": "button", "text": {"tag": "plain_text", "content": label}, "url": url, "type": "primary"}
        for label, url in card.buttons
    ]


def signature_fields(secret: str, now: datetime) -> dict[str, Any]:
    """Return `timestamp` in seconds and `sign`. Timestamp and secret are the *key*; the signed text is empty."""
    timestamp = str(int(now.timestamp()))
    digest = hmac.digest(f"{timestamp}\n{secret}".encode(), b"", "sha256")
    return {"timestamp": timestamp, "sign": base64.b64encode(digest).decode()}
