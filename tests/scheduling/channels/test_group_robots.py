from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from scheduling.channels.base import Delivered, Outcome, Permanent, Transient, Unknown
from scheduling.channels.robots.base import Robot, encode_json
from scheduling.channels.robots.dingtalk import DingTalk, sign_url
from scheduling.channels.robots.feishu import Feishu, signature_fields
from scheduling.channels.robots.wecom import WeCom
from tests.scheduling.channels.receivers import Answer, MessageFactory, Receiver, always, never, reply
from tests.scheduling.channels.vendors import DingTalkServer, FeishuServer, Vendor, WeComServer

TIMEOUT = timedelta(seconds=5)
PATHS = {
    WeCom: "/cgi-bin/webhook/send?key=k",
    DingTalk: "/robot/send?access_token=t",
    Feishu: "/open-apis/bot/v2/hook/h",
}
SERVERS: dict[type[Robot], Callable[..., Vendor]] = {WeCom: WeComServer, DingTalk: DingTalkServer, Feishu: FeishuServer}
HOMES = {WeCom: "qyapi.weixin.qq.com", DingTalk: "oapi.dingtalk.com", Feishu: "open.feishu.cn"}
SECRET = "SECtest/+="
every = pytest.mark.parametrize("robot", [WeCom, DingTalk, Feishu])
both = pytest.mark.parametrize("format", ["text", "markdown"])


async def sent(
    message_factory: MessageFactory,
    robot: type[Robot],
    answer: Answer,
    path: str = "",
    secret: str = "",
    form: str = "text",
    **changes: Any,
) -> Outcome:
    async with Receiver(answer) as receiver:
        url = receiver.url.removesuffix("/hook") + (path or PATHS[robot])
        message = message_factory.message(target={"url": url, "secret": secret}, **changes)
        return await robot({"format": form}, TIMEOUT).send(message, datetime.now(UTC) + timedelta(seconds=30))


@every
@both
async def test_robot_message_arrives_signed(message_factory: MessageFactory, robot: type[Robot], format: str) -> None:
    vendor = SERVERS[robot](secret=SECRET)

    outcome = await sent(message_factory, robot, vendor, secret=SECRET, form=format)

    assert isinstance(outcome, Delivered)
    assert "您好 Alice，指南在此 👩‍👩‍👧" in json.dumps(vendor.posted, ensure_ascii=False)


@every
async def test_robot_wrong_secret_is_permanent(message_factory: MessageFactory, robot: type[Robot]) -> None:
    if robot is WeCom:
        return  # its robots do not sign
    outcome = await sent(message_factory, robot, SERVERS[robot](secret="another"), secret=SECRET)

    assert isinstance(outcome, Permanent)
    assert outcome.reason in {"vendor_310000", "vendor_19021"}
    assert "校验" in outcome.detail


@every
async def test_unknown_robot_disables_the_target(message_factory: MessageFactory, robot: type[Robot]) -> None:
    outcome = await sent(message_factory, robot, SERVERS[robot](), path="/elsewhere?key=x&access_token=x")

    assert isinstance(outcome, Permanent)
    assert outcome.disable_target


@every
async def test_robot_quota_reply_is_transient_with_delay(message_factory: MessageFactory, robot: type[Robot]) -> None:
    outcome = await sent(message_factory, robot, SERVERS[robot](quota=0))

    assert isinstance(outcome, Transient)
    assert outcome.retry_after == timedelta(minutes=10 if robot is DingTalk else 1)
    assert "频繁" in outcome.detail


@every
@both
@pytest.mark.parametrize("letter", ["a", "您", "👩‍👩‍👧", '"', "\n", "\\", "\x01"])
async def test_robot_long_message_is_cut_to_vendor_limit(
    message_factory: MessageFactory, robot: type[Robot], format: str, letter: str
) -> None:
    vendor = SERVERS[robot](secret=SECRET)

    outcome = await sent(message_factory, robot, vendor, secret=SECRET, form=format, body=letter * 30_000)

    assert isinstance(outcome, Delivered), outcome
    text = json.dumps(vendor.posted[0], ensure_ascii=False)
    assert "…" in text
    limits = {"text": 2048, "markdown": 4096}
    size = len(vendor.posted[0][format]["content"].encode()) if robot is WeCom else len(encode_json(vendor.posted[0]))
    limit = limits[format] if robot is WeCom else 20_000
    assert limit - 50 < size <= limit


@every
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (reply(200, b"<html>blocked</html>"), Unknown("garbled", "<html>blocked</html>")),
        (reply(200, b""), Unknown("garbled", "")),
        (reply(200, b"[]"), Unknown("garbled", "[]")),
        (reply(200, b"{}"), Unknown("garbled", "{}")),
        (reply(200, b'{"errcode":"0","code":true}'), Unknown("garbled", '{"errcode":"0","code":true}')),
        (reply(200, b'{"errcode":0,"code":0}', {"content-length": "900", "connection": "close"}), None),
        (reply(200, b"[" * 60_000), None),
        (reply(302, b"", {"location": "/"}), Permanent("redirect", "redirects are not followed", 302)),
        (reply(404, b"no"), Permanent("http_404", "no", 404)),
        (reply(429, b"slow", {"retry-after": "9"}), Transient("throttled", "slow", timedelta(seconds=9), 429)),
        (reply(503, b"busy"), Transient("http_503", "busy", None, 503)),
        (reply(500, b"oops"), Unknown("http_500", "oops")),
        (reply(502, b"<html>"), Unknown("http_502", "<html>")),
        (reply(504, b"<html>"), Unknown("http_504", "<html>")),
    ],
)
async def test_robot_reply_without_verdict_is_judged_by_status(
    message_factory: MessageFactory, robot: type[Robot], answer: bytes, expected: Outcome | None
) -> None:
    async def once(request: Any, writer: Any) -> None:
        writer.write(answer)
        writer.close()

    outcome = await sent(message_factory, robot, once)

    if expected is None:
        assert isinstance(outcome, Unknown)
    else:
        assert outcome == expected


@pytest.mark.parametrize(
    ("robot", "verdict", "kind", "reason"),
    [
        (WeCom, {"errcode": -1, "errmsg": "system busy"}, Transient, "vendor_-1"),
        (WeCom, {"errcode": 93004, "errmsg": ""}, Permanent, "vendor_93004"),
        (WeCom, {"errcode": 777, "errmsg": "new"}, Transient, "vendor_other"),
        (DingTalk, {"errcode": 410100, "errmsg": "x"}, Transient, "vendor_410100"),
        (DingTalk, {"errcode": 310000, "errmsg": "keywords not in content"}, Permanent, "vendor_310000"),
        (DingTalk, {"errcode": 310000, "errmsg": "invalid timestamp"}, Transient, "vendor_310000"),
        (DingTalk, {"errcode": 430104, "errmsg": "x"}, Permanent, "vendor_430104"),
        (Feishu, {"code": 9499, "msg": "Bad Request"}, Permanent, "vendor_9499"),
        (Feishu, {"StatusCode": 0, "code": 9499, "msg": "too many request"}, Transient, "vendor_9499"),
        (Feishu, {"StatusCode": 0, "code": 19007, "msg": "Bot Not Enabled"}, Permanent, "vendor_19007"),
        (Feishu, {"code": 19024, "msg": "Key Words Not Found"}, Permanent, "vendor_19024"),
        (Feishu, {"StatusCode": 0, "StatusMessage": "success"}, Delivered, ""),
    ],
)
@pytest.mark.parametrize("status", [200, 400])
async def test_robot_vendor_codes_determine_outcome(
    message_factory: MessageFactory, robot: type[Robot], verdict: dict[str, Any], kind: type, reason: str, status: int
) -> None:
    outcome = await sent(message_factory, robot, always(reply(status, json.dumps(verdict).encode())))

    assert isinstance(outcome, kind)
    assert getattr(outcome, "reason", "") == reason
    if reason:
        assert str(verdict.get("errcode", verdict.get("code"))) in getattr(outcome, "detail")  # noqa: B009


@every
async def test_robot_error_detail_can_be_stored(message_factory: MessageFactory, robot: type[Robot]) -> None:
    body = b'{"errcode":31,"code":31,"errmsg":"\\u0000\\ud800' + b"x" * 5000 + b'","msg":"\\ud800"}'

    outcome = await sent(message_factory, robot, always(reply(200, body)))

    assert isinstance(outcome, Transient)
    assert len(outcome.detail) <= 1000
    assert "\x00" not in outcome.detail
    outcome.detail.encode()


@every
async def test_robot_timeout_is_unknown_and_sent_once(message_factory: MessageFactory, robot: type[Robot]) -> None:
    async with Receiver(lambda request, writer: never()) as receiver:
        message = message_factory.message(target={"url": receiver.url.removesuffix("/hook") + PATHS[robot]})
        outcome = await robot({}, timedelta(seconds=1)).send(message, datetime.now(UTC) + TIMEOUT)

    assert isinstance(outcome, Unknown)
    assert len(receiver.requests) == 1
    assert receiver.requests[0].headers["connection"] == "close"


@every
def test_robot_target_must_be_a_vendor_address(robot: type[Robot]) -> None:
    robot.validate_target({"url": f"https://{HOMES[robot]}{PATHS[robot]}", "secret": "s"})
    for url in (
        f"http://{HOMES[robot]}{PATHS[robot]}",
        f"https://{HOMES[robot]}/elsewhere",
        f"https://{HOMES[robot]}.example.com{PATHS[robot]}",
        f"https://example.com{PATHS[robot]}",
        f"https://{HOMES[robot]}@example.com{PATHS[robot]}",
        f"https://10.0.0.1{PATHS[robot]}",
    ):
        with pytest.raises(ValueError, match="url: "):
            robot.validate_target({"url": url})


@every
async def test_robot_without_target_is_permanent(message_factory: MessageFactory, robot: type[Robot]) -> None:
    outcome = await robot({}, TIMEOUT).send(message_factory.message(), datetime.now(UTC) + TIMEOUT)

    assert outcome == Permanent("bad_target", "url: is missing")


@every
def test_robot_config_errors_name_the_field(robot: type[Robot]) -> None:
    with pytest.raises(ValueError, match="format: must be one of text, markdown"):
        robot({"format": "html"}, TIMEOUT)
    with pytest.raises(ValueError, match="url: is not known here"):
        robot({"url": "https://example.com"}, TIMEOUT)
    with pytest.raises(ValueError, match="secret: must be text"):
        robot.validate_target({"url": f"https://{HOMES[robot]}{PATHS[robot]}", "secret": 5})


@every
def test_robot_target_key_hides_the_url(message_factory: MessageFactory, robot: type[Robot]) -> None:
    message = message_factory.message(target={"url": "https://example.com/key-of-the-robot"})

    key = robot({}, TIMEOUT).target_key(message)

    assert key.startswith(robot.kind)
    assert "key-of-the-robot" not in key


def test_dingtalk_signature_is_quoted_once() -> None:
    """printf '1767225600000\\nSECtest/+=' | openssl dgst -sha256 -hmac 'SECtest/+=' -binary | base64"""
    url = sign_url("https://oapi.dingtalk.com/robot/send?access_token=t", SECRET, datetime(2026, 1, 1, tzinfo=UTC))

    assert url.endswith("&timestamp=1767225600000&sign=euHAjNOCNez1MEi1s6KMvz77xUoEiQnS3NUNaq3pOcA%3D")
    assert "%25" not in url


def test_feishu_signature_uses_secret_as_key() -> None:
    """printf '' | openssl dgst -sha256 -mac HMAC -macopt hexkey:<hex of '1767225600\\nSECtest/+='> -binary | base64"""
    assert signature_fields(SECRET, datetime(2026, 1, 1, tzinfo=UTC)) == {
        "timestamp": "1767225600",
        "sign": "UY7K9XmtVq4Ailbkgqro4Dhf3Vw6fHMHOx7IQQHryjE=",
    }


async def test_dingtalk_slash_is_sent_as_2f(message_factory: MessageFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduling.channels.robots.dingtalk.base64.b64encode", lambda digest: b"a/b+c=")
    async with Receiver() as receiver:
        message = message_factory.message(target={"url": receiver.url + "?access_token=t", "secret": "s"})
        await DingTalk({}, TIMEOUT).send(message, datetime.now(UTC) + TIMEOUT)

    assert receiver.requests[0].target.endswith("&sign=a%2Fb%2Bc%3D")
