"""Send through WeChat accounts (公众号), mini-programs (小程序), WeCom (企业微信) and its service (微信客服).

Sources: developers.weixin.qq.com/doc/service/api/notify/template/api_sendtemplatemessage.html (template),
doc/offiaccount/Subscription_Messages (subscription), miniprogram/dev/OpenApiDoc/mp-message-management (mini-program),
doc/offiaccount/Basic_Information/getStableAccessToken.html (token), Global_Return_Code.html (codes).
developer.work.weixin.qq.com/document/path/90236 (messages), 94677 (customer service), 91039 (access token),
90313 (codes), 90312 (frequencies), 90968 (callbacks), 90930 (verification of the address for them), 94670 (fetching
the messages of customers: the callback only reports that there are some).
developers.weixin.qq.com/doc/offiaccount/Message_Management/Message_encryption_and_decryption_instructions.html.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
from base64 import b64decode
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlencode
from xml.etree.ElementTree import Element, ParseError, fromstring

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from django.utils.crypto import constant_time_compare

from scheduling.channels import options
from scheduling.channels.answers import Refusal, parse_answer
from scheduling.channels.base import (
    MOST_REPORTS,
    SUCCESS,
    CallbackRefused,
    CallbackRequest,
    CallbackResult,
    CustomerMessage,
    Delivered,
    Failure,
    InvalidSetting,
    Message,
    Outcome,
    Permanent,
    Quota,
    Report,
    limit_instant,
    read_uuid,
)
from scheduling.channels.http_client import Response, close_shared_transport, encode_json
from scheduling.channels.markup import escape_markdown, escape_tags, read_card
from scheduling.channels.robots import CARD, MARKDOWN, TEXT, clip_text
from scheduling.channels.vendors.base import VendorChannel, VendorRequest
from scheduling.error_text import ErrorText as _
from scheduling.templating import read_locale

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
TEMPLATE, SUBSCRIPTION = "template", "subscription"


# --- callbacks --------------------------------------------------------------------------------------------------------


LONGEST_AGE = timedelta(minutes=10)
KEY_LENGTH = 43  # characters of the EncodingAESKey
PADDING = 32  # bytes; the scheme pads to this instead of the block size of AES
HEAD = 16  # random bytes before the length


def read_key(text: str) -> bytes:
    """Return the AES key of an EncodingAESKey.

    Raises:
        ValueError: it is not 43 letters and digits.
    """
    try:
        key = b64decode(text + "=", validate=True) if len(text) == KEY_LENGTH and text.isascii() else b""
    except binascii.Error:
        key = b""
    if len(key) != PADDING:
        raise ValueError(_("must have %(length)s letters and digits", length=KEY_LENGTH))
    return key


def decrypt(text: str, key: bytes, receiver: str) -> bytes:
    """Return the content of an encrypted text for this receiver: the id of the corporation or the application.

    Raises:
        CallbackRefused: it is not such a text, or for another receiver.
    """
    try:
        sealed = b64decode(text, validate=True)
        decryptor = Cipher(AES(key), CBC(key[:16])).decryptor()
        plain = decryptor.update(sealed) + decryptor.finalize()
    except ValueError as error:
        raise CallbackRefused from error
    padding = plain[-1] if plain else 0
    if not 1 <= padding <= PADDING or len(plain) < HEAD + 4 + padding:
        raise CallbackRefused
    plain = plain[HEAD:-padding]
    length = int.from_bytes(plain[:4], "big")
    content, found = plain[4 : 4 + length], plain[4 + length :]
    if len(content) < length or found != receiver.encode():
        raise CallbackRefused
    return content


def parse_xml_document(content: bytes) -> Element:
    """Return the root of an XML document without a document type, which could expand without bound.

    Raises:
        ValueError: it is something else.
    """
    text = content.decode()
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("a document type is not accepted")
    try:
        return fromstring(text)  # noqa: S314  without a document type nothing expands
    except ParseError as error:
        raise ValueError(str(error)) from None


class WeChatCallbacks(VendorChannel):
    """The base of the kinds with callbacks: `callback_token`, and `callback_key` where messages are encrypted.

    A call that is older than `LONGEST_AGE` is refused. Calls are signed by SHA-1 over sorted parts, and encrypted by
    AES-256-CBC.
    """

    optional: ClassVar[tuple[str, ...]] = ("callback_token", "callback_key")
    secret_fields = VendorChannel.secret_fields | {"callback_token", "callback_key"}
    receiver_field: ClassVar[str]  #: setting with the id that callbacks are encrypted for
    accepts_plain: ClassVar[bool] = False  #: without `callback_key` the vendor may send plain messages

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        super().__init__(config, timeout)
        token, key = self.settings["callback_token"], self.settings["callback_key"]
        if token and not (3 <= len(token) <= 32 and token.isascii() and token.isalnum()):
            raise InvalidSetting("callback_token", _("must have 3 to 32 letters and digits"))
        if key:
            try:
                read_key(key)
            except ValueError as error:
                raise InvalidSetting("callback_key", str(error)) from None
        if key and not token:
            raise InvalidSetting("callback_token", _("is missing"))
        if token and not key and not self.accepts_plain:
            raise InvalidSetting("callback_key", _("is missing"))

    def answer_callback(self, request: CallbackRequest) -> CallbackResult:
        """Return what a genuine call reports. Raises `CallbackRefused`, and `ValueError` for unreadable content."""
        if not self.settings["callback_token"] or request.path_token:
            raise CallbackRefused
        given = request.query.get("timestamp", "")
        if not (given.isascii() and given.isdecimal() and len(given) <= 10):
            raise CallbackRefused
        if abs(request.now - datetime.fromtimestamp(int(given), UTC)) > LONGEST_AGE:
            raise CallbackRefused
        if request.body is None:
            return CallbackResult(text=self._open_echo(request.query))
        result = CallbackResult()
        self.read_message(self._open(request.query, request.body), request.now, result)
        return result

    def _open_echo(self, query: Mapping[str, str]) -> str:
        echo = query.get("echostr", "")
        if query.get("msg_signature"):
            return self._decrypt(query, echo).decode()
        self._check_plain(query)
        if not echo.isascii() or not echo.isalnum() or len(echo) > 128:
            raise CallbackRefused
        return echo

    def _open(self, query: Mapping[str, str], body: bytes) -> Element:
        if not self.settings["callback_key"]:
            self._check_plain(query)
            return parse_xml_document(body)
        try:
            sealed = parse_xml_document(body).findtext("Encrypt") or ""
        except ValueError as error:
            raise CallbackRefused from error
        return parse_xml_document(self._decrypt(query, sealed.strip()))

    def _decrypt(self, query: Mapping[str, str], sealed: str) -> bytes:
        if not self.settings["callback_key"] or not sealed:
            raise CallbackRefused
        self._check_signature(query, "msg_signature", sealed)
        return decrypt(sealed, read_key(self.settings["callback_key"]), self.settings[self.receiver_field])

    def _check_plain(self, query: Mapping[str, str]) -> None:
        # The plain signature covers no content. With a key only encrypted messages count.
        if not self.accepts_plain:
            raise CallbackRefused
        self._check_signature(query, "signature")

    def _check_signature(self, query: Mapping[str, str], name: str, *content: str) -> None:
        parts = (self.settings["callback_token"], query.get("timestamp", ""), query.get("nonce", ""), *content)
        expected = hashlib.sha1("".join(sorted(parts)).encode()).hexdigest()  # noqa: S324  the vendor's scheme
        if not constant_time_compare(query.get(name, ""), expected):
            raise CallbackRefused

    def read_message(self, root: Element, now: datetime, result: CallbackResult) -> None:
        """Add what a message reports to the result. A message other than an event is one of the customer's."""
        kind = root.findtext("MsgType") or ""
        at = read_seconds(root.findtext("CreateTime"), now)
        if kind and kind != "event":
            address = (root.findtext("FromUserName") or "").strip()
            message_id = (root.findtext("MsgId") or "").strip() or f"{address}:{root.findtext('CreateTime')}"
            if address and len(message_id) <= 200:
                result.messages.append(CustomerMessage(address, message_id, at or now))
        elif kind:
            self.read_event(root, at, result)

    def read_event(self, root: Element, at: datetime | None, result: CallbackResult) -> None:
        """Add what an event reports to the result."""


def read_seconds(text: str | None, now: datetime) -> datetime | None:
    """Return the instant of seconds since 1970, at most `now`; None for anything else."""
    try:
        return limit_instant(datetime.fromtimestamp(int(text or ""), UTC), now)
    except (ValueError, OverflowError, OSError):
        return None


def _build_request(url: str, document: Mapping[str, Any], token: str) -> VendorRequest:
    return VendorRequest(url, encode_json(document), query=urlencode({"access_token": token}))


# --- official accounts and mini-programs ------------------------------------------------------------------------------


STATES = ("formal", "trial", "developer")


class WeChatVendor(VendorChannel):
    """The base of both kinds. Address: the customer's openid in this account.

    A text has one “name: value” a line: the values of the template. First lines may be `template_id`, `url` and `page`.
    """

    fills_template: bool = True
    api: ClassVar[str] = "https://api.weixin.qq.com"
    path: str
    required: ClassVar[tuple[str, ...]] = ("app_id", "secret")
    refusals: ClassVar[Mapping[int, Refusal]] = {
        -1: Refusal("微信系统繁忙", timedelta(seconds=10)),
        40001: Refusal("access_token 无效", stale_token=True),
        40003: Refusal("openid 无效，或不属于该账号", gone=True),
        40014: Refusal("access_token 无效", stale_token=True),
        40037: Refusal("模板 template_id 不正确"),
        40165: Refusal("小程序页面路径不正确"),
        41001: Refusal("缺少 access_token", stale_token=True),
        41030: Refusal("page 路径不正确，或小程序尚未发布"),
        42001: Refusal("access_token 已过期", stale_token=True),
        43004: Refusal("用户未关注该公众号"),
        43101: Refusal("用户未订阅、已拒绝，或订阅次数已用完"),
        43116: Refusal("该模板因滥用已被限制下发"),
        45009: Refusal("接口调用次数已达当日上限", HOUR),
        45011: Refusal("接口调用太频繁", MINUTE),
        45047: Refusal("下行消息条数超过上限", HOUR),
        47003: Refusal("模板参数不正确：字段缺失、多余或内容不符合该字段的类型"),
        48001: Refusal("该账号没有此接口的权限"),
        48004: Refusal("接口已被封禁"),
        50002: Refusal("账号被限制，或用户已注销"),
    }

    def token_request(self, stale: str) -> VendorRequest:
        """Return the request for a stable token. A new one is forced only if WeChat refused the last one."""
        document = {
            "grant_type": "client_credential",
            "appid": self.settings["app_id"],
            "secret": self.secret,
            "force_refresh": bool(stale),
        }
        return VendorRequest(f"{self.base}/cgi-bin/stable_token", encode_json(document))

    def request(self, message: Message, token: str, now: datetime) -> VendorRequest:
        own, values = self.read_template(message.body, "url", "page")
        document = {
            "touser": str(message.target["address"]),
            "template_id": own["template_id"],
            "data": {name: {"value": value} for name, value in values.items()},
        }
        return _build_request(f"{self.base}{self.path}", document | self.more(message, own), token)

    def more(self, message: Message, own: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields of the kind. `own` are the reserved lines of the text."""
        raise NotImplementedError


class OfficialAccount(WeChatCallbacks, WeChatVendor):
    """Config: `type` (template or subscription), `template_id`, `mini_app_id` of the mini-program that `page` opens."""

    kind: ClassVar[str] = "wechat_official"
    id_field: str = "msgid"
    address_key = "wechat_official"
    optional: ClassVar[tuple[str, ...]] = ("type", "template_id", "mini_app_id", *WeChatCallbacks.optional)
    receiver_field: ClassVar[str] = "app_id"
    accepts_plain: ClassVar[bool] = True

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        super().__init__(config, timeout)
        self._type = options.read_choice(config, "type", (TEMPLATE, SUBSCRIPTION))
        self.path = f"/cgi-bin/message/{'template/send' if self._type == TEMPLATE else 'subscribe/bizsend'}"

    def read_event(self, root: Element, at: datetime | None, result: CallbackResult) -> None:
        """Add the receipts of template and subscription messages."""
        event = root.findtext("Event")
        if event == "TEMPLATESENDJOBFINISH":
            status = (root.findtext("Status") or "").strip()
            jobs = [(root.findtext("MsgID"), status == SUCCESS, status)]
        elif event == "subscribe_msg_sent_event":
            jobs = [
                (each.findtext("MsgID"), each.findtext("ErrorCode") == "0", each.findtext("ErrorStatus") or "")
                for each in root.iterfind(".//SubscribeMsgSentEvent/List")
            ]
        else:
            return
        for message_id, sent, status in jobs[:MOST_REPORTS]:
            if message_id:
                result.reports.append(
                    Report(
                        "delivered" if sent else "bounced", at, vendor_id=message_id[:120],
                        detail="" if sent else status[:300],
                        permanent=event == "TEMPLATESENDJOBFINISH" and "user block" in status,
                    )
                )  # fmt: skip

    def more(self, message: Message, own: Mapping[str, str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if own.get("page") and self.settings["mini_app_id"]:
            found["miniprogram"] = {"appid": self.settings["mini_app_id"], "pagepath": own["page"]}
        if own.get("url"):
            found["url" if self._type == TEMPLATE else "page"] = own["url"]
        if self._type == TEMPLATE:
            # WeChat sends one message for an openid and this id, within ten minutes.
            found["client_msg_id"] = message.delivery_key.hex
        return found


class MiniProgram(WeChatVendor):
    """Config: `template_id`, `state` (formal, trial or developer)."""

    kind: ClassVar[str] = "wechat_miniprogram"
    address_key = "wechat_miniprogram"
    optional: ClassVar[tuple[str, ...]] = ("template_id", "state")
    path: str = "/cgi-bin/message/subscribe/send"

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        super().__init__(config, timeout)
        self._state = options.read_choice(config, "state", STATES)

    def more(self, message: Message, own: Mapping[str, str]) -> dict[str, Any]:
        found = {
            "miniprogram_state": self._state,
            "lang": "zh_CN" if read_locale(message.locale).language == "zh" else "en_US",
        }
        return found | ({"page": own["page"]} if own.get("page") else {})


# --- WeCom and its customer service -----------------------------------------------------------------------------------


TEXT_LIMIT = 2_048  # bytes
CARD_LIMITS = {"title": 128, "description": 512, "btntxt": 12}  # bytes; btntxt: 4 Chinese characters
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


class WeComVendor(WeChatCallbacks):
    """The base of both kinds: one access token for a corporation and a secret."""

    api: ClassVar[str] = "https://qyapi.weixin.qq.com"
    path: ClassVar[str]
    receiver_field: ClassVar[str] = "corp_id"
    refusals: ClassVar[Mapping[int, Refusal]] = COMMON

    def token_request(self, stale: str) -> VendorRequest:
        """Return the request. WeCom answers with the same token until it expires."""
        query = {"corpid": self.settings["corp_id"], "corpsecret": self.secret}
        return VendorRequest(f"{self.base}/cgi-bin/gettoken", method="GET", query=urlencode(query))

    def request(self, message: Message, token: str, now: datetime) -> VendorRequest:
        return _build_request(f"{self.base}{self.path}", self.document(message), token)

    def document(self, message: Message) -> dict[str, Any]:
        raise NotImplementedError


class WeComApp(WeComVendor):
    """An application message to a member. Address: the member's userid.

    `format`: text, markdown, or card, whose button is the last line of the text. `duplicate_check` asks WeCom to drop
    an equal message to the same member within that time.
    """

    kind: ClassVar[str] = "wecom_app"
    id_field: str = "msgid"
    address_key = "wecom_app"
    quotas = (Quota(30, MINUTE), Quota(1_000, HOUR))
    required: ClassVar[tuple[str, ...]] = ("corp_id", "agent_id", "secret")
    optional: ClassVar[tuple[str, ...]] = (*WeComVendor.optional, "format", "duplicate_check")
    path: ClassVar[str] = "/cgi-bin/message/send"
    refusals: ClassVar[Mapping[int, Refusal]] = COMMON | {
        81013: Refusal("接收人不存在，或不在应用的可见范围", gone=True),
    }

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        super().__init__(config, timeout)
        self.format = options.read_choice(config, "format", (TEXT, MARKDOWN, CARD))
        if not self.settings["agent_id"].isdecimal():
            raise InvalidSetting("agent_id", _("must be a number"))
        self._duplicate_check = options.read_span(config, "duplicate_check", LONGEST_DUPLICATE_CHECK)

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        """Check that `address` names one member. WeCom reads `|` as a list and `@all` as every member."""
        super().validate_target(target)
        address = options.read_word(target, "address")
        if "|" in address or address.strip().lower() == "@all":
            raise InvalidSetting("address", _("must name one member"))

    def escape(self, value: str) -> str:
        return escape_tags(value) if self.format == TEXT else escape_markdown(value)

    def document(self, message: Message) -> dict[str, Any]:
        msgtype = "textcard" if self.format == CARD else self.format
        document: dict[str, Any] = {
            "touser": str(message.target["address"]),
            "msgtype": msgtype,
            "agentid": int(self.settings["agent_id"]),
        }
        if self.format == CARD:
            card = read_card(message.subject, message.body)
            label, url = card.buttons[0]
            content = {"title": card.title, "description": card.text, "btntxt": label}
            clipped = {name: clip_text(text, CARD_LIMITS[name]) for name, text in content.items()}
            document[msgtype] = clipped | {"url": url}
        else:
            document[msgtype] = {"content": clip_text(message.body, TEXT_LIMIT)}
        if self._duplicate_check:
            seconds = int(self._duplicate_check.total_seconds())
            document |= {"enable_duplicate_check": 1, "duplicate_check_interval": seconds}
        return document

    def judge_for(self, message: Message, response: Response) -> Outcome:
        """Judge by the code and by the lists of receivers without the message, which an answer of code 0 may have."""
        outcome = self.judge(response)
        answer = parse_answer(response) or {}
        address = str(message.target["address"]).lower()
        if isinstance(outcome, Delivered):
            if address in str(answer.get("invaliduser") or "").lower().split("|"):
                return self.refusals[81013].outcome(81013, "invaliduser", response)
            if address in str(answer.get("unlicenseduser") or "").lower().split("|"):
                return Permanent("vendor_unlicensed", "接收人没有有效的接口许可（unlicenseduser）", response.status)
        return outcome


MOST_REQUESTS = 10  #: of one callback, repeats with fewer messages included
PAGE = 100  #: messages; fewer if they are longer than a reply that is read
LONGEST_SYNC = timedelta(seconds=4)  #: WeCom waits five seconds for the answer
CUSTOMER = 3  #: origin of a message from the customer


class WeChatService(WeComVendor):
    """A customer service message to a WeChat customer. Address: the customer's external_userid.

    WeChat accepts five messages within 48 hours after each message of the customer. The quota counts from the last one
    that Aftertouch knows; without any it counts five in 48 hours.
    """

    kind: ClassVar[str] = "wechat_kf"
    address_key = "wechat_kf"
    quotas = (Quota(5, timedelta(hours=48)),)
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

    def read_event(self, root: Element, at: datetime | None, result: CallbackResult) -> None:
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

    def fetch_messages(self, result: CallbackResult, cursor: str) -> None:
        """Add the messages after the cursor to the result. Without one WeCom starts three days ago.

        Pages that were read count although a later one fails: a long backlog would otherwise start from its first page
        each time. The calling thread must not run an event loop.
        """
        asyncio.run(self._fetch_pages(result, cursor))

    async def _fetch_pages(self, result: CallbackResult, cursor: str) -> None:
        limit = PAGE
        try:
            async with asyncio.timeout(LONGEST_SYNC.total_seconds()):
                for _request in range(MOST_REQUESTS):
                    asked = {
                        "cursor": result.cursor or cursor, "token": result.sync_token, "limit": limit,
                        "open_kfid": self.settings["open_kfid"],
                    }  # fmt: skip
                    response, outcome = await self.call_vendor(
                        partial(_build_request, f"{self.base}/cgi-bin/kf/sync_msg", asked), self.judge,
                        LONGEST_SYNC / 2, repeatable=True,
                    )  # fmt: skip
                    if response.status == 200 and not response.complete and limit > 1:
                        limit = max(limit // 4, 1)
                        continue
                    if not isinstance(outcome, Delivered):
                        result.problem = outcome.reason
                        return
                    page = parse_answer(response) or {}
                    for each in page.get("msg_list") or ():
                        if isinstance(each, Mapping):
                            _read_entry(each, result)
                    result.cursor = str(page.get("next_cursor") or result.cursor or cursor)
                    limit = min(limit * 4, PAGE)  # the long messages may lie behind
                    if not page.get("has_more"):
                        return
                result.problem = f"more than {MOST_REQUESTS} requests"
        except TimeoutError:
            result.problem = "no answer within the time limit"
        except Failure as error:
            result.problem = str(error)
        finally:
            await close_shared_transport()


def _read_entry(entry: Mapping[str, Any], result: CallbackResult) -> None:
    now = datetime.now(UTC)
    at = read_seconds(str(entry.get("send_time") or ""), now)
    if entry.get("origin") == CUSTOMER:
        address, message_id = entry.get("external_userid"), entry.get("msgid")
        if (
            isinstance(address, str)
            and isinstance(message_id, str)
            and 0 < len(message_id) <= 200
            and f"{address}{message_id}".isprintable()
        ):
            result.messages.append(CustomerMessage(address, message_id, at or now))
    event: Any = entry.get("event")
    failed = isinstance(event, Mapping) and event.get("event_type") == "msg_send_fail"
    if failed and (key := read_uuid(event.get("fail_msgid", ""))):
        detail = f"msg_send_fail {event.get('fail_type')}"[:300]
        result.reports.append(Report("bounced", at, key, detail=detail))
