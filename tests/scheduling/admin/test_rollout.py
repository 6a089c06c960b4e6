"""An automatic roll-out on the page of its node: started, shown and stopped."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from scheduling.admin.matrix.node import NodeAdmin, NodeForm
from scheduling.experiments import rollouts
from scheduling.models import AutomaticRollout, Node
from scheduling.operations.failed_tasks import Actor
from tests.scheduling.admin.conftest import FillForm, Url, interrupt
from tests.support.matrix import MatrixBuilder
from tests.support.second_connection import act_on_second_connection
from tests.support.tables import each_row
from tests.support.undrawn import read_refusal

pytestmark = pytest.mark.django_db

TYPED = {"steps": "10，50, 100", "time": "2h", "touches": "30", "complaints": "0.3", "failures": "100"}


@pytest.fixture
def node(matrix: MatrixBuilder) -> Node:
    return matrix.node(canary_template=matrix.template("guide-v2"), canary_communities=["c9"])  # type: ignore[no-any-return]


@pytest.fixture
def rollout(node: Node) -> AutomaticRollout:
    rollouts.start_rollout(node.pk, {}, Actor("ops"))
    return AutomaticRollout.objects.get()


def page(client: Client, url: str) -> str:
    answer = client.get(url)
    assert answer.status_code == 200
    return answer.content.decode()


def test_editor_starts_rollout_with_default_plan(node: Node, editor: Client, admin_url: Url) -> None:
    url = admin_url("node_start_rollout", node.pk)
    assert url in page(editor, admin_url("node_change", node.pk))
    form = page(editor, url)
    for value in ("5, 20, 50, 100", "1d", "0.5", "5"):
        assert f'value="{value}"' in form
    assert editor.post(url, TYPED).status_code == 302
    assert AutomaticRollout.objects.get().plan == {
        "steps": [10, 50, 100], "time": 7200, "touches": 30, "complaints": 0.3, "failures": 100,
    }  # fmt: skip
    node.refresh_from_db()
    assert (node.canary_percent, node.history.first().history_user.username) == (10, "editor")  # type: ignore[union-attr]
    rollouts.stop_rollout(node.pk, Actor("ops"))
    assert 'value="10, 50, 100"' in page(editor, url), "the next one begins with it"


@each_row(
    "field, value, complaint",
    [
        ("steps", "50, 10", "must grow"), ("steps", "a few", "Percentages"), ("time", "soon", "not a duration"),
        ("touches", "0", "greater than or equal to 1"), ("failures", "101", "100"),
    ],
)  # fmt: skip
def test_rollout_form_errors_name_the_field(
    node: Node, editor: Client, admin_url: Url, field: str, value: str, complaint: str
) -> None:
    errors = read_refusal(editor, admin_url("node_start_rollout", node.pk), TYPED | {field: value})["form"].errors
    assert list(errors) == [field]
    assert complaint in str(errors)
    assert not AutomaticRollout.objects.exists()


def test_rollout_without_canary_is_refused(matrix: MatrixBuilder, editor: Client, admin_url: Url) -> None:
    bare = matrix.node("bare")
    assert "automatic-rollout" not in page(editor, admin_url("node_change", bare.pk))
    answer = editor.post(admin_url("node_start_rollout", bare.pk), TYPED)
    assert "Choose a canary template" in answer.content.decode()


def test_node_and_overview_show_a_withdrawn_canary(
    rollout: AutomaticRollout, editor: Client, viewer: Client, admin_url: Url
) -> None:
    words = "Complaints are above the limit, beyond chance."
    assert words not in page(viewer, "/admin/")
    AutomaticRollout.objects.update(state="withdrawn", reason="complaints", ended=240, failed=2, complained=19)
    Node.objects.update(canary_percent=0)
    for client in (editor, viewer):
        text = page(client, admin_url("node_change", rollout.pk))
        for shown in ("7.98 %", "19 of 238", "0.83 %", "2 of 240", "0.5 %", words):
            assert shown in text, shown
    overview = page(viewer, "/admin/")
    assert words in overview
    assert admin_url("node_change", rollout.pk) in overview


def test_editor_stops_rollout_after_confirmation(rollout: AutomaticRollout, editor: Client, admin_url: Url) -> None:
    url = admin_url("node_stop_rollout", rollout.pk)
    assert url in page(editor, admin_url("node_change", rollout.pk))
    page(editor, url)
    assert AutomaticRollout.objects.get().state == "running"
    assert editor.post(url).status_code == 302
    assert AutomaticRollout.objects.get().state == "stopped"
    answer = editor.post(url, follow=True)
    assert "The roll-out changed since you loaded the page" in answer.content.decode()


def test_node_form_locks_canary_during_rollout(
    rollout: AutomaticRollout, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", rollout.pk)
    data = fill_form(url)
    assert not {"template", "canary_template", "canary_percent", "canary_communities"} & set(data)
    sent = data | {"delay": "3h", "canary_percent": "77", "canary_communities": "x"}
    assert editor.post(url, sent).status_code == 302
    node = Node.objects.get()
    assert (str(node.delay), node.canary_percent, node.canary_communities) == ("3:00:00", 5, ["c9"])
    rollouts.advance_rollouts()
    assert AutomaticRollout.objects.get().reason == "time", "it is not disturbed"
    rollouts.stop_rollout(rollout.pk, Actor("ops"))
    assert "canary_percent" in fill_form(url)


def withdraw_in_parallel() -> None:
    """Over another connection, what a pass does that finds the canary harmful."""
    act_on_second_connection(lambda: rollouts.stop_rollout(AutomaticRollout.objects.get().pk, Actor("guard")))


@pytest.mark.django_db(transaction=True)
def test_node_save_does_not_undo_withdrawal(
    rollout: AutomaticRollout, editor: Client, admin_url: Url, fill_form: FillForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view reads the row, the roll-out withdraws, the form locks and writes the row."""
    url = admin_url("node_change", rollout.pk)
    data = fill_form(url, delay="3h", change_reason="later")
    interrupt(monkeypatch, NodeForm, withdraw_in_parallel)
    assert editor.post(url, data).status_code == 302
    stored = Node.objects.get()
    assert (str(stored.delay), stored.canary_percent, stored.canary_communities) == ("3:00:00", 0, [])
    last, before = stored.history.all()[:2]
    assert (last.version, last.canary_percent, last.history_change_reason) == (stored.version, 0, "later")
    assert (before.version, before.canary_percent) == (stored.version - 1, 0)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("verb", ["retire", "bring_back"])
def test_node_retirement_does_not_undo_withdrawal(
    rollout: AutomaticRollout, editor: Client, admin_url: Url, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = NodeAdmin.get_row_or_404

    def found(*given: Any) -> Any:
        row = read(*given)
        withdraw_in_parallel()
        return row

    monkeypatch.setattr(NodeAdmin, "get_row_or_404", found)
    assert editor.post(admin_url(f"node_{verb}", rollout.pk)).status_code == 302
    stored = Node.objects.get()
    assert (stored.retired_at is not None) == (verb == "retire")
    assert (stored.canary_percent, stored.canary_communities) == (0, [])
