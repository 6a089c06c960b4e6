"""A day in operations, in a real browser: an editor changes a delay, asks what would happen and watches a touch arrive,
an operator retries a failed one. Each with no more rights than the group has."""

from datetime import timedelta

import pytest

from tests.support.screenshots import save_screenshot


@pytest.fixture
def article_matrix(matrix):
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
    matrix.node("presale-download", name="资料下载后发使用指南", template=guide, delay=timedelta(minutes=15))
    matrix.stage = Stage.objects.create(key="insale", name="售中", position=1)
    tracking = matrix.template("tracking", body="{{ user.name }}，您的包裹 {{ event.data.order_no }} 已发出。")
    matrix.node(
        "insale-paid", "order.paid", name="支付后发物流消息", template=tracking, delay=timedelta(hours=2), priority=0
    )
    matrix.stage = Stage.objects.create(key="aftersale", name="售后", position=2)
    matrix.node(
        "aftersale-survey", "service.completed", name="服务完成后回访", delay=timedelta(days=7), rollout_percent=30
    )
    return matrix


@pytest.mark.usefixtures("article_matrix")
def test_operations_day_edits_previews_delivers_and_retries(ops, record_event):
    from scheduling.models import FailedTask, Node, Touch
    from tests.scheduling.core.conftest import deliver

    page = ops(group="editor")
    page.goto("/admin/")

    # The matrix, a card, another delay.
    page.click("text=矩阵")
    page.wait_for_selector("text=15 分钟")
    save_screenshot(page, "matrix")
    page.click(".at-node:has-text('15 分钟') .at-node-title")
    page.fill("[name=delay]", "soon")
    page.click("[name=_save]")
    page.wait_for_selector(".field-delay :text('不是时长')")
    page.fill("[name=delay]", "20m")
    page.fill("[name=change_reason]", "客户反馈太早")
    page.click("[name=_save]")
    page.wait_for_selector(".at-node:has-text('20 分钟')")
    node = Node.objects.get(key="presale-download")
    assert (node.delay, node.version) == (timedelta(minutes=20), 2)
    changed = node.history.latest()
    assert (changed.history_user.username, changed.history_change_reason) == ("editor", "客户反馈太早")

    # What would happen?
    page.click("#nav-sidebar-apps >> text=预演与回测")
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
    deliver([task_id])
    page.goto(f"/admin/scheduling/touch/?q={task_id}")
    page.click("#result_list tbody th a")
    page.wait_for_selector(".at-timeline")
    page.wait_for_load_state("domcontentloaded")
    said = page.inner_text(".at-timeline")
    assert [words in said for words in ("事件", "已计划", "规则检查通过", "第 1 次尝试", "已送达")] == [True] * 5
    assert "您好 王小安，这是使用指南" in said
    save_screenshot(page, "timeline")

    # An order without its number fails; an operator retries it.
    (failed_id,) = record_event("order.paid", occurred_at=now() - timedelta(hours=2)).task_ids
    deliver([failed_id])
    page = ops(group="operator")
    page.goto("/admin/")
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
def test_template_preview_follows_typed_text(ops):
    from scheduling.models import Template

    page = ops("en")
    page.goto(f"/admin/scheduling/template/{Template.objects.get(key='guide').pk}/change/")
    page.wait_for_selector("#template-preview :text('您好 Zhang San')")
    page.fill("[name='texts-0-body']", "Dear {{ user.name }}, {{ event.data.gift }}")
    page.wait_for_selector("#template-preview :text('“event.data.gift” is missing')")
    page.fill("#preview_data", '{"gift": "tea"}')
    page.fill("#preview_user", "ann")
    page.wait_for_selector("#template-preview :text('Dear 王小安, tea')")
