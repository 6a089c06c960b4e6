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
def node(matrix: Any, happen: Callable[..., Any]) -> Node:
    """Two touches wait: one for an hour already."""
    found: Node = matrix.node(delay=timedelta(hours=2))
    happen()
    pass_time(hours=1)
    happen(user="bob")
    return found


def lines(client: Client, admin_url: Url, filled: Filled, node: Node, **changes: Any) -> list[str]:
    data = filled(admin_url("node_change", node.pk), **changes)
    answer = client.post(admin_url("node_impact", node.pk), data)
    return [each["text"] for each in answer.json()["lines"]]


def test_another_delay_says_what_would_move(node: Node, editor: Client, admin_url: Url, filled: Filled) -> None:
    assert lines(editor, admin_url, filled, node, delay="30m") == [
        "2 touches wait at this node.",
        "The new delay places 2 of them elsewhere. 1 would be overdue; they go out over 10 minutes instead of at once.",
        "They keep their time unless you choose to move them.",
    ]
    node.refresh_from_db()
    assert node.delay == timedelta(hours=2)


def test_content_and_the_switch_say_what_becomes_of_what_waits(
    node: Node, matrix: Any, editor: Client, admin_url: Url, filled: Filled
) -> None:
    other = matrix.template("other")
    assert "new content" in lines(editor, admin_url, filled, node, template=other.pk)[1]
    assert "suppressed when they fall due" in lines(editor, admin_url, filled, node, enabled="")[1]
    assert lines(editor, admin_url, filled, node) == []
    assert lines(editor, admin_url, filled, node, delay="soon") == []
    assert lines(editor, admin_url, filled, node, priority=0) == []


@pytest.mark.django_db(transaction=True)
def test_what_waits_moves_when_the_editor_asks_for_it(
    node: Node, editor: Client, admin_url: Url, filled: Filled
) -> None:
    before = dict(Touch.objects.values_list("pk", "due_at"))
    url = admin_url("node_change", node.pk)
    editor.post(url, filled(url, delay="3h"))
    assert dict(Touch.objects.values_list("pk", "due_at")) == before
    page = editor.post(url, filled(url, delay="4h", move_waiting="on"), follow=True)
    assert "2 waiting touches were moved." in [str(each) for each in page.context["messages"]]
    after = dict(Touch.objects.values_list("pk", "due_at"))
    assert after == {key: due_at + timedelta(hours=2) for key, due_at in before.items()}


def test_what_takes_too_long_to_count_is_not_counted(
    node: Node, editor: Client, admin_url: Url, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = "They keep their time unless you move them. The number of moved touches is shown afterwards."
    monkeypatch.setattr(impact, "PREVIEW_TIMEOUT", timedelta(seconds=-1))
    assert lines(editor, admin_url, filled, node, delay="30m") == ["2 touches wait at this node.", keep]
    monkeypatch.setattr(impact, "count_within", lambda _: None)
    too_much = "Too many touches wait at this node to count them now."
    assert lines(editor, admin_url, filled, node, delay="30m") == [too_much, keep]


@pytest.mark.django_db(transaction=True)
def test_a_move_ends_in_time_and_says_what_is_left(
    node: Node, editor: Client, admin_url: Url, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(Touch.objects.values_list("pk", "due_at"))
    monkeypatch.setattr(impact, "PAGE_TIME_LIMIT", timedelta(seconds=-1))
    url = admin_url("node_change", node.pk)
    page = editor.post(url, filled(url, delay="4h", move_waiting="on"), follow=True)
    said = " ".join(str(each) for each in page.context["messages"])
    assert "0 waiting touches were moved." in said
    assert "2 more were not processed within the time limit." in said
    assert dict(Touch.objects.values_list("pk", "due_at")) == before


@pytest.mark.django_db(transaction=True)
def test_a_move_that_fails_leaves_the_edit_stored_and_says_so(
    node: Node, editor: Client, admin_url: Url, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OperationalError

    monkeypatch.setattr(impact, "move_waiting", refused)
    url = admin_url("node_change", node.pk)
    page = editor.post(url, filled(url, delay="4h", move_waiting="on"), follow=True)
    assert page.status_code == 200
    assert "not all touches moved" in " ".join(str(each) for each in page.context["messages"])
    node.refresh_from_db()
    assert node.delay == timedelta(hours=4)


def test_who_may_not_edit_is_not_told(node: Node, viewer: Client, admin_url: Url) -> None:
    assert viewer.post(admin_url("node_impact", node.pk), {}).status_code == 403
    assert "node-impact" not in viewer.get(admin_url("node_change", node.pk)).content.decode()


def test_a_new_node_has_nothing_to_move(matrix: Any, editor: Client, admin_url: Url) -> None:
    form = editor.get(admin_url("node_add")).context["adminform"]
    assert "move_waiting" not in [field for _, options in form.fieldsets for field in options["fields"]]
