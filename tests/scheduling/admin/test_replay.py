"""A draft is written, replayed, read, published or discarded; and by whom it is not."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.test import Client

from scheduling.experiments.replay import runs
from scheduling.models import Node, Replay
from tests.scheduling.core.conftest import pass_time
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db

Url = Callable[..., str]


@pytest.fixture
def node(matrix: MatrixBuilder, record_event: RecordEvent) -> Node:
    found: Node = matrix.node(delay=timedelta(minutes=15), guard_dedupe="ignore")
    for user in ("ann", "bob"):
        record_event(user=user)
    pass_time(days=1)
    return found


def replayed(client: Client, admin_url: Url, text: str) -> tuple[str, Replay]:
    answer = client.post(admin_url("replay_add"), {"draft": text, "days": 7})
    assert answer.status_code == 302, answer.context["form"].errors
    runs.execute_next_replay()
    return answer["location"], Replay.objects.latest("pk")


def test_draft_starts_with_the_live_configuration(node: Node, editor: Client, admin_url: Url) -> None:
    page = editor.get(admin_url("replay_add"))
    assert page.context["form"].initial["draft"] == runs.export_live_draft()
    assert "delay: 15m" in page.content.decode()


def test_draft_errors_name_each_field(node: Node, editor: Client, admin_url: Url) -> None:
    text = runs.export_live_draft().replace("delay: 15m", "delay: soon").replace("template: guide", "template: none")
    page = editor.post(admin_url("replay_add"), {"draft": text, "days": 7})
    said = " ".join(page.context["form"].errors["draft"])
    assert "nodes[0].delay: “soon” is not a duration" in said
    assert "nodes[0].template: there is no “none”" in said
    assert "delay: soon" in page.content.decode()
    assert not Replay.objects.exists()


def test_replay_result_compares_live_and_draft(node: Node, editor: Client, admin_url: Url) -> None:
    text = runs.export_live_draft().replace("limit: 3", "limit: 0")
    assert editor.post(admin_url("replay_add"), {"draft": text, "days": 7}).status_code == 200  # must be above zero
    link, run = replayed(editor, admin_url, runs.export_live_draft().replace("delay: 15m", "delay: 3d"))
    page = editor.get(link)
    figures = {each.words: (each.live, each.draft) for each in page.context["results"]["figures"]}
    assert (figures["Sent"], figures["Still waiting at the end"]) == ((2, 0), (0, 2))
    said = page.content.decode()
    assert all(words in said for words in ("Limits of the replay", "Sent a day", "<del>15m</del>", "<ins>3d</ins>"))
    assert "<script>" not in said.partition('id="replay"')[2].partition("</main>")[0]
    assert (run.state, run.actor_name) == ("done", "editor")


def test_replay_result_reports_incomplete_waiting(node: Node, editor: Client, admin_url: Url) -> None:
    link, run = replayed(editor, admin_url, runs.export_live_draft())
    words = "last planned ones are left out"
    assert words not in editor.get(link).content.decode()
    run.result["waiting_incomplete"] = True
    run.save()
    assert words in editor.get(link).content.decode()
    del run.result["waiting_incomplete"]  # from before an upgrade
    run.save()
    assert editor.get(link).status_code == 200


def test_running_replay_page_refreshes_itself(node: Node, editor: Client, admin_url: Url) -> None:
    editor.post(admin_url("replay_add"), {"draft": runs.export_live_draft(), "days": 7})
    run = Replay.objects.get()
    assert "data-live-again" in editor.get(admin_url("replay_change", run.pk)).content.decode()
    runs.execute_next_replay()
    said = editor.get(admin_url("replay_change", run.pk)).content.decode()
    assert "data-live-again" not in said
    assert "No change: the draft equals the live configuration." in said


def test_draft_is_published_with_its_author(node: Node, editor: Client, admin_url: Url) -> None:
    _, run = replayed(editor, admin_url, runs.export_live_draft().replace("delay: 15m", "delay: 20m"))
    page = editor.post(admin_url("replay_publish", run.pk), {"reason": "r", "move_waiting": "on"}, follow=True)
    assert [str(each) for each in page.context["messages"]] == ["The draft is live.", "0 waiting touches were moved."]
    node.refresh_from_db()
    assert node.delay == timedelta(minutes=20)
    assert node.history.latest().history_user.username == "editor"


def test_outdated_draft_is_not_published(node: Node, editor: Client, admin_url: Url) -> None:
    _, run = replayed(editor, admin_url, runs.export_live_draft().replace("delay: 15m", "delay: 20m"))
    node.priority = 0
    node.save()
    page = editor.post(admin_url("replay_publish", run.pk), {"reason": "r"}, follow=True)
    assert "The configuration changed after the replay" in str(next(iter(page.context["messages"])))
    node.refresh_from_db()
    assert node.delay == timedelta(minutes=15)


def test_draft_is_discarded_once_and_reused(node: Node, editor: Client, admin_url: Url) -> None:
    text = runs.export_live_draft().replace("delay: 15m", "delay: 20m")
    _, run = replayed(editor, admin_url, text)
    for said in ("The draft was discarded.", "Another user has already decided, or the replay is not finished."):
        page = editor.post(admin_url("replay_discard", run.pk), follow=True)
        assert said in str(next(iter(page.context["messages"])))
    page = editor.get(admin_url("replay_add"), {"from": run.pk})
    assert page.context["form"].initial["draft"] == text


@pytest.mark.parametrize("group", ["viewer", "operator"])
def test_replay_changes_need_the_editor_group(
    node: Node, as_member: Callable[[str], Client], admin_url: Url, editor: Client, group: str
) -> None:
    link, run = replayed(editor, admin_url, runs.export_live_draft().replace("delay: 15m", "delay: 20m"))
    member = as_member(group)
    assert member.get(admin_url("replay_add")).status_code == 403
    assert member.post(admin_url("replay_add"), {"draft": runs.export_live_draft(), "days": 7}).status_code == 403
    assert member.post(admin_url("replay_publish", run.pk), {"reason": "r"}).status_code == 403
    assert member.post(admin_url("replay_discard", run.pk)).status_code == 403
    page = member.get(link)
    assert page.status_code == 200
    assert "Publish the draft" not in page.content.decode()
    assert member.get(admin_url("replay_changelist")).status_code == 200
    node.refresh_from_db()
    assert node.delay == timedelta(minutes=15)
