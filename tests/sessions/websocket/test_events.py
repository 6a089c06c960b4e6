"""Events of a customer's page cannot affect others."""

import pytest

from scheduling.models import Event, EventType, Touch
from tests.scheduling.api.serving import cloud_event
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)


def order(source, **changes):
    return cloud_event("o1", source=source, type="order.paid", **changes)


def ack(page, event):
    page.send_frame("event", event=event, id="x")
    return page.receive_until("ack", id="x")


def refused(page, event):
    """The field that is wrong."""
    page.send_frame("event", event=event, id="x")
    error = page.receive_until("error", id="x")
    assert error["reason"] == "invalid"
    return str(error["errors"][0]["field"])


def test_page_event_cannot_block_real_event(open_page, api, matrix):
    """An event with the id of the next order would block the real one and its effects."""
    matrix.node("guide", "order.paid")
    for source in ("/orders", "/sessions", "/sessions/s2/user", "/sessions/s1/agent"):
        assert ack(open_page(), order(source))["source"] == "/sessions/s1/user"
    (real,) = api.event(order("/orders", subject="eve")).json()["events"]
    assert (real["duplicate"], len(real["touches"])) == (False, 1)
    others = open_page("s2", user="eve"), open_page(role="agent")
    assert [ack(page, order("/sessions/s1/user", subject=...))["duplicate"] for page in others] == [False, False]
    assert sorted(Event.objects.values_list("source", "user_id")) == [
        ("/orders", "eve"), ("/sessions/s1/agent", "ann"), ("/sessions/s1/user", "ann"), ("/sessions/s2/user", "eve"),
    ]  # fmt: skip


def test_page_event_does_not_show_touches_of_others(open_page, api, matrix):
    matrix.node("guide", "order.paid")
    (real,) = api.event(order("/orders", subject="eve")).json()["events"]
    found = ack(open_page(), order("/orders"))
    assert found["duplicate"] is False
    assert not set(found["touches"]) & set(real["touches"])
    assert set(found["touches"]) == {str(each.pk) for each in Touch.objects.filter(customer__user_id="ann")}


@pytest.mark.parametrize("role", ["user", "agent"])
def test_page_event_is_limited_to_chat_of_token(open_page, role):
    ann = open_page(role=role)
    for chat in ("c2", 1, ["c1"]):
        assert refused(ann, cloud_event(data={"chat_id": chat})) == "event.data.chat_id"
    assert refused(open_page("s2", role, chat_id=""), cloud_event()) == "event.data.chat_id"
    assert not Event.objects.exists()
    for number, data in enumerate([..., {}, {"chat_id": None}, {"chat_id": ""}, {"chat_id": "c1"}]):
        ack(ann, cloud_event(f"e{number}", data=data))
    assert {event.chat_id for event in Event.objects.all()} == {"c1"}


@pytest.mark.parametrize("role", ["user", "agent"])
def test_page_event_of_unknown_type_is_refused(open_page, api, role):
    """There is room for 2,000. A full list would refuse every new type, also of clients with a key."""
    ann = open_page(role=role)
    before = EventType.objects.count()
    assert refused(ann, cloud_event(type="made.up")) == "event.type"
    assert EventType.objects.count() == before
    assert api.event(cloud_event(type="made.up")).status_code == 202
    assert ack(ann, cloud_event(type="made.up"))["duplicate"] is False


@each_row("kind", ["customer.inactive", "complaint.received", "session.silent"])
def test_user_event_of_reserved_type_is_refused(open_page, kind):
    """No complaints either: enough of them would stop a text for all customers."""
    assert refused(open_page(), cloud_event(type=kind)) == "event.type"
    assert not Event.objects.exists()


def test_agent_may_report_complaint(open_page):
    assert ack(open_page(role="agent"), cloud_event(type="complaint.received"))["duplicate"] is False
    assert Event.objects.get().customer.opted_out
