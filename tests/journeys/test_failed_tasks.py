"""A receiver refuses every message. An operator sees it on the overview, retries five after the repair, then the rest.

An editor changes a rule after a replay of the day.
"""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from django.db.models.functions import Now

from tests.scheduling.core.conftest import _sending  # noqa: F401  a fixture
from tests.scheduling.core.receivers import ScriptedReceiver
from tests.support.screenshots import save_screenshot

if TYPE_CHECKING:
    pass

MANY, FEW, READERS = 58, 5, 4


@pytest.fixture
def refusing_receiver(matrix, record_event, _sending):  # noqa: F811
    """The partner's endpoint refuses what is sent to it; everything else is as on any other day."""
    from scheduling.models import ChannelConfig, FailedTask
    from tests.scheduling.core.conftest import deliver

    with ScriptedReceiver(script=[422] * MANY) as receiver:
        hook = ChannelConfig.objects.create(
            key="partner", kind="webhook", idempotent=True, config={"url": receiver.url}, timeout=timedelta(seconds=20)
        )
        matrix.node("insale-paid", trigger="order.paid", channel=hook)
        matrix.node("presale-download")
        deliver([task for number in range(READERS) for task in record_event(user=f"reader-{number}").task_ids])
        deliver(
            [task for number in range(MANY) for task in record_event("order.paid", user=f"buyer-{number}").task_ids]
        )
        assert FailedTask.objects.filter(channel="partner", state="open").count() == MANY
        yield receiver


def deliver_waiting_touches():
    """What a worker does, and its time has come."""
    from django.utils.timezone import now

    from scheduling.models import Touch
    from tests.scheduling.core.conftest import deliver

    waiting = Touch.objects.filter(state="scheduled")
    waiting.update(due_at=now())
    deliver(list(waiting.values_list("pk", flat=True)))


def count_delivered_retries():
    from scheduling.models import Touch

    return Touch.objects.filter(state="delivered", retry_of__isnull=False).count()


def run_next_batch():
    """The next batch, and its time has come."""
    from scheduling.models import BulkAction
    from scheduling.operations import bulk_actions

    BulkAction.objects.update(next_at=Now())
    bulk_actions.continue_bulk_actions()


def test_failure_spike_is_retried_and_rule_is_edited(ops, refusing_receiver):
    from scheduling.models import BulkAction, FailedTask

    page = ops(group="operator")
    page.goto("/admin/")

    # The overview shows the most frequent failures; the list groups them by cause.
    assert str(MANY) in page.inner_text("#actions li:has-text('partner')")
    save_screenshot(page, "spike", full_page=True)
    page.goto("/admin/scheduling/failedtask/groups/")
    page.click("tr:has-text('partner') a:has-text('查看')")

    # Five first.
    for number in range(FEW):
        page.check(f"input[name=_selected_action] >> nth={number}")
    page.select_option("select[name=action]", "bulk_retry")
    page.click("button[name=index]")
    page.fill("[name=reason]", "合作方已恢复")
    page.click("#content button[type=submit]:has-text('重试')")
    page.wait_for_selector("#action-toggle")
    deliver_waiting_touches()
    assert count_delivered_retries() == FEW

    # Then the rest, while a page shows how far they are.
    page.click("a[href*='/matching/retry/']")
    page.fill("[name=reason]", "前五个正常")
    page.fill("[name=per_second]", "10")
    page.click("#content button[type=submit]:has-text('重试')")
    page.wait_for_selector("progress")
    run_next_batch()
    page.wait_for_selector(f"text=/[1-9][0-9]* \\/ {MANY - FEW}/")  # how many depends on the time of the batch
    save_screenshot(page, "spike-progress")
    while BulkAction.objects.filter(state="running").exists():
        run_next_batch()
    page.wait_for_selector("#bulk-action:not([data-live-again])")
    deliver_waiting_touches()
    assert count_delivered_retries() == MANY
    assert len(refusing_receiver.calls) == 2 * MANY
    assert not FailedTask.objects.filter(state="open").exists()
    assert BulkAction.objects.get().actor_name == "operator"

    # What would a stricter limit have done to these days? An operator may look, an editor asks and publishes it.
    draft = "/admin/scheduling/configdraft/add/"
    assert page.goto(draft).status == 403
    tighten_cap(ops(group="editor"), draft)


def tighten_cap(page, draft):
    from scheduling.experiments import drafts
    from scheduling.models import ConfigDraft, HarassmentRule

    page.goto(draft)
    area = page.locator("[name=draft]")
    area.fill(area.input_value().replace("limit: 3", "limit: 2"))
    page.click("button:has-text('开始回测')")
    page.wait_for_selector("progress")
    assert drafts.run_next_replay()
    page.wait_for_selector("h2:has-text('回测结果')")
    counts = ConfigDraft.objects.get().result["draft"].values()
    assert sum(each.get("delivered", 0) for each in counts) == MANY + READERS
    page.click("a:has-text('发布草稿')")
    page.fill("[name=reason]", "收紧频次上限")
    page.click("button:has-text('发布')")
    page.wait_for_selector("text=草稿已上线")
    assert HarassmentRule.objects.get(kind="cap").limit == 2
    assert HarassmentRule.history.latest().history_user.username == "editor"


def test_editor_takes_over_edits_and_requeues(ops, refusing_receiver):
    """One failed task is assigned and discussed. An editor corrects its text, and the customer gets that."""
    from scheduling.models import FailedTask, Touch

    admin = "/admin/scheduling"
    page = ops(group="editor")
    page.goto(f"{admin}/failedtask/groups/")
    assert "24 小时" in page.inner_text("thead")
    assert "58" in (page.get_attribute("svg.at-spark", "aria-label") or "")
    save_screenshot(page, "failed-causes")
    row = FailedTask.objects.filter(state="open").order_by("pk")[0]
    page.goto(f"{admin}/failedtask/{row.pk}/change/")
    page.click("button:has-text('指派给我')")
    page.wait_for_selector("text=负责人已更改")
    page.fill("[name=text]", "已联系合作方，见 https://example.com/ticket/17 ，等回复")
    page.click("button:has-text('添加备注')")
    page.wait_for_selector(".at-comment a[rel~=noopener]")
    page.goto(f"{admin}/failedtask/?assignee=me")
    assert page.locator("#result_list tbody tr").count() == 1

    page.goto(f"{admin}/failedtask/{row.pk}/change/")
    page.click("a:has-text('修改后重试')")
    page.fill("[name=body]", "订单 A-17 已发货，请留意查收。")
    page.fill("[name=reason]", "补上订单号")
    save_screenshot(page, "failed-edit")
    page.click("form button[type=submit]:has-text('修改后重试')")
    page.wait_for_selector("ins:has-text('订单 A-17')")
    save_screenshot(page, "failed-edited", full_page=True)
    deliver_waiting_touches()
    again = Touch.objects.get(retry_of=row.task_id)
    assert (again.state, again.attempts[0].body) == ("delivered", "订单 A-17 已发货，请留意查收。")
    page.goto(f"{admin}/touch/{again.pk}/change/")
    page.wait_for_selector("ins:has-text('订单 A-17')")
