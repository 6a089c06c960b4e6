"""Messages of WeChat customer service: the callback has none, they are fetched and recorded once."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction

from scheduling.channels.vendors import wechat
from scheduling.models import ChannelConfig, Customer, DeliveryReceipt, Event
from tests.scheduling.api.test_callbacks import CORP, KEY, TOKEN, seal, spoken
from tests.scheduling.core.conftest import deliver_when_due

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("forgotten_tokens")]
ACCESS = {"errcode": 0, "access_token": "token-of-the-vendor", "expires_in": 7200}
SENT = {"errcode": 0, "errmsg": "ok", "msgid": "x"}


@pytest.fixture
def service(matrix, receiver):
    """A customer service account whose vendor is the receiver, and a customer of it."""
    config = {
        "url": receiver.url.removesuffix("/hook"), "corp_id": CORP, "open_kfid": "wk1", "secret": "s" * 20,
        "callback_token": TOKEN, "callback_key": KEY,
    }  # fmt: skip
    matrix.node(channel=ChannelConfig.objects.create(key="kf", kind="wechat_kf", config=config))
    return Customer.objects.create(user_id="ann", addresses={"wechat_kf": "wm1"})


def page(*entries, cursor, more=0):
    return {"errcode": 0, "errmsg": "ok", "next_cursor": cursor, "has_more": more, "msg_list": list(entries)}


def said(message_id, address="wm1"):
    seconds = int(datetime.now(UTC).timestamp())
    return {"msgid": message_id, "send_time": seconds, "origin": 3, "external_userid": address, "msgtype": "text"}


def notify(client, account="wk1"):
    event = spoken("sys", kind="event", Event="kf_msg_or_event", Token="T1", OpenKfId=account)
    query, body = seal(event)
    answer = client.post("/hooks/kf/", body, content_type="text/xml", query_params=query)
    return answer.status_code


def test_messages_are_fetched_by_cursor_and_recorded_once(service, receiver, client, record_event):
    receiver.script = [ACCESS, SENT]
    (row,) = deliver_when_due(record_event().task_ids[0])
    assert row.state == "delivered", row.reason
    receiver.script = [page(said("m1"), said("m2", "stranger"), cursor="c1", more=1), page(said("m3"), cursor="c2")]

    assert notify(client) == 200
    receiver.script = [page(said("m3"), said("m\0"), said("m4", "wm\ud800"), cursor="c3")]
    assert notify(client) == 200

    asked = [(call.json["cursor"], call.json["token"]) for call in receiver.calls if call.path.endswith("sync_msg")]
    assert asked == [("", "T1"), ("c1", "T1"), ("c2", "T1")]
    assert Event.objects.filter(type="conversation.started").count() == 2
    assert (DeliveryReceipt.objects.get().kind, DeliveryReceipt.objects.get().delivery_key) == ("replied", row.root_id)
    service.refresh_from_db()
    assert service.conversation_at is not None


def test_messages_that_could_not_be_recorded_are_fetched_again(service, receiver, client, second_connection, settings):
    settings.TIMEOUTS = replace(settings.TIMEOUTS, event_lock=1.0)
    receiver.script = [ACCESS, page(said("m1"), cursor="c1")]
    with transaction.atomic():
        Customer.objects.select_for_update().get(pk=service.pk)
        assert second_connection(lambda: notify(client)) == 503
    assert not Event.objects.exists()

    receiver.script = [page(said("m1"), cursor="c1"), page(cursor="c1")]
    assert [notify(client), notify(client)] == [200, 200]

    asked = [call.json["cursor"] for call in receiver.calls if call.path.endswith("sync_msg")]
    assert asked == ["", "", "c1"]
    assert Event.objects.filter(type="conversation.started").count() == 1


def test_failed_message_of_the_vendor_is_a_bounce(service, receiver, client, record_event):
    receiver.script = [ACCESS, SENT]
    (row,) = deliver_when_due(record_event().task_ids[0])
    failed = {
        "msgid": "e1", "origin": 4, "msgtype": "event",
        "event": {"event_type": "msg_send_fail", "fail_msgid": row.root_id.hex, "fail_type": 4},
    }  # fmt: skip
    receiver.script = [page(failed, {"event": "rubbish"}, {"event": {"event_type": "msg_send_fail"}}, cursor="c1")]
    assert notify(client) == 200
    assert (DeliveryReceipt.objects.get().kind, DeliveryReceipt.objects.get().detail) == ("bounced", "msg_send_fail 4")


def test_page_that_is_too_long_to_be_read_is_asked_for_in_parts(service, receiver, client):
    """A page of 1,000 messages had more than 64 KB. It was asked for again at each callback, and none got through."""
    long = page(*(said(f"m{number}") | {"text": {"content": "x" * 1_000}} for number in range(100)), cursor="c100")
    receiver.script = [ACCESS, long, page(said("m0"), cursor="c25", more=1), page(said("m25"), cursor="c50")]
    assert notify(client) == 200
    asked = [(call.json["cursor"], call.json["limit"]) for call in receiver.calls if call.path.endswith("sync_msg")]
    assert asked == [("", 100), ("", 25), ("c25", 100)]
    assert Event.objects.filter(type="conversation.started").count() == 2


@pytest.mark.parametrize("pages", [0, wechat.MOST_REQUESTS])
def test_read_pages_count_when_messages_are_left(service, receiver, client, monkeypatch, pages):
    """A vendor that fails is asked again later, and a slow one with a long backlog would otherwise send the same pages
    at each callback."""
    monkeypatch.setattr(wechat, "LONGEST_SYNC", timedelta(minutes=1))
    read = [page(said(f"m{number}"), cursor=f"c{number}", more=1) for number in range(1, pages + 1)]
    receiver.script = [ACCESS, *read, "hang_up", "hang_up", "hang_up"]
    assert notify(client) == 503
    assert Event.objects.filter(type="conversation.started").count() == pages
    receiver.script = [page(said("last"), cursor="c9")]
    assert notify(client) == 200
    assert receiver.calls[-1].json["cursor"] == (f"c{pages}" if pages else "")
    assert Event.objects.filter(type="conversation.started").count() == pages + 1


def test_another_account_of_the_channel_starts_without_a_cursor(service, receiver, client):
    assert notify(client, "wk2") == 200
    assert not receiver.calls, "the callback of an unknown account fetches nothing"
    receiver.script = [ACCESS, page(said("m1"), cursor="c1"), ACCESS, page(said("m2"), cursor="d1")]
    assert notify(client) == 200
    row = ChannelConfig.objects.get(key="kf")
    row.config = {**row.config, "open_kfid": "wk2"}
    row.save()
    assert notify(client, "wk2") == 200
    assert [call.json["cursor"] for call in receiver.calls if call.path.endswith("sync_msg")] == ["", ""]
