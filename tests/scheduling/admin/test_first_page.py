"""What the overview shows first: work that waits, marks of configuration changes, the checklist of the first hour."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now

from rpa_tasks.models import Platform, Shop
from scheduling.admin.dashboard.charts import ActionLine
from scheduling.admin.dashboard.overview import MODELS
from scheduling.models import Alert, ChannelConfig, DismissedChecklist, FailedTask, Node, Pause, Touch
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db

ALL_WELL = "All is well: nothing waits for a person."


def lines(client: Client) -> dict[str, ActionLine]:
    return {str(each.words): each for each in read_context(client, reverse("admin:index"))["actions"]}


def text(client: Client, **query: Any) -> str:
    return client.get(reverse("admin:index"), query).content.decode()


def test_login_leads_to_the_overview_in_the_chosen_language_without_external_resources(
    viewer: Client, client: Client
) -> None:
    answer = client.post(reverse("admin:login"), {"username": "viewer", "password": "x"})
    assert answer["location"] == reverse("admin:index")
    client.post("/i18n/setlang/", {"language": "zh-hans"})
    page = text(client)
    assert "总览" in page
    assert not re.search(r'(src|href)="(https?:)?//', page)


# --- what needs action ------------------------------------------------------------------------------------------------


def test_overview_without_waiting_work_shows_that_all_is_well(viewer: Client, valkey: redis.Redis) -> None:
    assert lines(viewer) == {}
    assert ALL_WELL in text(viewer)


def test_each_line_of_waiting_work_opens_its_rows(
    viewer: Client, matrix: MatrixBuilder, record_event: RecordEvent, failed: Callable[..., FailedTask]
) -> None:
    task = failed("eve")
    matrix.node(delay=timedelta(hours=1))
    for user in ("ann", "bob"):
        record_event("material.downloaded", user)
    Touch.objects.filter(state="scheduled").update(paused_by="node:guide")
    Pause.objects.create(scope="node:guide")
    Pause.objects.create(scope="channel:log")
    shop = Shop.objects.create(platform=Platform.objects.create(key="tb"), shop_id="s1")
    Shop.objects.filter(pk=shop.pk).update(login_state="needed", login_lost_at=now())
    Alert.objects.create(condition="unattended", subject="touch.low", since=now(), value=1, message_at=now())
    found = lines(viewer)
    assert list(found) == [
        "1 open failed task: Data for the text is missing", f"Shop {shop} needs a login",
        "Paused: node guide.", "Paused: channel log.", "No worker consumes touch.low",
    ]  # fmt: skip
    held = found["Paused: node guide."]
    assert held.detail == "touches held: 2"
    assert found["Paused: channel log."].detail == "touches held: 0"
    assert len(read_context(viewer, held.link)["cl"].result_list) == 2
    cause = found["1 open failed task: Data for the text is missing"]
    assert [row.pk for row in read_context(viewer, cause.link)["cl"].result_list] == [task.pk]
    for line in found.values():
        read_context(viewer, line.link)
    assert ALL_WELL not in text(viewer)


def test_late_touches_and_old_messages_are_lines(
    viewer: Client, matrix: MatrixBuilder, record_event: RecordEvent, valkey: redis.Redis
) -> None:
    from celery import current_app

    matrix.node(delay=timedelta(hours=1))
    record_event("material.downloaded")
    Touch.objects.update(due_at=now() - timedelta(minutes=2))
    with current_app.connection_for_write() as connection:
        before = (now() - timedelta(minutes=5)).timestamp()
        connection.SimpleQueue("touch.low").put({}, headers={"published_at": before})
    found = lines(viewer)
    assert found["Touches are late: 1"].link == f"{reverse('admin:scheduling_touch_changelist')}?status=overdue"
    assert found["Messages wait too long in touch.low"].link == reverse("admin:scheduling_touch_workers")


def test_every_figure_of_the_overview_is_a_link(
    as_member: Callable[[str], Client], failed: Callable[..., FailedTask], valkey: redis.Redis
) -> None:
    failed()
    context = read_context(as_member("admin"), reverse("admin:index"))
    figures = [*context["figures"], *(each for card in context["cards"] for each in card.figures)]
    assert [str(each.words) for each in figures if not each.link] == []


# --- changes in the charts --------------------------------------------------------------------------------------------


def test_configuration_change_is_marked_in_each_chart(
    as_member: Callable[[str], Client], matrix: MatrixBuilder, record_event: RecordEvent
) -> None:
    node = matrix.node()
    for model in MODELS:
        model.history.all().delete()  # type: ignore[attr-defined]
    node.delay = timedelta(hours=9)
    node._change_reason = "file a.yaml"
    node.save()
    node.history.update(history_date=now().replace(minute=30) - timedelta(hours=1))
    client = as_member("viewer")
    context = read_context(client, reverse("admin:index"))
    charts = [*context["charts"], *context["more_charts"]]
    link = reverse("admin:scheduling_node_history", args=[node.pk])
    assert len(charts) > 5
    for chart in charts:
        (change,) = chart.changes
        assert (change.bar, change.link) == (22, link)
        assert change.words == "Service node guide · file a.yaml"
        *_, marks = json.loads(chart.data)["datasets"]
        assert (marks["data"], marks["links"][22]) == ([None] * 22 + [1, None], link)
    assert client.get(link).status_code == 200
    node.history.update(history_date=now() - timedelta(days=2))
    assert read_context(client, reverse("admin:index"))["changes"] == []
    assert len(read_context(client, reverse("admin:index"), {"days": 7})["changes"]) == 1


def test_changes_of_one_row_in_one_bar_are_one_mark(viewer: Client, matrix: MatrixBuilder) -> None:
    template = matrix.template("guide")
    text_of_template = template.texts.get()
    for number in range(3):
        text_of_template.body = f"text {number}"
        text_of_template.save()
    words = [each.words for each in read_context(viewer, reverse("admin:index"))["changes"]]
    assert [each for each in words if "Template guide" in each] == [words[0]]


# --- the first hour ---------------------------------------------------------------------------------------------------


def steps(client: Client) -> dict[str, bool]:
    return {str(step.words): step.done for step in read_context(client, reverse("admin:index"))["checklist"]}


def test_checklist_ticks_what_is_done_and_leaves_when_complete(
    as_member: Callable[[str], Client], matrix: MatrixBuilder, record_event: RecordEvent
) -> None:
    node = matrix.node(delay=timedelta(hours=1))
    client = as_member("admin")
    names = ["Set a channel", "Enable the first node", "Send a test event", "Invite a colleague"]
    assert steps(client) == dict.fromkeys(names, False)
    for step in read_context(client, reverse("admin:index"))["checklist"]:
        assert client.get(step.link).status_code == 200
    hook = ChannelConfig.objects.create(key="hook", kind="webhook", config={"url": "https://example.com/in"})
    assert [name for name, done in steps(client).items() if done] == names[:1]
    Node.objects.filter(pk=node.pk).update(channel=hook)
    record_event("material.downloaded")
    assert [name for name, done in steps(client).items() if done] == names[:3]
    User.objects.create_user("bob", password="x", is_staff=True)
    assert steps(client) == {}
    assert 'id="first-hour"' not in text(client)


def test_checklist_invites_only_where_the_user_may(as_member, settings):
    """A right to add users does not give the right to invite."""
    client, viewer = as_member("admin"), as_member("viewer")
    links = [step.link for step in read_context(client, reverse("admin:index"))["checklist"]]
    assert links[-1] == reverse("admin:scheduling_invitation_add")
    User.objects.get(username="viewer").user_permissions.add(Permission.objects.get(codename="add_user"))
    assert steps(viewer) == {}
    settings.AFTERTOUCH_OIDC_ONLY = True
    assert "Invite a colleague" not in steps(client)


def test_dismissed_checklist_stays_hidden_for_this_user_only(as_member: Callable[[str], Client]) -> None:
    admin, editor, viewer = as_member("admin"), as_member("editor"), as_member("viewer")
    assert list(steps(editor)) == ["Set a channel", "Enable the first node", "Send a test event"]
    assert steps(viewer) == {}
    address = reverse("dismiss_checklist")
    assert admin.get(address).status_code == 405
    for _ in range(2):
        assert admin.post(address)["Location"] == reverse("admin:index")
    assert steps(admin) == {}
    assert steps(editor) != {}
    assert DismissedChecklist.objects.count() == 1
    assert Client().post(address)["Location"].startswith(reverse("admin:login"))
