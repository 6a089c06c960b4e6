"""Edits of forms collect in the user's draft, which is replayed, rebased and published."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import yaml
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from scheduling.experiments.replay import open_drafts, runs
from scheduling.models import AuditEntry, ConfigDraft, HarassmentRule, Node, Replay, Stage
from sessions.models import SilencePolicy
from tests.support.matrix import MatrixBuilder

pytestmark = pytest.mark.django_db

Url = Callable[..., str]
FillForm = Callable[..., dict[str, Any]]


@pytest.fixture
def node(matrix: MatrixBuilder) -> Node:
    return matrix.node(delay=timedelta(minutes=15))


def tried(client: Client, url: str, data: dict[str, Any]) -> Any:
    """The page that follows the button beside “Save”."""
    return client.post(url, {**data, "_try_draft": "1"}, follow=True)


def texts(page: Any) -> list[str]:
    return [str(each) for each in page.context["messages"]]


def act(client: Client, admin_url: Url, name: str, **more: Any) -> Any:
    seen = open_drafts.compute_seen(ConfigDraft.objects.first())
    return client.post(admin_url("replay_draft"), {"act": name, "seen": seen, **more}, follow=True)


def list_labels(page: Any) -> list[str]:
    return [f"{each['section']} {each['label']}" for each in page.context["changes"]]


def test_form_edits_collect_in_a_draft_and_change_nothing_live(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", node.pk)
    page = tried(editor, url, fill_form(url, delay="20m"))
    assert texts(page) == ["The edit is in your draft. The live configuration has not changed."]
    page = tried(editor, url, fill_form(url, holdout_percent="5"))
    cap = HarassmentRule.objects.get(kind="cap")
    url = admin_url("harassmentrule_change", cap.pk)
    tried(editor, url, fill_form(url, limit="1"))
    stage = node.stage
    url = admin_url("stage_change", stage.pk)
    tried(editor, url, fill_form(url, name="Before the sale"))
    url = admin_url("template_change", node.template.pk)
    page = tried(editor, url, fill_form(url, **{"texts-0-body": "Hello {{ user.name }}"}))
    assert sorted(list_labels(page)) == [
        "harassment_rules cap (user)", "nodes guide", f"stages {stage.key}", "templates guide",
    ]  # fmt: skip
    shown = page.content.decode()
    assert all(words in shown for words in ("<ins>20m</ins>", "<ins>5", "<ins>Hello {{ user.name }}</ins>"))
    node.refresh_from_db()
    cap.refresh_from_db()
    assert (node.delay, node.version, cap.limit) == (timedelta(minutes=15), 1, 3)
    assert Stage.objects.get().name != "Before the sale"
    assert Node.history.count() == 1
    assert not LogEntry.objects.exists()
    assert not AuditEntry.objects.filter(action="changed").exists()


def test_new_row_is_tried_from_its_form(node: Node, editor: Client, admin_url: Url, fill_form: FillForm) -> None:
    url = admin_url("node_add")
    parts = {"stage": node.stage.pk, "template": node.template.pk, "channel": node.channel.pk}
    data = fill_form(url, key="second", trigger="order.paid", delay="1h", **parts)
    page = tried(editor, url, data)
    assert list_labels(page) == ["nodes second"], page.content.decode()
    assert Node.objects.count() == 1


def test_invalid_form_shows_its_errors_and_opens_no_draft(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", node.pk)
    page = tried(editor, url, fill_form(url, delay="soon"))
    assert "delay" in page.context["adminform"].form.errors
    assert not ConfigDraft.objects.exists()
    page = tried(editor, url, fill_form(url))
    assert texts(page) == ["The form changes nothing that a draft can hold."]
    assert not ConfigDraft.objects.exists()


def test_button_needs_the_right_to_replay(
    node: Node, as_member: Callable[[str], Client], editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", node.pk)
    assert "_try_draft" in editor.get(url).content.decode()
    assert "_try_draft" not in editor.get(admin_url("channelconfig_change", node.channel.pk)).content.decode()
    data = fill_form(url, delay="20m")
    user = User.objects.get(username="editor")
    user.groups.clear()
    user.user_permissions.set(Permission.objects.filter(codename__in=("view_node", "change_node")))
    assert "_try_draft" not in editor.get(url).content.decode()
    assert editor.post(url, {**data, "_try_draft": "1"}).status_code == 403
    assert as_member("operator").post(url, {**data, "_try_draft": "1"}).status_code == 403
    assert not ConfigDraft.objects.exists()


def test_draft_change_is_removed_unless_another_needs_it(node: Node, editor: Client, admin_url: Url) -> None:
    given = yaml.safe_load(runs.export_live_draft())
    given["stages"].append({"key": "late"})
    given["nodes"][0] |= {"stage": "late", "delay": "20m"}
    page = editor.post(admin_url("replay_add"), {"draft": yaml.safe_dump(given), "days": 7, "_keep": "1"}, follow=True)
    assert list_labels(page) == ["stages late", "nodes guide"]
    page = act(editor, admin_url, "drop", position="0")
    assert texts(page) == ["Another change of the draft needs this one. Remove that one first."]
    page = act(editor, admin_url, "drop", position="1")
    assert list_labels(page) == ["stages late"]
    page = act(editor, admin_url, "drop", position="0")
    assert not ConfigDraft.objects.exists()
    assert (Node.objects.get().delay, Stage.objects.count()) == (timedelta(minutes=15), 1)


def test_draft_is_rebased_onto_later_live_edits(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", node.pk)
    tried(editor, url, fill_form(url, delay="20m"))
    node.holdout_percent = 5
    node.save()
    page = editor.get(admin_url("replay_draft"))
    assert page.context["review"].is_outdated
    assert [each["path"] for each in page.context["changes"][0]["differences"]] == ["delay"]
    for name, more in (("replay", {"days": "7"}), ("drop", {"position": "0"})):
        assert "The live configuration changed" in texts(act(editor, admin_url, name, **more))[0]
    page = act(editor, admin_url, "rebase")
    assert not page.context["review"].is_outdated
    (entry,) = yaml.safe_load(ConfigDraft.objects.get().document)["nodes"]
    assert (entry["delay"], entry["holdout"]) == ("20m", 5)
    act(editor, admin_url, "discard")
    assert not ConfigDraft.objects.exists()


def test_page_that_shows_an_older_draft_changes_nothing(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", node.pk)
    tried(editor, url, fill_form(url, delay="20m"))
    page = editor.get(admin_url("replay_add"))
    data = page.context["form"].initial
    tried(editor, url, fill_form(url, delay="30m"))
    page = editor.post(admin_url("replay_add"), {**data, "days": 7})
    assert "The draft changed after you opened the page" in str(page.context["form"].errors)
    page = editor.post(admin_url("replay_draft"), {"act": "rebase", "seen": data["seen"]}, follow=True)
    assert "The draft changed after you opened the page" in texts(page)[0]
    assert "delay: 30m" in ConfigDraft.objects.get().document


def test_draft_is_published_with_the_reason_in_history_and_audit(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", node.pk)
    tried(editor, url, fill_form(url, delay="20m"))
    act(editor, admin_url, "replay", days="7")
    assert runs.execute_next_replay()
    run = Replay.objects.get()
    url = admin_url("replay_publish", run.pk)
    page = editor.get(url)
    shown = page.content.decode()
    assert all(words in shown for words in ("nodes", "<ins>20m</ins>", "Node guide: 0 touches wait."))
    assert editor.post(url, {"reason": ""}).context["form"].errors.keys() == {"reason"}
    page = editor.post(url, {"reason": "quieter mornings"}, follow=True)
    assert texts(page) == ["The draft is live."]
    node.refresh_from_db()
    latest = node.history.latest()
    assert (latest.history_change_reason, latest.history_user.username) == (
        f"quieter mornings (replay #{run.pk})", "editor",
    )  # fmt: skip
    reasons = AuditEntry.objects.filter(action="published").values_list("reason", flat=True)
    assert set(reasons) == {"quieter mornings", f"quieter mornings (replay #{run.pk})"}
    assert not ConfigDraft.objects.exists()
    assert "already decided" in editor.get(url).content.decode()


def test_draft_edited_after_its_replay_stays_open(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", node.pk)
    tried(editor, url, fill_form(url, delay="20m"))
    act(editor, admin_url, "replay", days="7")
    assert runs.execute_next_replay()
    tried(editor, url, fill_form(url, holdout_percent="5"))
    editor.post(admin_url("replay_publish", Replay.objects.get().pk), {"reason": "r"})
    page = act(editor, admin_url, "rebase")
    assert [each["path"] for each in page.context["changes"][0]["differences"]] == ["holdout"]


def test_silence_policy_is_published_and_not_simulated(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    policy = SilencePolicy.objects.create(key="vip", tags=["vip"], threshold=timedelta(minutes=5))
    url = reverse("admin:chat_sessions_silencepolicy_change", args=[policy.pk])
    page = tried(editor, url, fill_form(url, threshold="10m"))
    assert list_labels(page) == ["silence_policies vip"]
    assert "not simulated" in page.content.decode()
    act(editor, admin_url, "replay", days="1")
    assert runs.execute_next_replay()
    editor.post(admin_url("replay_publish", Replay.objects.get().pk), {"reason": "r"})
    policy.refresh_from_db()
    assert policy.threshold == timedelta(minutes=10)
