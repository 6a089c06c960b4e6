"""Send to DingTalk (钉钉) group robots. Source: open.dingtalk.com/document/orgapp/custom-robots-send-group-messages.

DingTalk blocks a robot for ten minutes after more than 20 messages in a minute.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar
from urllib.parse import quote

from scheduling.channels.answers import Refusal
from scheduling.channels.base import Message, Quota
from scheduling.channels.markup import Card, Mentions, read_card
from scheduling.channels.robots.base import CARD, MARKDOWN, Robot, clip_text, encode_json

LIMIT = 20_000  # bytes of the whole request
TITLE_LENGTH = 32  # characters; shown in the notification of a markdown message
THROTTLED_FOR = timedelta(minutes=10)
WRONG_CLOCK = Refusal("签名时间戳无效，请校准服务器时间", timedelta(minutes=1))


class DingTalk(Robot):
    """A DingTalk robot. Target: `url` with its access_token, and `secret` (SEC…) if the robot checks signatures."""

    kind: ClassVar[str] = "dingtalk"
    quotas: ClassVar[tuple[Quota, ...]] = (Quota(20, timedelta(minutes=1)),)
    hosts: ClassVar[frozenset[str]] = frozenset({"oapi.dingtalk.com"})
    path: ClassVar[str] = "/robot/send"
    code_fields: ClassVar[tuple[str, ...]] = ("errcode",)
    text_fields: ClassVar[tuple[str, ...]] = ("errmsg",)
    refusals: ClassVar[Mapping[int, Refusal]] = {
        -1: Refusal("钉钉系统繁忙", timedelta(seconds=10)),
        88: Refusal("鉴权异常：access_token 为空或无效"),
        40035: Refusal("缺少参数或不是合法的 JSON"),
        43004: Refusal("请求头 Content-Type 不正确"),
        90030: Refusal("机器人调用次数已达上限", timedelta(hours=1)),
        130101: Refusal("发送过于频繁：每个机器人每分钟最多 20 条，已被限流 10 分钟", THROTTLED_FOR),
        300001: Refusal("access_token 不存在", gone=True),
        300005: Refusal("access_token 不存在", gone=True),
        310000: Refusal("安全设置校验未通过：请检查关键词、加签密钥与 IP 白名单"),
        400013: Refusal("群已被解散", gone=True),
        400101: Refusal("access_token 不存在", gone=True),
        400102: Refusal("机器人已停用，请联系管理员启用"),
        400105: Refusal("不支持的消息类型"),
        400106: Refusal("机器人不存在，请确认机器人是否在群中", gone=True),
        410100: Refusal("发送过于频繁：每个机器人每分钟最多 20 条，已被限流 10 分钟", THROTTLED_FOR),
        430101: Refusal("消息含有不安全的外链"),
        430102: Refusal("消息含有不合适的文本"),
        430103: Refusal("消息含有不合适的图片"),
        430104: Refusal("消息含有不合适的内容"),
    }

    def request(self, message: Message, now: datetime) -> tuple[str, dict[str, Any]]:
        url, secret = str(message.target["url"]), str(message.target.get("secret") or "")
        body, mentions = self.split_body(message)
        if self.format == CARD:
            card = read_card(message.subject, body)
            body = card.text
            build = partial(_build_action_card, card)
        else:
            title = " ".join((message.subject or body).split())[:TITLE_LENGTH] or "…"
            build = partial(self._build_text, title, mentions)
        clipped = clip_text(body, LIMIT, lambda text: len(encode_json(build(text))))
        return (sign_url(url, secret, now) if secret else url), build(clipped)

    def _build_text(self, title: str, mentions: Mentions, text: str) -> dict[str, Any]:
        # The vendor notifies only those that the text names too.
        text += "".join(f" @{name}" for name in (*mentions.phones, *mentions.users))
        at = {"atMobiles": list(mentions.phones), "atUserIds": list(mentions.users), "isAtAll": mentions.everyone}
        markdown = self.format == MARKDOWN
        content = {"title": title, "text": text} if markdown else {"content": text}
        document: dict[str, Any] = {"msgtype": self.format, self.format: content}
        return document | ({"at": at} if any(at.values()) else {})

    def refusal(self, code: int, said: str) -> Refusal | None:
        # One code covers four causes; only a wrong clock can resolve without an operator.
        if code == 310000 and "timestamp" in said.lower():
            return WRONG_CLOCK
        return super().refusal(code, said)


def _build_action_card(card: Card, text: str) -> dict[str, Any]:
    """Return an actionCard, which notifies no member."""
    buttons = [{"title": label, "actionURL": url} for label, url in card.buttons]
    return {"msgtype": "actionCard", "actionCard": {"title": card.title, "text": text, "btns": buttons}}


def sign_url(url: str, secret: str, now: datetime) -> str:
    """Return the URL with `timestamp` (ms) and `sign`, percent-encoded exactly once: %252F is a wrong signature."""
    timestamp = str(int(now.timestamp() * 1000))
    digest = hmac.digest(secret.encode(), f"{timestamp}\n{secret}".encode(), "sha256")
    sign = quote(base64.b64encode(digest), safe="")
    base, _, _ = url.partition("#")
    return f"{base}{'&' if '?' in base else '?'}timestamp={timestamp}&sign={sign}"
