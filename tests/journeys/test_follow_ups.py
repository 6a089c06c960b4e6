"""An editor joins two nodes to a journey in a real browser, and the second message follows the first."""

from datetime import timedelta

from tests.support.chromium import open_sections
from tests.support.screenshots import save_screenshot
from tests.support.waiting import WAIT_LIMIT


def test_editor_joins_nodes_and_second_message_follows(ops, matrix, record_event, monkeypatch):
    from config.local.processes import wait_until
    from scheduling.ledger import ends
    from scheduling.models import Node, Touch
    from scheduling.planning.own_events import record_ends
    from tests.scheduling.core.conftest import deliver

    monkeypatch.setattr(ends, "WRITE_LAG", timedelta(0))
    matrix.node("survey", "service.completed")
    reminder = matrix.node("reminder", template=matrix.template("reminder", body="{{ event.data.origin.order_no }}"))
    address = f"/admin/scheduling/node/{reminder.pk}/change/"
    page = ops(group="editor")

    # A journey that returns to its node is refused, and the error names the way.
    page.goto(address)
    open_sections(page)
    page.fill("[name=trigger]", "touch.delivered")
    page.fill("[name=from_nodes]", "reminder")
    page.click("[name=_save]")
    page.wait_for_selector(".field-from_nodes :text('节点不能跟进自身：reminder ← reminder')")
    save_screenshot(page, "follow-up-cycle")
    page.fill("[name=from_nodes]", "survey")
    page.fill("[name=delay]", "0")
    page.fill("[name=cancel_on]", "touch.replied")
    page.click("[name=_save]")
    page.wait_for_selector(".at-matrix")
    reminder.refresh_from_db()
    assert (reminder.trigger, reminder.from_nodes) == ("touch.delivered", ["survey"])

    # The preview of the first event names the follower.
    page.goto("/admin/scheduling/event/preview/?type=service.completed&user_id=ann")
    page.wait_for_selector(".at-outcome:has-text('后续跟进： reminder (touch.delivered)')")
    save_screenshot(page, "follow-up-preview")

    # It comes to pass.
    record_ends()
    deliver(record_event("service.completed", data={"order_no": "A1"}).task_ids)
    assert wait_until(lambda: record_ends() or Node.objects.get(key="reminder").touches.exists(), WAIT_LIMIT)
    (task_id,) = Touch.objects.filter(node=reminder).values_list("pk", flat=True)
    deliver([task_id])
    page.goto(f"/admin/scheduling/touch/{task_id}/change/")
    page.wait_for_selector(".at-timeline:has-text('touch.delivered')")
    assert "A1" in page.inner_text(".at-timeline")
    save_screenshot(page, "follow-up-timeline")

    # In English, and read-only.
    page = ops("en", group="viewer")
    page.goto(address)
    open_sections(page)
    page.wait_for_selector("text=Follows these nodes")
    assert page.input_value("[name=from_nodes]:disabled") == "survey"
    save_screenshot(page, "follow-up-node-en")
