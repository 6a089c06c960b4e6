"""The cards of the matrix: what they show, and what they do to a node."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils.timezone import localtime, now
from pytest_django import Settings

from scheduling.admin.matrix import grid
from scheduling.models import Event, Node, Stage, Template, Touch
from tests.scheduling.admin.conftest import FillForm, Url, read_messages
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.second_connection import Race, SecondConnection
from tests.support.tables import each_row
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db


def find_card(client: Client, admin_url: Url, node: Node) -> Any:
    rows = read_context(client, admin_url("node_matrix"))["rows"]
    cards = [card for row in rows for cell in row["cells"] for card in cell["cards"]]
    return next(card for card in cards if card["node"].pk == node.pk)


def place(client: Client, admin_url: Url, node: Node, **changes: Any) -> Any:
    """Send the form of a card as the page shows it, with changes."""
    shown = find_card(client, admin_url, node)
    data = {"row_version": shown["row_version"], "stage": node.stage_id, "enabled": str(node.enabled), **changes}
    return client.post(admin_url("node_place", node.pk), data)


def test_matrix_shows_cards_by_stage_and_trigger(matrix: MatrixBuilder, viewer: Client, admin_url: Url) -> None:
    Stage.objects.create(key="aftersale", name="After the sale")
    matrix.channel.name = "运维群"
    matrix.channel.save()
    template = matrix.template("guide", body="Hello {{ user.name }},\n  the guide is ready. " + "x" * 80)
    minutes = timedelta(minutes=15)
    node = matrix.node("guide", name="资料指南", template=template, delay=minutes, rollout_percent=30)
    matrix.node("off", trigger="order.paid", enabled=False, dynamic=True)
    assert str(node) == "资料指南"
    page = viewer.get(admin_url("node_matrix"))
    text = page.content.decode()
    for words in (
        "资料指南", "guide", "Hello {{ user.name }}, the guide is ready.", "15 minutes", "运维群", "After the sale",
        "dynamic", "Switched off", "Rollout 30%",
    ):  # fmt: skip
        assert words in text
    cells = {row["stage"].key: [cell["cards"] for cell in row["cells"]] for row in page.context["rows"]}
    assert [[card["node"].key for card in cards] for cards in cells["presale"]] == [["guide"], ["off"]]
    assert len(cells["presale"][0][0]["summary"]) == 60
    assert cells["aftersale"] == [[], []]
    assert 'role="switch"' not in text
    assert "at-add" not in text
    assert "<select" not in text.split("at-matrix")[1]
    template.texts.update(subject="How to start")
    assert "How to start" in viewer.get(admin_url("node_matrix")).content.decode()


@pytest.fixture
def ended_touches(matrix: MatrixBuilder, record_event: RecordEvent) -> Node:
    """Five touches of one node: two of yesterday, two of four days ago, one of last month."""
    node = matrix.node(delay=timedelta(hours=1))
    noon = localtime().replace(hour=12)
    for days, state in ((1, "delivered"), (1, "suppressed"), (4, "delivered"), (4, "unknown"), (30, "failed")):
        at = noon - timedelta(days=days)
        (task_id,) = record_event(user=f"{days}-{state}").task_ids
        Touch.objects.filter(pk=task_id).update(state=state, settled_at=at, sending_at=at, due_at=at, lease_until=None)
    return node


def test_figures_of_a_card_link_to_the_touches_that_they_count(
    ended_touches: Node, viewer: Client, admin_url: Url
) -> None:
    card = find_card(viewer, admin_url, ended_touches)
    assert [[each["count"] for each in period["figures"]] for period in card["periods"]] == [[1, 1, 0], [2, 1, 1]]
    for period in card["periods"]:
        for each in period["figures"]:
            assert len(read_context(viewer, each["link"])["cl"].result_list) == each["count"]


def test_card_shows_dashes_if_counting_takes_too_long(
    ended_touches: Node, viewer: Client, admin_url: Url, settings: Settings
) -> None:
    settings.TIMEOUTS = replace(settings.TIMEOUTS, overview=0)
    assert ">–</a>" in viewer.get(admin_url("node_matrix")).content.decode()


def test_switch_stores_version_and_author_and_checks_the_whole_node(
    matrix: MatrixBuilder, editor: Client, admin_url: Url
) -> None:
    node = matrix.node()
    answer = place(editor, admin_url, node, enabled="False")
    assert answer.url == f"{admin_url('node_matrix')}#node-{node.pk}"
    node.refresh_from_db()
    assert (node.enabled, node.version, node.history.first().history_user.username) == (False, 2, "editor")
    assert place(editor, admin_url, node, enabled="True").status_code == 302
    node.refresh_from_db()
    assert (node.enabled, node.version) == (True, 3)
    Node.objects.filter(pk=node.pk).update(goal_event="order.paid", enabled=False)  # no form stores it without a limit
    answer = place(editor, admin_url, node, enabled="True")
    assert "goal" in read_messages(answer)
    node.refresh_from_db()
    assert not node.enabled


def test_switch_off_with_waiting_touches_shows_the_impact_first(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    node = matrix.node(delay=timedelta(hours=1))
    matrix.node("reminder", "touch.delivered", from_nodes=[node.key])
    record_event()
    page = place(editor, admin_url, node, enabled="False")
    assert page.status_code == 200
    text = page.content.decode()
    assert "1 touch waits at this node." in text
    assert "follow it and plan no more touches: reminder." in text
    assert "suppressed when they fall due" in text
    node.refresh_from_db()
    assert node.enabled
    form = page.context["form"]
    data = {field.html_name: field.value() for field in form} | dict(page.context["hidden"])
    assert editor.post(admin_url("node_place", node.pk), {**data, "change_reason": "too many"}).status_code == 302
    node.refresh_from_db()
    assert (node.enabled, node.history.first().history_change_reason) == (False, "too many")


def test_switch_off_is_confirmed_also_if_counting_takes_too_long(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = matrix.node()
    monkeypatch.setattr(grid, "count_within", lambda count: None)
    text = place(editor, admin_url, node, enabled="False").content.decode()
    assert "Too many touches wait at this node to count them now." in text
    assert "suppressed when they fall due" in text
    node.refresh_from_db()
    assert node.enabled


def test_move_changes_the_stage_and_keeps_the_touches(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    other = Stage.objects.create(key="aftersale", name="After the sale")
    node = matrix.node(delay=timedelta(hours=1))
    assert place(editor, admin_url, node, stage=other.pk).status_code == 302
    node.refresh_from_db()
    assert node.stage == other
    record_event()
    due = Touch.objects.get().due_at
    page = place(editor, admin_url, node, stage=matrix.stage.pk)
    assert "They keep their time, content and channel." in page.content.decode()
    assert place(editor, admin_url, node, stage=matrix.stage.pk, confirmed="1").status_code == 302
    node.refresh_from_db()
    assert (node.stage, Touch.objects.get().due_at) == (matrix.stage, due)


@each_row(
    "changes, complaint",
    [({"stage": "0"}, "Select a valid choice"), ({"enabled": None}, "required"), ({"row_version": "x"}, "Changed")],
)
def test_card_with_bad_or_old_values_changes_nothing(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, changes: dict[str, Any], complaint: str
) -> None:
    node = matrix.node()
    shown = find_card(editor, admin_url, node)
    data = {"row_version": shown["row_version"], "stage": node.stage_id, "enabled": "False", **changes}
    answer = editor.post(
        admin_url("node_place", node.pk), {key: each for key, each in data.items() if each is not None}
    )
    assert complaint in read_messages(answer)
    node.refresh_from_db()
    assert (node.enabled, node.version) == (True, 1)


@pytest.mark.django_db(transaction=True)
def test_of_two_moves_from_old_pages_one_wins(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, race: Race
) -> None:
    stages = [Stage.objects.create(key=key) for key in ("a", "b")]
    node = matrix.node()
    shown = find_card(editor, admin_url, node)
    sent = [{"row_version": shown["row_version"], "stage": each.pk, "enabled": "True"} for each in stages]
    race(2, lambda number: editor.post(admin_url("node_place", node.pk), sent[number]).status_code)
    node.refresh_from_db()
    assert node.version == 2
    assert node.stage in stages


@pytest.mark.django_db(transaction=True)
def test_copies_are_switched_off_and_have_keys_of_their_own(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, record_event: RecordEvent, race: Race
) -> None:
    node = matrix.node(name="Guide", delay=timedelta(hours=1), tags=["offer"])
    record_event()
    address = admin_url("node_copy", node.pk)
    assert race(2, lambda number: editor.post(address).status_code) == [302, 302]
    copies = Node.objects.exclude(pk=node.pk).order_by("key")
    assert [(each.key, each.name, each.enabled, each.version) for each in copies] == [
        ("guide-2", "Guide (copy)", False, 1), ("guide-3", "Guide (copy)", False, 1),
    ]  # fmt: skip
    assert (copies[0].delay, copies[0].tags, copies[0].template) == (node.delay, ["offer"], node.template)
    assert copies[0].history.get().history_user.username == "editor"
    assert not copies[0].touches.exists()


@pytest.mark.django_db(transaction=True)
def test_copy_is_refused_if_a_file_stores_its_key_at_the_same_moment(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, monkeypatch: pytest.MonkeyPatch,
    second_connection: SecondConnection,
) -> None:  # fmt: skip
    """A configuration file does not take the lock of derived keys."""
    node, derive = matrix.node(), grid.derive_node_key
    others = {each: getattr(node, each) for each in ("stage", "trigger", "template", "channel")}

    def derive_taken_key(*given: str) -> str:
        key = derive(*given)
        second_connection(lambda: Node.objects.create(key=key, name="Of a file", **others))
        return key

    monkeypatch.setattr(grid, "derive_node_key", derive_taken_key)
    answer = editor.post(admin_url("node_copy", node.pk))
    assert answer.url == f"{admin_url('node_matrix')}#node-{node.pk}"
    assert "“guide” was not copied" in read_messages(answer)
    assert [each.name for each in Node.objects.exclude(pk=node.pk)] == ["Of a file"]


def test_node_is_not_copied_while_it_names_retired_rows(matrix: MatrixBuilder, editor: Client, admin_url: Url) -> None:
    """The copy would be in use, and the export of the configuration could not be applied."""
    node = matrix.node(retired_at=now())
    Template.objects.update(retired_at=now())
    answer = editor.post(admin_url("node_copy", node.pk))
    assert "It uses objects that are retired: guide." in read_messages(answer)
    assert Node.objects.get() == node


@each_row(
    "name, key",
    [("Second reminder!", "second-reminder"), ("首单欢迎", "presale-order-paid"), ("", "presale-order-paid")],
)
def test_new_node_without_key_derives_it(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: FillForm, name: str, key: str
) -> None:
    url = admin_url("node_add")
    data = {
        "name": name, "stage": matrix.stage.pk, "trigger": "order.paid", "delay": "1h",
        "template": matrix.template("guide").pk, "channel": matrix.channel.pk,
    }  # fmt: skip
    sent = fill_form(url, **data)
    for expected in (key, f"{key}-2"):
        answer = editor.post(url, sent)
        assert answer.url == f"{admin_url('node_matrix')}#node-{Node.objects.get(key=expected).pk}"


def test_preview_shows_the_message_for_a_real_customer(
    matrix: MatrixBuilder, viewer: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    template = matrix.template("guide", body="{{ user.name }}: {{ event.data.order_no }}")
    node = matrix.node("guide", template=template, enabled=False)
    address = admin_url("node_preview", node.pk)
    assert "No recent event" in viewer.get(address).content.decode()
    record_event(user="ann", data={"order_no": "A1"})
    record_event(user="bob", data={"order_no": "B2"})
    touches = Touch.objects.count()
    assert "B2" in viewer.get(address).content.decode()
    text = viewer.get(address, {"user_id": "ann"}).content.decode()
    assert "A1" in text
    assert "as if the node were enabled" in text
    assert "order_no" in viewer.get(address, {"user_id": "carl"}).content.decode()
    assert (Touch.objects.count(), Event.objects.count()) == (touches, 2)
    assert "node-preview" in viewer.get(admin_url("node_change", node.pk)).content.decode()
