"""Edits a draft, replays the last days, reads what would have been sent, publishes it."""

from datetime import timedelta

import pytest

from tests.journeys.conftest import check_width
from tests.support.screenshots import save_screenshot


@pytest.fixture
def week_of_events(matrix, record_event):
    """A week of downloads and orders."""
    from tests.scheduling.core.conftest import pass_time

    guide = matrix.template("guide", body="您好 {{ user.name }}，这是使用指南。")
    matrix.node("presale-download", template=guide, delay=timedelta(minutes=15), guard_dedupe="ignore")
    tracking = matrix.template("tracking", body="您的包裹 {{ event.data.order_no }} 已发出。")
    matrix.node("insale-paid", trigger="order.paid", template=tracking, delay=timedelta(hours=2), over_cap="defer")
    for day in range(6):
        for user in ("ann", "bob", "cat", "dan")[: 2 + day % 3]:
            for _ in range(3 if user == "ann" else 1):
                record_event(user=user)
            record_event("order.paid", user, data={"order_no": f"A{day}"} if user != "dan" else {})
        pass_time(days=1)


@pytest.mark.usefixtures("week_of_events")
def test_replay_draft_is_run_and_published(ops):
    from scheduling.experiments import drafts
    from scheduling.models import ConfigDraft, HarassmentRule

    page = ops()
    page.goto("/admin/")
    page.click("#nav-sidebar-apps >> text=预演与回测")
    page.click(".at-tabs >> text=我的草稿")
    page.click(".at-tabs >> text=YAML")
    area = page.locator("[name=draft]")
    live = area.input_value()
    area.fill(live.replace("limit: 3", "limit: many"))
    page.click("button:has-text('开始回测')")
    page.wait_for_selector(".errorlist :text('harassment_rules[0].limit')")
    area = page.locator("[name=draft]")
    area.fill(live.replace("limit: 3", "limit: 1").replace("delay: 15m", "delay: 30m"))
    page.click("button:has-text('开始回测')")
    page.wait_for_selector("progress")
    assert drafts.run_next_replay()
    page.wait_for_selector("h2:has-text('回测结果')")  # the page looks again by itself
    result = ConfigDraft.objects.get().result
    live_sent, sent = (sum(each["delivered"] for each in result[name].values()) for name in ("live", "draft"))
    assert sent < live_sent
    row = page.inner_text(".wi-outcomes tr:has-text('已发送') >> nth=0").split()
    assert row[-3:] == [str(live_sent), str(sent), f"−{live_sent - sent}"]
    save_screenshot(page, "replay")
    check_width(page)
    page.click("a:has-text('发布草稿')")
    page.fill("[name=reason]", "夜间少打扰")
    page.click("button:has-text('发布')")
    page.wait_for_selector("text=草稿已上线")
    assert HarassmentRule.objects.get(kind="cap").limit == 1
    assert HarassmentRule.history.latest().history_user.username == "ops"


@pytest.mark.usefixtures("week_of_events")
def test_edits_of_two_forms_are_tried_and_published_together(ops):
    from scheduling.experiments import drafts
    from scheduling.models import HarassmentRule, Node

    page, node, cap = ops(), Node.objects.get(key="presale-download"), HarassmentRule.objects.get(kind="cap")
    admin = "/admin/scheduling"
    page.goto(f"{admin}/node/{node.pk}/change/")
    page.fill("[name=delay]", "soon")
    page.click("button:has-text('用最近 7 天试算')")
    page.wait_for_selector(".errorlist, :text('soon')")
    page.fill("[name=delay]", "45m")
    page.click("button:has-text('用最近 7 天试算')")
    page.wait_for_selector("ins:text('45m')")
    page.goto(f"{admin}/harassmentrule/{cap.pk}/change/")
    page.fill("[name=limit]", "1")
    page.click("button:has-text('用最近 7 天试算')")
    page.wait_for_selector("text=改动已放入您的草稿")
    page.wait_for_load_state("domcontentloaded")
    assert page.locator(".wi-change").count() == 2
    save_screenshot(page, "draft")
    page.click("button:has-text('开始回测')")
    page.wait_for_selector("progress")
    assert drafts.run_next_replay()
    page.click("a:has-text('发布草稿')")
    page.fill("[name=reason]", "夜间少打扰")
    save_screenshot(page, "draft-publish")
    page.click("button:has-text('发布')")
    page.wait_for_selector("text=草稿已上线")
    node.refresh_from_db()
    assert (node.delay, HarassmentRule.objects.get(kind="cap").limit) == (timedelta(minutes=45), 1)
    assert node.history.latest().history_change_reason == "夜间少打扰"


def test_node_edit_moves_waiting_touches(ops, matrix, record_event):
    from scheduling.models import Touch

    node = matrix.node(delay=timedelta(hours=2))
    (task_id,) = record_event().task_ids
    before = Touch.objects.get(pk=task_id).due_at
    page = ops("en")
    page.goto(f"/admin/scheduling/node/{node.pk}/change/")
    page.fill("[name=delay]", "3h")
    page.click("[name=move_waiting]")
    page.click("[name=_save]")
    page.wait_for_selector(":text('1 waiting touch was moved.')")
    assert Touch.objects.get(pk=task_id).due_at == before + timedelta(hours=1)
