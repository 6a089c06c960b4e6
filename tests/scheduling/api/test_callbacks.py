"""Callbacks of vendors over HTTP: genuine ones are recorded, all others are refused without a reason."""

import json
import secrets
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta
from hashlib import sha1

import pytest
import requests
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC

from scheduling.channels.base import CallbackRefused, CallbackRequest
from scheduling.channels.vendors.sms import AliyunSms, TencentSms
from scheduling.channels.vendors.wechat import OfficialAccount, WeComApp, parse_xml_document, read_key, read_seconds
from scheduling.delivery.routing import store_vendor_ids
from scheduling.ids import new_id
from scheduling.models import ChannelConfig, Customer, DeliveryReceipt, DisabledTarget, Event, Touch
from tests.scheduling.api.serving import cloud_event
from tests.scheduling.core.conftest import deliver_when_due
from tests.support.second_connection import run_concurrently
from tests.support.tables import each_row

TOKEN, KEY, SMS_TOKEN = "QDG6eK", "jWmYm7qr5nMoAUwZRjGtBxmz3KA1tkAj3ykkR6q2B2C", "a1b2c3d4e5f6a7b8"
CORP = "wx5823bf96d3bd56c7"
SPAN = timedelta(seconds=5)
WECOM = {"corp_id": CORP, "agent_id": 218, "secret": "s" * 20, "callback_token": TOKEN, "callback_key": KEY}
OFFICIAL = {"app_id": "wx1", "template_id": "T", "secret": "s" * 20, "callback_token": TOKEN}
ALIYUN = {
    "access_key_id": "L", "sign_name": "示例", "template_id": "S", "secret": "s" * 20, "callback_token": SMS_TOKEN,
}  # fmt: skip
TENCENT = {
    "secret_id": "A", "sdk_app_id": 1, "sign_name": "示例", "template_id": 1, "secret": "s" * 20,
    "callback_token": SMS_TOKEN,
}  # fmt: skip
#: The examples of the vendors' documentation and libraries.
ECHO = {
    "msg_signature": "5c45ff5e21c57e6ad56bac8758b79b1d9ac89fd3",
    "timestamp": "1409659589",
    "nonce": "263014780",
    "echostr": "P9nAzCzyDtyTWESHep1vC5X9xho/qYX3Zpb4yKa9SKld1DsH3Iyt3tP3zNdtp+4RPcs8TgAE7OaBO+FZXvnaqQ==",
}
MESSAGE = {
    "msg_signature": "477715d11cdb4164915debcba66cb864d751f3e6", "timestamp": "1409659813", "nonce": "1372623149",
}  # fmt: skip
SEALED = (
    "RypEvHKD8QQKFhvQ6QleEB4J58tiPdvo+rtK1I9qca6aM/wvqnLSV5zEPeusUiX5L5X/0lWfrf0QADHHhGd3QczcdCUpj911L3vg3W/sYYvuJTs3"
    "TUUkSUXxaccAS0qhxchrRYt66wiSpGLYL42aM6A8dTT+6k4aSknmPj48kzJs8qLjvd4Xgpue06DOdnLxAUHzM6+kDZ+HMZfJYuR+LtwGc2hgf5gs"
    "ijff0ekUNXZiqATP7PF5mZxZ3Izoun1s4zG4LUMnvw2r+KqCKIw+3IQH03v+BCA9nMELNqbSf6tiWSrXJB3LAVGUcallcrw8V2t9EL4EhzJWrQUa"
    "x5wLVMNS0+rUPA3k22Ncx4XXZS9o0MBH27Bo6BpNelZpS+/uh9KsNlY6bHCmJU9p8g7m3fVKn28H3KDYA5Pl/T8Z1ptDAVe0lXdQ2YoyyH2uyPIG"
    "HBZZIs2pDBS8R07+qN+E7Q=="
)
OFFICIAL_MESSAGE = {
    "msg_signature": "5d197aaffba7e9b25a30732f161a50dee96bd5fa", "timestamp": "1409735669", "nonce": "1320562132",
}  # fmt: skip
OFFICIAL_SEALED = (
    "hyzAe4OzmOMbd6TvGdIOO6uBmdJoD0Fk53REIHvxYtJlE2B655HuD0m8KUePWB3+LrPXo87wzQ1QLvbeUgmBM4x6F8PGHQHFVAFmOD2LdJF9FrXp"
    "bUAh0B5GIItb52sn896wVsMSHGuPE328HnRGBcrS7C41IzDWyWNlZkyyXwon8T332jisa+h6tEDYsVticbSnyU8dKOIbgU6ux5VTjg3yt+WGzjlp"
    "Kn6NPhRjpA912xMezR4kw6KWwMrCVKSVCZciVGCgavjIQ6X8tCOp3yZbGpy0VxpAe+77TszTfRd5RJSVO/HTnifJpXgCSUdUue1v6h0EIBYYI1BD"
    "1DlD+C0CR8e6OewpusjZ4uBl9FyJvnhvQl+q5rv1ixrcpCumEPo5MJSgM9ehVsNPfUM669WuMyVWQLCzpu9GhglF2PE="
)


def at(seconds):
    return datetime.fromtimestamp(int(seconds), UTC)


# --- examples of the vendors ------------------------------------------------------------------------------------------


def test_published_examples_are_read():
    """A verification, a message to a corporation, and one to an official account."""
    wecom = WeComApp(WECOM, SPAN)
    assert wecom.answer_callback(CallbackRequest(ECHO, None, "", at(ECHO["timestamp"]))).text == "1616140317555161061"

    body = f"<xml><ToUserName>{CORP}</ToUserName><Encrypt><![CDATA[{SEALED}]]></Encrypt></xml>".encode()
    [found] = wecom.answer_callback(CallbackRequest(MESSAGE, body, "", at(MESSAGE["timestamp"]))).messages
    assert (found.address, found.message_id, found.at) == ("mycreate", "4561255354251345929", at("1409659813"))

    settings = OFFICIAL | {
        "app_id": "wx2c2769f8efd9abc2", "callback_token": "spamtest",
        "callback_key": "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG",
    }  # fmt: skip
    body = f"<xml><Encrypt><![CDATA[{OFFICIAL_SEALED}]]></Encrypt></xml>".encode()
    request = CallbackRequest(OFFICIAL_MESSAGE, body, "", at(OFFICIAL_MESSAGE["timestamp"]))
    [found] = OfficialAccount(settings, SPAN).answer_callback(request).messages
    assert (found.address, found.message_id) == ("oyORnuP8q7ou2gfYjqLzSIWZf0rs", "6054768590064713728")


@each_row(
    "given, minutes",
    [
        ({}, -11),
        ({}, 11),
        *(({"timestamp": each}, 0) for each in ("", "-1", "1e9", "99999999999", "999999999999", "９")),
    ],
)
def test_callback_of_another_time_is_refused(given, minutes):
    request = CallbackRequest(ECHO | given, None, "", at(ECHO["timestamp"]) + timedelta(minutes=minutes))
    with pytest.raises(CallbackRefused):
        WeComApp(WECOM, SPAN).answer_callback(request)


def test_message_for_another_corporation_is_refused():
    channel = WeComApp(WECOM | {"corp_id": "ww-other"}, SPAN)
    with pytest.raises(CallbackRefused):
        channel.answer_callback(CallbackRequest(ECHO, None, "", at(ECHO["timestamp"])))


@each_row(
    "kind, settings, field",
    [
        (WeComApp, {"callback_key": ""}, "callback_key"),
        (WeComApp, {"callback_key": "short"}, "callback_key"),
        (WeComApp, {"callback_token": ""}, "callback_token"),
        (WeComApp, {"callback_token": "a b c"}, "callback_token"),
        (AliyunSms, {"callback_token": "short"}, "callback_token"),
        (TencentSms, {"callback_token": "a/b/c/d/e/f/g/h/i"}, "callback_token"),
    ],
)
def test_settings_that_cannot_protect_a_callback_are_refused(kind, settings, field):
    usual = {WeComApp: WECOM, AliyunSms: ALIYUN, TencentSms: TENCENT}
    with pytest.raises(ValueError, match=f"^{field}: "):
        kind(usual[kind] | settings, SPAN)


def test_document_type_is_refused():
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">]><xml>&a;</xml>'
    for content in (bomb.encode(), bomb.encode("utf-16"), b"<xml>", b"\xff", b""):
        with pytest.raises(ValueError):
            parse_xml_document(content)


# --- over HTTP --------------------------------------------------------------------------------------------------------


def seal(xml, receiver=CORP, key=KEY):
    """Return the query and the body of a genuine encrypted callback."""
    content = xml.encode()
    plain = secrets.token_bytes(16) + len(content).to_bytes(4, "big") + content + receiver.encode()
    padding = 32 - len(plain) % 32
    aes = read_key(key)
    encryptor = Cipher(AES(aes), CBC(aes[:16])).encryptor()
    sealed = b64encode(encryptor.update(plain + bytes([padding]) * padding) + encryptor.finalize()).decode()
    timestamp, nonce = str(int(datetime.now(UTC).timestamp())), "42"
    signature = sha1("".join(sorted([TOKEN, timestamp, nonce, sealed])).encode()).hexdigest()
    query = {"msg_signature": signature, "timestamp": timestamp, "nonce": nonce}
    return query, f"<xml><Encrypt>{sealed}</Encrypt></xml>".encode()


def sign_plain(**more):
    timestamp = str(int(datetime.now(UTC).timestamp()))
    signature = sha1("".join(sorted([TOKEN, timestamp, "7"])).encode()).hexdigest()
    return {"signature": signature, "timestamp": timestamp, "nonce": "7", **more}


def spoken(address="zhang", message_id="m1", kind="text", **more):
    fields = {"FromUserName": address, "CreateTime": str(int(datetime.now(UTC).timestamp())), "MsgType": kind}
    fields |= {"MsgId": message_id} | more
    return "<xml>" + "".join(f"<{name}>{text}</{name}>" for name, text in fields.items()) + "</xml>"


def call(api, path, body=None, query=None):
    method = "GET" if body is None else "POST"
    return requests.request(method, f"{api.address}/hooks/{path}", data=body, params=query, timeout=60)


@pytest.fixture
def sent(matrix, api):
    """Return a function that delivers a message and then gives its node a channel of this kind."""

    def sent(kind, config, addresses):
        node = matrix.node()
        api("PUT", "/customers/ann", {"addresses": addresses})
        api.event(cloud_event())
        row = deliver_when_due(Touch.objects.get().pk)[0]
        node.channel = ChannelConfig.objects.create(key=kind, kind=kind, config=config)
        node.save()
        store_vendor_ids([(node.channel_id, "v1", row.pk)])
        return row.pk

    return sent


@pytest.mark.django_db(transaction=True)
def test_reply_opens_a_conversation_once(api, sent):
    key = sent("wecom_app", WECOM, {"wecom_app": "zhang"})
    query, body = seal(spoken())

    answers = run_concurrently(8, lambda _: call(api, "wecom_app/", body, query))

    assert {(each.status_code, each.text) for each in answers} == {(200, "success")}
    assert Event.objects.filter(type="conversation.started").count() == 1
    assert (DeliveryReceipt.objects.get().kind, DeliveryReceipt.objects.get().delivery_key) == ("replied", key)
    first = Customer.objects.get(user_id="ann").conversation_at
    assert first is not None
    call(api, "wecom_app/", *reversed(seal(spoken(message_id="m2"))))
    assert Event.objects.filter(type="conversation.started").count() == 2
    assert DeliveryReceipt.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_message_reaches_all_customers_with_the_address(api, sent):
    sent("wecom_app", WECOM, {"wecom_app": "zhang"})
    users = [f"{'x' * 199}{letter}" for letter in "ab"]
    for user_id in users:
        api("PUT", f"/customers/{user_id}", {"addresses": {"wecom_app": "zhang"}})
    query, body = seal(spoken(message_id="m" * 60))
    assert [call(api, "wecom_app/", body, query).status_code for _ in range(2)] == [200, 200]
    found = Event.objects.filter(type="conversation.started").values_list("user_id", flat=True)
    assert sorted(found) == ["ann", *users]
    query, body = seal(spoken("a stranger"))
    assert call(api, "wecom_app/", body, query).status_code == 200
    assert (found.count(), Customer.objects.count()) == (3, 3)


@pytest.mark.django_db(transaction=True)
def test_template_message_receipt_is_recorded(api, sent):
    sent("wechat_official", OFFICIAL, {"wechat_official": "openid"})
    event = spoken("openid", kind="event", Event="TEMPLATESENDJOBFINISH", MsgID="v1", Status="failed:user block")
    assert call(api, "wechat_official/", event.encode(), sign_plain()).text == "success"
    row = DeliveryReceipt.objects.get()
    assert (row.kind, row.detail) == ("bounced", "failed:user block")
    assert DisabledTarget.objects.get().channel.key == "wechat_official"
    echo = call(api, "wechat_official/", query=sign_plain(echostr="123456"))
    assert (echo.status_code, echo.text) == (200, "123456")
    assert call(api, "wechat_official/", query=sign_plain(echostr="<b>x</b>")).status_code == 403


@pytest.mark.django_db(transaction=True)
def test_receipt_before_the_id_is_stored_is_asked_again(api, sent):
    key = sent("wechat_official", OFFICIAL, {"wechat_official": "openid"})
    event = spoken("openid", kind="event", Event="TEMPLATESENDJOBFINISH", MsgID="v2", Status="success").encode()
    assert call(api, "wechat_official/", event, sign_plain()).status_code == 503
    store_vendor_ids([(ChannelConfig.objects.get(key="wechat_official").pk, "v2", key)])
    assert call(api, "wechat_official/", event, sign_plain()).status_code == 200
    assert DeliveryReceipt.objects.get().kind == "delivered"
    for at in ("1", "0"):  # an old one, and a vendor's zero: repeated for ever otherwise
        old = spoken("openid", kind="event", Event="TEMPLATESENDJOBFINISH", MsgID="v3", Status="success", CreateTime=at)
        assert call(api, "wechat_official/", old.encode(), sign_plain()).status_code == 200


def test_time_that_cannot_be_is_none():
    """PostgreSQL stores some that cannot be read again: the page of the touch would fail for ever."""
    now = datetime.now(UTC)
    for text in ("0001-01-01 00:00:00", "1970-01-01 08:00:00", "9999-12-31 23:59:59", "2026-02-30 00:00:00", ""):
        body = json.dumps([{"out_id": str(new_id()), "success": True, "report_time": text}]).encode()
        [report] = AliyunSms(ALIYUN, SPAN).answer_callback(CallbackRequest({}, body, SMS_TOKEN, now)).reports
        assert report.at is None, text
    for text in ("-62135596800", "0", "99999999999", "9" * 5_000, "soon"):
        assert read_seconds(text, now) is None, text
    assert read_seconds(str(int(now.timestamp()) + 60), now) == now, "a clock that is a little ahead"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["sms_aliyun", "sms_tencent"])
@pytest.mark.parametrize("delivered", [True, False])
def test_sms_reports_are_recorded(api, sent, kind, delivered):
    key = sent(kind, ALIYUN if kind == "sms_aliyun" else TENCENT, {"phone": "13800138000"})
    aliyun = {
        "phone_number": "13800138000", "send_time": "2017-01-01 00:00:00", "report_time": "2017-01-01 00:00:00",
        "success": delivered, "err_code": "DELIVERED" if delivered else "MK:0001", "err_msg": "空号", "sms_size": "1",
        "biz_id": "unknown", "out_id": str(key),
    }  # fmt: skip
    tencent = {
        "user_receive_time": "2015-10-17 08:03:04", "nationcode": "86", "mobile": "13800138000", "sid": "v1",
        "report_status": "SUCCESS" if delivered else "FAIL", "errmsg": "DELIVRD", "description": "空号",
    }  # fmt: skip
    unstorable = [{"sid": f"v{letter}", "biz_id": f"v{letter}"} for letter in "\0\ud800"]
    body = json.dumps([aliyun if kind == "sms_aliyun" else tencent, {"sid": 7}, None, "x", *unstorable]).encode()

    answers = [call(api, f"{kind}/{SMS_TOKEN}", body) for _ in range(2)]

    assert [each.json() for each in answers] == [
        {"code": 0, "msg": "接收成功"} if kind == "sms_aliyun" else {"result": 0, "errmsg": "OK"}
    ] * 2
    row = DeliveryReceipt.objects.get()
    assert (row.kind, row.at.year < 2020) == ("delivered" if delivered else "bounced", True)
    assert DisabledTarget.objects.count() == (not delivered)


@pytest.mark.django_db(transaction=True)
def test_wrong_proof_gets_403_without_a_reason(api, sent):
    sent("wecom_app", WECOM, {"wecom_app": "zhang"})
    ChannelConfig.objects.create(key="sms", kind="sms_aliyun", config=ALIYUN)
    ChannelConfig.objects.create(key="bare", kind="sms_aliyun", config=ALIYUN | {"callback_token": ""})
    ChannelConfig.objects.create(key="sealed", kind="wechat_official", config=OFFICIAL | {"callback_key": KEY})
    query, body = seal(spoken())
    other, foreign = seal(spoken(), receiver="ww-other")
    refused = [
        call(api, "wecom_app/", body, query | {"msg_signature": "0" * 40}),
        call(api, "wecom_app/", body, query | {"nonce": "43"}),
        call(api, "wecom_app/", body, query | {"timestamp": "1409659589"}),
        call(api, "wecom_app/", body, {}),
        call(api, "wecom_app/", foreign, other),
        call(api, "wecom_app/extra", body, query),
        call(api, "wecom_app/", query=query | {"echostr": "123"}),
        call(api, "sms/", b"[]"),
        call(api, f"sms/{SMS_TOKEN}x", b"[]"),
        call(api, "bare/", b"[]"),
        call(api, "sealed/", spoken().encode(), sign_plain()),  # an account with a key takes no plain messages
        call(api, "log/", b"[]"),
        call(api, "nowhere/", b"[]"),
        call(api, "nowhere/x", b"[]"),
    ]
    assert {(each.status_code, each.text) for each in refused} == {(403, "")}
    assert not DeliveryReceipt.objects.exists()
    assert not Event.objects.filter(type="conversation.started").exists()


@pytest.mark.django_db(transaction=True)
def test_rubbish_bodies_are_refused_and_change_nothing(api, sent):
    sent("wecom_app", WECOM, {"wecom_app": "zhang"})
    ChannelConfig.objects.create(key="sms", kind="sms_aliyun", config=ALIYUN)
    genuine, body = seal(spoken())
    deep = b"[" * 100_000
    shapes = [
        secrets.token_bytes(300), deep, b"{}", b"null", b'[{"success": true}]', b'[{"out_id": ["x"]}]', b'"x"',
        body[:-9],
        b"<xml>" * 5_000, b"", b"\xff\xfe", b'[{"success": true, "out_id": "1", "biz_id": "' + b"9" * 500 + b'"}]',
        b64encode(secrets.token_bytes(64)), b"<xml><Encrypt>AAAA</Encrypt></xml>",
    ]  # fmt: skip
    with requests.Session() as session:
        for number in range(2 * len(shapes)):
            shape = shapes[number // 2]
            path = f"sms/{SMS_TOKEN}" if number % 2 else "wecom_app/"
            answer = session.post(f"{api.address}/hooks/{path}", data=shape, params=genuine, timeout=60)
            assert answer.status_code in (200, 400, 403), (number, answer.status_code, shape[:40])
    too_long = requests.post(f"{api.address}/hooks/sms/{SMS_TOKEN}", data=b" " * 1_100_000, timeout=60)
    assert too_long.status_code == 413
    assert not DeliveryReceipt.objects.exists()


def test_sealed_text_opens_only_unchanged():
    query, body = seal(spoken())
    sealed = body[len("<xml><Encrypt>") : -len("</Encrypt></xml>")].decode()
    channel, now = WeComApp(WECOM, SPAN), datetime.now(UTC)
    raw = bytearray(b64decode(sealed))
    for place in range(0, len(raw), 7):
        changed = bytes(raw[:place]) + bytes([raw[place] ^ 1]) + bytes(raw[place + 1 :])
        forged = f"<xml><Encrypt>{b64encode(changed).decode()}</Encrypt></xml>".encode()
        with pytest.raises(CallbackRefused):
            channel.answer_callback(CallbackRequest(query, forged, "", now))
    assert channel.answer_callback(CallbackRequest(query, body, "", now)).messages
