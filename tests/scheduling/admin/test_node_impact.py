"""An edit of a node shows its effect on waiting touches, and moves them only on request."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError
from django.test import Client

from scheduling.admin.matrix import preview as impact
from scheduling.models import Customer, HarassmentRule, Node, Touch
from tests.scheduling.admin.conftest import FillForm, Url
from tests.scheduling.admin.test_conditions import rows
from tests.scheduling.core.conftest import pass_time
from tests.support.matrix import MatrixBuilder

pytestmark = pytest.mark.django_db

Lines = Callable[..., list[str]]


@pytest.fixture
def node(matrix: MatrixBuilder, record_event: Callable[..., Any]) -> Node:
    """Two touches wait: one for an hour already."""
    found: Node = matrix.node(delay=timedelta(hours=2))
    record_event()
    pass_time(hours=1)
    record_event(user="bob")
    return found


@pytest.fixture
def lines(editor: Client, admin_url: Url, fill_form: FillForm, node: Node) -> Lines:
    """What the form of the node shows about these changes."""
    filled = fill_form(admin_url("node_change", node.pk))

    def lines(**changes: Any) -> list[str]:
        answer = editor.post(admin_url("node_impact", node.pk), filled | changes)
        return [each["text"] for each in answer.json()["lines"]]

    return lines


def test_impact_counts_moved_touches_and_describes_other_changes(
    node: Node, matrix: MatrixBuilder, lines: Lines
) -> None:
    assert lines(delay="30m") == [
        "2 touches wait at this node.",
        "The new delay places 2 of them elsewhere. 1 would be overdue; they go out over 10 minutes instead of at once.",
        "They keep their time unless you choose to move them.",
    ]
    for field, value, words in (
        ("template", matrix.template("other").pk, "new content"), ("enabled", "", "suppressed when they fall due"),
        ("guard_dedupe", "ignore", "new guards"), ("tags", "sale", "new tags"),
        ("trigger", "order.paid", "later events"), ("cancel_on", "order.paid", "cancel them"),
    ):  # fmt: skip
        count, effect = lines(**{field: value})
        assert count == "2 touches wait at this node."
        assert words in effect
    for without_effect in ({}, {"delay": "soon"}, {"priority": 0}):
        assert lines(**without_effect) == []
    matrix.node("reminder", "touch.delivered", from_nodes=[node.key])
    assert "plan no more touches: reminder." in lines(enabled="")[1]
    node.refresh_from_db()
    assert node.delay == timedelta(hours=2)


def test_impact_of_a_condition_counts_touches_that_would_not_meet_it(lines: Lines) -> None:
    Customer.objects.filter(user_id="ann").update(level="vip")
    assert lines(**rows(("customer.level", "eq", "vip", "")))[1:] == [
        "They are judged by the new conditions when they fall due.",
        "If they fell due now, 1 of 2 would not meet them.",
    ]


def test_impact_of_a_rule_counts_the_touches_that_it_covers(
    node: Node, matrix: MatrixBuilder, record_event: Callable[..., Any], editor: Client, admin_url: Url,
    fill_form: FillForm,
) -> None:  # fmt: skip
    matrix.node("sale", trigger="order.paid", tags=["sale"], delay=timedelta(hours=1))
    matrix.node("free", trigger="order.paid", guard_cap="ignore", delay=timedelta(hours=1))
    record_event("order.paid")
    rule = HarassmentRule.objects.get(kind="cap")

    def rule_lines(url: str, form: str, **changes: Any) -> list[str]:
        answer = editor.post(url, fill_form(form, **changes))
        return [each["text"] for each in answer.json()["lines"]]

    later = "They are judged by the new rule when they fall due."
    page, change = admin_url("harassmentrule_impact", rule.pk), admin_url("harassmentrule_change", rule.pk)
    assert rule_lines(page, change, limit=5) == ["The rule covers 3 waiting touches.", later]
    assert rule_lines(page, change) == []
    added = {"kind": "cap", "scope": "user", "limit": 1, "window": "1h", "tag": "sale"}
    new = rule_lines(admin_url("harassmentrule_impact_of_new"), admin_url("harassmentrule_add"), **added)
    assert new == ["The rule covers 1 waiting touch.", later]


def test_impact_of_the_holdout_counts_customers_inside_the_share(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    def holdout_lines(**changes: Any) -> list[str]:
        answer = editor.post(admin_url("holdout_impact_of_new"), fill_form(admin_url("holdout_add"), **changes))
        return [each["text"] for each in answer.json()["lines"]]

    assert holdout_lines(percent="99.99") == [
        "Of 2 customers with waiting touches the new share includes 2.",
        "Their touches are suppressed when they fall due.",
    ]
    Node.objects.update(guard_holdout="ignore")
    assert holdout_lines(percent="99.99") == ["Of 0 customers with waiting touches the new share includes 0."]


@pytest.mark.django_db(transaction=True)
def test_waiting_touches_move_only_on_request(node: Node, editor: Client, admin_url: Url, fill_form: FillForm) -> None:
    before = dict(Touch.objects.values_list("pk", "due_at"))
    url = admin_url("node_change", node.pk)
    editor.post(url, fill_form(url, delay="3h"))
    assert dict(Touch.objects.values_list("pk", "due_at")) == before
    page = editor.post(url, fill_form(url, delay="4h", move_waiting="on"), follow=True)
    assert "2 waiting touches were moved." in [str(each) for each in page.context["messages"]]
    after = dict(Touch.objects.values_list("pk", "due_at"))
    assert after == {key: due_at + timedelta(hours=2) for key, due_at in before.items()}


def test_impact_skips_counts_that_take_too_long(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = "They keep their time unless you move them. The number of moved touches is shown afterwards."
    monkeypatch.setattr(impact, "PREVIEW_TIMEOUT", timedelta(seconds=-1))
    assert lines(delay="30m") == ["2 touches wait at this node.", keep]
    monkeypatch.setattr(impact, "count_within", lambda _: None)
    assert lines(delay="30m") == ["Too many touches wait at this node to count them now.", keep]


@pytest.mark.django_db(transaction=True)
def test_move_stops_at_time_limit_and_reports_rest(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(Touch.objects.values_list("pk", "due_at"))
    monkeypatch.setattr(impact, "PAGE_TIME_LIMIT", timedelta(seconds=-1))
    url = admin_url("node_change", node.pk)
    page = editor.post(url, fill_form(url, delay="4h", move_waiting="on"), follow=True)
    said = " ".join(str(each) for each in page.context["messages"])
    assert "0 waiting touches were moved." in said
    assert "2 more were not processed within the time limit." in said
    assert dict(Touch.objects.values_list("pk", "due_at")) == before


@pytest.mark.django_db(transaction=True)
def test_failed_move_keeps_the_edit_and_reports_it(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OperationalError

    monkeypatch.setattr(impact, "move_waiting", refused)
    url = admin_url("node_change", node.pk)
    page = editor.post(url, fill_form(url, delay="4h", move_waiting="on"), follow=True)
    assert page.status_code == 200
    assert "not all touches moved" in " ".join(str(each) for each in page.context["messages"])
    node.refresh_from_db()
    assert node.delay == timedelta(hours=4)
