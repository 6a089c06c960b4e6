"""A day in operations, in a real browser: an editor changes a delay, asks what would happen and watches a touch arrive,
an operator retries a failed one. Each with no more rights than the group has."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.screenshots import save_screenshot

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def article_matrix(matrix: Any) -> Any:
    """The article's matrix, in short."""
    from scheduling.models import Customer, DelayRule, EventType, Stage

    matrix.stage.name = "售前"
    matrix.stage.save()
    for key, name in (
        ("material.downloaded", "资料下载"),
        ("order.paid", "订单支付"),
        ("service.completed", "服务完成"),
    ):
        EventType.objects.create(key=key, name=name)
    DelayRule.objects.create(pk=1, by_level={"vip": 3600, "normal": 7200})
    Customer.objects.create(user_id="ann", name="王小安", level="vip")
    guide = matrix.template("guide", body="您好 {{ user.name }}，这是使用指南，点此预约顾问。")
    matrix.node("presale-download", template=guide, delay=timedelta(minutes=15))
    matrix.stage = Stage.objects.create(key="insale", name="售中", position=1)
    tracking = matrix.template("tracking", body="{{ user.name }}，您的包裹 {{ event.data.order_no }} 已发出。")
    matrix.node("insale-paid", trigger="order.paid", template=tracking, delay=timedelta(hours=2), priority=0)
    matrix.stage = Stage.objects.create(key="aftersale", name="售后", position=2)
    matrix.node("aftersale-survey", trigger="service.completed", delay=timedelta(days=7), rollout_percent=30)
    return matrix


@pytest.mark.usefixtures("article_matrix")
def test_operations_day_edits_previews_delivers_and_retries(
    ops: Callable[..., Any], live_server: Any, record_event: Callable[..., Any]
) -> None:
    from scheduling.delivery.pipeline import deliver_touches
    from scheduling.models import FailedTask, Node, Touch

    page = ops(group="editor")

    # The matrix, a card, another delay.
    page.click("text=矩阵")
    page.wait_for_selector("text=15 分钟")
    save_screenshot(page, "matrix")
    page.click("a.at-node:has-text('15 分钟')")
    page.fill("[name=delay]", "soon")
    page.click("[name=_save]")
    page.wait_for_selector(".field-delay :text('不是时长')")
    page.fill("[name=delay]", "20m")
    page.fill("[name=change_reason]", "客户反馈太早")
    page.click("[name=_save]")
    page.wait_for_selector("#changelist")
    node = Node.objects.get(key="presale-download")
    assert (node.delay, node.version) == (timedelta(minutes=20), 2)
    changed = node.history.latest()
    assert (changed.history_user.username, changed.history_change_reason) == ("editor", "客户反馈太早")

    # What would happen?
    page.click("text=发送预演")
    page.fill("[name=type]", "material.downloaded")
    page.fill("[name=user_id]", "ann")
    page.click("text=开始预演")
    page.wait_for_selector(".at-outcome:has-text('会发送')")
    page.wait_for_load_state("domcontentloaded")
    assert "您好 王小安" in page.inner_text(".at-outcome")
    save_screenshot(page, "preview")

    # It comes to pass: the download was 20 minutes ago.
    from django.utils.timezone import now

    (task_id,) = record_event("material.downloaded", occurred_at=now() - timedelta(minutes=20)).task_ids
    deliver_touches([task_id])
    page.goto(f"{live_server.url}/admin/scheduling/touch/?q={task_id}")
    page.click("#result_list tbody th a")
    page.wait_for_selector(".at-timeline")
    page.wait_for_load_state("domcontentloaded")
    said = page.inner_text(".at-timeline")
    assert [words in said for words in ("事件", "已计划", "规则检查通过", "第 1 次尝试", "已送达")] == [True] * 5
    assert "您好 王小安，这是使用指南" in said
    save_screenshot(page, "timeline")

    # An order without its number fails; an operator retries it.
    (failed_id,) = record_event("order.paid", occurred_at=now() - timedelta(hours=2)).task_ids
    deliver_touches([failed_id])
    page = ops(group="operator")
    page.click("#nav-sidebar-apps >> text=失败任务")
    page.click("#result_list tbody th a")
    page.wait_for_selector("h2:has-text('缺少模板所需数据')")
    save_screenshot(page, "failed-task")
    page.click("a.at-button:has-text('重试')")
    page.fill("[name=reason]", "模板已修正")
    page.click("form button:has-text('重试')")
    page.wait_for_selector(".at-tag:has-text('重新发布')")
    failed = FailedTask.objects.get(task_id=failed_id)
    assert (failed.state, failed.actor_name, failed.action_reason) == ("retried", "operator", "模板已修正")
    again = Touch.objects.get(pk=failed.retried_as)
    assert again.root_id == Touch.objects.get(pk=failed_id).root_id


@pytest.mark.usefixtures("article_matrix")
def test_template_preview_follows_typed_text(ops: Callable[..., Any], live_server: Any) -> None:
    from scheduling.models import Template

    page = ops("en")
    page.goto(f"{live_server.url}/admin/scheduling/template/{Template.objects.get(key='guide').pk}/change/")
    page.wait_for_selector("#template-preview :text('您好 Zhang San')")
    page.fill("[name='texts-0-body']", "Dear {{ user.name }}, {{ event.data.gift }}")
    page.wait_for_selector("#template-preview :text('the data has no “event.data.gift”')")
    page.fill("#preview_data", '{"gift": "tea"}')
    page.fill("#preview_user", "ann")
    page.wait_for_selector("#template-preview :text('Dear 王小安, tea')")


@pytest.mark.usefixtures("article_matrix")
def test_matrix_and_touch_pages_fit_in_all_layouts(
    ops: Callable[..., Any], live_server: Any, record_event: Callable[..., Any]
) -> None:
    """Wide and narrow, light and dark, both languages: nothing is wider than its screen."""
    from django.utils.timezone import now

    from scheduling.delivery.pipeline import deliver_touches

    for user in ("ann", "bob", "cat"):
        for minutes in (21, 20):
            deliver_touches(
                record_event("material.downloaded", user, occurred_at=now() - timedelta(minutes=minutes)).task_ids
            )
        record_event("order.paid", user, occurred_at=now() - timedelta(minutes=90))
    deliver_touches(record_event("order.paid", "ann", occurred_at=now() - timedelta(hours=3)).task_ids)
    for language, scheme, width in (("zh-hans", "light", 1400), ("en", "dark", 1400), ("zh-hans", "light", 390)):
        page = ops(language, scheme, width)
        for path in ("", "scheduling/node/matrix/", "scheduling/touch/", "scheduling/event/preview/"):
            page.goto(f"{live_server.url}/admin/{path}")
            page.wait_for_load_state("load")
            overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert overflow <= 0, (language, width, path, overflow)
            if width < 400 and "matrix" in path:
                save_screenshot(page, "narrow-matrix")
