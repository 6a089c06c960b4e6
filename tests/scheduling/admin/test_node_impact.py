"""An edit of a node says what it means for what waits, and moves it only when asked to."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError
from django.test import Client

from scheduling.admin.matrix import node_impact as impact
from scheduling.models import Node, Touch
from tests.scheduling.core.conftest import pass_time

pytestmark = pytest.mark.django_db

Url = Callable[..., str]
Filled = Callable[..., dict[str, Any]]


@pytest.fixture
def node(matrix: Any, record_event: Callable[..., Any]) -> Node:
    """Two touches wait: one for an hour already."""
    found: Node = matrix.node(delay=timedelta(hours=2))
    record_event()
    pass_time(hours=1)
    record_event(user="bob")
    return found


def lines(client: Client, admin_url: Url, fill_form: Filled, node: Node, **changes: Any) -> list[str]:
    data = fill_form(admin_url("node_change", node.pk), **changes)
    answer = client.post(admin_url("node_impact", node.pk), data)
    return [each["text"] for each in answer.json()["lines"]]


def test_impact_of_new_delay_counts_moved_touches(
    node: Node, editor: Client, admin_url: Url, fill_form: Filled
) -> None:
    assert lines(editor, admin_url, fill_form, node, delay="30m") == [
        "2 touches wait at this node.",
        "The new delay places 2 of them elsewhere. 1 would be overdue; they go out over 10 minutes instead of at once.",
        "They keep their time unless you choose to move them.",
    ]
    node.refresh_from_db()
    assert node.delay == timedelta(hours=2)


def test_impact_describes_content_and_switch_changes(
    node: Node, matrix: Any, editor: Client, admin_url: Url, fill_form: Filled
) -> None:
    other = matrix.template("other")
    assert "new content" in lines(editor, admin_url, fill_form, node, template=other.pk)[1]
    assert "suppressed when they fall due" in lines(editor, admin_url, fill_form, node, enabled="")[1]
    assert lines(editor, admin_url, fill_form, node) == []
    assert lines(editor, admin_url, fill_form, node, delay="soon") == []
    assert lines(editor, admin_url, fill_form, node, priority=0) == []


@pytest.mark.django_db(transaction=True)
def test_waiting_touches_move_only_on_request(node: Node, editor: Client, admin_url: Url, fill_form: Filled) -> None:
    before = dict(Touch.objects.values_list("pk", "due_at"))
    url = admin_url("node_change", node.pk)
    editor.post(url, fill_form(url, delay="3h"))
    assert dict(Touch.objects.values_list("pk", "due_at")) == before
    page = editor.post(url, fill_form(url, delay="4h", move_waiting="on"), follow=True)
    assert "2 waiting touches were moved." in [str(each) for each in page.context["messages"]]
    after = dict(Touch.objects.values_list("pk", "due_at"))
    assert after == {key: due_at + timedelta(hours=2) for key, due_at in before.items()}


def test_impact_skips_counts_that_take_too_long(
    node: Node, editor: Client, admin_url: Url, fill_form: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = "They keep their time unless you move them. The number of moved touches is shown afterwards."
    monkeypatch.setattr(impact, "PREVIEW_TIMEOUT", timedelta(seconds=-1))
    assert lines(editor, admin_url, fill_form, node, delay="30m") == ["2 touches wait at this node.", keep]
    monkeypatch.setattr(impact, "count_within", lambda _: None)
    too_much = "Too many touches wait at this node to count them now."
    assert lines(editor, admin_url, fill_form, node, delay="30m") == [too_much, keep]


@pytest.mark.django_db(transaction=True)
def test_move_stops_at_time_limit_and_reports_rest(
    node: Node, editor: Client, admin_url: Url, fill_form: Filled, monkeypatch: pytest.MonkeyPatch
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
    node: Node, editor: Client, admin_url: Url, fill_form: Filled, monkeypatch: pytest.MonkeyPatch
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


def test_impact_needs_edit_permission(node: Node, viewer: Client, admin_url: Url) -> None:
    assert viewer.post(admin_url("node_impact", node.pk), {}).status_code == 403
    assert "node-impact" not in viewer.get(admin_url("node_change", node.pk)).content.decode()


def test_new_node_form_has_no_move_option(matrix: Any, editor: Client, admin_url: Url) -> None:
    form = editor.get(admin_url("node_add")).context["adminform"]
    assert "move_waiting" not in [field for _, options in form.fieldsets for field in options["fields"]]
