"""What a customer's page can do to others by the events that it tells of: nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduling.models import Event, EventType, Touch
from tests.scheduling.api.serving import Client, told
from tests.sessions.front.serving import Page

pytestmark = pytest.mark.django_db(transaction=True)

Open = Callable[..., Page]


def order(source: str, **changes: Any) -> dict[str, Any]:
    return told("o1", source=source, type="order.paid", **changes)


def ack(page: Page, event: dict[str, Any]) -> dict[str, Any]:
    page.say("event", event=event, id="x")
    return page.hear_until("ack", id="x")


def refused(page: Page, event: dict[str, Any]) -> str:
    """The field that is wrong."""
    page.say("event", event=event, id="x")
    error = page.hear_until("error", id="x")
    assert error["reason"] == "invalid"
    return str(error["errors"][0]["field"])


def test_nobody_takes_the_place_of_an_event_to_come(enter: Open, api: Client, matrix: Any) -> None:
    """Whoever tells of the next order first would keep the real one out, with what it leads to and calls off."""
    matrix.node("guide", "order.paid")
    for source in ("/orders", "/sessions", "/sessions/s2/user", "/sessions/s1/agent"):
        assert ack(enter(), order(source))["source"] == "/sessions/s1/user"
    (real,) = api.event(order("/orders", subject="eve")).json()["events"]
    assert (real["duplicate"], len(real["touches"])) == (False, 1)
    others = enter("s2", user="eve"), enter(role="agent")
    assert [ack(page, order("/sessions/s1/user", subject=...))["duplicate"] for page in others] == [False, False]
    assert sorted(Event.objects.values_list("source", "user_id")) == [
        ("/orders", "eve"), ("/sessions/s1/agent", "ann"), ("/sessions/s1/user", "ann"), ("/sessions/s2/user", "eve"),
    ]  # fmt: skip


def test_nobody_learns_what_anothers_event_led_to(enter: Open, api: Client, matrix: Any) -> None:
    matrix.node("guide", "order.paid")
    (real,) = api.event(order("/orders", subject="eve")).json()["events"]
    found = ack(enter(), order("/orders"))
    assert found["duplicate"] is False
    assert not set(found["touches"]) & set(real["touches"])
    assert set(found["touches"]) == {str(each.pk) for each in Touch.objects.filter(customer__user_id="ann")}


@pytest.mark.parametrize("role", ["user", "agent"])
def test_an_event_reaches_no_community_but_the_tokens(enter: Open, role: str) -> None:
    ann = enter(role=role)
    for chat in ("c2", 1, ["c1"]):
        assert refused(ann, told(data={"chat_id": chat})) == "event.data.chat_id"
    assert refused(enter("s2", role, chat_id=""), told()) == "event.data.chat_id"
    assert not Event.objects.exists()
    for number, data in enumerate([..., {}, {"chat_id": None}, {"chat_id": ""}, {"chat_id": "c1"}]):
        ack(ann, told(f"e{number}", data=data))
    assert {event.chat_id for event in Event.objects.all()} == {"c1"}


@pytest.mark.parametrize("role", ["user", "agent"])
def test_types_that_somebody_makes_up_are_refused(enter: Open, api: Client, role: str) -> None:
    """There is room for 2,000, and whoever filled it would have every new one refused, also of those with a key."""
    ann = enter(role=role)
    before = EventType.objects.count()
    assert refused(ann, told(type="made.up")) == "event.type"
    assert EventType.objects.count() == before
    assert api.event(told(type="made.up")).status_code == 202
    assert ack(ann, told(type="made.up"))["duplicate"] is False


@pytest.mark.parametrize("kind", ["customer.inactive", "complaint.received", "session.silent"])
def test_a_customer_tells_only_of_what_customers_do(enter: Open, kind: str) -> None:
    """And of no complaint: enough of them stop a text for everybody."""
    assert refused(enter(), told(type=kind)) == "event.type"
    assert not Event.objects.exists()


def test_an_agent_tells_of_a_complaint(enter: Open) -> None:
    assert ack(enter(role="agent"), told(type="complaint.received"))["duplicate"] is False
    assert Event.objects.get().customer.opted_out
