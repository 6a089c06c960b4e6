"""Conditions, variants, times and the calendar in the back office, as a browser without scripts sends them."""

from __future__ import annotations

import re
from datetime import time
from html import unescape
from typing import Any

import pytest
from django.test import Client
from django.utils.timezone import now

from scheduling.admin.matrix.conditions import format_value, parse_value
from scheduling.configuration import condition_fields
from scheduling.models import Calendar, Node
from scheduling.policy.node_conditions import Facts, compile_condition
from tests.scheduling.admin.conftest import CheckFormErrors, FillForm, FormErrors, SaveForm, Url
from tests.scheduling.core.conftest import pass_time
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db

GROUPED = {
    "all": [
        {"field": "event.data.total", "op": "gte", "value": 500},
        {"any": [
            {"field": "customer.level", "op": "in", "value": ["vip", "1", "a,b"]},
            {"field": "customer.events.order.paid.count", "op": "eq", "value": 0},
        ]},
        {"field": "customer.tags", "op": "exists"},
    ]
}  # fmt: skip


PARTS = ("field", "op", "value", "group")


def rows(*given: tuple[str, str, str, str], name: str = "when", join: str = "all") -> dict[str, str]:
    sent = {f"{name}-join": join}
    for place, row in enumerate(given):
        sent |= {f"{name}-{place}-{part}": text for part, text in zip(PARTS, row, strict=True)}
    return sent


def read_inputs(html: str) -> dict[str, str]:
    """What a browser would send back of the rows that the page shows."""
    sent = {}
    for tag in re.findall(r"<input[^>]*>", html):
        name = re.search(r'name="([^"]*)"', tag)
        value = re.search(r'value="([^"]*)"', tag)
        if name and re.match(r"(when|variants)-", name[1]):
            sent[name[1]] = unescape(value[1]) if value else ""
    for name, options in re.findall(r'<select name="((?:when|variants)-[^"]*)"[^>]*>(.*?)</select>', html, re.S):
        chosen = re.search(r'<option value="([^"]*)" selected', options)
        sent[name] = unescape(chosen[1]) if chosen else ""
    return sent


@each_row(
    "value",
    ["vip", "1", "true", "a,b", 'say "hi"', " x", "", 5, 2.5, True, "杭州", "1.50", 12345.67, 1234567.89, 0.00001,
     100.0, 1e300, -5, 2**63, "2026112812345678", "1e5", "null", "{}"],
)  # fmt: skip
def test_value_typed_and_shown_is_the_same(value: Any) -> None:
    shown = parse_value(format_value(value))
    assert (shown, isinstance(shown, str)) == (value, isinstance(value, str))


@each_row(
    "typed, event, matches",
    [
        ("12345678901234568", "12345678901234568", True), ("12345678901234568", "12345678901234567", False),
        ("12345678901234568", 12345678901234568, True), ("1e5", "1e5", True), ("6E12", "6E12", True),
        ("500", "500.0", True), ("007", "007", True),
    ],
)  # fmt: skip
def test_typed_id_matches_only_itself(typed: str, event: Any, matches: bool) -> None:
    condition = compile_condition({"all": [{"field": "event.data.id", "op": "eq", "value": parse_value(typed)}]})
    assert condition
    assert condition.holds(Facts({"id": event}, "", "")) is matches


def test_other_edits_of_a_node_keep_all_digits(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    when = {"all": [{"field": "event.data.amount", "op": "gte", "value": 12345.67}]}
    rules = {"default": 60, "active_factor": 0.1234567, "by_level": {}}
    node = matrix.node(trigger="order.paid", when=when, delay_rules=rules, rollout_percent=33.333333)
    url = admin_url("node_change", node.pk)
    inputs = read_inputs(editor.get(url).content.decode())
    assert editor.post(url, {**fill_form(url, name="renamed"), **inputs}).status_code == 302
    assert Node.objects.values("name", "when", "delay_rules", "rollout_percent").get() == {
        "name": "renamed", "when": when, "delay_rules": rules, "rollout_percent": 33.333333,
    }  # fmt: skip


def test_other_edits_of_a_node_keep_as_many_groups_as_a_file_may_have(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    tags = [{"field": "customer.tags", "op": "contains", "value": f"tag{number}"} for number in range(20)]
    when = {
        "all": [{"any": tags[place : place + 2]} for place in range(0, 18, 2)] + [{"any": [each]} for each in tags[18:]]
    }
    url = admin_url("node_change", matrix.node(when=when).pk)
    inputs = read_inputs(editor.get(url).content.decode())
    assert editor.post(url, {**fill_form(url, name="renamed"), **inputs}).status_code == 302
    assert Node.objects.values("name", "when").get() == {"name": "renamed", "when": when}


def test_rows_of_the_form_are_stored_shown_and_kept_by_the_next_save(
    matrix: MatrixBuilder, editor: Client, viewer: Client, admin_url: Url, fill_form: FillForm, save_form: SaveForm
) -> None:
    matrix.template("gold")
    node = matrix.node(trigger="order.paid", send_window=[])
    url = admin_url("node_change", node.pk)
    sent = rows(
        ("event.data.total", "gte", "500", ""), ("customer.level", "in", 'vip，"1", "a,b"', "A"),
        ("customer.events.order.paid.count", "eq", "0", "A"), ("", "eq", "", ""), ("customer.tags", "exists", "", ""),
    )  # fmt: skip
    save_form(url, **sent)
    stored = Node.objects.get()
    assert stored.when == GROUPED
    Node.objects.update(variants=[{"key": "gold", "template": "gold", "when": GROUPED}])
    inputs = read_inputs(editor.get(url).content.decode())
    assert editor.post(url, {**fill_form(url), **inputs}).status_code == 302
    node.refresh_from_db()
    assert (node.when, node.variants[0]["when"], node.send_window) == (GROUPED, GROUPED, [])
    assert node.version == stored.version
    page = unescape(viewer.get(url).content.decode())
    assert set(re.findall(r'<fieldset class="at-conditions"([^>]*)>', page)) == {" disabled"}
    assert re.findall(r'name="when-\d-field" value="([^"]*)"', page) == [
        "event.data.total", "customer.level", "customer.events.order.paid.count", "customer.tags",
    ]  # fmt: skip


def test_wrong_row_is_named_and_shown_again(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", matrix.node().pk)
    filled = fill_form(url)
    for row, complaint in (
        (("total", "eq", "1", ""), "Row 2: “total” is not known"),
        (("event.data.total", "gte", "much", ""), "Row 2: must be a number"),
        (("", "eq", "1", ""), "Row 2: is missing"),
        (("customer.tags", "eq", "x", "A"), "Row 2: must be one of contains"),
    ):
        answer = editor.post(url, filled | rows(("chat_id", "eq", "c1", ""), row))
        assert list(answer.context["adminform"].form.errors) == ["when"], row
        page = answer.content.decode()
        assert complaint in page
        assert read_inputs(page)["when-0-value"] == "c1", row


def test_unknown_data_field_is_refused_with_suggestions(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, record_event: RecordEvent,
    list_form_errors: FormErrors, save_form: SaveForm,
) -> None:  # fmt: skip
    node = matrix.node(trigger="order.paid")
    record_event("order.paid", data={"total": 5, "items": [{"sku": "A"}], "prices": {"100": [{"7": 1}]}})
    record_event("order.paid", data={"by": {"13812345678": {"sum": 1}, "tel=13812345678": 1}})
    url = admin_url("node_change", node.pk)
    page = editor.get(url).content.decode()
    assert all(f'value="event.data.{each}"' in page for each in ("items.0.sku", "by.0.sum"))
    assert "13812345678" not in page
    (errors,) = list_form_errors(url, rows(("event.data.totl", "gte", "1", "")))
    assert "did you mean event.data.total" in errors["when"]
    sent = rows(
        ("event.data.total", "gte", "1", ""), ("event.data.items.4.sku", "exists", "", ""),
        ("event.data.prices.100.3.7", "exists", "", ""),
    )  # fmt: skip
    save_form(url, **sent)
    Node.objects.update(when={"all": [{"field": "event.data.gone", "op": "exists"}]})
    save_form(url, **rows(("event.data.gone", "exists", "", "")))  # a stored field is accepted


def test_unknown_field_of_a_rare_type_is_refused(
    matrix: MatrixBuilder, record_event: RecordEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where many events of other types came since, and weeks ago."""
    monkeypatch.setattr(condition_fields, "MOST_SAMPLED", 2)
    record_event("visit.booked", data={"place": "A"})
    pass_time(days=30)
    for _ in range(5):
        record_event("order.paid", data={"total": 5})
    found = condition_fields.FieldCatalogue().find_unknown({"when": "event.data.plce"}, "visit.booked")
    assert [problem.partition("; ")[2] for _, problem in found] == ["did you mean event.data.place?"]


def test_variants_and_times_are_stored_from_the_form(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, save_form: SaveForm
) -> None:
    matrix.template("gold")
    url = admin_url("node_change", matrix.node().pk)
    sent = {
        "variants-0-key": "vips", "variants-0-template": "gold",
        **rows(("customer.level", "eq", "vip", ""), name="variants-0", join="any"),
        "at": "10:00", "at_day": "next_working", "send_window": "周一至周五 9:00-18:00\nsat 10:00-16:00",
    }  # fmt: skip
    save_form(url, **sent)
    node = Node.objects.get()
    assert node.variants == [
        {"key": "vips", "template": "gold", "when": {"any": [{"field": "customer.level", "op": "eq", "value": "vip"}]}}
    ]
    assert (node.at, node.at_day) == (time(10), "next_working")
    assert node.send_window == [
        {"days": ["mon", "tue", "wed", "thu", "fri"], "from": "09:00", "to": "18:00"},
        {"days": ["sat"], "from": "10:00", "to": "16:00"},
    ]
    page = editor.get(admin_url("node_history", node.pk)).content.decode()
    assert "vips, gold: any(customer.level eq vip)" in unescape(page)


def test_retired_node_keeps_a_variant_whose_template_was_retired_too(
    matrix: MatrixBuilder, admin_url: Url, list_form_errors: FormErrors, save_form: SaveForm
) -> None:
    for key in ("gold", "silver"):
        matrix.template(key, retired_at=now())
    url = admin_url("node_change", matrix.node(retired_at=now()).pk)
    sent = {
        "variants-0-key": "vip",
        "variants-0-template": "gold",
        **rows(("chat_id", "eq", "c", ""), name="variants-0"),
    }
    refused = "there is no template “gold”"
    assert refused in list_form_errors(url, sent)[0]["variants"]
    variant = {"key": "vip", "template": "gold", "when": {"all": [{"field": "chat_id", "op": "eq", "value": "c"}]}}
    Node.objects.update(variants=[variant])
    save_form(url, name="renamed", **sent)
    assert Node.objects.values("name", "variants").get() == {"name": "renamed", "variants": [variant]}
    assert list(list_form_errors(url, sent | {"variants-0-template": "silver"})[0]) == ["variants"]


def test_calendar_stores_windows_and_own_days(editor: Client, admin_url: Url, save_form: SaveForm) -> None:
    row = Calendar.objects.create(key="china")
    url = admin_url("calendar_change", row.pk)
    assert "2026-10-10 Sat working" in editor.get(url).content.decode()
    save_form(url, send_window="工作日 09:00-18:00", closed="2026-12-25", open="2026-12-26，2026-12-27")
    row.refresh_from_db()
    assert row.send_window == [{"days": ["working"], "from": "09:00", "to": "18:00"}]
    assert (row.closed, row.open) == (["2026-12-25"], ["2026-12-26", "2026-12-27"])
    assert "working 09:00-18:00" in editor.get(admin_url("calendar_changelist")).content.decode()


def test_calendar_and_template_are_kept_while_a_row_names_them(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, save_form: SaveForm, list_form_errors: FormErrors
) -> None:
    """Without the calendar the default send windows followed the holidays of the default one."""
    save_form(admin_url("calendar_add"), key="germany", country="DE", timezone="Europe/Berlin", position="1")
    germany, gold = Calendar.objects.get(key="germany"), matrix.template("gold")
    matrix.node("varied", variants=[{"key": "gold", "template": "gold", "when": GROUPED}])
    page = admin_url("node_change", matrix.node().pk)
    named = {"send_window": "mon-fri 10:00-20:00 calendar=germany timezone=Europe/Berlin"}
    save_form(page, **named)
    assert Node.objects.get(key="guide").send_window[0]["calendar"] == "germany"
    window = {"days": ["working"], "from": "09:00", "to": "18:00", "calendar": "germany"}
    china = Calendar.objects.create(key="china", send_window=[window])
    retire = admin_url("calendar_retire", germany.pk)
    assert "Still used by: calendar china, node guide." in editor.post(retire, follow=True).content.decode()
    save_form(page, send_window="")
    assert "Still used by: calendar china." in editor.post(retire, follow=True).content.decode()
    editor.post(admin_url("template_retire", gold.pk))
    for row in (germany, gold):
        row.refresh_from_db()
        assert row.retired_at is None
    china.send_window = []
    china.save()
    editor.post(retire)
    germany.refresh_from_db()
    assert germany.retired_at
    assert "there is no calendar “germany”" in list_form_errors(page, named)[0]["send_window"]


def test_wrong_calendar_names_its_field(check_form_errors: CheckFormErrors, admin_url: Url) -> None:
    check_form_errors(
        admin_url("calendar_change", Calendar.objects.create(key="china").pk),
        ({"closed": "25 December"}, "closed"), ({"open": "2026-02-30"}, "open"), ({"country": "XX"}, "country"),
        ({"closed": "2026-12-25", "open": "2026-12-25"}, "open"), ({"send_window": "often"}, "send_window"),
        ({"send_window": "mon 9:00-10:00 calendar=moon"}, "send_window"), ({"timezone": "Peking"}, "timezone"),
    )  # fmt: skip


def test_preview_shows_why_nothing_is_planned_and_how_the_time_came_about(
    matrix: MatrixBuilder, viewer: Client, admin_url: Url
) -> None:
    matrix.node("big", when={"all": [{"field": "event.data.total", "op": "gte", "value": 500}]})
    matrix.node("late", at=time(10), at_day="next_working")
    page = viewer.get(admin_url("event_preview"), {"type": "material.downloaded", "user_id": "ann"})
    big, late = (next(each for each in page.context["outcomes"] if each["node"] == key) for key in ("big", "late"))
    assert big["title"] == "No touch is planned"
    assert dict(big["facts"])["limit"] == "event.data.total gte 500"
    assert late["steps"][0].startswith("the delay ends: ")
    assert late["steps"][1].startswith("time of day (The next working day): ")
    assert late["steps"][-1].endswith("10:00:00</time>")
    assert "Due time:" in page.content.decode()
