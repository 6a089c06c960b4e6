"""Channels to one person on the real path: event, touch, customer's address, quota, ledger."""

from datetime import timedelta

import pytest
from django.utils.timezone import now

from scheduling.models import ChannelConfig, Customer, DisabledTarget
from scheduling.monitoring.receivers import list_receivers
from tests.scheduling.core.conftest import deliver_when_due, rows

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("forgotten_tokens")]

TOKEN = {"access_token": "token-of-the-vendor", "expires_in": 7200}
DONE, EXPIRED, GONE = {"errcode": 0}, {"errcode": 42001}, {"errcode": 40003}


@pytest.fixture
def texts(matrix, receiver):
    """A described channel whose token and messages go to the receiver."""
    base = receiver.url.removesuffix("/hook")
    config = {
        "url": f"{base}/send",
        "address": "phone",
        "query": {"access_token": "{{ channel.token }}"},
        "body": {"to": "{{ message.address }}", "text": "{{ message.body }}"},
        "token": {"url": f"{base}/token", "body": {}},
        "success": {"field": "errcode", "value": 0},
        "code_field": "errcode",
        "errors": [{"code": 42001, "then": "refresh_token"}, {"code": 40003, "then": "address_invalid"}],
        "quotas": ["1/1m"],
    }
    channel = ChannelConfig.objects.create(key="texts", kind="http", config=config)
    matrix.node(channel=channel)
    for number in range(4):
        Customer.objects.create(user_id=f"user-{number}", addresses={"phone": f"1380013800{number}"})
    return channel


def sent_to(receiver):
    return [call.json["to"] for call in receiver.calls if call.path == "/send"]


def test_person_channel_delivers_to_each_address_with_one_token(texts, receiver, record_event):
    receiver.script = [TOKEN, DONE, DONE, DONE]
    waiting = [record_event(user=f"user-{number}").task_ids[0] for number in range(3)]
    nowhere = record_event(user="without-address").task_ids[0]

    found = deliver_when_due(*waiting, nowhere)

    assert [(row.state, row.reason) for row in found] == [("delivered", "")] * 3 + [("failed", "no_target")]
    assert sorted(sent_to(receiver)) == ["13800138000", "13800138001", "13800138002"]
    assert [call.path for call in receiver.calls].count("/token") == 1


def test_person_channel_invalid_address_is_disabled_until_it_changes(texts, receiver, record_event):
    receiver.script = [TOKEN, GONE]
    (first,) = deliver_when_due(record_event(user="user-0").task_ids[0])
    (second,) = deliver_when_due(record_event(user="user-0", type="material.downloaded").task_ids[0])

    assert (first.state, first.reason) == ("failed", "vendor_40003")
    assert (second.state, second.reason) == ("failed", "target_disabled")
    assert DisabledTarget.objects.filter(channel=texts).count() == 1
    assert len(sent_to(receiver)) == 1


def test_person_channel_quota_counts_each_address(texts, receiver, record_event, matrix):
    matrix.node("second", channel=texts)
    receiver.script = [TOKEN, DONE, DONE, DONE]
    waiting = [*record_event(user="user-0").task_ids, *record_event(user="user-1").task_ids]
    began = now()

    found = deliver_when_due(*waiting)

    assert sorted((row.state, row.reason) for row in found) == [("delivered", "")] * 2 + [("scheduled", "quota")] * 2
    assert sorted(sent_to(receiver)) == ["13800138000", "13800138001"]
    (shown,) = list_receivers(0, 10).rows
    assert (shown.waiting, shown.resting_reason) == (2, "")
    assert shown.rate != pytest.approx(1 / 60), "the limit of one address is not that of all"
    later = [row for row in rows(waiting) if row.state == "scheduled"]
    assert all(row.due_at > began + timedelta(seconds=30) for row in later)


def test_customer_service_message_of_the_customer_opens_a_new_allowance(matrix, receiver, record_event):
    config = {
        "corp_id": "ww1", "open_kfid": "wk1", "secret": "a-long-vendor-secret", "quotas": ["1/48h"],
        "url": receiver.url.removesuffix("/hook"),
    }  # fmt: skip
    channel = ChannelConfig.objects.create(key="service", kind="wechat_kf", config=config)
    matrix.node(channel=channel, guard_dedupe="ignore", guard_cap="ignore")
    Customer.objects.create(user_id="ann", addresses={"wechat_kf": "wm1"})
    receiver.script = [TOKEN, DONE, DONE]

    (first,) = deliver_when_due(record_event().task_ids[0])
    (second,) = deliver_when_due(record_event().task_ids[0])
    record_event("conversation.started")
    (third,) = deliver_when_due(record_event().task_ids[0])

    assert [(row.state, row.reason) for row in (first, second, third)] == [
        ("delivered", ""), ("scheduled", "quota"), ("delivered", ""),
    ]  # fmt: skip
    assert len([call for call in receiver.calls if call.path == "/cgi-bin/kf/send_msg"]) == 2
