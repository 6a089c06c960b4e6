"""An editor finds a customer by a part of the name, and edits attributes and tags in a real browser."""

from tests.journeys.conftest import check_width
from tests.support.screenshots import save_screenshot


def test_customer_is_found_by_name_and_gets_attributes_and_tags(ops, matrix):
    from scheduling.models import Customer, CustomerProfile

    Customer.objects.create(user_id="ann", name="王小明", level="vip")
    Customer.objects.create(user_id="bob", name="李雷")
    page = ops(group="editor")
    page.goto("/admin/scheduling/customer/?q=小明")
    assert page.locator("#result_list tbody tr").count() == 1
    page.click("#result_list tbody th a")
    page.fill("[name=attributes]", "city: 上海\n1st: no")
    page.click("[name=_save]")
    page.wait_for_selector(".field-attributes .errorlist")
    save_screenshot(page, "customer-attribute-error")
    page.fill("[name=attributes]", "city: 上海\npaid: 520.5\nmember: true\nsince: 2026-03-03T12:00:00Z")
    page.fill("[name=tags]", "tea, 老客")
    page.click("[name=_continue]")
    page.wait_for_selector(":text('成功')")
    row = CustomerProfile.objects.get(customer__user_id="ann")
    assert row.attributes == {"city": "上海", "paid": 520.5, "member": True, "since": "2026-03-03T12:00:00Z"}
    assert sorted(row.tags) == ["tea", "老客"]
    assert "520.5" in page.input_value("[name=attributes]")
    save_screenshot(page, "customer-attributes", full_page=True)

    page = ops("en", "dark", group="viewer")
    page.goto("/admin/scheduling/customer/?tag=tea")
    page.click("#result_list tbody th a")
    assert "city: 上海" in page.input_value("[name=attributes]:disabled")
    check_width(page)
