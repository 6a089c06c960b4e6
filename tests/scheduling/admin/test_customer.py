"""A customer's page shows whether and when the next touch may be sent, and why earlier ones were not."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils.timezone import now
from pytest_django import DjangoAssertNumQueries

from scheduling import sql
from scheduling.admin.shown_values import format_instant
from scheduling.customers.changes import change_customer
from scheduling.models import Complaint, Customer, CustomerChange, CustomerProfile, HarassmentRule, Node, Touch
from scheduling.operations import commands
from tests.scheduling.admin.conftest import FillForm, FormErrors, SaveForm, Url
from tests.scheduling.core.conftest import deliver
from tests.support.matrix import MatrixBuilder

pytestmark = pytest.mark.django_db(transaction=True)

RecordEvent = Callable[..., Any]
HOUR = timedelta(hours=1)


@pytest.fixture
def open_customer_page(viewer: Client, admin_url: Url) -> Callable[..., Any]:
    def open_customer_page() -> Any:
        return viewer.get(admin_url("customer_change", Customer.objects.get(user_id="ann").pk))

    return open_customer_page


@pytest.fixture
def send(record_event: RecordEvent) -> Callable[..., Touch]:
    def send(type: str, ago: timedelta = timedelta(0)) -> Touch:
        (task_id,) = record_event(type).task_ids
        deliver([task_id])
        if ago:
            Touch.objects.filter(pk=task_id).update(reserved_at=now() - ago, settled_at=now() - ago)
        return Touch.objects.get(pk=task_id)

    return send


def read_node_rows(answer: Any) -> dict[str, tuple[str, str, datetime | None]]:
    nodes = answer.context["eligibility"]["nodes"]
    return {each["node"].key: (each["words"], each["why"], each["again"]) for each in nodes}


def test_customer_below_cap_may_be_sent_more(
    matrix: MatrixBuilder, send: Callable[..., Touch], open_customer_page: Callable[..., Any]
) -> None:
    matrix.node("a", trigger="a")
    matrix.node("b", trigger="b")
    sent = send("a")
    answer = open_customer_page()
    assert answer.context["eligibility"]["open"]
    assert answer.context["eligibility"]["usages"] == ["1 of 3 in 1 day"]
    again = sent.reserved_at + timedelta(hours=72)
    assert read_node_rows(answer) == {
        "a": ("Would not be sent", "Same content sent recently", again), "b": ("May be sent", "", None),
    }  # fmt: skip


def test_conditions_count_for_the_customer_now(
    matrix: MatrixBuilder, record_event: RecordEvent, open_customer_page: Callable[..., Any]
) -> None:
    def condition(field: str, operator: str, value: Any) -> dict[str, Any]:
        return {"all": [{"field": field, "op": operator, "value": value}]}

    record_event("b")
    matrix.node("vip", trigger="a", when=condition("customer.level", "eq", "vip"))
    matrix.node("first", trigger="b", when=condition("customer.events.b.count", "eq", 0))
    matrix.node("big", trigger="c", when=condition("event.data.total", "gte", 500))
    matrix.node("plain", trigger="d")
    nodes = {each["node"].key: each for each in open_customer_page().context["eligibility"]["nodes"]}
    assert {key: each["words"] for key, each in nodes.items()} == {
        "vip": "Would not be sent", "first": "Would not be sent", "big": "Would not be sent", "plain": "May be sent",
    }  # fmt: skip
    assert [key for key, each in nodes.items() if each["reads_event"]] == ["big"]


def test_customer_at_cap_shows_next_possible_time(
    matrix: MatrixBuilder, send: Callable[..., Touch], open_customer_page: Callable[..., Any]
) -> None:
    HarassmentRule.objects.filter(kind="dedupe").delete()
    matrix.node("a", trigger="a")
    first = send("a", 20 * HOUR)
    for _ in range(2):
        send("a", HOUR)
    suppressed = send("a")
    assert suppressed.state == "suppressed"
    answer = open_customer_page()
    again = first.reserved_at + timedelta(hours=24)
    assert not answer.context["eligibility"]["open"]
    assert answer.context["eligibility"]["at"] == again
    assert read_node_rows(answer)["a"] == ("Would not be sent", "Customer's limit reached", again)
    text = answer.content.decode()
    assert f"next possible {format_instant(again)}" in text
    assert "3 / 3 in 1 day" in text


def test_customer_opted_out_shows_blocked_nodes(
    matrix: MatrixBuilder, record_event: RecordEvent, open_customer_page: Callable[..., Any]
) -> None:
    record_event("a")
    matrix.node("ad", trigger="a", template=matrix.template("ad", category="marketing"))
    matrix.node("care", trigger="a", template=matrix.template("care", category="service"))
    Customer.objects.update(opted_out=True, opted_out_at=now())
    answer = open_customer_page()
    assert read_node_rows(answer) == {
        "ad": ("Would not be sent", "Customer opted out", None), "care": ("May be sent", "", None),
    }  # fmt: skip
    assert "opted out" in answer.content.decode()
    Node.objects.all().delete()
    assert "not by time alone" in open_customer_page().content.decode(), "it has no next time"


def test_operator_lifts_a_person_s_own_opt_out_with_a_source(
    record_event: RecordEvent, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    record_event("complaint.received")
    url = admin_url("customer_change", Customer.objects.get().pk)
    page = fill_form(url, opted_out=None)
    assert "where the customer has agreed" in editor.post(url, page).content.decode()
    assert Customer.objects.get().opted_out
    assert editor.post(url, page | {"consent_source": "call of 3 March"}).status_code == 302
    ann = Customer.objects.get()
    assert (ann.opted_out, ann.objected_at, ann.consent["source"]) == (False, None, "call of 3 March")
    assert "call of 3 March · <time" in editor.get(url).content.decode()
    page = fill_form(url)
    assert editor.post(url, page | {"opted_out": "on"}).status_code == 302
    assert Customer.objects.get().objected_at
    told = [(each.actor, each.after["opted_out"]) for each in CustomerChange.objects.order_by("pk")]
    assert told == [("shop", True), ("editor", False), ("editor", True)]


def test_operator_makes_the_opt_out_of_a_client_the_person_s_own(
    editor: Client, admin_url: Url, fill_form: FillForm, save_form: SaveForm
) -> None:
    commands.update_customer("ann", {"opted_out": True})
    url = admin_url("customer_change", Customer.objects.get().pk)
    save_form(url, name="Ann")
    assert Customer.objects.get().objected_at is None
    assert "remove the tick" in editor.post(url, fill_form(url, consent_source="call")).content.decode()
    save_form(url, objection="on")
    assert Customer.objects.get().objected_at


@pytest.mark.parametrize("clicks", [False, True])
def test_opt_out_that_is_later_than_the_consent_or_the_page_stays(
    editor: Client, admin_url: Url, fill_form: FillForm, clicks: bool
) -> None:
    """A click on the link outdates an open page."""
    change_customer("ann", {"objection": True}, actor="unsubscribe")
    Customer.objects.update(objected_at=sql.now() + timedelta(minutes=-2 if clicks else 1))
    url = admin_url("customer_change", Customer.objects.get().pk)
    page = fill_form(url, opted_out=None, consent_source="call of 3 March")
    if clicks:
        change_customer("ann", {"objection": True}, actor="unsubscribe")
    answer = editor.post(url, page, follow=True)
    assert ("Reload the page" if clicks else "The opt-out stays") in answer.content.decode()
    assert Customer.objects.get().opted_out


def test_customer_page_lists_events_and_complaints(
    matrix: MatrixBuilder, record_event: RecordEvent, send: Callable[..., Touch],
    open_customer_page: Callable[..., Any], admin_url: Url,
) -> None:  # fmt: skip
    matrix.node("a", trigger="a")
    send("a")
    record_event("complaint.received", event_id="c1")
    answer = open_customer_page()
    assert [event.type for event in answer.context["events"]] == ["complaint.received", "a"]
    (complaint,) = answer.context["complaints"]
    assert complaint == Complaint.objects.get()
    assert admin_url("complaint_change", complaint.pk) in answer.content.decode()


def test_customer_page_hides_parts_without_permission(
    matrix: MatrixBuilder, record_event: RecordEvent, open_customer_page: Callable[..., Any]
) -> None:
    matrix.node("a", trigger="a")
    record_event("a")
    user = User.objects.get(username="viewer")
    user.groups.clear()
    user.user_permissions.set(Permission.objects.filter(codename="view_customer"))
    answer = open_customer_page()
    assert answer.status_code == 200
    hidden = ("eligibility", "upcoming", "past", "events", "complaints")
    assert [name for name in hidden if name in answer.context] == []


def test_customer_page_query_count_is_constant(
    matrix: MatrixBuilder, record_event: RecordEvent, open_customer_page: Callable[..., Any],
    django_assert_max_num_queries: DjangoAssertNumQueries,
) -> None:  # fmt: skip
    matrix.node("a", trigger="a", delay=HOUR)
    for _ in range(8):
        record_event("a")
    open_customer_page()
    with django_assert_max_num_queries(27):
        open_customer_page()


def test_editor_changes_attributes_and_tags_with_history(
    editor: Client, admin_url: Url, list_form_errors: FormErrors, save_form: SaveForm
) -> None:
    ann = commands.update_customer("ann", {"attributes": {"city": "上海", "old": 1}, "tags": ["vip"]}, actor="api:shop")
    page = admin_url("customer_change", ann.pk)
    wanted = "city: 杭州\npaid: 12.5\nmember: true"

    for given in ("a b: 1", "city:", "paid: null"):  # the API takes null as a removal, but here the name is there
        assert list(list_form_errors(page, {"attributes": given})[0]) == ["attributes"], given
    save_form(page, attributes=wanted, tags="new，vip")

    profile = CustomerProfile.objects.get()
    assert profile.attributes == {"city": "杭州", "paid": 12.5, "member": True}
    assert profile.tags == ["new", "vip"]
    assert "上海" in editor.get(page).content.decode()  # the value before, in the history


def test_editor_writes_addresses_as_texts_by_the_rules_of_the_api(
    editor: Client, admin_url: Url, list_form_errors: FormErrors, save_form: SaveForm
) -> None:
    """The number `+8613800138000` has no plus, and no vendor takes a number."""
    ann = commands.update_customer("ann", {"addresses": {"email": "ann@example.com", "inapp": "ann"}})
    page = admin_url("customer_change", ann.pk)
    many = "\n".join(f"k{number}: x" for number in range(21))
    for given in ("email: nobody", "Phone: 1", "phone:", "phone 1", "phone: 1\nphone: 2", many):
        assert list(list_form_errors(page, {"addresses": given})[0]) == ["addresses"], given

    save_form(page, addresses="phone: +8613800138000\nwecom_app: 007\nemail: ann@example.com")

    ann.refresh_from_db()
    assert ann.addresses == {"phone": "+8613800138000", "wecom_app": "007", "email": "ann@example.com"}
    save_form(page, timezone="Asia/Tokyo")
    assert CustomerChange.objects.latest("pk").after == {"timezone": "Asia/Tokyo"}
    assert list(list_form_errors(page, {"timezone": "Mars"})[0]) == ["timezone"]


def test_stored_values_older_than_the_rules_stop_no_other_edit(
    editor: Client, admin_url: Url, list_form_errors: FormErrors, save_form: SaveForm
) -> None:
    ann = Customer.objects.create(user_id="ann", addresses={"Phone": 1, "email": "nobody"})
    CustomerProfile.objects.create(customer=ann, attributes={"a b": 1, "city": "Rome"})
    page = admin_url("customer_change", ann.pk)
    save_form(page, opted_out="on")
    assert Customer.objects.get().opted_out
    assert Customer.objects.get().addresses == {"Phone": "1", "email": "nobody"}
    assert list(list_form_errors(page, {"addresses": "email: nobody\nphone: 1"})[0]) == ["addresses"]

    save_form(page, addresses="email: ann@example.com", attributes="city: Rome")

    assert Customer.objects.get().addresses == {"email": "ann@example.com"}
    assert CustomerProfile.objects.get().attributes == {"city": "Rome"}


def test_address_is_stored_as_a_text_without_quotes(editor: Client, admin_url: Url, save_form: SaveForm) -> None:
    """YAML needs quotes around a number that is a text, and stored some as numbers."""
    ann = Customer.objects.create(user_id="ann", addresses={"phone": 13800138000})
    page = admin_url("customer_change", ann.pk)
    save_form(page, name="Ann")
    assert Customer.objects.get().addresses == {"phone": "13800138000"}
    save_form(page, addresses="phone: '+8613800138000'\nwecom_app: \"007\"\ninapp: 'a\"")
    assert Customer.objects.get().addresses == {"phone": "+8613800138000", "wecom_app": "007", "inapp": "'a\""}
    Customer.objects.update(addresses={"inapp": '"a"'})
    save_form(page, addresses='inapp: ""a""\nphone: 1')
    assert Customer.objects.get().addresses == {"inapp": '"a"', "phone": "1"}


def test_wrong_kind_of_an_address_is_explained_in_the_reader_s_language(
    editor: Client, admin_url: Url, list_form_errors: FormErrors
) -> None:
    page = admin_url("customer_change", Customer.objects.create(user_id="ann").pk)
    editor.cookies["django_language"] = "zh-hans"
    (errors,) = list_form_errors(page, {"addresses": "Phone: 1"})
    assert "只能包含小写字母、数字" in errors["addresses"]
