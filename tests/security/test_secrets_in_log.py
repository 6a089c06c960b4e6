"""What is as good as a password is in no line of the log, whatever happens: delivered, refused, broken, saved."""

import base64
import logging
from datetime import timedelta

import pytest
from django.test import Client

from scheduling.channels.base import Permanent
from scheduling.models import ChannelConfig, Community, Customer, Touch
from scheduling.operations.commands import create_api_key
from tests.scheduling.core.conftest import (  # noqa: F401  fixtures
    _sending,
    create_fake_channel,
    deliver_when_due,
    fake_channel,
    hook,
    receiver,
)
from tests.support.tables import each_row
from tests.support.touch_logs import list_attempts

HUSH = "hush-693axrwr7fslsgkqzmtv"
SIGNING = base64.b64encode(b"a signing secret of 32 bytes 8-)").decode()
FORMS = [
    f"https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key={HUSH}", f"https://oapi.dingtalk.com/robot/send?x=1&access_token={HUSH}",
    f"https://open.feishu.cn/open-apis/bot/v2/hook/{HUSH}", f"smtp://bob:{HUSH}@relay:587", f"redis://:{HUSH}@10.0.0.1/0",
    f"wss://shop/ws/v1/sessions/s1?token={HUSH}", f"Authorization: Bearer {HUSH}", f"{{'url': 'https://x/?sign={HUSH}'}}",
]  # fmt: skip


@each_row("said", [*FORMS, f"whsec_{SIGNING}", "SEC" + SIGNING.encode().hex()[:64], "at_" + "x" * 43])
def test_log_replaces_secrets_in_errors(read_log, said):
    try:
        raise ValueError(f"cannot send to {said}")
    except ValueError:
        logging.getLogger("somebody").exception("broke at %s", said)
    lines = read_log()
    assert "ValueError: cannot send to " in lines
    assert "…" in lines
    for secret in (HUSH, SIGNING, SIGNING.encode().hex()[:64], "x" * 43):
        assert secret not in lines


def test_log_keeps_text_without_secrets(read_log):
    logging.getLogger("somebody").warning("%s", "https://shop/a?keys=1&monkey=2 at_9:30 bob@relay hook/1")
    assert "https://shop/a?keys=1&monkey=2 at_9:30 bob@relay hook/1" in read_log()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("script", [[], [400], ["hang_up"]], ids=str)
def test_webhook_result_logs_no_secret(matrix, record_event, hook, receiver, script, read_log):  # noqa: F811
    hook.config = {"url": f"{receiver.url}?token={HUSH}", "secret": f"whsec_{SIGNING}"}
    hook.save()
    matrix.node(channel=hook)
    receiver.script = script
    deliver_when_due(*record_event().task_ids)
    assert "webhook-signature" in {name.lower() for name in receiver.calls[0].headers}
    lines = read_log()
    assert "touches_settled" in lines or "touch_failed" in lines
    assert HUSH not in lines
    assert SIGNING not in lines


@pytest.mark.django_db(transaction=True)
def test_wecom_refusal_logs_no_secret(matrix, record_event, receiver, read_log):  # noqa: F811
    receiver.script = [{"errcode": 93000, "errmsg": f"invalid webhook url ?key={HUSH}"}]
    Community.objects.create(chat_id="c1", targets={"wecom": {"url": f"{receiver.url}?key={HUSH}"}})
    matrix.node(channel=ChannelConfig.objects.create(key="robot", kind="wecom"))
    deliver_when_due(*record_event(chat_id="c1").task_ids)
    assert len(receiver.calls) == 1
    lines = read_log()
    assert "touches_settled" in lines or "touch_failed" in lines
    assert HUSH not in lines


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "script",
    [
        [{"access_token": HUSH}, {"code": 5, "echo": HUSH}],
        [{"error": HUSH}],
        [500],
    ],
    ids=str,
)
def test_declared_channel_logs_no_token_and_no_secret(matrix, record_event, receiver, script, read_log):  # noqa: F811
    token = {"url": f"{receiver.url}/{script!r}".replace(" ", ""), "body": {"secret": "{{ channel.secret }}"}}
    config = {
        "url": receiver.url, "secret": HUSH, "query": {"token": "{{ channel.token }}"}, "token": token, "body": {},
        "success": {"field": "code", "value": 0},
    }  # fmt: skip
    receiver.script = list(script)
    matrix.node(channel=ChannelConfig.objects.create(key="texts", kind="http", config=config))
    deliver_when_due(*record_event().task_ids)
    assert receiver.calls
    lines = read_log()
    assert "touches_settled" in lines or "touch_failed" in lines
    assert HUSH not in lines
    assert HUSH not in "".join(each.detail for each in list_attempts())


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("_sending")
def test_unreachable_smtp_relay_logs_no_secret(matrix, record_event, read_log):
    config = {"url": f"smtp://bob:{HUSH}@127.0.0.1:1", "from": "house@example.org"}
    channel = ChannelConfig.objects.create(key="mail", kind="email", config=config, retry_delays=[])
    matrix.node(channel=channel)
    (task_id,) = record_event().task_ids
    customer = Touch.objects.get().customer
    customer.addresses = {"email": {"address": "ann@example.org"}}
    customer.save()
    (touch,) = deliver_when_due(task_id)
    lines = read_log()
    assert "touch_failed" in lines, touch.reason
    assert HUSH not in lines


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("stage", ["send", "settle"])
def test_delivery_crash_logs_no_secret(
    matrix, record_event, create_fake_channel, fake_channel, stage, monkeypatch, read_log,  # noqa: F811
):  # fmt: skip
    def crash(*_):
        password = HUSH
        raise RuntimeError(f"{len(password)} characters did not fit into {FORMS[0]} whsec_{SIGNING}")

    matrix.node(channel=create_fake_channel())
    if stage == "send":
        fake_channel.play = crash
    else:
        fake_channel.play = lambda message: Permanent("refused")
        monkeypatch.setattr("scheduling.delivery.settling.settlement_of", crash)
        monkeypatch.setattr("scheduling.delivery.settling.without_detail", lambda result: result)
        monkeypatch.setattr("scheduling.delivery.sender.LEASE", timedelta(0))
    deliver_when_due(*record_event().task_ids)
    lines = read_log()
    assert "characters did not fit into" in lines
    assert HUSH not in lines
    assert SIGNING not in lines


@pytest.mark.django_db
@each_row("answer", [200, 404, 500])
def test_api_request_logs_no_key(monkeypatch, valkey, answer, read_log):
    def crash(*_, **__):
        raise RuntimeError(f"no room for {key}")

    key = create_api_key("shop", ["customers"])
    if answer == 500:
        monkeypatch.setattr("scheduling.api.customers.serialize_customer", crash)
        Customer.objects.create(user_id="ann")
    client = Client(raise_request_exception=False, headers={"authorization": f"Bearer {key}"})
    if answer == 200:
        seen = client.put("/api/v1/customers/ann", "{}", content_type="application/json")
    else:
        seen = client.get("/api/v1/customers/ann")
    assert seen.status_code == answer, seen.content
    lines = read_log()
    assert ("no room for at_…" in lines) == (answer == 500)
    assert key not in lines


@pytest.mark.django_db
def test_channel_form_logs_no_secret_or_session(as_member, read_log):
    client = as_member("admin")
    page = "/admin/scheduling/channelconfig/add/"
    context = client.get(page).context
    forms = [context["adminform"].form, *(each.formset.management_form for each in context["inline_admin_formsets"])]
    data = {each.html_name: each.value() for form in forms for each in form if each.value() is not None}
    secrets = {"secret_url": f"https://example.com/?token={HUSH}", "secret_secret": f"whsec_{SIGNING}"}
    answer = client.post(page, data | {"key": "hook", "kind": "webhook"} | secrets)
    assert answer.status_code == 302, answer.content.decode()
    assert ChannelConfig.objects.get().config["secret"] == f"whsec_{SIGNING}"
    lines = read_log()
    for secret in (HUSH, SIGNING, client.cookies["sessionid"].value):
        assert secret not in lines
