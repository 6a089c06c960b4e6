import json
from datetime import timedelta

import pytest

from scheduling.channels.base import Delivered, Permanent, Transient, Unknown
from scheduling.channels.http_client import encode_json
from scheduling.channels.robots import DingTalk, Feishu, WeCom
from tests.scheduling.channels.http_receivers import Receiver, always, build_message, reply, time_out
from tests.scheduling.channels.vendors import DingTalkServer, FeishuServer, WeComServer
from tests.support.tables import each_row

TIMEOUT = timedelta(seconds=30)
PATHS = {
    WeCom: "/cgi-bin/webhook/send?key=k",
    DingTalk: "/robot/send?access_token=t",
    Feishu: "/open-apis/bot/v2/hook/h",
}
SERVERS = {WeCom: WeComServer, DingTalk: DingTalkServer, Feishu: FeishuServer}
HOMES = {WeCom: "qyapi.weixin.qq.com", DingTalk: "oapi.dingtalk.com", Feishu: "open.feishu.cn"}
SECRET = "SECtest/+="
every = each_row("robot", [WeCom, DingTalk, Feishu])
both = each_row("format", ["text", "markdown"])


async def sent(robot, answer, path="", secret="", form="text", **changes):
    async with Receiver(answer) as receiver:
        url = receiver.url.removesuffix("/hook") + (path or PATHS[robot])
        message = build_message(target={"url": url, "secret": secret}, **changes)
        return await robot({"format": form}, TIMEOUT).send(message)


@every
@both
async def test_robot_message_arrives_signed(robot, format):
    vendor = SERVERS[robot](secret=SECRET)

    outcome = await sent(robot, vendor, secret=SECRET, form=format)

    assert isinstance(outcome, Delivered)
    assert "您好 Alice，指南在此 👩‍👩‍👧" in json.dumps(vendor.posted, ensure_ascii=False)


@each_row("robot, reason", [(DingTalk, "vendor_310000"), (Feishu, "vendor_19021")])
async def test_robot_wrong_secret_is_permanent(robot, reason):
    outcome = await sent(robot, SERVERS[robot](secret="another"), secret=SECRET)

    assert isinstance(outcome, Permanent)
    assert outcome.reason == reason
    assert "校验" in outcome.detail


@every
async def test_unknown_robot_disables_the_target_and_a_full_one_waits(robot):
    gone = await sent(robot, SERVERS[robot](), path="/elsewhere?key=x&access_token=x")
    assert isinstance(gone, Permanent)
    assert gone.disable_target

    full = await sent(robot, SERVERS[robot](quota=0))
    assert isinstance(full, Transient)
    assert full.retry_after == timedelta(minutes=10 if robot is DingTalk else 1)
    assert "频繁" in full.detail


@every
@both
@each_row("letter", ["a", "👩‍👩‍👧", '"'])
async def test_robot_long_message_is_cut_to_vendor_limit(robot, format, letter):
    vendor = SERVERS[robot](secret=SECRET)

    outcome = await sent(robot, vendor, secret=SECRET, form=format, body=letter * 30_000)

    assert isinstance(outcome, Delivered), outcome
    text = json.dumps(vendor.posted[0], ensure_ascii=False)
    assert "…" in text
    limits = {"text": 2048, "markdown": 4096}
    size = len(vendor.posted[0][format]["content"].encode()) if robot is WeCom else len(encode_json(vendor.posted[0]))
    limit = limits[format] if robot is WeCom else 20_000
    assert limit - 50 < size <= limit


@every
@each_row(
    "answer, expected",
    [
        (reply(200, b"<html>blocked</html>"), Unknown("garbled", "<html>blocked</html>")),
        (reply(200, b'{"errcode":"0","code":true}'), Unknown("garbled", '{"errcode":"0","code":true}')),
        (reply(200, b'{"errcode":0,"code":0}', {"content-length": "900", "connection": "close"}), None),
        (reply(200, b"[" * 60_000), None),
        (reply(302, b"", {"location": "/"}), Permanent("redirect", "redirects are not followed", 302)),
        (reply(429, b"slow", {"retry-after": "9"}), Transient("throttled", "slow", timedelta(seconds=9), 429)),
        (reply(500, b"oops"), Unknown("http_500", "oops")),
    ],
)
async def test_robot_reply_without_verdict_is_judged_by_status(robot, answer, expected):
    async def once(request, writer):
        writer.write(answer)
        writer.close()

    outcome = await sent(robot, once)

    if expected is None:
        assert isinstance(outcome, Unknown)
    else:
        assert outcome == expected


@each_row(
    "robot, verdict, kind, reason, statuses",
    [
        (WeCom, {"errcode": 93004, "errmsg": ""}, Permanent, "vendor_93004", (200, 400, 500)),
        (WeCom, {"errcode": 777, "errmsg": "new"}, Transient, "vendor_other", (200, 400)),
        (WeCom, {"errcode": 777, "errmsg": "new"}, Unknown, "vendor_other", (500,)),
        (DingTalk, {"errcode": 310000, "errmsg": "keywords not in content"}, Permanent, "vendor_310000", (200, 400)),
        (DingTalk, {"errcode": 310000, "errmsg": "invalid timestamp"}, Transient, "vendor_310000", (200, 400)),
        (DingTalk, {"errcode": 777, "errmsg": "new"}, Unknown, "vendor_other", (500,)),
        (Feishu, {"code": 9499, "msg": "Bad Request"}, Permanent, "vendor_9499", (200, 400)),
        (Feishu, {"StatusCode": 0, "code": 9499, "msg": "too many request"}, Transient, "vendor_9499", (200, 400)),
        (Feishu, {"StatusCode": 0, "code": 19007, "msg": "Bot Not Enabled"}, Permanent, "vendor_19007", (200, 400)),
        (Feishu, {"StatusCode": 0, "StatusMessage": "success"}, Delivered, "", (200, 400)),
        (Feishu, {"code": 777, "msg": "new"}, Unknown, "vendor_other", (500,)),
    ],
)
async def test_robot_vendor_codes_determine_outcome(robot, verdict, kind, reason, statuses):
    """With a server error an unlisted code is unknown: the vendor may have sent."""
    for status in statuses:
        outcome = await sent(robot, always(reply(status, json.dumps(verdict).encode())))
        assert (type(outcome), getattr(outcome, "reason", "")) == (kind, reason), status


@every
async def test_robot_error_detail_can_be_stored(robot):
    body = b'{"errcode":31,"code":31,"errmsg":"\\u0000\\ud800' + b"x" * 5000 + b'","msg":"\\ud800"}'

    outcome = await sent(robot, always(reply(200, body)))

    assert isinstance(outcome, Transient)
    assert len(outcome.detail) <= 1000
    assert "\x00" not in outcome.detail
    outcome.detail.encode()


@every
async def test_robot_timeout_is_unknown_and_sent_once(robot):
    async with Receiver(time_out) as receiver:
        message = build_message(target={"url": receiver.url.removesuffix("/hook") + PATHS[robot]})
        outcome = await robot({}, TIMEOUT).send(message)

    assert isinstance(outcome, Unknown)
    assert len(receiver.requests) == 1
    assert receiver.requests[0].headers["connection"] == "close"


@every
def test_robot_target_must_be_a_vendor_address(robot):
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
    with pytest.raises(ValueError, match="secret: must be text"):
        robot.validate_target({"url": f"https://{HOMES[robot]}{PATHS[robot]}", "secret": 5})
    with pytest.raises(ValueError, match="format: must be one of text, markdown"):
        robot({"format": "html"}, TIMEOUT)
    key = robot({}, TIMEOUT).target_key(build_message(target={"url": "https://example.com/key-of-the-robot"}))
    assert key.startswith(robot.kind)
    assert "key-of-the-robot" not in key


async def test_dingtalk_slash_is_sent_as_2f(monkeypatch):
    monkeypatch.setattr("scheduling.channels.robots.base64.b64encode", lambda digest: b"a/b+c=")
    async with Receiver() as receiver:
        message = build_message(target={"url": receiver.url + "?access_token=t", "secret": "s"})
        await DingTalk({}, TIMEOUT).send(message)

    assert receiver.requests[0].target.endswith("&sign=a%2Fb%2Bc%3D")


OK = always(reply(200, b'{"errcode":0,"code":0}'))
LETTER = "新订单 <b>\n请尽快处理\n[查看](https://shop.example.com/o/1)\n[拒绝](https://shop.example.com/o/2)"


async def posted(robot, config, **changes):
    async with Receiver(OK) as receiver:
        url = receiver.url.removesuffix("/hook") + PATHS[robot]
        message = build_message(target={"url": url}, **changes)
        outcome = await robot(config, TIMEOUT).send(message)
        assert isinstance(outcome, Delivered), outcome
        return receiver.requests[0].json


@every
@both
async def test_robot_mentions_members_of_the_last_line(robot, format):
    body = "有新订单\n@all @13800138000 @zhangsan"
    document = await posted(robot, {"format": format, "mentions": True}, body=body)

    expected = {
        (WeCom, "text"): {"msgtype": "text", "text": {
            "content": "有新订单", "mentioned_list": ["zhangsan", "@all"], "mentioned_mobile_list": ["13800138000"],
        }},
        (WeCom, "markdown"): {"msgtype": "markdown", "markdown": {"content": "有新订单<@zhangsan>"}},
        (Feishu, "text"): {"msg_type": "text", "content": {
            "text": '有新订单 <at user_id="all"></at> <at user_id="zhangsan"></at>',
        }},
        (Feishu, "markdown"): {"msg_type": "interactive", "card": {
            "config": {"wide_screen_mode": True},
            "elements": [{"tag": "markdown", "content": "有新订单 <at id=all></at> <at id=zhangsan></at>"}],
        }},
    }  # fmt: skip
    if robot is DingTalk:
        assert document["at"] == {"atMobiles": ["13800138000"], "atUserIds": ["zhangsan"], "isAtAll": True}
        assert "有新订单 @13800138000 @zhangsan" in document[format].values()
    else:
        assert document == expected[robot, format]


@every
async def test_robot_without_the_setting_mentions_no_member(robot):
    document = await posted(robot, {}, body="客户说：\n@all")
    text = json.dumps(document, ensure_ascii=False)
    assert "客户说：\\n@all" in text
    assert not {"mentioned_list", "at"} & {*document, *document.get("text", {})}
    assert "<at" not in text


async def test_robot_cards_have_title_and_buttons():
    documents = [
        await posted(robot, {"format": "card"}, subject="", body=LETTER) for robot in (WeCom, DingTalk, Feishu)
    ]
    links = ["https://shop.example.com/o/1", "https://shop.example.com/o/2"]
    wecom, dingtalk, feishu = documents
    assert wecom == {
        "msgtype": "template_card",
        "template_card": {
            "card_type": "text_notice",
            "main_title": {"title": "新订单 <b>"},
            "sub_title_text": "请尽快处理",
            "jump_list": [{"type": 1, "title": "查看", "url": links[0]}, {"type": 1, "title": "拒绝", "url": links[1]}],
            "card_action": {"type": 1, "url": links[0]},
        },
    }
    assert dingtalk == {
        "msgtype": "actionCard",
        "actionCard": {
            "title": "新订单 <b>",
            "text": "请尽快处理",
            "btns": [{"title": "查看", "actionURL": links[0]}, {"title": "拒绝", "actionURL": links[1]}],
        },
    }
    assert feishu["card"]["header"]["title"]["content"] == "新订单 <b>"
    assert [each["url"] for each in feishu["card"]["elements"][1]["actions"]] == links


@every
@each_row("letter", ["👩‍👩‍👧", '"'])
async def test_robot_long_card_keeps_its_buttons(robot, letter):
    body = letter * 30_000 + "\n[查看](https://shop.example.com/o/1)"
    document = await posted(robot, {"format": "card"}, subject="标题", body=body)
    assert "https://shop.example.com/o/1" in json.dumps(document)
    assert len(encode_json(document)) <= 20_000


@each_row("robot", [WeCom, DingTalk])
async def test_robot_card_without_button_is_permanent(robot):
    outcome = await robot({"format": "card"}, TIMEOUT).send(
        build_message(target={"url": f"https://{HOMES[robot]}{PATHS[robot]}"})
    )
    assert (type(outcome), getattr(outcome, "reason", "")) == (Permanent, "bad_content")
