"""Send template and subscription messages of WeChat official accounts (公众号) and mini-programs (小程序).

Sources: developers.weixin.qq.com/doc/service/api/notify/template/api_sendtemplatemessage.html (template),
doc/offiaccount/Subscription_Messages (subscription), miniprogram/dev/OpenApiDoc/mp-message-management (mini-program),
doc/offiaccount/Basic_Information/getStableAccessToken.html (token), Global_Return_Code.html (codes).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, ClassVar
from xml.etree.ElementTree import Element

from scheduling.channels import options
from scheduling.channels.answers import Refusal
from scheduling.channels.base import Message
from scheduling.channels.http_client import Transport
from scheduling.channels.markup import BadContent
from scheduling.channels.robots.base import encode_json
from scheduling.channels.vendors.base import VendorChannel, VendorRequest, add_query, read_lines
from scheduling.channels.vendors.callbacks import CallbackResult, WeChatCallbacks, read_send_job
from scheduling.templating.rendering import read_locale

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
TEMPLATE, SUBSCRIPTION = "template", "subscription"
RESERVED = ("template_id", "url", "page")  #: first lines of a text that are no values
STATES = ("formal", "trial", "developer")


class WeChatVendor(VendorChannel):
    """The base of both kinds. Address: the customer's openid in this account.

    A text has one “name: value” a line: the values of the template. First lines may be `template_id`, `url` and `page`.
    """

    fills_template: bool = True
    api: ClassVar[str] = "https://api.weixin.qq.com"
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
        own, values = read_lines(message.body, RESERVED)
        template = own.get("template_id") or self.settings["template_id"]
        if not template:
            raise BadContent("template_id: the text and the channel name no template")
        document = {
            "touser": str(message.target["address"]),
            "template_id": template,
            "data": {name: {"value": value} for name, value in values.items()},
        }
        url = add_query(f"{self.base}{self.path}", {"access_token": token})
        return VendorRequest(url, encode_json(document | self.more(message, own)))

    @property
    def path(self) -> str:
        raise NotImplementedError

    def more(self, message: Message, own: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields of the kind. `own` are the reserved lines of the text."""
        raise NotImplementedError


class OfficialAccount(WeChatCallbacks, WeChatVendor):
    """Config: `type` (template or subscription), `template_id`, `mini_app_id` of the mini-program that `page` opens."""

    kind: ClassVar[str] = "wechat_official"
    id_field: str = "msgid"
    address_key: str = "wechat_official"
    optional: ClassVar[tuple[str, ...]] = ("type", "template_id", "mini_app_id", "callback_token", "callback_key")
    secret_fields: ClassVar[frozenset[str]] = VendorChannel.secret_fields | {"callback_token", "callback_key"}
    receiver_field: ClassVar[str] = "app_id"
    accepts_plain: ClassVar[bool] = True

    def __init__(self, config: Mapping[str, Any], timeout: timedelta, *, transport: Transport | None = None) -> None:
        super().__init__(config, timeout, transport=transport)
        self._type = options.read_choice(config, "type", (TEMPLATE, SUBSCRIPTION))

    def read_event(self, root: Element, at: datetime, result: CallbackResult) -> None:
        """Add the receipt of a template or subscription message."""
        read_send_job(root, at, result)

    @property
    def path(self) -> str:
        return f"/cgi-bin/message/{'template/send' if self._type == TEMPLATE else 'subscribe/bizsend'}"

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
    address_key: str = "wechat_miniprogram"
    optional: ClassVar[tuple[str, ...]] = ("template_id", "state")

    def __init__(self, config: Mapping[str, Any], timeout: timedelta, *, transport: Transport | None = None) -> None:
        super().__init__(config, timeout, transport=transport)
        self._state = options.read_choice(config, "state", STATES)

    @property
    def path(self) -> str:
        return "/cgi-bin/message/subscribe/send"

    def more(self, message: Message, own: Mapping[str, str]) -> dict[str, Any]:
        found = {
            "miniprogram_state": self._state,
            "lang": "zh_CN" if read_locale(message.locale).language == "zh" else "en_US",
        }
        return found | ({"page": own["page"]} if own.get("page") else {})
