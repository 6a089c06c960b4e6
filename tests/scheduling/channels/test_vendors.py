"""Messages to one person, sent to servers that respond as the vendors document."""

import asyncio
import re
from datetime import UTC, datetime, timedelta

import pytest

from scheduling.channels.base import Delivered, Permanent, Transient, Unknown
from scheduling.channels.http_client import Response
from scheduling.channels.vendors import base
from scheduling.channels.vendors.base import Token, hide_in_text
from scheduling.channels.vendors.sms import (
    AliyunSms,
    SmsChannel,
    TencentSms,
    canonical_query,
    sign_for_aliyun,
    sign_for_tencent,
)
from scheduling.channels.vendors.wechat import MiniProgram, OfficialAccount, WeChatService, WeChatVendor, WeComApp
from tests.scheduling.channels.conftest import age_tokens
from tests.scheduling.channels.http_receivers import (
    MessageFactory,
    Receiver,
    always,
    build_message,
    reply,
    reset,
    time_out,
)
from tests.scheduling.channels.person_vendors import AliyunServer, TencentServer, TokenVendor
from tests.support.tables import each_row

pytestmark = pytest.mark.usefixtures("token_server")
TIMEOUT = timedelta(seconds=30)
SECRET = "a-long-vendor-secret"
SETTINGS = {
    WeComApp: {"corp_id": "ww1", "agent_id": 7, "secret": SECRET},
    WeChatService: {"corp_id": "ww1", "open_kfid": "wk1", "secret": SECRET},
    OfficialAccount: {"app_id": "wx1", "template_id": "T1", "secret": SECRET},
    MiniProgram: {"app_id": "wx2", "template_id": "T2", "secret": SECRET},
    AliyunSms: {"access_key_id": "LTAI", "sign_name": "示例", "template_id": "SMS_1", "secret": SECRET},
    TencentSms: {
        "secret_id": "AKID", "sdk_app_id": 1400006666, "sign_name": "示例", "template_id": 1110, "secret": SECRET,
    },
}  # fmt: skip
VALUES = "thing1: 指南 A:B\ntime2：10:00"
every = each_row("kind", list(SETTINGS))
with_token = each_row("kind", [WeComApp, WeChatService, OfficialAccount, MiniProgram])


async def sent(kind, answer, config=None, address="", count=1, **changes):
    forget_tokens()
    async with Receiver(answer) as receiver:
        url = receiver.url.removesuffix("/hook")
        channel = kind(SETTINGS[kind] | {"url": url} | (config or {}), TIMEOUT)
        message = message_to(kind, address, **changes)
        for _ in range(count):
            outcome = await channel.send(message)
        return outcome


def forget_tokens():
    cache = base.shared_tokens()
    cache._redis.flushdb()
    cache._known.clear()


def message_to(kind, address="", **changes):
    usual = {"repeatable": False} | ({"body": VALUES} if kind.fills_template else {})
    address = address or ("13800138000" if issubclass(kind, SmsChannel) else "zhangsan")
    return build_message(target={"address": address}, **usual | changes)


@with_token
async def test_vendor_messages_arrive_with_one_token(kind):
    vendor = TokenVendor()

    outcome = await sent(kind, vendor, count=3)

    assert isinstance(outcome, Delivered), outcome
    assert (len(vendor.posted), len(vendor.fetches)) == (3, 1)
    assert vendor.posted[0]["touser"] == "zhangsan"
    if kind.fills_template:
        assert vendor.posted[0]["data"] == {"thing1": {"value": "指南 A:B"}, "time2": {"value": "10:00"}}
    else:
        assert vendor.posted[0]["text"] == {"content": "您好 Alice，指南在此 👩‍👩‍👧"}
    assert vendor.token not in outcome.reply


@each_row("kind", [WeComApp, OfficialAccount])
@each_row("code", [42001, 40001])
async def test_vendor_expired_token_is_refreshed_once_and_the_message_arrives_once(kind, code, token_server):
    vendor = TokenVendor(expired_code=code)
    forget_tokens()
    async with Receiver(vendor) as receiver:
        channel = kind(SETTINGS[kind] | {"url": receiver.url.removesuffix("/hook")}, TIMEOUT)
        message = message_to(kind, "lisi")
        await channel.send(message)
        vendor.expire()
        age_tokens(token_server)
        outcomes = await asyncio.gather(*(channel.send(message) for _ in range(20)))

    assert all(isinstance(outcome, Delivered) for outcome in outcomes), outcomes
    assert len(vendor.fetches) == 2
    assert len(vendor.posted) == 21
    if issubclass(kind, WeChatVendor):
        assert [fetch.json["force_refresh"] for fetch in vendor.fetches] == [False, True]


@each_row("kind", [WeComApp, OfficialAccount])
async def test_vendor_that_gives_no_token_or_refuses_it_gets_few_requests(kind):
    refusal = {"errcode": 40001, "errmsg": f"invalid credential {SECRET}"}
    vendors = [(TokenVendor(fixed_token="never-accepted"), ""), (TokenVendor(refuse_token=refusal), "40001")]
    for vendor, detail in vendors:
        outcome = await sent(kind, vendor, count=5)

        assert isinstance(outcome, Transient), outcome
        assert outcome.reason in ("token_refused", "token_expired")
        assert detail in outcome.detail
        assert SECRET not in outcome.detail
        assert len(vendor.fetches) == 1
        assert len(vendor.calls) <= (0 if detail else 10)
        assert not vendor.posted


@each_row(
    "answer",
    [
        b"<html>", b"[]", b'{"access_token": 5}', b'{"access_token": ""}', b'{"access_token": "a b\\n"}',
        b'{"access_token": "' + b"x" * 100_000 + b'"}', b"[" * 60_000,
    ],
)  # fmt: skip
async def test_vendor_token_answer_of_rubbish_is_transient(answer):
    outcome = await sent(WeComApp, always(reply(200, answer)))
    assert isinstance(outcome, Transient), outcome
    assert outcome.reason in ("token_refused", "token_failed")


@each_row("expires", [b"1" + b"0" * 400, b"NaN", b"-1", b'"soon"', b"null"])
def test_vendor_token_of_an_odd_lifetime_lasts_as_usual(expires):
    answer = Response(200, body=b'{"access_token": "t", "expires_in": ' + expires + b"}")
    assert WeComApp(SETTINGS[WeComApp], TIMEOUT).read_token(answer) == Token("t", timedelta(hours=2))


@each_row("kind", [WeComApp, OfficialAccount, AliyunSms, TencentSms])
@each_row(
    "raw, expected",
    [
        (reply(200, b"<html>blocked</html>"), Unknown),
        (reply(200, b'{"errcode":0' + b" " * 200_000 + b"}"), Unknown),
        (reply(500, b"oops"), Unknown),
        (reply(503, b"busy"), Transient),
        (reply(302, b"", {"location": "http://127.0.0.1/"}), Permanent),
        (b"rubbish\r\n\r\n", Unknown),
        (b"", Unknown),
    ],
)
async def test_vendor_answer_without_code_is_judged_by_status(kind, raw, expected):
    outcome = await sent(kind, after_token(raw))
    assert isinstance(outcome, expected), outcome


def after_token(raw):
    """Give a token, then this answer; an empty one: reset the connection; None: answer nothing."""
    vendor = TokenVendor()

    async def answer(request, writer):
        if "oken" in request.target.partition("?")[0]:
            await vendor(request, writer)
        elif raw is None:
            await time_out()
        elif not raw:
            reset(writer)
        else:
            writer.write(raw)
            await writer.drain()
            writer.close()

    return answer


@each_row("kind", [WeComApp, AliyunSms])
async def test_vendor_that_hangs_is_unknown(kind):
    outcome = await sent(kind, after_token(None))
    assert (type(outcome), getattr(outcome, "reason", "")) == (Unknown, "timeout")


@each_row(
    "kind, verdict, expected, gone",
    [
        (WeComApp, {"errcode": 81013, "errmsg": "user & party & tag all invalid"}, Permanent, True),
        (WeComApp, {"errcode": 0, "errmsg": "ok", "invaliduser": "ZhangSan|x"}, Permanent, True),
        (WeComApp, {"errcode": 0, "errmsg": "ok", "unlicenseduser": "zhangsan"}, Permanent, False),
        (WeComApp, {"errcode": 0, "errmsg": "ok", "invaliduser": "other"}, Delivered, False),
        (WeComApp, {"errcode": 45009, "errmsg": "api freq out of limit"}, Transient, False),
        (WeComApp, {"errcode": 777, "errmsg": "new"}, Transient, False),
        (WeChatService, {"errcode": 40096, "errmsg": "invalid external userid"}, Permanent, True),
        (MiniProgram, {"errcode": 43101, "errmsg": "user refuse to accept the msg"}, Permanent, False),
    ],
)
async def test_vendor_code_determines_outcome(kind, verdict, expected, gone):
    vendor = TokenVendor(ok=verdict)

    outcome = await sent(kind, vendor)

    assert isinstance(outcome, expected), outcome
    assert getattr(outcome, "disable_target", False) is gone
    assert len(vendor.calls) == 1


async def test_wecom_card_has_title_and_button_and_asks_for_the_check_of_duplicates():
    vendor = TokenVendor()
    body = "第一行\n第二行\n[查看订单](https://shop.example.com/o/1)"

    await sent(WeComApp, vendor, {"format": "card", "duplicate_check": "4h"}, subject="订单已发货", body=body)
    plain = await sent(WeComApp, vendor, {"format": "card"}, body="没有按钮")

    assert vendor.posted[0]["msgtype"] == "textcard"
    assert vendor.posted[0]["textcard"] == {
        "title": "订单已发货", "description": "第一行\n第二行", "btntxt": "查看订单", "url": "https://shop.example.com/o/1",
    }  # fmt: skip
    assert (vendor.posted[0]["enable_duplicate_check"], vendor.posted[0]["duplicate_check_interval"]) == (1, 14_400)
    assert (type(plain), getattr(plain, "reason", "")) == (Permanent, "bad_content")
    assert len(vendor.posted) == 1


def test_wechat_service_quota_counts_from_the_customers_last_message():
    channel = WeChatService(SETTINGS[WeChatService], TIMEOUT)
    now = datetime.now(UTC)
    messages = [
        build_message(target={"address": address}, spoke_at=at)
        for address, at in [("a", now), ("a", now), ("a", now + timedelta(hours=1)), ("b", now), ("a", None)]
    ]
    keys = [channel.quota_key(message) for message in messages]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4
    assert len({channel.target_key(message) for message in messages}) == 1


@every
@each_row(
    "changes, problem",
    [
        ({"secret": ""}, "secret: is missing"),
        ({"secret": ["x"]}, "secret: must be text"),
        ({"url": "https://evil.example.com"}, "url: must start with"),
        ({"url": "https://169.254.169.254"}, "url: the address is not public"),
    ],
)
def test_vendor_setting_errors_name_the_field(kind, changes, problem):
    with pytest.raises(ValueError, match="^" + re.escape(problem)):
        kind(SETTINGS[kind] | changes, TIMEOUT)


@each_row("quotas, problem", [("20/1m", "must be a list"), (["20"], "“20” is not like"), (["0/1m"], "“0/1m”"),
                              (["2000/1m"], "“2000/1m”"), ([5], "“5” is not like")])  # fmt: skip
def test_vendor_quotas_are_checked(quotas, problem):
    with pytest.raises(ValueError, match="^" + re.escape(f"quotas: {problem}")):
        WeComApp(SETTINGS[WeComApp] | {"quotas": quotas}, TIMEOUT)


BAD_ADDRESSES = [
    *((kind, address) for kind in SETTINGS for address in ("", "a\nb", "x" * 501, ["a"])),
    *((kind, address) for kind in (AliyunSms, TencentSms) for address in ("12", "138 0013 8000", "alice@example.com")),
    *((WeComApp, address) for address in ("@all", "@ALL", "boss|cfo")),  # many members
]


@each_row("kind, address", BAD_ADDRESSES)
async def test_vendor_bad_address_is_permanent(kind, address):
    channel = kind(SETTINGS[kind], TIMEOUT)
    message = build_message(target={"address": address})
    outcome = await channel.send(message)
    assert (type(outcome), getattr(outcome, "reason", "")) == (Permanent, "bad_target")


async def test_wechat_texts_name_template_link_and_page():
    body = "template_id: T9\nurl: https://shop.example.com/o\npage: pages/order\nthing1: 指南"
    vendor = TokenVendor()

    await sent(OfficialAccount, vendor, {"mini_app_id": "wx9"}, body=body)
    await sent(OfficialAccount, vendor, {"type": "subscription"}, body=body)
    await sent(MiniProgram, vendor, body=body, locale="en")

    data = {"thing1": {"value": "指南"}}
    template, subscription, mini = vendor.posted
    assert template == {
        "touser": "zhangsan", "template_id": "T9", "data": data, "url": "https://shop.example.com/o",
        "miniprogram": {"appid": "wx9", "pagepath": "pages/order"}, "client_msg_id": MessageFactory.delivery_key.hex,
    }  # fmt: skip
    assert subscription == {
        "touser": "zhangsan", "template_id": "T9", "data": data, "page": "https://shop.example.com/o",
    }  # fmt: skip
    assert mini == {
        "touser": "zhangsan", "template_id": "T9", "data": data, "page": "pages/order", "miniprogram_state": "formal",
        "lang": "en_US",
    }  # fmt: skip
    paths = [call.target.partition("?")[0] for call in vendor.calls]
    assert paths == [
        "/cgi-bin/message/template/send",
        "/cgi-bin/message/subscribe/bizsend",
        "/cgi-bin/message/subscribe/send",
    ]


@each_row("kind", [OfficialAccount, AliyunSms])
@each_row(
    "body",
    ["您好 Alice", "thing1: A\nurl: https://x.example.com\ntemplate_id: T9", "thing1: A\nthing1: B"],
)
async def test_vendor_text_that_is_no_list_of_values_is_permanent(kind, body):
    vendor = TokenVendor()
    outcome = await sent(kind, vendor, body=body)
    assert (type(outcome), getattr(outcome, "reason", "")) == (Permanent, "bad_content")
    assert not vendor.calls


def test_signatures_match_the_examples_of_the_documentation():
    digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    headers = {
        "host": "ecs.cn-shanghai.aliyuncs.com", "x-acs-action": "RunInstances", "x-acs-version": "2014-05-26",
        "x-acs-date": "2023-10-26T10:22:32Z", "x-acs-signature-nonce": "3156853299f313e23d1673dc12e1703d",
        "x-acs-content-sha256": digest,
    }  # fmt: skip
    image = "win2019_1809_x64_dtc_zh-cn_40G_alibase_20230811.vhd"
    query = canonical_query({"RegionId": "cn-shanghai", "ImageId": image})
    assert sign_for_aliyun(query, headers, "YourAccessKeyId", "YourAccessKeySecret").endswith(
        "Signature=06563a9e1b43f5dfe96b81484da74bceab24a1d853912eee15083a6f0f3283c0"
    )

    body = b'{"Limit": 1, "Filters": [{"Values": ["\\u672a\\u547d\\u540d"], "Name": "instance-name"}]}'
    signed = {
        "content-type": "application/json; charset=utf-8", "host": "cvm.tencentcloudapi.com",
        "x-tc-action": "describeinstances",
    }  # fmt: skip
    at = datetime.fromtimestamp(1551113065, UTC)
    assert sign_for_tencent("cvm", signed, body, at, "AKID" + "*" * 32, "*" * 32).endswith(
        "SignedHeaders=content-type;host;x-tc-action, "
        "Signature=10b1a37a7301a02ca19a647ad722d5e43b4b3cff309d421d85b46093f6ab6c4f"
    )


async def test_aliyun_sms_is_signed_and_filled():
    server = AliyunServer(SECRET)

    outcome = await sent(AliyunSms, server)

    assert isinstance(outcome, Delivered), outcome
    assert server.posted == [
        {
            "PhoneNumbers": "13800138000", "SignName": "示例", "TemplateCode": "SMS_1",
            "TemplateParam": '{"thing1": "指南 A:B", "time2": "10:00"}', "OutId": str(MessageFactory.delivery_key),
        }
    ]  # fmt: skip
    longest = "\n".join(f"value{number}: {'您' * 100}" for number in range(5))  # nine characters of the query for each
    assert isinstance(await sent(AliyunSms, server, body=longest), Delivered)
    beyond = await sent(AliyunSms, server, body=f"{longest}\nvalue6: {'您' * 500}")
    assert (type(beyond), getattr(beyond, "reason", "")) == (Permanent, "bad_url")
    refused = await sent(AliyunSms, server, {"secret": "another-secret"})
    assert (type(refused), getattr(refused, "reason", "")) == (Permanent, "vendor_SignatureDoesNotMatch")


async def test_tencent_sms_is_signed_and_filled():
    server = TencentServer(SECRET)

    outcome = await sent(TencentSms, server)

    assert isinstance(outcome, Delivered), outcome
    assert server.posted == [
        {
            "PhoneNumberSet": ["13800138000"], "SmsSdkAppId": "1400006666", "SignName": "示例", "TemplateId": "1110",
            "TemplateParamSet": ["指南 A:B", "10:00"], "SessionContext": str(MessageFactory.delivery_key),
        }
    ]  # fmt: skip
    refused = await sent(TencentSms, server, {"secret": "another-secret"})
    assert (type(refused), getattr(refused, "reason", "")) == (Permanent, "vendor_AuthFailure.SignatureFailure")


@each_row(
    "code, text, expected, wait",
    [
        ("isv.BUSINESS_LIMIT_CONTROL", "触发分钟级流控Permits:1", Transient, timedelta(minutes=1)),
        ("isv.BUSINESS_LIMIT_CONTROL", "触发小时级流控Permits:5", Transient, timedelta(hours=1)),
        ("isv.BUSINESS_LIMIT_CONTROL", "触发天级流控Permits:10", Transient, timedelta(days=1)),
        ("isv.MOBILE_NUMBER_ILLEGAL", "号码格式错误", Permanent, None),
        ("isp.SYSTEM_ERROR", "系统错误", Unknown, None),
        ("InternalError", "The request processing has failed", Unknown, None),
        ("isv.NEW_CODE", "?", Transient, None),
    ],
)
async def test_aliyun_code_determines_outcome(code, text, expected, wait):
    server = AliyunServer(SECRET, verdict={"Code": code, "Message": text, "RequestId": "r"})
    outcome = await sent(AliyunSms, server)
    assert (type(outcome), getattr(outcome, "retry_after", None)) == (expected, wait)
    assert getattr(outcome, "disable_target", False) is (code == "isv.MOBILE_NUMBER_ILLEGAL")


@each_row(
    "code, expected, reason",
    [
        ("FailedOperation.PhoneNumberInBlacklist", Permanent, "vendor_FailedOperation.PhoneNumberInBlacklist"),
        ("InternalError.Timeout", Unknown, "vendor_InternalError.Timeout"),
        ("InternalError.NewCode", Unknown, "vendor_InternalError"),
        ("InvalidParameterValue.NewCode", Transient, "vendor_other"),
    ],
)
@each_row("whole", [False, True])
async def test_tencent_code_determines_outcome(code, expected, reason, whole):
    status = {"SendStatusSet": [{"Code": code, "Message": "text"}]}
    verdict = {"Response": {"Error": {"Code": code, "Message": "text"}} if whole else status}
    outcome = await sent(TencentSms, TencentServer(SECRET, verdict=verdict))
    assert (type(outcome), getattr(outcome, "reason", "")) == (expected, reason)
    assert getattr(outcome, "disable_target", False) is (expected is Permanent)


@each_row("form", ["p@ss/word+1&2", "p%40ss%2Fword%2B1%262", "cEBzcy93b3JkKzEmMg"])
def test_echoed_secret_is_hidden_in_each_encoding(form):
    assert hide_in_text(f"bad key {form}.", "p@ss/word+1&2") == "bad key ****."
