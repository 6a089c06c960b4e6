"""An editor subscribes another system to what happens, sees it fail and rest, and sends a range again."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.utils.timezone import localtime, now

from tests.scheduling.core.receivers import ScriptedReceiver
from tests.support.screenshots import save_screenshot

SECRET = "whsec_" + "ZGVtby1vbmx5LXNlY3JldC1vZi10aGlydHktdHdvLWI="


@pytest.fixture
def crm(settings):
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1"]
    with ScriptedReceiver() as server:
        yield server


def test_subscription_is_created_rests_and_sends_a_range_again(ops, matrix, crm):
    from scheduling.models import WebhookEndpoint, WebhookSubscription
    from tests.scheduling.webhooks import conftest as outbox
    from tests.scheduling.webhooks.conftest import note_changes, pass_time

    def send_all():
        """Run a sender in another thread: Playwright has an event loop in this one."""
        with ThreadPoolExecutor(1) as sender:
            sender.submit(outbox.send_all).result()

    admin = "/admin/scheduling"
    page = ops(group="editor")
    page.goto(f"{admin}/webhooksubscription/add/")
    page.fill("[name=key]", "crm")
    page.check("[name=events][value='touch.ended']")
    page.check("[name=events][value='pause.changed']")
    page.fill("[name=secret_url]", "http://10.0.0.1/in")
    page.fill("[name=secret_secret]", "short")
    page.click("[name=_save]")
    page.wait_for_selector(".field-secret_url .errorlist :text('https')")
    page.wait_for_selector(".field-secret_secret .errorlist")
    save_screenshot(page, "webhook-errors", full_page=True)
    page.fill("[name=secret_url]", crm.url)
    page.fill("[name=secret_secret]", SECRET)
    page.click("[name=_save]")
    page.wait_for_selector("#changelist td:has-text('正常')")
    hook = WebhookSubscription.objects.get()
    assert (hook.key, hook.events) == ("crm", ["touch.ended", "pause.changed"])
    change = f"{admin}/webhooksubscription/{hook.pk}/change/"

    # What happens is in the list of messages.
    note_changes(3, objects=3)
    send_all()
    page.goto(f"{admin}/webhookmessage/")
    assert page.locator("#result_list tbody tr:has-text('已送达')").count() == 3
    save_screenshot(page, "webhook-messages")

    # The receiver fails and rests. The list and the overview show it.
    crm.script = [500] * 100
    note_changes(5, objects=5, start=3)
    send_all()
    assert WebhookEndpoint.objects.get().state == "resting"
    page.goto("/admin/")
    page.click("a:has-text('无响应的 Webhook')")
    page.wait_for_selector("td:has-text('熔断至')")
    save_screenshot(page, "webhook-rests")

    # It is repaired. Enabling sends at once; a range is sent again with the same ids.
    crm.script = []
    page.goto(change)
    page.click("a:has-text('启用')")
    page.click("form button:has-text('启用')")
    page.wait_for_selector("[name=_save]")
    pass_time(minutes=1)  # the messages wait for their next attempt
    send_all()
    sent = crm.keys
    assert len(set(sent)) == 8
    page.click("a:has-text('按时间段重新推送')")
    since, until = localtime(now() - timedelta(hours=1)), localtime(now() + timedelta(hours=1))
    for name, at in (("since", until), ("until", since)):
        page.fill(f"[name={name}_0]", f"{at:%Y-%m-%d}")
        page.fill(f"[name={name}_1]", f"{at:%H:%M:%S}")
    page.click("form button:has-text('重新推送')")
    page.wait_for_selector(".errorlist")
    for name, at in (("since", since), ("until", until)):
        page.fill(f"[name={name}_0]", f"{at:%Y-%m-%d}")
        page.fill(f"[name={name}_1]", f"{at:%H:%M:%S}")
    save_screenshot(page, "webhook-replay")
    page.click("form button:has-text('重新推送')")
    page.wait_for_selector(":text('8')")
    page.wait_for_selector("[name=_save]")
    send_all()
    assert sorted(crm.keys[len(sent) :]) == sorted(set(sent))
