"""Retries all that match, watches how far it is, stops it."""

from datetime import timedelta

import pytest

from scheduling.admin.failed_tasks import bulk_action
from tests.journeys.conftest import check_width
from tests.support.screenshots import save_screenshot


@pytest.fixture(autouse=True)
def _start_at_once(monkeypatch):
    monkeypatch.setattr(bulk_action, "UNDO_WINDOW", timedelta(0))


@pytest.fixture
def many_failed_tasks(matrix, record_event):
    """More failed tasks than a page shows."""
    from scheduling.models import FailedTask
    from tests.scheduling.core.conftest import deliver

    matrix.node(template=matrix.template("broken", body="{{ event.data.order_no }}"), guard_dedupe="ignore")
    deliver([record_event(user=f"user-{number}").task_ids[0] for number in range(53)])
    return FailedTask.objects.count()


def test_bulk_retry_of_all_matches_is_shown_and_stopped(ops, many_failed_tasks):
    from scheduling.models import BulkAction, FailedTask
    from scheduling.operations import bulk_actions

    page = ops("en")
    page.goto("/admin/scheduling/failedtask/?failure=failed")
    page.click("a[href*='/matching/retry/']")
    page.wait_for_selector(f"text=Applies to {many_failed_tasks} failed tasks.")
    page.fill("[name=reason]", "the receiver is back")
    page.fill("[name=per_second]", "4")
    save_screenshot(page, "bulk-confirm")
    page.click("#content button[type=submit]:has-text('Retry')")
    page.wait_for_selector(f"text=0 of {many_failed_tasks}")
    BulkAction.objects.get()
    bulk_actions.continue_bulk_actions()
    page.wait_for_selector(f"text=20 of {many_failed_tasks}")  # the page looks again by itself

    # A look that brings nothing new leaves the button where it is: it may be being pressed.
    page.evaluate("document.querySelector('#bulk-action button').stayed = true")
    for _ in range(2):
        with page.expect_response(lambda answer: "x-live" in answer.request.headers):
            pass
    assert page.evaluate("document.querySelector('#bulk-action button').stayed")
    check_width(page)
    save_screenshot(page, "bulk-action")  # which leaves a `style` in the form, so not before
    page.click("text=Stop the bulk action")
    page.wait_for_selector("text=Changes made before the stop stay")
    bulk_actions.continue_bulk_actions()
    assert FailedTask.objects.filter(state="retried").count() == 20
