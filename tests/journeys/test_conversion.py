"""The page of effects, in a browser."""

from datetime import timedelta

from tests.journeys.conftest import visit_layouts
from tests.support.screenshots import save_screenshot


def test_conversion_page_shows_control_group_and_fits(ops, matrix, record_event):
    from scheduling.planning.ingest import NewEvent, record_events
    from tests.scheduling.core.conftest import deliver, pass_time

    matrix.node("insale-paid", holdout_percent=30, goal_event="order.paid", goal_within=timedelta(days=1))
    downloads = [NewEvent("shop", f"d{number}", "material.downloaded", f"user{number}") for number in range(60)]
    deliver([task_id for receipt in record_events(downloads) for task_id in receipt.task_ids])
    for number in range(0, 60, 3):
        record_event("order.paid", f"user{number}")
    pass_time(days=2)
    page = ops()
    for look in visit_layouts(page, "/admin/scheduling/node/conversion/"):
        assert page.locator("td:has-text('对照组')").count() > 0
        save_screenshot(page, f"effect{look}")
