"""Send to WeCom (企业微信) group robots. Source: developer.work.weixin.qq.com/document/path/91770, codes path/90313."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, ClassVar

from scheduling.channels.answers import Refusal
from scheduling.channels.base import Message, Quota
from scheduling.channels.markup import Card, read_card
from scheduling.channels.robots.base import CARD, MARKDOWN, Robot, clip_text, utf8_size

LIMITS = {"text": 2_048, "markdown": 4_096}  # bytes of `content` in UTF-8
CARD_TITLE, CARD_TEXT, CARD_LABEL = 26, 112, 13  # characters that the vendor recommends at most
CARD_BUTTONS = 3
MINUTE = timedelta(minutes=1)


class WeCom(Robot):
    """A WeCom robot. The key in the URL is the only secret. WeCom does not sign, so a target's `secret` is ignored."""

    kind: ClassVar[str] = "wecom"
    quotas: ClassVar[tuple[Quota, ...]] = (Quota(20, MINUTE),)
    hosts: ClassVar[frozenset[str]] = frozenset({"qyapi.weixin.qq.com"})
    path: ClassVar[str] = "/cgi-bin/webhook/send"
    code_fields: ClassVar[tuple[str, ...]] = ("errcode",)
    text_fields: ClassVar[tuple[str, ...]] = ("errmsg",)
    refusals: ClassVar[Mapping[int, Refusal]] = {
        -1: Refusal("企业微信系统繁忙", timedelta(seconds=10)),
        40008: Refusal("不合法的消息类型"),
        40058: Refusal("消息参数不合法，可能内容超长或格式错误"),
        44004: Refusal("消息内容为空"),
        45002: Refusal("消息内容超过大小限制"),
        45009: Refusal("发送过于频繁：每个机器人每分钟最多 20 条", MINUTE),
        45033: Refusal("接口并发调用超过限制", timedelta(seconds=10)),
        93000: Refusal("机器人地址不合法，或机器人已被移出群", gone=True),
        93004: Refusal("机器人已被停用，请在群里启用"),
        93008: Refusal("机器人不在群里", gone=True),
    }

    def request(self, message: Message, now: datetime) -> tuple[str, dict[str, Any]]:
        body, mentions = self.split_body(message)
        url = str(message.target["url"])
        if self.format == CARD:
            return url, {
                "msgtype": "template_card",
                "template_card": _build_notice_card(read_card(message.subject, body)),
            }
        if self.format == MARKDOWN:  # it mentions user ids only
            suffix = "".join(f"<@{user}>" for user in mentions.users)
            content = clip_text(body, LIMITS[MARKDOWN] - utf8_size(suffix)) + suffix
            return url, {"msgtype": "markdown", "markdown": {"content": content}}
        text: dict[str, Any] = {"content": clip_text(body, LIMITS[self.format])}
        if users := [*mentions.users, *(["@all"] if mentions.everyone else [])]:
            text["mentioned_list"] = users
        if mentions.phones:
            text["mentioned_mobile_list"] = list(mentions.phones)
        return url, {"msgtype": "text", "text": text}


def _build_notice_card(card: Card) -> dict[str, Any]:
    """Return a card of the type text_notice. The first button is also the address of the whole card."""
    return {
        "card_type": "text_notice",
        "main_title": {"title": clip_text(card.title, CARD_TITLE, len)},
        "sub_title_text": clip_text(card.text, CARD_TEXT, len),
        "jump_list": [
            {"type": 1, "title": clip_text(label, CARD_LABEL, len), "url": url}
            for label, url in card.buttons[:CARD_BUTTONS]
        ],
        "card_action": {"type": 1, "url": card.buttons[0][1]},
    }
