from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from html import unescape
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import OperationalError
from django.test import Client
from django.utils.timezone import now

from scheduling.admin.matrix import preview
from scheduling.models import ChannelConfig, HarassmentRule, Node, Touch
from tests.scheduling.admin.conftest import CheckFormErrors, FillForm, SaveForm, Url
from tests.scheduling.admin.test_conditions import rows
from tests.scheduling.core.conftest import pass_time
from tests.support.matrix import MatrixBuilder
from tests.support.second_connection import Race
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db


def test_edited_delay_stores_version_author_and_reason(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, save_form: SaveForm
) -> None:
    node = matrix.node(delay=timedelta(minutes=15))
    save_form(admin_url("node_change", node.pk), delay="1h30m", change_reason="too early")
    node.refresh_from_db()
    assert (node.delay, node.version) == (timedelta(minutes=90), 2)
    last = node.history.first()
    assert (last.history_user.username, last.history_change_reason) == ("editor", "too early")
    history = editor.get(admin_url("node_history", node.pk)).content.decode()
    assert all(words in history for words in ("15m", "1h30m"))


def test_node_rules_and_lists_are_parsed_from_text_and_kept_by_the_next_save(
    matrix: MatrixBuilder, admin_url: Url, save_form: SaveForm
) -> None:
    matrix.node("before")
    url = admin_url("node_change", matrix.node().pk)
    save_form(
        url, delay_rules="vip=1h，normal=2h, default=24h, factor=0.5", cancel_on="order.paid, order.paid\nrefund.asked",
        rollout_communities="c1\nc2", trigger="touch.delivered", from_nodes="before",
    )  # fmt: skip
    save_form(url)
    node = Node.objects.get(key="guide")
    assert node.delay_rules == {"by_level": {"vip": 3600, "normal": 7200}, "default": 86400, "active_factor": 0.5}
    assert (node.cancel_on, node.rollout_communities) == (["order.paid", "refund.asked"], ["c1", "c2"])
    assert (node.trigger, node.from_nodes, node.version) == ("touch.delivered", ["before"], 2)


def test_node_form_errors_name_the_field(
    matrix: MatrixBuilder, check_form_errors: CheckFormErrors, admin_url: Url
) -> None:
    node = matrix.node("guide")
    matrix.node("reminder", "touch.delivered", from_nodes=["guide"])
    matrix.node("last", "touch.failed", from_nodes=["reminder"])
    matrix.node("old", "touch.failed", from_nodes=["guide"], retired_at=now())
    matrix.template("retired", retired_at=now())

    def varied(template: str) -> dict[str, str]:
        return {
            "variants-0-key": "vips", "variants-0-template": template,
            **rows(("chat_id", "eq", "1", ""), name="variants-0"),
        }  # fmt: skip

    check_form_errors(
        admin_url("node_change", node.pk),
        ({"delay": "15 minutes"}, "delay", "not a duration"),
        ({"delay": ""}, "delay", "required"),
        ({"delay_rules": "vip=1h"}, "delay_rules", "default"),
        ({"delay_rules": "vip=soon, default=1d"}, "delay_rules", "not a duration"),
        ({"delay_rules": "default=1d, factor=x"}, "delay_rules", "not a number"),
        ({"rollout_percent": "101"}, "rollout_percent", "100"),
        ({"goal_event": "order.paid"}, "goal_within"),
        ({"expires_after": "0"}, "expires_after", "above zero"),
        ({"trigger": "touch.delivered", "from_nodes": "last"}, "from_nodes", "guide ← last ← reminder ← guide"),
        ({"trigger": "touch.delivered", "from_nodes": "gone"}, "from_nodes", "there is no node “gone”"),
        ({"trigger": "touch.delivered", "from_nodes": ""}, "from_nodes", "is about touches of other nodes"),
        ({"from_nodes": "reminder"}, "from_nodes", "needs one of these triggers: touch.bounced, touch.cancelled"),
        ({"trigger": "touch.failed", "from_nodes": "last\nold"}, "from_nodes", "guide ← old ← guide"),
        ({"send_window": "mon 9-18"}, "send_window", "must be like"),
        ({"send_window": "mon 9:00-18:00 calendar=moon"}, "send_window", "there is no calendar “moon”"),
        ({"send_window": "mon 9:00-18:00 timezone=Peking"}, "send_window", "“Peking” is not customer or an IANA time"),
        ({"at_day": "next"}, "at", "is missing"),
        ({"at": "10:00", "not_before": "09:00"}, "not_before", "cannot apply"),
        ({"variants-0-template": "guide"}, "variants", "Variant 1: needs a key, a template"),
        (varied("gone"), "variants", "Variant 1: there is no template “gone”"),
        (varied("retired"), "variants", "Variant 1: there is no template “retired”"),
    )


def test_new_node_form_is_prefilled_from_its_cell(matrix: MatrixBuilder, editor: Client, admin_url: Url) -> None:
    matrix.node()
    page = editor.get(admin_url("node_matrix")).content.decode()
    (link,) = re.findall('class="at-add" href="([^"]*)"', page)
    form = read_context(editor, unescape(link))["adminform"].form
    assert (form["trigger"].value(), str(form["stage"].value())) == ("material.downloaded", str(matrix.stage.pk))


def test_used_node_is_retired_not_deleted(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, record_event: Callable[..., Any]
) -> None:
    node, unused = matrix.node(), matrix.node("unused", trigger="order.paid")
    record_event()
    assert editor.post(admin_url("node_delete", node.pk), {"post": "yes"}).status_code == 403
    retire = admin_url("node_retire", node.pk)
    page = editor.get(retire).content.decode()
    assert "Retire “guide”?" in page
    assert "1 touch waits at this node." in page
    assert "They are suppressed when they fall due, unless the node is restored by then." in page
    editor.post(retire)
    node.refresh_from_db()
    assert node.retired_at is not None
    assert node.version == 2
    assert list(read_context(editor, admin_url("node_changelist"))["cl"].result_list) == [unused]
    editor.post(admin_url("node_bring_back", node.pk))
    node.refresh_from_db()
    assert node.retired_at is None
    editor.post(admin_url("node_delete", unused.pk), {"post": "yes"})
    assert list(Node.objects.all()) == [node]


def test_node_is_not_restored_before_what_it_uses(matrix: MatrixBuilder, editor: Client, admin_url: Url) -> None:
    """All touches of the restored node failed: their channel was retired since."""
    node = matrix.node()
    for name, row in (("node", node), ("channelconfig", matrix.channel), ("node", node)):
        url = admin_url(f"{name}_bring_back" if row.retired_at else f"{name}_retire", row.pk)
        page = editor.post(url, follow=True).content.decode()
        row.refresh_from_db()
    assert "It uses objects that are retired: log. Restore them first." in page
    assert node.retired_at is not None


def test_rule_is_not_restored_before_the_channel_that_it_names(editor: Client, admin_url: Url) -> None:
    """The exported configuration was refused: its rule named no channel."""
    channel = ChannelConfig.objects.create(key="other", kind="log", retired_at=now())
    rule = HarassmentRule.objects.create(
        kind="cap", limit=3, window=timedelta(days=1), channel=channel.key, retired_at=now()
    )
    page = editor.post(admin_url("harassmentrule_bring_back", rule.pk), follow=True).content.decode()
    assert "It uses objects that are retired: other. Restore them first." in page
    rule.refresh_from_db()
    assert rule.retired_at is not None


def test_channel_that_a_rule_names_is_neither_retired_nor_deleted(
    matrix: MatrixBuilder, editor: Client, admin_url: Url
) -> None:
    """The exported configuration was refused: its rule named no channel."""
    channel = ChannelConfig.objects.create(key="other", kind="log")
    HarassmentRule.objects.create(kind="cap", limit=3, window=timedelta(days=1), channel="other")
    page = editor.post(admin_url("channelconfig_retire", channel.pk), follow=True).content.decode()
    name = "anti-harassment rule At most so many in a rolling window (Customer)"
    assert f"Still used by: {name}." in page
    for days in range(2, 8):
        HarassmentRule.objects.create(kind="cap", limit=3, window=timedelta(days=days), channel="other")
    page = editor.post(admin_url("channelconfig_retire", channel.pk), follow=True).content.decode()
    assert f"Still used by: {', '.join([name] * 5)} (and 2 more)." in page
    assert editor.post(admin_url("channelconfig_delete", channel.pk), {"post": "yes"}).status_code == 403
    channel.refresh_from_db()
    assert channel.retired_at is None


def test_node_page_counts_waiting_touches(
    matrix: MatrixBuilder, viewer: Client, admin_url: Url, record_event: Callable[..., Any]
) -> None:
    node = matrix.node(delay=timedelta(hours=1))
    record_event(user="ann")
    record_event(user="bob")
    page = viewer.get(admin_url("node_change", node.pk)).content.decode()
    link = f"{admin_url('touch_changelist')}?node__id__exact={node.pk}&amp;state__in=scheduled,queued"
    assert f'href="{link}">2<' in page
    assert len(read_context(viewer, link.replace("&amp;", "&"))["cl"].result_list) == 2


@pytest.mark.django_db(transaction=True)
def test_concurrent_saves_close_no_cycle(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: FillForm, race: Race
) -> None:
    matrix.node("a")
    matrix.node("b")
    urls = {node.key: admin_url("node_change", node.pk) for node in Node.objects.all()}
    sent = {
        key: fill_form(url, trigger="touch.delivered", from_nodes="b" if key == "a" else "a")
        for key, url in urls.items()
    }
    answers = race(2, lambda number: editor.post(urls["ab"[number]], sent["ab"[number]]).status_code)
    assert sorted(answers) == [200, 302]
    assert sorted(Node.objects.values_list("from_nodes", flat=True), key=len)[0] == []


def test_followed_node_cannot_be_retired(matrix: MatrixBuilder, editor: Client, admin_url: Url) -> None:
    node = matrix.node("guide")
    follower = matrix.node("reminder", "touch.delivered", from_nodes=["guide"])
    editor.post(admin_url("node_retire", node.pk))
    node.refresh_from_db()
    assert node.retired_at is None
    editor.post(admin_url("node_retire", follower.pk))
    editor.post(admin_url("node_retire", node.pk))
    node.refresh_from_db()
    assert node.retired_at is not None


@pytest.mark.django_db(transaction=True)
def test_waiting_touches_move_only_on_request_and_the_page_reports_those_that_stay(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: FillForm, record_event: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    node = matrix.node(delay=timedelta(hours=2))
    record_event()
    pass_time(hours=1)
    record_event(user="bob")
    url = admin_url("node_change", node.pk)

    def list_due() -> dict[Any, Any]:
        return dict(Touch.objects.values_list("pk", "due_at"))

    def edit(**changes: str) -> str:
        page = editor.post(url, fill_form(url, **changes), follow=True)
        return " ".join(str(each) for each in page.context["messages"])

    before = list_due()
    edit(delay="3h")
    assert list_due() == before
    assert "2 waiting touches were moved." in edit(delay="4h", move_waiting="on")
    moved = {key: due_at + timedelta(hours=2) for key, due_at in before.items()}
    assert list_due() == moved
    monkeypatch.setattr(preview, "PAGE_TIME_LIMIT", timedelta(seconds=-1))
    said = edit(delay="5h", move_waiting="on")
    assert "0 waiting touches were moved." in said
    assert "2 more were not processed within the time limit." in said
    assert list_due() == moved
    monkeypatch.setattr(preview, "move_waiting", Mock(side_effect=OperationalError))
    assert "not all touches moved" in edit(delay="6h", move_waiting="on")
    node.refresh_from_db()
    assert node.delay == timedelta(hours=6), "the edit stays"
