"""Send to the group robots of WeCom (企业微信), DingTalk (钉钉) and Feishu (飞书), and clip texts to their limits.

The vendors answer most requests with HTTP 200, so the body decides. Code 0 is delivered, a listed code follows the
vendor's table, an unreadable body is unknown. A robot has no idempotency key: a repeat posts twice. Every request
therefore uses its own connection, and a request with a lost answer is never sent again.

Sources: developer.work.weixin.qq.com/document/path/91770, codes path/90313;
open.dingtalk.com/document/orgapp/custom-robots-send-group-messages;
open.feishu.cn/document/client-docs/bot-v3/add-custom-bot.

DingTalk blocks a robot for ten minutes after more than 20 messages in a minute. Feishu takes 100 messages a minute and
5 a second. At full and half hours it applies lower limits (code 11232).
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar
from urllib.parse import quote

from wcwidth import grapheme_boundary_before

from scheduling.channels import options
from scheduling.channels.answers import CodedAnswers, Refusal
from scheduling.channels.base import Channel, InvalidSetting, Message, Outcome, Quota
from scheduling.channels.http_client import JSON_HEADERS, encode_json, shared_transport
from scheduling.channels.markup import (
    Card,
    Mentions,
    escape_markdown,
    escape_mentions,
    escape_tags,
    read_card,
    split_mentions,
)
from scheduling.channels.ssrf import PrivateHosts, check_url
from scheduling.error_text import ErrorText as _

TEXT, MARKDOWN, CARD = "text", "markdown", "card"


class Robot(CodedAnswers, Channel):
    """Base of the robots. Target: `url`, and `secret` if the robot signs.

    Config: `proxy`, `format` (text, markdown or card). With `mentions` a last line such as “@all @zhangsan” notifies
    members.
    """

    needs_target = True
    target_fields = frozenset({"url", "secret"})
    secret_fields = target_fields | {"proxy"}

    hosts: ClassVar[frozenset[str]]  #: the vendor's hosts; others only if allowed as private hosts
    path: ClassVar[str]  #: prefix of a robot's URL path at the vendor

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        super().__init__(config, timeout)
        options.check_known_keys(config, {"format", "mentions", "proxy"})
        self._proxy = options.read_proxy(config)
        self.format = options.read_choice(config, "format", (TEXT, MARKDOWN, CARD))
        self._mentions = options.read_flag(config, "mentions")

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        """Check that `url` is an address of this vendor's robots."""
        options.check_known_keys(target, {"url", "secret"})
        options.read_text(target, "secret")
        private = PrivateHosts.from_settings()
        url = check_url(options.read_url(target), private)
        host = (url.raw_host or "").lower().removesuffix(".")
        if host in cls.hosts:
            if url.scheme != "https" or not url.raw_path.startswith(cls.path):
                raise InvalidSetting(
                    "url", _("a robot's address must start with %(start)s", start=f"https://{host}{cls.path}")
                )
        elif not private.open(url):
            raise InvalidSetting("url", _("the host must be %(host)s", host=", ".join(sorted(cls.hosts))))

    def target_key(self, message: Message) -> str:
        return options.opaque_key(self.kind, str(message.target.get("url", "")))

    def escape(self, value: str) -> str:
        value = escape_tags(value) if self.format == TEXT else escape_markdown(value)
        return escape_mentions(value) if self._mentions else value

    async def attempt(self, message: Message) -> Outcome:
        """Try once. Return `Unknown` if the vendor's result cannot be read."""
        self.validate_target(message.target)
        now = datetime.now(UTC)
        document = self.build_document(message, now)
        response = await shared_transport().request(
            "POST", str(message.target["url"]), encode_json(document), JSON_HEADERS, timeout=self.timeout,
            repeatable=False, proxy=self._proxy, query=self.sign_query(message, now),
        )  # fmt: skip
        return self.judge(response)

    def sign_query(self, message: Message, now: datetime) -> str:
        """Return the query that signs the request, for vendors that expect the signature there."""
        return ""

    def build_document(self, message: Message, now: datetime) -> dict[str, Any]:
        """Return the JSON document of this message, clipped to the limits, with the signature that belongs there.

        Raises:
            BadContent: a card without the button that the vendor requires.
        """
        raise NotImplementedError

    def split_body(self, message: Message) -> tuple[str, Mentions]:
        """Return the text and the members that it mentions."""
        return split_mentions(message.body) if self._mentions else (message.body, Mentions())


ELLIPSIS = "…"
LONGEST_CLUSTER = 32  # code points to drop for a whole character; natural language has no longer clusters


def utf8_size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def clip_text(text: str, limit: int, size: Callable[[str], int] = utf8_size) -> str:
    """Return `text`, or its longest prefix that fits with a final …; "" if even the … does not fit.

    `size` must grow with the text and count at least 1 per character.
    """
    if len(text) <= limit and size(text) <= limit:
        return text
    low, high = 0, min(len(text), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if size(text[:middle] + ELLIPSIS) <= limit:
            low = middle
        else:
            high = middle - 1
    # Cut no character: a family emoji, a flag, a letter with marks.
    boundary = grapheme_boundary_before(text, low + 1)
    clipped = text[: boundary if low - boundary <= LONGEST_CLUSTER else low] + ELLIPSIS
    return clipped if size(clipped) <= limit else ""


# --- WeCom ------------------------------------------------------------------------------------------------------------


WECOM_LIMITS = {"text": 2_048, "markdown": 4_096}  # bytes of `content` in UTF-8
CARD_TITLE, CARD_TEXT, CARD_LABEL = 26, 112, 13  # characters that the vendor recommends at most
CARD_BUTTONS = 3
MINUTE = timedelta(minutes=1)


class WeCom(Robot):
    """A WeCom robot. The key in the URL is the only secret. WeCom does not sign, so a target's `secret` is ignored."""

    kind: ClassVar[str] = "wecom"
    quotas = (Quota(20, MINUTE),)
    hosts: ClassVar[frozenset[str]] = frozenset({"qyapi.weixin.qq.com"})
    path: ClassVar[str] = "/cgi-bin/webhook/send"
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

    def build_document(self, message: Message, now: datetime) -> dict[str, Any]:
        body, mentions = self.split_body(message)
        if self.format == CARD:
            card = _build_notice_card(read_card(message.subject, body))
            return {"msgtype": "template_card", "template_card": card}
        if self.format == MARKDOWN:  # it mentions user ids only
            suffix = "".join(f"<@{user}>" for user in mentions.users)
            content = clip_text(body, WECOM_LIMITS[MARKDOWN] - utf8_size(suffix)) + suffix
            return {"msgtype": "markdown", "markdown": {"content": content}}
        text: dict[str, Any] = {"content": clip_text(body, WECOM_LIMITS[self.format])}
        if users := [*mentions.users, *(["@all"] if mentions.everyone else [])]:
            text["mentioned_list"] = users
        if mentions.phones:
            text["mentioned_mobile_list"] = list(mentions.phones)
        return {"msgtype": "text", "text": text}


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


# --- DingTalk ---------------------------------------------------------------------------------------------------------


DINGTALK_LIMIT = 20_000  # bytes of the whole request
TITLE_LENGTH = 32  # characters; shown in the notification of a markdown message
THROTTLED_FOR = timedelta(minutes=10)
WRONG_CLOCK = Refusal("签名时间戳无效，请校准服务器时间", timedelta(minutes=1))


class DingTalk(Robot):
    """A DingTalk robot. Target: `url` with its access_token, and `secret` (SEC…) if the robot checks signatures."""

    kind: ClassVar[str] = "dingtalk"
    quotas = (Quota(20, timedelta(minutes=1)),)
    hosts: ClassVar[frozenset[str]] = frozenset({"oapi.dingtalk.com"})
    path: ClassVar[str] = "/robot/send"
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

    def sign_query(self, message: Message, now: datetime) -> str:
        """Return `timestamp` (ms) and `sign`, percent-encoded exactly once: %252F is a wrong signature."""
        secret = str(message.target.get("secret") or "")
        if not secret:
            return ""
        timestamp = str(int(now.timestamp() * 1000))
        digest = hmac.digest(secret.encode(), f"{timestamp}\n{secret}".encode(), "sha256")
        return f"timestamp={timestamp}&sign={quote(base64.b64encode(digest), safe='')}"

    def build_document(self, message: Message, now: datetime) -> dict[str, Any]:
        body, mentions = self.split_body(message)
        if self.format == CARD:
            card = read_card(message.subject, body)
            body = card.text
            build = partial(_build_action_card, card)
        else:
            title = " ".join((message.subject or body).split())[:TITLE_LENGTH] or "…"
            build = partial(self._build_text, title, mentions)
        clipped = clip_text(body, DINGTALK_LIMIT, lambda text: len(encode_json(build(text))))
        return build(clipped)

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


# --- Feishu -----------------------------------------------------------------------------------------------------------


FEISHU_LIMIT = 20_000  # bytes of the whole request; the vendor documents 20 KB
RATE_LIMITED = Refusal("发送过于频繁：每个机器人每分钟最多 100 条、每秒最多 5 条，整点半点更易被限流", MINUTE)


class Feishu(Robot):
    """A Feishu or Lark robot.

    Target: `url`, and `secret` if the robot checks signatures. Markdown is sent as a card.
    """

    kind: ClassVar[str] = "feishu"
    quotas = (Quota(100, MINUTE), Quota(5, timedelta(seconds=1)))
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

    def build_document(self, message: Message, now: datetime) -> dict[str, Any]:
        secret = str(message.target.get("secret") or "")
        signature = signature_fields(secret, now) if secret else {}
        body, mentions = self.split_body(message)
        card = read_card(message.subject, body, fewest_buttons=0) if self.format == CARD else None
        # The vendor knows user ids (`ou_…`) and “all”, no phone numbers.
        mark = '<at user_id="{}"></at>' if self.format == TEXT else "<at id={}></at>"
        names = [*(["all"] if mentions.everyone else []), *mentions.users]
        build = partial(self._document, card, "".join(f" {mark.format(name)}" for name in names))
        clipped = clip_text(
            card.text if card else body, FEISHU_LIMIT, lambda text: len(encode_json(signature | build(text)))
        )
        return signature | build(clipped)

    def _document(self, card: Card | None, mentions: str, text: str) -> dict[str, Any]:
        if self.format == TEXT:
            return {"msg_type": "text", "content": {"text": text + mentions}}
        found: dict[str, Any] = {"config": {"wide_screen_mode": True}}
        found["elements"] = [{"tag": "markdown", "content": text + mentions}]
        if card:
            found["header"] = {"title": {"tag": "plain_text", "content": card.title}, "template": "blue"}
            buttons = [
                {"tag": "button", "text": {"tag": "plain_text", "content": label}, "url": url, "type": "primary"}
                for label, url in card.buttons
            ]
            if buttons:
                found["elements"].append({"tag": "action", "actions": buttons})
        return {"msg_type": "interactive", "card": found}

    def refusal(self, code: int, said: str) -> Refusal | None:
        # 9499 means a bad request, unless its text contains "too many request".
        if code == 9499 and "too many" in said.lower():
            return RATE_LIMITED
        return super().refusal(code, said)


def signature_fields(secret: str, now: datetime) -> dict[str, Any]:
    """Return `timestamp` in seconds and `sign`. Timestamp and secret are the *key*; the signed text is empty."""
    timestamp = str(int(now.timestamp()))
    digest = hmac.digest(f"{timestamp}\n{secret}".encode(), b"", "sha256")
    return {"timestamp": timestamp, "sign": base64.b64encode(digest).decode()}
