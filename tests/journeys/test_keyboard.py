"""Lists, rows, actions and confirmations are reached by Tab, and the focus is visible at each stop."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    pass

MOST_STOPS = 120
#: What a focused element, or the element around it, draws: an outline, a ring or a border of another colour.
FOCUS = """target => {
    const active = document.activeElement;
    const style = getComputedStyle(active);
    const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
    return {found: active.matches(target), visible: outlined || style.boxShadow !== "none",
        box: active !== document.body && active.getBoundingClientRect().width > 0,
        what: active.outerHTML.slice(0, 160)};
}"""


def tab_to(page, target):
    """Press Tab until an element that matches has the focus. Each stop on the way shows it.

    After the last stop the browser starts at the top again, with the focus on the body.
    """
    hidden = []
    for _ in range(MOST_STOPS):
        page.keyboard.press("Tab")
        focus = page.evaluate(FOCUS, target)
        if focus["box"] and not focus["visible"]:
            hidden.append(focus["what"])
        if focus["found"]:
            assert hidden == []
            return
    pytest.fail(f"Tab does not reach {target}")


def press_at(page, target, key="Enter"):
    """Reach an element by Tab and press a key there."""
    tab_to(page, target)
    page.keyboard.press(key)


def confirm(page, reason=""):
    """Submit the confirmation, with a reason if it asks for one."""
    if reason:
        page.wait_for_selector("[name=reason]")
        page.wait_for_load_state()
        tab_to(page, "[name=reason]")
        page.keyboard.type(reason)
    press_at(page, "#content-main button[type=submit]")


def test_touch_is_cancelled_by_keyboard(ops, matrix, record_event):
    from scheduling.models import Touch

    matrix.node("guide")
    record_event()
    touch = Touch.objects.get()
    page = ops("en")
    page.goto("/admin/scheduling/touch/")
    press_at(page, "#result_list tbody th a")
    page.wait_for_url(f"**/{touch.pk}/change/**")
    press_at(page, f"a[href$='/{touch.pk}/cancel/']")
    page.wait_for_url("**/cancel/")
    confirm(page)
    page.wait_for_url(f"**/{touch.pk}/change/")
    assert Touch.objects.get().state == "cancelled"


def test_failed_task_is_retried_by_keyboard(ops, matrix, record_event):
    from scheduling.models import FailedTask
    from tests.scheduling.core.conftest import deliver

    matrix.node("broken", template=matrix.template("broken", body="{{ event.data.order_no }}"))
    deliver(record_event().task_ids)
    page = ops("en")
    page.goto("/admin/scheduling/failedtask/")
    press_at(page, "input.action-select", "Space")
    tab_to(page, "select[name=action]")
    page.keyboard.press("I")  # Ignore; a pause of a second between letters would begin another word
    assert page.input_value("select[name=action]") == "bulk_ignore"
    press_at(page, "button[name=index]")
    confirm(page, "known")
    page.wait_for_selector("text=Ignore: 1 failed task.")
    assert FailedTask.objects.get().state == "ignored"


def test_node_of_matrix_is_paused_by_keyboard(ops, matrix):
    from scheduling.models import Pause

    node = matrix.node("guide")
    page = ops("en")
    page.goto("/admin/scheduling/node/matrix/")
    press_at(page, f"a.at-node[href*='/{node.pk}/'], .at-node a[href*='/{node.pk}/']")
    page.wait_for_url(f"**/node/{node.pk}/change/**")
    press_at(page, f"a[href*='/{node.pk}/pause']")
    confirm(page, "holiday")
    page.wait_for_selector(".at-banner:has-text('holiday')")
    assert Pause.objects.get().scope == "node:guide"
