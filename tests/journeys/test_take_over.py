"""An operator logs a shop in from the back office: the page drives the shop's real browser on the node."""

import hashlib
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from django.urls import reverse
from django.utils.timezone import now

from config.local.processes import wait_until
from rpa_tasks.browsers import upkeep
from rpa_tasks.models import ExecutionNode, LoginState, Platform, Shop, TakeOver
from rpa_tasks.takeover import host as take_over_host
from rpa_tasks.takeover.host import TakeOverHost
from tests.journeys.conftest import check_width
from tests.rpa_tasks.browsers import operator_page
from tests.rpa_tasks.browsers.browser_processes import extend_time_limits, list_pool_processes
from tests.sessions.websocket.web_processes import web
from tests.support.screenshots import save_screenshot
from tests.support.thread_servers import serving_in_thread
from tests.support.waiting import WAIT_LIMIT

if TYPE_CHECKING:
    pass


PASTE = """() => {
    const data = new DataTransfer();
    data.setData("text/plain", "-8个字");
    const event = new ClipboardEvent("paste", { clipboardData: data, cancelable: true });
    document.getElementById("take-over-keys").dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def site_url(django_db_setup, django_db_blocker):
    """A real web process: Django's own test server has no WebSockets."""
    with django_db_blocker.unblock(), web() as address:
        yield f"http://{address}"


@pytest.fixture
def node(settings, monkeypatch, valkey):
    """This process hosts the take-overs of the node `exec-1`."""
    folder = Path(tempfile.mkdtemp(prefix="pool-"))
    settings.AFTERTOUCH_STATE_DIR, settings.AFTERTOUCH_NODE = folder, "exec-1"
    extend_time_limits(monkeypatch)
    monkeypatch.setattr(take_over_host, "CONNECTED_WITHIN", WAIT_LIMIT)
    ExecutionNode.objects.create(name="exec-1", seen_at=now() + timedelta(hours=1), started_at=now(), slots=3)
    host = TakeOverHost()
    host.start()
    yield
    host.stop()
    assert wait_until(lambda: upkeep.end_unused() == 0, WAIT_LIMIT)
    assert wait_until(lambda: not list_pool_processes(folder), WAIT_LIMIT)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shop(transactional_db):
    platform = Platform.objects.create(key="pdd", name="拼多多")
    return Shop.objects.create(platform=platform, shop_id="s1", name="旗舰店", login_state=LoginState.NEEDED)


@pytest.fixture
def site():
    site = operator_page.Platform()
    with serving_in_thread(site):
        yield site


def click_page(page, x, y):
    """Click at a place of the shop's page, in parts of its size."""
    box = page.locator("#take-over-page").bounding_box()
    page.mouse.click(box["x"] + box["width"] * x, box["y"] + box["height"] * y)


def end_before_answer(page, socket):
    """Continue the jobs; the take-over's socket closes before the page gets the answer of its form."""
    held = []
    page.route(page.url, lambda route: held.append((route, route.fetch(max_redirects=0))))
    page.click("form button:has-text('已登录，继续任务')", no_wait_after=True)
    if not socket.is_closed():
        socket.wait_for_event("close")
    route, answer = held[0]
    route.fulfill(response=answer)


@pytest.mark.usefixtures("node")
def test_operator_logs_a_shop_in_from_the_back_office(ops, shop, site):
    page = ops(group="operator")
    page.goto(reverse("admin:rpa_tasks_shop_changelist"))
    page.click("#result_list tr:has-text('旗舰店') >> text=接管")
    page.wait_for_selector("text=店铺需要登录")
    save_screenshot(page, "take-over-start")
    with page.expect_websocket() as connecting:
        page.click("form button:has-text('接管')")
    page.wait_for_selector("#take-over-status:text-is('你正在操作这个浏览器')")
    page.fill("#take-over-url", site.url)
    page.press("#take-over-url", "Enter")
    page.wait_for_selector("#take-over-tabs button:has-text('店铺后台')")
    pixel = "[...document.getElementById('take-over-page').getContext('2d').getImageData(60, 60, 1, 1).data]"
    page.wait_for_function(f"{pixel}[0] > 200 && {pixel}[0] < 248")  # the button; a blank page may never be shown

    click_page(page, 0.5, 0.25)
    assert wait_until(lambda: "/clicked" in site.noted, WAIT_LIMIT)
    # The canvas shows the button in its new colour.
    page.wait_for_function(f"{pixel}[0] < 60 && {pixel}[1] > 90")
    click_page(page, 0.5, 0.75)
    page.keyboard.type("ann")
    page.keyboard.insert_text("旗舰店")  # as an input method does
    assert wait_until(lambda: "/typed/ann旗舰店" in site.noted, WAIT_LIMIT)
    page.evaluate(PASTE)
    assert wait_until(lambda: "/typed/ann旗舰店-8个字" in site.noted, WAIT_LIMIT)
    save_screenshot(page, "take-over")

    page.fill("#take-over-url", f"{site.url}files")
    page.press("#take-over-url", "Enter")
    page.wait_for_selector("#take-over-tabs button:has-text('商品')")
    click_page(page, 0.5, 0.25)
    content = b"0123456789" * 20_000  # several parts
    page.wait_for_selector("#take-over-chooser input")  # `set_input_files` does not wait until it is shown
    page.set_input_files("#take-over-chooser input", {"name": "主图.png", "mimeType": "image/png", "buffer": content})
    uploaded = f"/uploaded/主图.png/{len(content)}/{hashlib.sha256(content).hexdigest()}"
    assert wait_until(lambda: uploaded in site.noted, WAIT_LIMIT)
    page.wait_for_selector("#take-over-chooser", state="hidden")  # the browser moves where that was
    click_page(page, 0.5, 0.75)
    page.wait_for_selector("#take-over-downloads li:has-text('订单.csv') >> text=保存")
    save_screenshot(page, "take-over-files")
    with page.expect_download() as saving:
        page.click("#take-over-downloads >> text=保存")
    assert saving.value.suggested_filename == "订单.csv"
    assert saving.value.path().read_text("utf-8") == operator_page.REPORT
    page.wait_for_selector("#take-over-downloads", state="hidden")

    watcher = ops("en", "dark")
    watcher.goto(page.url)
    watcher.wait_for_selector("#take-over-status:text-is('operator controls, you watch')")
    watcher.wait_for_function("document.getElementById('take-over-page').dataset.pictures >= 1")
    save_screenshot(watcher, "take-over-dark-en")

    end_before_answer(page, connecting.value)
    page.wait_for_url(f"**{reverse('admin:rpa_tasks_shop_change', args=[shop.pk])}")
    assert wait_until(lambda: TakeOver.objects.filter(end="continued").exists(), WAIT_LIMIT)
    watcher.wait_for_selector(".at-table td:has-text('Logged in, the jobs continue')")
    row, shop = TakeOver.objects.get(), Shop.objects.get()
    assert (row.username, row.address, shop.login_state) == ("operator", "127.0.0.1", LoginState.OK)
    narrow = ops(width=390)
    narrow.goto(page.url.replace("change", "take-over"))
    check_width(narrow)
    narrow.goto(reverse("admin:rpa_tasks_takeover_changelist"))
    narrow.wait_for_selector("#result_list td:has-text('operator')")
