"""An editor works in the matrix, in a real browser: a new node, a copy, another stage, off and on."""

from datetime import timedelta

import pytest
from django.utils.timezone import now

from scheduling.monitoring.statistics import HourlyCache
from tests.journeys.conftest import check_width
from tests.support.screenshots import save_screenshot


@pytest.fixture
def busy_matrix(matrix, record_event):
    """Three named nodes in two stages, with ended touches of yesterday and one that waits."""
    from scheduling.models import Customer, EventType, Stage, TemplateText, Touch

    HourlyCache.clear_all()
    matrix.stage.name = "售前"
    matrix.stage.save()
    matrix.channel.name = "仅记日志"
    matrix.channel.save()
    for key, name in (("material.downloaded", "资料下载"), ("order.paid", "订单支付")):
        EventType.objects.create(key=key, name=name)
    Customer.objects.create(user_id="ann", name="王小安", level="vip")
    guide = matrix.template("guide", body="您好 {{ user.name }}，这是使用指南，订单 {{ event.data.order_no }}。")
    TemplateText.objects.filter(template=guide).update(subject="资料使用指南")
    matrix.node("presale-download", name="资料下载后发使用指南", template=guide, delay=timedelta(minutes=15))
    matrix.stage = Stage.objects.create(key="insale", name="售中", position=1)
    matrix.node("insale-paid", "order.paid", name="支付后发收货教程", delay=timedelta(hours=2), priority=0)
    matrix.node("insale-first", "order.paid", name="首单欢迎", delay=timedelta(days=1), enabled=False)
    at = now() - timedelta(days=1)
    for number in range(12):
        (task_id,) = record_event("order.paid", f"user{number}").task_ids
        state = ("delivered", "delivered", "suppressed", "delivered", "failed")[number % 5]
        Touch.objects.filter(pk=task_id).update(
            state=state, settled_at=at, sending_at=at, due_at=at, queued_at=at, lease_until=None
        )
    record_event("material.downloaded", "ann", data={"order_no": "A1"})
    return matrix


def test_editor_adds_copies_moves_and_switches_nodes(ops, busy_matrix):
    from scheduling.models import Node

    page = ops(group="editor")
    page.goto("/admin/scheduling/node/matrix/")
    check_width(page)

    # A new node gets its key from stage and trigger, and the page returns to its card.
    page.click("tr:has(th:has-text('售中')) td[data-trigger='订单支付'] .at-add")
    page.fill("[name=name]", "付款提醒")
    page.fill("[name=delay]", "1h")
    page.select_option("[name=template]", label="guide")
    page.select_option("[name=channel]", label="仅记日志")
    save_screenshot(page, "node-add", full_page=True)
    page.click("[name=_save]")
    page.wait_for_selector(".at-node:target:has-text('付款提醒')")
    made = Node.objects.get(key="insale-order-paid")

    # Its page shows what a real customer would get.
    page.click(f"#node-{made.pk} .at-node-title")
    page.fill("#preview-user", "ann")
    page.click("#node-preview button")
    page.wait_for_selector("#node-preview .at-outcome")
    page.go_back()

    # A copy is switched off; the keyboard moves it to another stage.
    page.click(f"#node-{made.pk} summary")
    page.click(f"#node-{made.pk} :text-is('复制')")
    page.wait_for_selector(".at-node.off:target:has-text('付款提醒（副本）')")
    copy = Node.objects.get(key="insale-order-paid-2")
    page.focus(f"#node-{copy.pk} summary")
    page.keyboard.press("Enter")
    page.focus(f"#move-{copy.pk}")
    page.select_option(f"#move-{copy.pk}", label="售前")
    page.focus(f"#node-{copy.pk} form:has(select) button")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"tr:has(th:has-text('售前')) #node-{copy.pk}")

    # The mouse drags it back, and switches it on.
    page.wait_for_load_state()  # a card can be dragged from then on
    page.drag_and_drop(f"#node-{copy.pk} .at-headline", "tr:has(th:has-text('售中')) .at-vacant .at-add")
    page.wait_for_selector(f"tr:has(th:has-text('售中')) #node-{copy.pk}")
    page.click(f"#node-{copy.pk} [role=switch]")
    page.wait_for_selector(f"#node-{copy.pk} [aria-checked=true]")
    copy.refresh_from_db()
    assert (copy.stage.key, copy.enabled, copy.version) == ("insale", True, 4)

    # A touch waits: the page asks first.
    node = Node.objects.get(key="presale-download")
    page.click(f"#node-{node.pk} [role=switch]")
    page.wait_for_selector("text=到期时会被拦截")
    save_screenshot(page, "node-switch-off")
    page.fill("[name=change_reason]", "内容过时")
    page.click("form button:has-text('关闭')")
    page.wait_for_selector(f"#node-{node.pk}.off")


def test_card_stays_at_its_place_on_the_screen(ops, matrix):
    """The browser scrolls the card that an address names to the top edge, and the grid to its side."""
    nodes = [matrix.node(f"node-{number}", f"trigger.{number % 9}") for number in range(36)]
    card, page = f"#node-{nodes[24].pk}", ops(group="editor")
    page.set_viewport_size({"width": 1200, "height": 700})
    page.goto("/admin/scheduling/node/matrix/")
    page.evaluate("document.querySelector('.at-matrix-scroll').scrollLeft = 300; window.scrollTo(0, 200)")
    box = page.locator(card).bounding_box()
    assert box is not None

    def await_place():
        words = "([card, box]) => (({x, y}) => x === box.x && y === box.y)"
        page.wait_for_function(f"{words}(document.querySelector(card).getBoundingClientRect())", arg=[card, box])

    page.click(f"{card} [role=switch]")
    page.wait_for_selector(f"{card}:target [aria-checked=false]")
    await_place()
    page.click(f"{card} .at-node-title")
    page.fill("[name=name]", "付款提醒")
    page.click("[name=_save]")
    page.wait_for_selector(f"{card}:target:has-text('付款提醒')")
    await_place()


def test_second_click_while_the_server_is_slow_copies_nothing(ops, matrix):
    from scheduling.models import Node

    matrix.node("guide")
    page = ops("en")
    page.clock.set_fixed_time(now())
    held = []
    page.goto("/admin/scheduling/node/matrix/")
    page.route("**/copy/", lambda route: held.append(route))
    page.click(".at-card-menu summary")
    box = page.locator(".at-card-menu button:has-text('Copy')").bounding_box()
    assert box is not None
    place = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)  # a click by selector waits for the answer
    with page.expect_request("**/copy/"):
        page.mouse.click(*place)
    page.mouse.click(*place)
    held[0].continue_()
    page.wait_for_selector("text=It is switched off.")
    assert Node.objects.count() == 2
    assert len(held) == 1


def test_preview_without_login_shows_no_earlier_text(ops, matrix):
    page, template = ops("en"), matrix.template("guide", body="Good morning")
    page.goto(f"/admin/scheduling/template/{template.pk}/change/")
    page.wait_for_selector("#template-preview .at-bubble:has-text('Good morning')")
    page.context.clear_cookies(name="sessionid")
    page.fill("textarea[name$='-0-body']", "Good evening")
    page.wait_for_selector("#template-preview >> text=The preview cannot be loaded.")
    assert page.locator("#template-preview .at-bubble").count() == 0
