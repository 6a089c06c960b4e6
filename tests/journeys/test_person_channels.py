"""An editor describes a vendor's API, tests a template to one person, and sees an address fail for good."""

import pytest
from django.urls import reverse

from tests.scheduling.core.conftest import _sending, deliver_when_due  # noqa: F401  a fixture
from tests.scheduling.core.receivers import ScriptedReceiver
from tests.support.screenshots import save_screenshot

SETTINGS = """address: phone
query: {access_token: "{{ channel.token }}"}
body: {to: "{{ message.address }}", text: "{{ message.body }}"}
token: {url: "BASE/token", body: {secret: "{{ channel.secret }}"}}
success: {field: errcode, op: eq, value: 0}
code_field: errcode
errors:
  - {code: 40003, then: address_invalid}
quotas: [MANY]
"""
TOKEN = {"access_token": "token-of-the-vendor", "expires_in": 7200}


@pytest.fixture
def vendor(_sending):  # noqa: F811
    from scheduling.channels.vendors.base import shared_tokens

    shared_tokens.cache_clear()
    with ScriptedReceiver([TOKEN, {"errcode": 0}, {"errcode": 40003}]) as server:
        yield server
    shared_tokens.cache_clear()


def test_described_channel_reaches_a_person_and_disables_a_wrong_address(ops, matrix, vendor, record_event):
    from scheduling.models import ChannelConfig, Customer

    Customer.objects.create(user_id="ann", name="王小安", addresses={"phone": "13800138000"})
    template = matrix.template("guide", body="您好 {{ user.name }}，使用指南已备好。")
    base = vendor.url.removesuffix("/hook")
    described = SETTINGS.replace("BASE", base)
    page = ops(group="editor")
    page.goto("/admin/scheduling/channelconfig/add/")
    page.fill("[name=key]", "texts")
    page.select_option("[name=kind]", "http")
    page.fill("[name=settings]", described.replace("MANY", "many"))
    page.fill("[name=secret_url]", f"{base}/send")
    page.fill("[name=secret_secret]", "a-long-vendor-secret")
    page.click("[name=_save]")
    page.wait_for_selector(".field-settings .errorlist :text('quotas')")
    save_screenshot(page, "channel-error", full_page=True)
    page.fill("[name=settings]", described.replace("MANY", "100/1m"))
    page.fill("[name=secret_url]", f"{base}/send")
    page.fill("[name=secret_secret]", "a-long-vendor-secret")
    page.click("[name=_save]")
    page.wait_for_selector("#changelist td:has-text('HTTP')")
    channel = ChannelConfig.objects.get(key="texts")
    change = f"/admin/scheduling/channelconfig/{channel.pk}/change/"
    page.goto(change)
    assert "a-long-vendor-secret" not in page.content()
    save_screenshot(page, "channel-described", full_page=True)

    # A test message to one person.
    page.goto(reverse("admin:scheduling_template_send_test", args=[template.pk]))
    page.select_option("[name=channel]", str(channel.pk))
    page.fill("[name=user_id]", "ann")
    page.click("form.at-card button[type=submit]")
    page.wait_for_selector(":text('已送达')")
    assert vendor.calls[-1].json == {"to": "13800138000", "text": "【测试】 您好 王小安，使用指南已备好。"}
    save_screenshot(page, "channel-test")

    # The vendor does not know the address: the touch fails, and the channel lists the address.
    matrix.node("guide", template=template, channel=channel)
    (task_id,) = record_event().task_ids
    assert deliver_when_due(task_id)[0].reason == "vendor_40003"
    page.goto(f"/admin/scheduling/touch/{task_id}/change/")
    page.wait_for_selector(".at-timeline")
    save_screenshot(page, "touch-address-invalid", full_page=True)
    assert "40003" in page.inner_text(".at-timeline")
    page = ops("en", "dark", group="editor")
    page.goto(change)
    page.wait_for_selector("text=Disabled targets")
    save_screenshot(page, "channel-disabled-dark-en", full_page=True)
