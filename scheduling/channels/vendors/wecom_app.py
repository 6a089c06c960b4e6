"""Send WeCom (企业微信) application messages to members, and WeChat customer service (微信客服) messages to customers.

Sources: developer.work.weixin.qq.com/document/path/90236 (messages), 94677 (customer service), 91039 (access token),
90313 (codes), 90312 (frequencies).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, ClassVar
from xml.etree.ElementTree import Element

from scheduling.channels import options
from scheduling.channels.answers import Refusal, parse_answer
from scheduling.channels.base import Delivered, InvalidSetting, Message, Outcome, Permanent, Quota, Quotas
from scheduling.channels.http_client import Response, Transport
from scheduling.channels.markup import escape_markdown, escape_tags, read_card
from scheduling.channels.robots.base import clip_text, encode_json
from scheduling.channels.vendors.base import VendorChannel, VendorRequest, add_query
from scheduling.channels.vendors.callbacks import CallbackResult, WeChatCallbacks
from scheduling.error_text import ErrorText as _

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
TEXT_LIMIT = 2_048  # bytes
CARD_LIMITS = {"title": 128, "description": 512, "btntxt": 12}  # bytes; btntxt: 4 Chinese characters
TEXT, MARKDOWN, CARD = "text", "markdown", "card"
LONGEST_DUPLICATE_CHECK = timedelta(hours=4)

#: Codes of path/90313 that every call may return.
COMMON: dict[int, Refusal] = {
    -1: Refusal("企业微信系统繁忙", timedelta(seconds=10)),
    40001: Refusal("access_token 的 secret 不正确", stale_token=True),
    40003: Refusal("成员 userid 无效", gone=True),
    40008: Refusal("不合法的消息类型"),
    40014: Refusal("access_token 无效", stale_token=True),
    40033: Refusal("请求含有不合法的字符"),
    40056: Refusal("不合法的 agentid"),
    40058: Refusal("消息参数不合法，可能内容超长或格式错误"),
    41001: Refusal("缺少 access_token", stale_token=True),
    42001: Refusal("access_token 已过期", stale_token=True),
    44004: Refusal("消息内容为空"),
    45002: Refusal("消息内容超过大小限制"),
    45009: Refusal("接口调用超过频率限制", MINUTE),
    45033: Refusal("接口并发调用超过限制", timedelta(seconds=10)),
    48002: Refusal("应用没有该接口的权限"),
    60011: Refusal("应用没有权限：成员不在应用的可见范围"),
    60020: Refusal("服务器 IP 不在应用的企业可信 IP 中", HOUR),
    60111: Refusal("成员不存在", gone=True),
    301002: Refusal("应用没有权限操作此 agentid"),
    701008: Refusal("接收人没有有效的互通账号"),
}


class WeComVendor(WeChatCallbacks, VendorChannel):
    """The base of both kinds: one access token for a corporation and a secret."""

    api: ClassVar[str] = "https://qyapi.weixin.qq.com"
    path: ClassVar[str]
    optional: ClassVar[tuple[str, ...]] = ("callback_token", "callback_key")
    secret_fields: ClassVar[frozenset[str]] = VendorChannel.secret_fields | {"callback_token", "callback_key"}
    receiver_field: ClassVar[str] = "corp_id"
    refusals: ClassVar[Mapping[int, Refusal]] = COMMON

    def token_request(self, stale: str) -> VendorRequest:
        """Return the request. WeCom answers with the same token until it expires."""
        query = {"corpid": self.settings["corp_id"], "corpsecret": self.secret}
        return VendorRequest(add_query(f"{self.base}/cgi-bin/gettoken", query), method="GET")

    def request(self, message: Message, token: str, now: datetime) -> VendorRequest:
        url = add_query(f"{self.base}{self.path}", {"access_token": token})
        return VendorRequest(url, encode_json(self.document(message)))

    def document(self, message: Message) -> dict[str, Any]:
        raise NotImplementedError


class WeComApp(WeComVendor):
    """An application message to a member. Address: the member's userid.

    `format`: text, markdown, or card, whose button is the last line of the text. `duplicate_check` asks WeCom to drop
    an equal message to the same member within that time.
    """

    kind: ClassVar[str] = "wecom_app"
    id_field: str = "msgid"
    address_key: str = "wecom_app"
    quotas: Quotas = (Quota(30, MINUTE), Quota(1_000, HOUR))
    required: ClassVar[tuple[str, ...]] = ("corp_id", "agent_id", "secret")
    optional: ClassVar[tuple[str, ...]] = (*WeComVendor.optional, "format", "duplicate_check")
    path: ClassVar[str] = "/cgi-bin/message/send"
    refusals: ClassVar[Mapping[int, Refusal]] = COMMON | {
        81013: Refusal("接收人不存在，或不在应用的可见范围", gone=True),
    }

    def __init__(self, config: Mapping[str, Any], timeout: timedelta, *, transport: Transport | None = None) -> None:
        super().__init__(config, timeout, transport=transport)
        self.format = options.read_choice(config, "format", (TEXT, MARKDOWN, CARD))
        if not self.settings["agent_id"].isdecimal():
            raise InvalidSetting("agent_id", _("must be a number"))
        self._duplicate_check = options.read_span(config, "duplicate_check", LONGEST_DUPLICATE_CHECK)

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        """Check that `address` names one member. WeCom reads `|` as a list and `@all` as every member.

        Raises:
            InvalidSetting: the address is not accepted.
        """
        super().validate_target(target)
        address = options.read_word(target, "address")
        if "|" in address or address.strip().lower() == "@all":
            raise InvalidSetting("address", _("must name one member"))

    def escape(self, value: str) -> str:
        return escape_tags(value) if self.format == TEXT else escape_markdown(value)

    def document(self, message: Message) -> dict[str, Any]:
        msgtype = "textcard" if self.format == CARD else self.format
        document = {
            "touser": str(message.target["address"]),
            "msgtype": msgtype,
            "agentid": int(self.settings["agent_id"]),
            msgtype: self._content(message),
        }
        if self._duplicate_check:
            seconds = int(self._duplicate_check.total_seconds())
            document |= {"enable_duplicate_check": 1, "duplicate_check_interval": seconds}
        return document

    def _content(self, message: Message) -> dict[str, str]:
        if self.format != CARD:
            return {"content": clip_text(message.body, TEXT_LIMIT)}
        card = read_card(message.subject, message.body)
        label, url = card.buttons[0]
        content = {"title": card.title, "description": card.text, "btntxt": label}
        return {name: clip_text(text, CARD_LIMITS[name]) for name, text in content.items()} | {"url": url}

    def judge_for(self, message: Message, response: Response) -> Outcome:
        """Judge by the code and by the lists of receivers without the message, which an answer of code 0 may have."""
        outcome = self.judge(response)
        answer = parse_answer(response)
        address = str(message.target["address"]).lower()
        if isinstance(outcome, Delivered):
            if address in str(answer.get("invaliduser") or "").lower().split("|"):
                return self.refusals[81013].outcome(81013, "invaliduser", response)
            if address in str(answer.get("unlicenseduser") or "").lower().split("|"):
                return Permanent("vendor_unlicensed", "接收人没有有效的接口许可（unlicenseduser）", response.status)
        return outcome


class WeChatService(WeComVendor):
    """A customer service message to a WeChat customer. Address: the customer's external_userid.

    WeChat accepts five messages within 48 hours after each message of the customer. The quota counts from the last one
    that Aftertouch knows; without any it counts five in 48 hours.
    """

    kind: ClassVar[str] = "wechat_kf"
    address_key: str = "wechat_kf"
    quotas: Quotas = (Quota(5, timedelta(hours=48)),)
    required: ClassVar[tuple[str, ...]] = ("corp_id", "open_kfid", "secret")
    path: ClassVar[str] = "/cgi-bin/kf/send_msg"
    refusals: ClassVar[Mapping[int, Refusal]] = COMMON | {
        40096: Refusal("external_userid 无效", gone=True),
        95000: Refusal("open_kfid 无效"),
        95001: Refusal("客户上次发言后已发送 5 条，客户再次发言后才能继续发送"),
        95002: Refusal("客户上次发言已超过 48 小时"),
        95004: Refusal("客服账号不存在"),
        95011: Refusal("企业尚未启用微信客服"),
        95012: Refusal("客服账号未授权给该应用"),
        95013: Refusal("会话已结束"),
        95016: Refusal("当前会话状态不允许发送"),
        95017: Refusal("应用未获得调用微信客服接口的权限"),
        95018: Refusal("当前会话状态不允许发送：会话已转人工，或客户尚未发言"),
    }

    def escape(self, value: str) -> str:
        return escape_tags(value)  # WeChat reads <a> in a text

    def quota_key(self, message: Message) -> str:
        """Return the customer and the time of the last message, which opens a new allowance."""
        spoke_at = message.spoke_at.timestamp() if message.spoke_at and self.counts_addresses else ""
        return f"{super().quota_key(message)}:{spoke_at}"

    def read_event(self, root: Element, at: datetime, result: CallbackResult) -> None:
        """Note that messages of this account wait at WeCom. The callback itself has none."""
        if root.findtext("Event") == "kf_msg_or_event" and root.findtext("OpenKfId") == self.settings["open_kfid"]:
            result.sync_token = root.findtext("Token") or ""

    def document(self, message: Message) -> dict[str, Any]:
        return {
            "touser": str(message.target["address"]),
            "open_kfid": self.settings["open_kfid"],
            "msgid": message.delivery_key.hex,
            "msgtype": "text",
            "text": {"content": clip_text(message.body, TEXT_LIMIT)},
        }
