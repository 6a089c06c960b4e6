"""Send SMS by Alibaba Cloud (阿里云) and by Tencent Cloud (腾讯云), from templates that these have approved.

Neither has an idempotency key: `OutId` and `SessionContext` come back with the receipt and prevent no second message.
Requests are signed by ACS3-HMAC-SHA256 and TC3-HMAC-SHA256. Sources: help.aliyun.com/document_detail/419273.html and
101346.html (codes), help.aliyun.com/zh/sdk/product-overview/v3-request-structure-and-signature,
cloud.tencent.com/document/api/382/55981 and 59177 (codes), 382/52072 (signature).
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, ClassVar
from urllib.parse import quote
from zoneinfo import ZoneInfo

from django.utils.crypto import constant_time_compare
from yarl import URL

from scheduling.channels.answers import Code, Refusal
from scheduling.channels.base import (
    MOST_REPORTS,
    CallbackRefused,
    CallbackRequest,
    CallbackResult,
    InvalidSetting,
    Message,
    Quota,
    Report,
    limit_instant,
    read_uuid,
)
from scheduling.channels.http_client import JSON_HEADERS, encode_json
from scheduling.channels.vendors.base import VendorChannel, VendorRequest
from scheduling.error_text import ErrorText as _

ALIYUN, TENCENT = "ACS3-HMAC-SHA256", "TC3-HMAC-SHA256"


def canonical_query(parameters: Mapping[str, str]) -> str:
    """Return the sorted query in RFC 3986 encoding."""
    return "&".join(f"{quote(name, safe='~')}={quote(value, safe='~')}" for name, value in sorted(parameters.items()))


def sign_for_aliyun(query: str, headers: Mapping[str, str], key_id: str, secret: str) -> str:
    """Return the `Authorization` header of a POST request to `/` without a body.

    `headers` have lower-case names; they are host, content-type and x-acs-*.
    """
    canonical, names = _canonical_request(query, headers, b"")
    signature = hmac.digest(secret.encode(), f"{ALIYUN}\n{_digest(canonical)}".encode(), "sha256").hex()
    return f"{ALIYUN} Credential={key_id},SignedHeaders={names},Signature={signature}"


def sign_for_tencent(
    service: str, headers: Mapping[str, str], body: bytes, now: datetime, key_id: str, secret: str
) -> str:
    """Return the `Authorization` header of a POST request to `/`, signed for the UTC day of `now`."""
    canonical, names = _canonical_request("", headers, body)
    day = now.astimezone(UTC).strftime("%Y-%m-%d")
    scope = f"{day}/{service}/tc3_request"
    signed = f"{TENCENT}\n{int(now.timestamp())}\n{scope}\n{_digest(canonical)}"
    key = f"TC3{secret}".encode()
    for part in (day, service, "tc3_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, signed.encode(), "sha256").hex()
    return f"{TENCENT} Credential={key_id}/{scope}, SignedHeaders={names}, Signature={signature}"


def _canonical_request(query: str, headers: Mapping[str, str], body: bytes) -> tuple[str, str]:
    lines = "".join(f"{name}:{headers[name].strip()}\n" for name in sorted(headers))
    names = ";".join(sorted(headers))
    return f"POST\n/\n{query}\n{lines}\n{names}\n{sha256(body).hexdigest()}", names


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
PHONE = re.compile(r"\+?[0-9]{5,20}")
SHORTEST_CALLBACK_TOKEN = 16  # characters; the address is the only proof
CHINA = ZoneInfo("Asia/Shanghai")


class SmsChannel(VendorChannel):
    """The base of both. Address: a phone number. A text has one “name: value” a line, first `template_id` if needed.

    Reports of the vendors carry no signature: `callback_token` at the end of the address is the proof.
    """

    address_key = "phone"
    fills_template: bool = True
    optional: ClassVar[tuple[str, ...]] = ("template_id", "callback_token")
    secret_fields = VendorChannel.secret_fields | {"callback_token"}
    accepted: ClassVar[str] = "OK"
    accepted_answer: ClassVar[Mapping[str, Any]]  #: to a callback

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        super().__init__(config, timeout)
        token = self.settings["callback_token"]
        if token and not (SHORTEST_CALLBACK_TOKEN <= len(token) <= 128 and token.isascii() and token.isalnum()):
            raise InvalidSetting(
                "callback_token",
                _("must have %(least)s to 128 letters and digits", least=SHORTEST_CALLBACK_TOKEN),
            )

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        """Check that `address` is a phone number."""
        super().validate_target(target)
        if not PHONE.fullmatch(str(target["address"])):
            raise InvalidSetting("address", _("must be a phone number: 5 to 20 digits, with or without +"))

    @property
    def host(self) -> str:
        url = URL(self.base)
        return f"{url.raw_host}:{url.explicit_port}" if url.explicit_port else str(url.raw_host)

    # --- callbacks ------------------------------------------------------------------------------------------------

    def answer_callback(self, request: CallbackRequest) -> CallbackResult:
        """Return the receipts of a call. Raises `CallbackRefused`, and `ValueError` for unreadable content."""
        token = self.settings["callback_token"]
        if not token or not constant_time_compare(request.path_token, token):
            raise CallbackRefused
        result = CallbackResult(json.dumps(self.accepted_answer, ensure_ascii=False), "application/json")
        if request.body is None:
            return result
        try:
            given = json.loads(request.body)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(given, list):
            raise ValueError("must be a list of reports")
        for each in given[:MOST_REPORTS]:
            if isinstance(each, Mapping) and (report := self.read_report(each, request.now)):
                result.reports.append(report)
        return result

    def read_report(self, given: Mapping[str, Any], now: datetime) -> Report | None:
        """Return one report, or None for one that names no message."""
        raise NotImplementedError


def _build_report(
    delivered: bool, at: datetime | None, delivery_key: object, vendor_id: object, code: object, meaning: object
) -> Report | None:
    """Return the receipt of one SMS. A number that does not exist (空号) bounces for good."""
    key = read_uuid(delivery_key)
    name = vendor_id if isinstance(vendor_id, str) and vendor_id.isprintable() else ""
    if key is None and not 0 < len(name) <= 120:
        return None
    detail = "" if delivered else f"{_clean(code)} {_clean(meaning)}".strip()[:300]
    return Report(
        "delivered" if delivered else "bounced", at, key, vendor_id="" if key else name, detail=detail,
        permanent=not delivered and "空号" in detail,
    )  # fmt: skip


def _read_china_time(text: object, now: datetime) -> datetime | None:
    """Return the instant of a time in China, at most `now`; None for anything else."""
    try:
        return limit_instant(datetime.strptime(str(text), "%Y-%m-%d %H:%M:%S").replace(tzinfo=CHINA), now)
    except (ValueError, OverflowError):
        return None


def _clean(text: object) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in str(text or "")[:300])


class AliyunSms(SmsChannel):
    """SMS by Alibaba Cloud. The text's names are the variables of the template."""

    kind: ClassVar[str] = "sms_aliyun"
    id_field: str = "BizId"
    accepted_answer: ClassVar[Mapping[str, Any]] = {"code": 0, "msg": "接收成功"}
    quotas = (Quota(1, MINUTE), Quota(5, HOUR), Quota(10, DAY))
    required: ClassVar[tuple[str, ...]] = ("access_key_id", "sign_name", "secret")
    api: ClassVar[str] = "https://dysmsapi.aliyuncs.com"
    code_fields: ClassVar[tuple[str, ...]] = ("Code",)
    text_fields: ClassVar[tuple[str, ...]] = ("Message",)
    refusals: ClassVar[Mapping[str, Refusal]] = {
        "isv.BUSINESS_LIMIT_CONTROL": Refusal("触发号码流控", MINUTE),
        "isv.DAY_LIMIT_CONTROL": Refusal("已达控制台设置的日发送限额", HOUR),
        "isv.MONTH_LIMIT_CONTROL": Refusal("已达控制台设置的月发送限额"),
        "isv.MOBILE_NUMBER_ILLEGAL": Refusal("手机号码格式错误", gone=True),
        "isv.BLACK_KEY_CONTROL_LIMIT": Refusal("变量含有禁止使用的关键词"),
        "isv.SMS_TEMPLATE_ILLEGAL": Refusal("模板不存在或未审核通过"),
        "isv.SMS_SIGNATURE_ILLEGAL": Refusal("签名不存在或未审核通过"),
        "isv.SMS_SIGNATURE_SCENE_ILLEGAL": Refusal("签名与模板类型不一致"),
        "isv.SMS_CONTENT_ILLEGAL": Refusal("短信内容含有禁止发送的内容"),
        "isv.SMS_SIGN_ILLEGAL": Refusal("签名已被禁止使用"),
        "isv.TEMPLATE_MISSING_PARAMETERS": Refusal("缺少模板变量"),
        "isv.TEMPLATE_PARAMS_ILLEGAL": Refusal("模板变量不符合规范"),
        "isv.PARAM_LENGTH_LIMIT": Refusal("变量长度超过限制"),
        "isv.PARAM_NOT_SUPPORT_URL": Refusal("变量不支持网址"),
        "isv.INVALID_PARAMETERS": Refusal("参数不正确"),
        "isv.INVALID_JSON_PARAM": Refusal("模板变量不是合法的 JSON"),
        "isv.AMOUNT_NOT_ENOUGH": Refusal("账户余额不足", HOUR),
        "isv.OUT_OF_SERVICE": Refusal("业务停机，请检查余额", HOUR),
        "isv.ACCOUNT_ABNORMAL": Refusal("账户异常", HOUR),
        "isv.ACCOUNT_NOT_EXISTS": Refusal("账户不存在"),
        "isv.PRODUCT_UN_SUBSCRIPT": Refusal("尚未开通短信服务"),
        "isv.PRODUCT_UNSUBSCRIBE": Refusal("尚未开通短信服务"),
        "isv.DENY_IP_RANGE": Refusal("来源 IP 所在地区被禁用"),
        "isp.RAM_PERMISSION_DENY": Refusal("RAM 用户没有发送短信的权限"),
        "isp.SYSTEM_ERROR": Refusal("阿里云短信系统错误", unclear=True),
        "SignatureDoesNotMatch": Refusal("签名不正确，请检查 AccessKey Secret"),
        "InvalidAccessKeyId.NotFound": Refusal("AccessKey ID 不存在"),
        "InvalidTimeStamp.Expired": Refusal("请求时间戳已过期，请校准服务器时间", MINUTE),
        "Throttling.User": Refusal("接口调用太频繁", timedelta(seconds=5)),
        "Throttling": Refusal("接口调用太频繁", timedelta(seconds=5)),
        "ServiceUnavailable": Refusal("服务暂不可用", timedelta(seconds=10)),
        "InternalError": Refusal("阿里云内部错误，是否送出未知", unclear=True),
    }  # fmt: skip

    def request(self, message: Message, token: str, now: datetime) -> VendorRequest:
        own, values = self.read_template(message.body)
        query = canonical_query(
            {
                "PhoneNumbers": str(message.target["address"]),
                "SignName": self.settings["sign_name"],
                "TemplateCode": own["template_id"],
                "OutId": str(message.delivery_key),
                **({"TemplateParam": json.dumps(values, ensure_ascii=False)} if values else {}),
            }
        )
        headers = {
            "host": self.host,
            "x-acs-action": "SendSms",
            "x-acs-version": "2017-05-25",
            "x-acs-date": now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "x-acs-signature-nonce": secrets.token_hex(16),
            "x-acs-content-sha256": sha256(b"").hexdigest(),
        }
        signature = sign_for_aliyun(query, headers, self.settings["access_key_id"], self.secret)
        return VendorRequest(f"{self.base}/", headers=headers | {"authorization": signature}, query=query)

    def read_report(self, given: Mapping[str, Any], now: datetime) -> Report | None:
        return _build_report(
            given.get("success") is True, _read_china_time(given.get("report_time"), now), given.get("out_id"),
            given.get("biz_id"), given.get("err_code"), given.get("err_msg"),
        )  # fmt: skip

    def refusal(self, code: str, said: str) -> Refusal | None:
        # One code covers the limits of a minute, an hour and a day.
        refusal = super().refusal(code, said)
        if code == "isv.BUSINESS_LIMIT_CONTROL":
            wait = DAY if "天级" in said else HOUR if "小时级" in said else MINUTE
            return Refusal("触发号码流控", wait)
        return refusal


class TencentSms(SmsChannel):
    """SMS by Tencent Cloud. The text's values fill {1}, {2} … of the template, in the order of their lines."""

    kind: ClassVar[str] = "sms_tencent"
    id_field: str = "Response.SendStatusSet.0.SerialNo"
    accepted_answer: ClassVar[Mapping[str, Any]] = {"result": 0, "errmsg": "OK"}
    quotas = (Quota(1, timedelta(seconds=30)), Quota(5, HOUR), Quota(10, DAY))
    required: ClassVar[tuple[str, ...]] = ("secret_id", "sdk_app_id", "sign_name", "secret")
    optional: ClassVar[tuple[str, ...]] = ("template_id", "region", "callback_token")
    api: ClassVar[str] = "https://sms.tencentcloudapi.com"
    accepted: ClassVar[str] = "Ok"
    code_fields: ClassVar[tuple[str, ...]] = ("Response.Error.Code", "Response.SendStatusSet.0.Code")
    text_fields: ClassVar[tuple[str, ...]] = ("Response.Error.Message", "Response.SendStatusSet.0.Message")
    refusals: ClassVar[Mapping[str, Refusal]] = {
        "LimitExceeded.PhoneNumberThirtySecondLimit": Refusal("该号码 30 秒内发送条数超过上限", timedelta(seconds=30)),
        "LimitExceeded.PhoneNumberOneHourLimit": Refusal("该号码 1 小时内发送条数超过上限", HOUR),
        "LimitExceeded.PhoneNumberDailyLimit": Refusal("该号码当日发送条数超过上限", DAY),
        "LimitExceeded.PhoneNumberSameContentDailyLimit": Refusal("该号码当日相同内容条数超过上限", DAY),
        "LimitExceeded.DeliveryFrequencyLimit": Refusal("命中频率限制策略", MINUTE),
        "LimitExceeded.AppDailyLimit": Refusal("应用当日发送条数超过上限", HOUR),
        "LimitExceeded.AppMainlandChinaDailyLimit": Refusal("应用当日发送条数超过上限", HOUR),
        "LimitExceeded.DailyLimit": Refusal("国际短信当日发送条数超过上限", HOUR),
        "RequestLimitExceeded": Refusal("接口调用太频繁", timedelta(seconds=5)),
        "FailedOperation.PhoneNumberInBlacklist": Refusal("号码在免打扰名单中：用户已退订或被运营商限制", gone=True),
        "InvalidParameterValue.IncorrectPhoneNumber": Refusal("手机号格式错误", gone=True),
        "FailedOperation.ContainSensitiveWord": Refusal("内容含有敏感词"),
        "FailedOperation.TemplateIncorrectOrUnapproved": Refusal("模板不存在、未审核通过，或变量个数不符"),
        "FailedOperation.TemplateParamSetNotMatchApprovedTemplate": Refusal("变量与模板不符"),
        "FailedOperation.SignatureIncorrectOrUnapproved": Refusal("签名不存在或未审核通过"),
        "FailedOperation.InsufficientBalanceInSmsPackage": Refusal("套餐包余量不足", HOUR),
        "FailedOperation.MarketingSendTimeConstraint": Refusal("营销短信只能在 8 点到 22 点发送", HOUR),
        "FailedOperation.FailResolvePacket": Refusal("请求解析失败"),
        "InvalidParameterValue.ContentLengthLimit": Refusal("短信内容太长"),
        "InvalidParameterValue.TemplateParameterLengthLimit": Refusal("变量长度超过限制"),
        "InvalidParameterValue.TemplateParameterFormatError": Refusal("变量格式不正确"),
        "InvalidParameterValue.ProhibitedUseUrlInTemplateParameter": Refusal("变量不能含有网址"),
        "InvalidParameterValue.SdkAppIdNotExist": Refusal("SdkAppId 不存在"),
        "UnauthorizedOperation.SdkAppIdIsDisabled": Refusal("SdkAppId 已停用"),
        "UnauthorizedOperation.SmsSdkAppIdVerifyFail": Refusal("SdkAppId 校验失败"),
        "UnauthorizedOperation.SerivceSuspendDueToArrears": Refusal("欠费停止服务", HOUR),
        "UnauthorizedOperation.RequestIpNotInWhitelist": Refusal("服务器 IP 不在白名单中", HOUR),
        "UnauthorizedOperation.RequestPermissionDeny": Refusal("没有发送短信的权限"),
        "AuthFailure.SignatureFailure": Refusal("签名不正确，请检查 SecretKey"),
        "AuthFailure.SecretIdNotFound": Refusal("SecretId 不存在"),
        "AuthFailure.SignatureExpire": Refusal("签名已过期，请校准服务器时间", MINUTE),
        "InternalError.Timeout": Refusal("下发短信超时，是否送出未知", unclear=True),
        "InternalError.SendAndRecvFail": Refusal("腾讯云内部超时，是否送出未知", unclear=True),
        "InternalError.OtherError": Refusal("腾讯云内部错误，是否送出未知", unclear=True),
        "InternalError": Refusal("腾讯云内部错误，是否送出未知", unclear=True),
    }  # fmt: skip

    def request(self, message: Message, token: str, now: datetime) -> VendorRequest:
        own, values = self.read_template(message.body)
        body = encode_json(
            {
                "PhoneNumberSet": [str(message.target["address"])],
                "SmsSdkAppId": self.settings["sdk_app_id"],
                "SignName": self.settings["sign_name"],
                "TemplateId": own["template_id"],
                "TemplateParamSet": list(values.values()),
                "SessionContext": str(message.delivery_key),
            }
        )
        signed = JSON_HEADERS | {"host": self.host, "x-tc-action": "sendsms"}
        headers = signed | {
            "authorization": sign_for_tencent("sms", signed, body, now, self.settings["secret_id"], self.secret),
            "x-tc-action": "SendSms",
            "x-tc-version": "2021-01-11",
            "x-tc-timestamp": str(int(now.timestamp())),
            "x-tc-region": self.settings["region"] or "ap-guangzhou",
        }
        return VendorRequest(f"{self.base}/", body, headers)

    def find_code(self, answer: Mapping[str, Any]) -> Code | None:
        # Any sub-code of InternalError leaves open whether the message was sent, also one that is not listed. The
        # reason has a listed code only: its length and its characters are known.
        code = super().find_code(answer)
        is_internal = isinstance(code, str) and code.startswith("InternalError")
        return "InternalError" if is_internal and code not in self.refusals else code

    def read_report(self, given: Mapping[str, Any], now: datetime) -> Report | None:
        return _build_report(
            given.get("report_status") == "SUCCESS", _read_china_time(given.get("user_receive_time"), now),
            given.get("ext"), given.get("sid"), given.get("errmsg"), given.get("description"),
        )  # fmt: skip
