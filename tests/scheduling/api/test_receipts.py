"""Receipts of sent messages over HTTP."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from scheduling.customers.erasure import continue_erasures
from scheduling.delivery.routing import store_vendor_ids
from scheduling.models import (
    ChannelConfig,
    Complaint,
    Customer,
    DeliveryReceipt,
    DisabledTarget,
    Event,
    Touch,
    VendorMessage,
)
from scheduling.models.encrypted import Sealed
from scheduling.models.node import digest_address
from tests.scheduling.api.serving import cloud_event
from tests.scheduling.core.conftest import deliver_when_due
from tests.support.second_connection import run_concurrently
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)
UNKNOWN = "01890000-0000-7000-8000-000000000000"


def report(api, *receipts):
    answer = api("POST", "/receipts", {"receipts": list(receipts)})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_receipts_in_any_order_are_stored_once_with_the_earliest_time(api, sent):
    start = datetime.now(UTC).replace(microsecond=0)
    receipts = [
        {"delivery_key": str(sent), "type": kind, "time": (start - timedelta(minutes=minutes)).isoformat()}
        for minutes, kind in ((1, "read"), (5, "delivered"), (3, "read"), (2, "read"))
    ]
    assert report(api, *receipts[:1]) == {"accepted": 1, "duplicates": 0, "refused": []}
    assert report(api, *receipts) == {"accepted": 1, "duplicates": 3, "refused": []}
    shown = api.get(f"/touches/{sent}").json()["receipts"]
    assert [each["type"] for each in shown] == ["delivered", "read"]
    assert datetime.fromisoformat(shown[1]["time"]) == start - timedelta(minutes=3)


def test_receipts_about_unknown_messages_are_refused_one_by_one(api, sent):
    answer = report(
        api,
        {"delivery_key": UNKNOWN, "type": "read"},
        {"delivery_key": str(sent), "type": "read"},
        {"channel": "nowhere", "vendor_id": "m1", "type": "read"},
        {"channel": "mail", "vendor_id": "m1", "type": "read"},
    )
    assert (answer["accepted"], answer["duplicates"]) == (1, 0)
    assert [(each["position"], each["field"]) for each in answer["refused"]] == [
        (0, "delivery_key"), (2, "channel"), (3, "vendor_id"),
    ]  # fmt: skip
    assert "90 days" in answer["refused"][0]["message"]
    assert "30 days" in answer["refused"][2]["message"]


@each_row(
    "change, field",
    [
        ({"type": "opened"}, "type"),
        ({"delivery_key": "x"}, "delivery_key"),
        ({"delivery_key": None}, "delivery_key"),
        ({"channel": "mail", "vendor_id": "m"}, "delivery_key"),
        ({"time": "2026-01-31T08:00:00"}, "time"),
        ({"time": 5}, "time"),
        ({"time": "2999-01-01T00:00:00Z"}, "time"),
        ({"detail": "x" * 301}, "detail"),
        ({"permanent": True}, "permanent"),
        ({"address": "a@b.example"}, "address"),
        ({"more": 1}, "more"),
    ],
)
def test_malformed_receipt_is_refused_by_position_and_field(api, sent, change, field):
    good = {"delivery_key": str(sent), "type": "read"}
    answer = api("POST", "/receipts", {"receipts": [good, good | change]})
    assert answer.status_code == 422
    assert any(each["field"].endswith(f"receipts.1.{field}") for each in answer.json()["errors"]), answer.text
    assert api("POST", "/receipts", {"receipts": [good] * 501}).status_code == 422
    assert not DeliveryReceipt.objects.exists()


def test_racing_receipts_are_stored_once(api, sent, matrix):
    matrix.node("after-read", trigger="touch.read")
    order = random.Random(20_261_123)
    kinds = ["delivered", "read", "clicked", "replied"]
    receipts = [{"delivery_key": str(sent), "type": kind} for kind in kinds]

    answers = run_concurrently(16, lambda _: report(api, *order.sample(receipts, 4)))

    assert sum(each["accepted"] for each in answers) == 4
    assert sum(each["duplicates"] for each in answers) == 60
    assert DeliveryReceipt.objects.count() == 4
    assert Event.objects.filter(type="touch.read").count() == 1
    assert Touch.objects.filter(node__key="after-read").count() == 1


def test_vendor_id_names_the_message_until_its_retention_ends(api, sent, settings):
    mail = ChannelConfig.objects.get(key="mail")
    store_vendor_ids([(mail.pk, "m-77", sent), (mail.pk, "m-77", sent)])
    receipt = {"channel": "mail", "vendor_id": "m-77", "type": "delivered"}
    assert report(api, receipt)["accepted"] == 1
    VendorMessage.objects.all().delete()
    assert report(api, receipt)["refused"][0]["field"] == "vendor_id"
    assert DeliveryReceipt.objects.get().delivery_key == sent


def test_reply_opens_a_conversation_and_complaint_is_recorded(api, sent):
    key = {"delivery_key": str(sent)}
    report(api, key | {"type": "replied"}, key | {"type": "complained"})
    report(api, key | {"type": "replied"}, key | {"type": "complained"})
    ann = Customer.objects.get(user_id="ann")
    assert ann.conversation_at is not None
    assert ann.opted_out
    assert Complaint.objects.get().touch_id == sent
    assert sorted(Event.objects.exclude(type="material.downloaded").values_list("type", flat=True)) == [
        "complaint.received", "conversation.started",
    ]  # fmt: skip


def test_receipt_is_an_event_only_if_a_node_has_it_as_trigger(api, sent, matrix):
    report(api, {"delivery_key": str(sent), "type": "delivered"})
    assert not Event.objects.filter(type__startswith="touch.").exists()
    matrix.node("after-read", trigger="touch.read")
    report(api, {"delivery_key": str(sent), "type": "read"})
    event = Event.objects.get(type="touch.read")
    assert (event.data["node"], event.data["task_id"], event.chat_id) == ("guide", str(sent), "c1")
    for kind in ("clicked", "replied"):
        matrix.node(f"after-{kind}", trigger=f"touch.{kind}", from_nodes=["guide"])
        matrix.node(f"other-{kind}", trigger=f"touch.{kind}", from_nodes=["after-read"])
        report(api, {"delivery_key": str(sent), "type": kind})
    planned = Touch.objects.exclude(pk=sent).values_list("node__key", flat=True)
    assert sorted(planned) == ["after-clicked", "after-read", "after-replied"]


def test_permanent_bounce_disables_the_address_until_it_changes(api, sent):
    bounce = {"delivery_key": str(sent), "type": "bounced", "detail": "550 no such user"}
    report(api, bounce)
    assert not DisabledTarget.objects.exists()  # a bounce that may pass
    DeliveryReceipt.objects.all().delete()

    report(api, bounce | {"permanent": True})

    assert DisabledTarget.objects.get().reason == "bounced: 550 no such user"
    api.event(cloud_event("later", type="material.downloaded"))
    later = Touch.objects.exclude(pk=sent).get()
    later.node.guard_dedupe = "ignore"
    later.node.save()
    assert deliver_when_due(later.pk)[0].reason == "target_disabled"
    api("PUT", "/customers/ann", {"addresses": {"email": "ann@example.org"}})
    assert not DisabledTarget.objects.exists()


@pytest.mark.parametrize("together", [True, False])
def test_permanent_bounce_after_one_that_might_have_passed_disables_once(api, sent, together):
    soft = {"delivery_key": str(sent), "type": "bounced", "detail": "452 mailbox full"}
    hard = soft | {"detail": "550 no such user", "permanent": True}
    for batch in [[soft, hard]] if together else [[soft], [hard]]:
        report(api, *batch)
    assert DisabledTarget.objects.get().reason == "bounced: 550 no such user"
    DisabledTarget.objects.all().delete()  # by an operator
    assert report(api, soft, hard)["duplicates"] == 2
    assert not DisabledTarget.objects.exists()


def test_bounce_disables_the_address_that_it_names(api, sent):
    """If the customer still has it. Mail goes to the encoded domain, and servers report that one."""
    api("PUT", "/customers/ann", {"addresses": {"email": "ann@example.org"}})
    bounce = {"delivery_key": str(sent), "type": "bounced", "permanent": True}
    for former in ({}, {"address": "ann@example.com"}):
        assert report(api, bounce | former)["accepted"] == 1
        assert not DisabledTarget.objects.exists()
        DeliveryReceipt.objects.all().delete()
    Customer.objects.update(addresses={"email": "ann@例子.cn"})
    for given in ("ANN@xn--fsqu00a.cn", "ann@例子.cn"):
        report(api, bounce | {"address": given})
        assert DisabledTarget.objects.get().target_digest == digest_address("ann@例子.cn")
        DisabledTarget.objects.all().delete()
        DeliveryReceipt.objects.all().delete()


def test_bounce_of_a_channel_whose_settings_cannot_be_read_stops_no_other_receipt(api, sent):
    """Once it is stored, a repeat of the bounce disables no address."""
    ChannelConfig.objects.update(kind="http", config=Sealed("gibberish", "config"))
    bounce = {"delivery_key": str(sent), "type": "bounced", "permanent": True}
    told = report(api, bounce, {"delivery_key": str(sent), "type": "read"})
    assert (told["accepted"], [each["field"] for each in told["refused"]]) == (1, ["channel"])
    assert not DeliveryReceipt.objects.filter(kind="bounced").exists()


def test_erasure_empties_the_receipts_of_the_customer(api, sent):
    store_vendor_ids([(ChannelConfig.objects.get(key="mail").pk, "m-78", sent)])
    report(api, {"delivery_key": str(sent), "type": "read", "detail": "紫金路"})
    exported = api.get("/customers/ann/export").json()
    assert exported["touches"][0]["receipts"][0]["detail"] == "紫金路"
    api("DELETE", "/customers/ann")
    continue_erasures()
    assert (DeliveryReceipt.objects.get().detail, VendorMessage.objects.count()) == ("", 0)
    report(api, {"delivery_key": str(sent), "type": "replied", "detail": "紫金路"})
    assert set(DeliveryReceipt.objects.values_list("detail", flat=True)) == {""}
    assert not Event.objects.filter(type="conversation.started").exists()
