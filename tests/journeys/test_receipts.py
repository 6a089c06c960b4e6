"""A customer opens a link of a message and its address bounces: operators see both, and undo the block."""

from datetime import timedelta

from tests.support.screenshots import save_screenshot
from tests.support.waiting import WAIT_LIMIT, WAIT_LIMIT_MS


def test_opened_link_is_followed_and_bounced_address_is_enabled_again(ops, site_url, matrix, record_event, settings):
    from config.local.processes import wait_until
    from scheduling.channels.base import Report
    from scheduling.delivery.links import make_link_token
    from scheduling.models import ChannelConfig, Customer, DisabledTarget, Touch
    from scheduling.receipts import record_reports
    from tests.scheduling.core.conftest import deliver

    settings.AFTERTOUCH_LINK_BASE_URL = site_url
    target = f"{site_url}/static/scheduling/ops.css"
    node = matrix.node(template=matrix.template("guide", body=f"请看 {target} 。"))
    matrix.node("thanks", "touch.clicked", from_nodes=["guide"], delay=timedelta(0))
    page = ops()
    Customer.objects.create(user_id="ann", addresses={"email": "ann@example.com"})
    (task_id,) = record_event().task_ids
    deliver([task_id])
    assert wait_until(lambda: Touch.objects.get(pk=task_id).state == "delivered", WAIT_LIMIT)
    node.channel = ChannelConfig.objects.create(key="mail", kind="email", config={"from": "shop@example.com"})
    node.save()

    # The customer opens the link in a browser of its own.
    customer = page.context.browser.new_context(base_url=site_url, user_agent="Mozilla/5.0 (iPhone) MicroMessenger/8.0")
    customer.set_default_timeout(WAIT_LIMIT_MS)
    opened = customer.new_page()
    opened.goto(f"/l/{make_link_token(task_id, 0)}")
    assert opened.url == target
    customer.close()
    page.goto(f"/admin/scheduling/touch/{task_id}/change/")
    page.wait_for_selector(".at-timeline:has-text('回执：已点击链接')")
    save_screenshot(page, "receipt-timeline")
    (follower,) = Touch.objects.filter(node__key="thanks")
    assert follower.event.type == "touch.clicked"

    # The address bounces for good.
    record_reports([Report("bounced", delivery_key=task_id, detail="550 5.1.1 no such user", permanent=True)])
    address = f"/admin/scheduling/customer/{Customer.objects.get().pk}/change/"
    page.goto(address)
    page.wait_for_selector("#disabled-addresses:has-text('5.1.1 no such user')")
    save_screenshot(page, "receipt-customer")
    page.click("a:has-text('重新启用地址')")
    page.wait_for_selector("text=email · mail")
    save_screenshot(page, "receipt-enable")
    page.click("button[type=submit]:has-text('启用')")
    page.wait_for_url(address)
    assert not DisabledTarget.objects.exists()

    # In English, read-only.
    record_reports([Report("read", delivery_key=task_id, detail="iPhone")])
    page = ops("en", group="viewer")
    page.goto(f"/admin/scheduling/touch/{task_id}/change/")
    page.wait_for_selector(".at-timeline:has-text('Receipt: Bounced')")
    save_screenshot(page, "receipt-timeline-en")
    page.goto(f"/admin/scheduling/node/{Touch.objects.get(pk=task_id).node_id}/change/")
    page.wait_for_selector("#receipts")
    save_screenshot(page.locator("#receipts"), "receipt-node-en")
