"""An editor chooses whom a node speaks to, what it sends and when, in a real browser."""

from datetime import time, timedelta

import pytest
from django.utils.timezone import localtime

from tests.journeys.conftest import check_width
from tests.support.chromium import open_sections
from tests.support.screenshots import save_screenshot

FIRST_BIG_ORDER = {
    "all": [
        {"field": "event.data.total", "op": "gte", "value": 500},
        {"any": [
            {"field": "customer.level", "op": "in", "value": ["vip", "gold"]},
            {"field": "customer.events.order.paid.count", "op": "eq", "value": 0},
        ]},
    ]
}  # fmt: skip


def fill_row(page, name, field, op, value, group=""):
    page.fill(f"[name={name}-field]", field)
    page.select_option(f"[name={name}-op]", op)
    page.fill(f"[name={name}-value]", value)
    page.select_option(f"[name={name}-group]", group)


@pytest.fixture
def thanks(matrix, record_event):
    """A node for paid orders, and an order of last week that shows the fields of the data."""
    from scheduling.models import Calendar, Customer

    Calendar.objects.create(pk=1, key="china")
    Customer.objects.create(user_id="ann", name="王小安", level="vip")
    matrix.template("gold", body="贵宾{{ user.name }}，订单 {{ event.data.order_no }} 由专属顾问跟进。")
    record_event("order.paid", "bob", data={"total": 20, "order_no": "A0"})
    return matrix.node("thanks", "order.paid", delay=timedelta(minutes=15))


def test_editor_sets_conditions_variants_and_times(ops, thanks, record_event):
    address = f"/admin/scheduling/node/{thanks.pk}/change/"
    preview = "/admin/scheduling/event/preview/"
    page = ops(group="editor")
    page.goto(address)
    open_sections(page)

    # A misspelt field is refused, with the nearest name.
    fill_row(page, "when-0", "event.data.totl", "gte", "500")
    page.click("[name=_save]")
    page.wait_for_selector(".field-when .errorlist :text('event.data.total')")
    save_screenshot(page, "condition-unknown-field", full_page=True)
    open_sections(page)
    fill_row(page, "when-0", "event.data.total", "gte", "500")
    fill_row(page, "when-1", "customer.level", "in", "vip, gold", "A")
    fill_row(page, "when-2", "customer.events.order.paid.count", "eq", "0", "A")
    page.click("details.at-variant summary")
    page.fill("[name=variants-0-key]", "vips")
    page.select_option("[name=variants-0-template]", "gold")
    fill_row(page, "variants-0-0", "customer.level", "eq", "vip")
    page.fill("[name=at]", "10:00")
    page.select_option("[name=at_day]", "next_working")
    page.fill("[name=send_window]", "工作日 09:00-18")
    page.click("[name=_save]")
    page.wait_for_selector(".field-send_window .errorlist")
    page.fill("[name=send_window]", "工作日 09:00-18:00")
    save_screenshot(page, "when-and-times", full_page=True)
    page.click("[name=_save]")
    page.wait_for_selector(".at-matrix")
    thanks.refresh_from_db()
    assert thanks.when == FIRST_BIG_ORDER
    assert [each["template"] for each in thanks.variants] == ["gold"]
    assert (thanks.at, thanks.at_day) == (time(10), "next_working")
    assert thanks.send_window == [{"days": ["working"], "from": "09:00", "to": "18:00"}]

    # The preview explains the choice, the instant and a refusal.
    for data, words in (
        ('{"total": 600, "order_no": "A1"}', ("贵宾王小安", "A1", "下一个工作日")),
        ('{"total": 20, "order_no": "A2"}', ("data.total", "500")),
    ):
        page.goto(f"{preview}?type=order.paid&user_id=ann")
        page.fill("[name=event_data]", data)
        page.click("text=开始预演")
        page.wait_for_selector(f".at-outcome:has-text('{words[0]}')")
        page.wait_for_load_state("domcontentloaded")
        said = page.inner_text(".at-outcome")
        assert [word in said for word in words] == [True] * len(words)
        save_screenshot(page, f"preview-of-{'variant' if '600' in data else 'condition'}")
    assert len(record_event("order.paid", "ann", data={"total": 600, "order_no": "A1"}).task_ids) == 1
    assert record_event("order.paid", "ann", data={"total": 20, "order_no": "A2"}).task_ids == ()

    # In English, for a viewer: the same fields, and none takes a word.
    page = ops("en", "dark", group="viewer")
    page.goto(address)
    open_sections(page)
    fields = page.locator("[name=when-0-field], [name=when-0-value], [name=variants-0-key], [name=variants-0-0-value]")
    assert [each.input_value() for each in fields.all()] == ["vips", "vip", "event.data.total", "500"]
    assert all(each.is_disabled() for each in fields.all())
    save_screenshot(page, "when-dark-en", full_page=True)
    check_width(page)


def test_editor_adds_own_day_and_default_windows_to_the_calendar(ops, thanks):
    from scheduling.models import Calendar

    page = ops(group="editor")
    page.goto("/admin/scheduling/calendar/1/change/")
    page.fill("[name=closed]", "2026-12-25 也许")
    page.click("[name=_save]")
    page.wait_for_selector(".field-closed .errorlist :text('2026-12-25 也许')")
    page.fill("[name=closed]", "2026-12-25")
    weekday = (localtime() + timedelta(days=3)).weekday()  # the window is closed now, whenever the test runs
    page.fill("[name=send_window]", f"周{'一二三四五六日'[weekday]} 09:00-21:00")
    page.click("[name=_save]")
    page.wait_for_selector(":text('成功')")
    row = Calendar.objects.get()
    day = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")[weekday]
    assert (row.closed, row.send_window) == (["2026-12-25"], [{"days": [day], "from": "09:00", "to": "21:00"}])
    save_screenshot(page, "calendar")
    page.goto("/admin/scheduling/event/preview/?type=order.paid&user_id=ann")
    page.wait_for_selector(".at-outcome:has-text('09:00')")
