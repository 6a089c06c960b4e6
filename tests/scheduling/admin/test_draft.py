"""Edits of forms collect in the user's draft, which is replayed, read and published; and by whom it is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now

from scheduling.experiments import drafts
from scheduling.models import AuditEntry, ConfigDraft, HarassmentRule, Node, Stage
from sessions.models import SilencePolicy
from tests.scheduling.admin.conftest import FillForm, Url
from tests.scheduling.core.conftest import pass_time
from tests.support.drafts import replay_draft
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db


@pytest.fixture
def node(matrix: MatrixBuilder) -> Node:
    return matrix.node(delay=timedelta(minutes=15))


def tried(client: Client, url: str, data: dict[str, Any]) -> Any:
    """The page that follows the button beside “Save”."""
    return client.post(url, {**data, "_try_draft": "1"}, follow=True)


def texts(page: Any) -> list[str]:
    return [str(each) for each in page.context["messages"]]


def list_refusals(page: Any, **typed: str) -> list[str]:
    """The errors of the form that is shown again with what was typed."""
    form = page.context["adminform"].form
    assert {name: form[name].value() for name in typed} == typed
    return list(form.non_field_errors())


def act(client: Client, admin_url: Url, name: str, **more: Any) -> Any:
    seen = drafts.compute_seen(ConfigDraft.objects.first())
    return client.post(admin_url("configdraft_mine"), {"act": name, "seen": seen, **more}, follow=True)


def publish(client: Client, admin_url: Url, **more: Any) -> Any:
    """What the button of the confirmation sends."""
    draft = ConfigDraft.objects.get()
    url = admin_url("configdraft_publish", draft.pk)
    return client.post(url, {"seen": drafts.compute_seen(draft), "reason": "r", **more}, follow=True)


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


def test_new_row_is_tried_and_a_form_with_errors_or_without_changes_opens_no_draft(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", node.pk)
    assert "delay" in tried(editor, url, fill_form(url, delay="soon")).context["adminform"].form.errors
    assert texts(tried(editor, url, fill_form(url))) == ["The form changes nothing that a draft can hold."]
    assert not ConfigDraft.objects.exists()
    url = admin_url("node_add")
    parts = {"stage": node.stage.pk, "template": node.template.pk, "channel": node.channel.pk}
    page = tried(editor, url, fill_form(url, key="second", trigger="order.paid", delay="1h", **parts))
    assert list_labels(page) == ["nodes second"], page.content.decode()
    assert Node.objects.count() == 1


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


def test_later_live_edits_stay_and_a_conflict_asks_for_a_new_draft(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    cap = HarassmentRule.objects.get(kind="cap")
    url, rule_url = admin_url("node_change", node.pk), admin_url("harassmentrule_change", cap.pk)
    tried(editor, url, fill_form(url, delay="20m"))
    stage = node.stage
    stage.name = "Renamed"
    stage.save()
    page = tried(editor, rule_url, fill_form(rule_url, limit="1"))  # the draft now starts from the renamed stage
    assert list_labels(page) == ["nodes guide", "harassment_rules cap (user)"]
    replay_draft(ConfigDraft.objects.get())
    node.holdout_percent = 5
    node.save()
    clash = "Another user edited the same rows since the draft was started: guide."
    (problem,) = editor.get(admin_url("configdraft_mine")).context["problems"]
    assert problem.startswith(clash)
    assert texts(act(editor, admin_url, "replay"))[0].startswith(clash)
    page = tried(editor, rule_url, fill_form(rule_url, limit="2"))
    assert list_refusals(page, limit="2")[0].startswith(clash)
    assert texts(publish(editor, admin_url))[0].startswith(clash)
    node.refresh_from_db()
    assert node.delay == timedelta(minutes=15)
    act(editor, admin_url, "discard")
    assert not ConfigDraft.objects.exists()


def test_edit_on_top_of_a_draft_that_fits_no_more_names_the_problem(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", node.pk)
    tried(editor, url, fill_form(url, delay="20m"))
    text = ConfigDraft.objects.get().document
    node.channel.retired_at = now()
    node.channel.save()
    rule_url = admin_url("harassmentrule_change", HarassmentRule.objects.get(kind="cap").pk)
    problem = "nodes[0].channel: there is no channel “log”"
    assert list_refusals(tried(editor, rule_url, fill_form(rule_url, limit="1")), limit="1") == [problem]
    assert problem in editor.get(admin_url("configdraft_mine")).content.decode()
    assert ConfigDraft.objects.get().document == text


def test_publication_of_a_draft_that_fits_no_more_names_the_place(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = admin_url("node_change", node.pk)
    tried(editor, url, fill_form(url, delay="20m"))
    replay_draft(ConfigDraft.objects.get())
    plan_edits = drafts.plan_edits

    def plan_before_a_retirement(draft: ConfigDraft) -> Any:
        planned = plan_edits(draft)
        node.channel.retired_at = now()
        node.channel.save()
        return planned

    monkeypatch.setattr(drafts, "plan_edits", plan_before_a_retirement)
    page = publish(editor, admin_url)
    assert page.context["form"].non_field_errors() == ["nodes[0].channel: there is no channel “log”"]
    node.refresh_from_db()
    assert node.delay == timedelta(minutes=15)


def test_page_that_shows_an_older_draft_changes_nothing(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", node.pk)
    tried(editor, url, fill_form(url, delay="20m"))
    data = editor.get(admin_url("configdraft_add")).context["form"].initial
    tried(editor, url, fill_form(url, delay="30m"))
    page = editor.post(admin_url("configdraft_add"), data)
    assert "The draft changed after you opened the page" in str(page.context["form"].errors)
    mine = admin_url("configdraft_mine")
    for name in ("replay", "discard"):
        page = editor.post(mine, {"act": name, "seen": data["seen"]}, follow=True)
        assert texts(page) == ["The draft changed after you opened the page. Reload the page."]
    assert "delay: 30m" in ConfigDraft.objects.get().document
    shown = re.findall('name="seen" value="([^"]*)"', page.content.decode())
    for _click in range(2):
        editor.post(mine, {"act": "discard", "seen": shown[-1]})
        assert not ConfigDraft.objects.exists()


def test_text_errors_name_each_field(node: Node, editor: Client, admin_url: Url) -> None:
    page = editor.get(admin_url("configdraft_add"))
    live = page.context["form"].initial["draft"]
    assert live == drafts.export_live_draft()
    assert "delay: 15m" in page.content.decode()
    text = live.replace("delay: 15m", "delay: soon").replace("template: guide", "template: none")
    page = editor.post(admin_url("configdraft_add"), {**page.context["form"].initial, "draft": text})
    said = " ".join(page.context["form"].errors["draft"])
    assert "nodes[0].delay: “soon” is not a duration" in said
    assert "nodes[0].template: there is no template “none”" in said
    assert "delay: soon" in page.content.decode()
    assert not ConfigDraft.objects.exists()


def test_result_compares_live_and_draft_for_each_node(
    node: Node, record_event: RecordEvent, editor: Client, admin_url: Url
) -> None:
    Node.objects.update(guard_dedupe="ignore")
    for user in ("ann", "bob"):
        record_event(user=user)
    pass_time(days=1)
    text = drafts.export_live_draft().replace("delay: 15m", "delay: 3d")
    editor.post(admin_url("configdraft_add"), {"draft": text, "seen": drafts.compute_seen(None)})
    page = editor.get(admin_url("configdraft_mine"))
    assert "data-live-again" in page.content.decode()
    assert drafts.run_next_replay()
    page = editor.get(admin_url("configdraft_mine"))
    expected = [
        ("planned", 2, 2, "="), ("sent", 2, 0, "−2"), ("still waiting", 0, 2, "+2"),
    ]  # fmt: skip
    assert [
        (key, [tuple(each[name] for name in ("words", "live", "draft", "difference")) for each in counts])
        for key, counts in page.context["results"]["nodes"]
    ] == [("All nodes", expected), ("guide", expected)]
    said = page.content.decode()
    assert page.context["problems"] == []
    assert "data-live-again" not in said
    assert all(words in said for words in ("Limits of the replay", "2 events from", "<del>15m</del>", "<ins>3d</ins>"))
    draft = ConfigDraft.objects.get()
    draft.result["shortened"] = True
    draft.save()
    assert "starts later" in editor.get(admin_url("configdraft_change", draft.pk)).content.decode()


def test_draft_is_published_with_the_reason_in_history_and_audit(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", node.pk)
    tried(editor, url, fill_form(url, delay="20m"))
    url = admin_url("configdraft_publish", ConfigDraft.objects.get().pk)
    assert "has not been replayed" in editor.get(url).content.decode()
    act(editor, admin_url, "replay")
    assert drafts.run_next_replay()
    shown = editor.get(url).content.decode()
    assert all(words in shown for words in ("nodes", "<ins>20m</ins>", "Node guide: 0 touches wait."))
    assert publish(editor, admin_url, reason="").context["form"].errors.keys() == {"reason"}
    page = publish(editor, admin_url, reason="quieter mornings", move_waiting="on")
    assert texts(page) == ["The draft is live.", "0 waiting touches were moved."]
    node.refresh_from_db()
    latest = node.history.latest()
    assert (node.delay, latest.history_change_reason, latest.history_user.username) == (
        timedelta(minutes=20), "quieter mornings", "editor",
    )  # fmt: skip
    assert AuditEntry.objects.get(action="published").reason == "quieter mornings"
    assert not ConfigDraft.objects.exists()


def test_silence_policy_is_published_and_not_simulated(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    policy = SilencePolicy.objects.create(key="vip", tags=["vip"], threshold=timedelta(minutes=5))
    url = reverse("admin:chat_sessions_silencepolicy_change", args=[policy.pk])
    page = tried(editor, url, fill_form(url, threshold="10m"))
    assert list_labels(page) == ["silence_policies vip"]
    assert "not simulated" in page.content.decode()
    act(editor, admin_url, "replay")
    assert drafts.run_next_replay()
    publish(editor, admin_url)
    policy.refresh_from_db()
    assert policy.threshold == timedelta(minutes=10)
