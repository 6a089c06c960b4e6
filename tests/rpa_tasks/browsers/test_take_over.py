"""Take-overs with a real browser, real Valkey and real web processes; the node is this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from operator import gt
from typing import Any

import pytest
import redis
from django.contrib.sessions.models import Session
from django.db import connection
from pytest_django import Settings
from websockets.exceptions import InvalidStatus

from rpa_tasks.browsers.launch import NoBrowser
from rpa_tasks.models import Lane, Shop, TakeOver
from rpa_tasks.takeover import host, leases
from tests.rpa_tasks.browsers.browser_elsewhere import Elsewhere
from tests.rpa_tasks.browsers.browser_processes import read_slot_states
from tests.rpa_tasks.browsers.operator_page import OperatorPage, Platform, create_operator
from tests.rpa_tasks.browsers.taking_over import Open, RunWithBrowser, control, open_take_over, start, wait_for_end
from tests.support.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)


def read_messages(spy: redis.client.PubSub) -> Iterator[bytes]:
    """What was published; a confirmation of the subscription comes as None."""
    for _ in range(10_000):
        if message := spy.get_message():
            yield message["data"]


@pytest.mark.usefixtures("host")
def test_operator_clicks_types_and_pastes_in_the_browser_of_an_idle_shop(
    shop: Shop, open_page: Open, platform: Platform, valkey: redis.Redis, read_log: Callable[[], str]
) -> None:
    with valkey.pubsub(ignore_subscribe_messages=True) as spy:
        spy.psubscribe("at:takeover:*")
        row, page = open_take_over(shop, open_page)
        control(page, platform)
        before = page.pictures
        page.click(page.size[0] / 2, page.size[1] / 4)
        page.wait(lambda: "/clicked" in platform.noted and page.pictures > before, "the click changes no picture")
        page.click(page.size[0] / 2, page.size[1] * 3 / 4)
        page.send("key", type="down", key="a", code="KeyA", number=65, modifiers=0)
        page.send("key", type="up", key="a", code="KeyA", number=65, modifiers=0)
        page.send("text", text="订单密码-hunter2")
        page.wait(lambda: "/typed/a订单密码-hunter2" in platform.noted, "nothing is typed")
        page.send("key", type="down", key="Backspace", code="Backspace", number=8, modifiers=0)
        page.wait(lambda: "/typed/a订单密码-hunter" in platform.noted, "no key is pressed")
        assert leases.request_end(row, leases.TakeOverEnd.ENDED)
        assert page.wait_for_close() == 4000
        passed = b"".join(read_messages(spy))
    assert wait_for_end(row) == "ended"
    assert read_slot_states() == {"pdd-s1": "idle"}
    lane = Lane.objects.get(shop=shop)
    assert (lane.held_until, lane.task_id, lane.home) == (None, None, "n1")
    ended = TakeOver.objects.get()
    assert (ended.username, ended.address, ended.node, ended.key) == ("ann", "203.0.113.7", "n1", None)
    assert len(passed) > 1_000
    assert b"hunter" not in passed + read_log().encode()


def open_page_with_dialog(shop: Shop, open_page: Open, platform: Platform) -> OperatorPage:
    _, page = open_take_over(shop, open_page)
    control(page, platform)
    page.send("go", url=f"{platform.url}asking")
    page.wait(lambda: [tab["title"] for tab in page.state["tabs"]] == ["验证"], "no page")
    page.click(page.size[0] / 2, page.size[1] / 4)
    page.wait(lambda: page.state["dialog"], "no dialog is shown")
    return page


@pytest.mark.usefixtures("host")
def test_operator_answers_dialogs_and_changes_tabs(shop: Shop, open_page: Open, platform: Platform) -> None:
    page = open_page_with_dialog(shop, open_page, platform)
    first = page.state["shown"]
    assert (page.state["dialog"]["kind"], page.state["dialog"]["message"]) == ("prompt", "验证码?")
    shown = page.state["dialog"]["id"]
    page.send("dialog", id=shown ^ 1 or 2, accept=True, text="to the dialog before")
    page.send("dialog", id=shown, accept=True, text="8231")
    page.wait(lambda: "/answered/8231" in platform.noted and not page.state["dialog"], "no answer arrives")
    page.click(page.size[0] / 2, page.size[1] * 3 / 4)
    page.wait(lambda: len(page.state["tabs"]) == 2 and page.state["shown"] != first, "the new tab is not shown")
    second = page.state["shown"]
    page.send("tab", id=first)
    page.wait(lambda: page.state["shown"] == first, "the first tab is not shown again")
    page.send("close_tab", id=second)
    page.wait(lambda: [tab["id"] for tab in page.state["tabs"]] == [first], "the tab is not closed")
    page.send("move", step=-1)
    page.wait(lambda: [tab["title"] for tab in page.state["tabs"]] == ["店铺后台"], "it does not go back")


@pytest.mark.usefixtures("host")
def test_dialog_is_answered_after_a_look_at_another_tab(shop: Shop, open_page: Open, platform: Platform) -> None:
    """DevTools forgets an open dialog when the tab is left, and the page would hang in it."""
    page = open_page_with_dialog(shop, open_page, platform)
    first = page.state["shown"]
    page.send("new_tab")
    page.wait(lambda: len(page.state["tabs"]) == 2, "there is no other tab")
    (second,) = {tab["id"] for tab in page.state["tabs"]} - {first}
    page.send("tab", id=second)
    page.send("tab", id=first)
    page.send("dialog", id=page.state["dialog"]["id"], accept=True, text="8231")
    page.wait(lambda: "/answered/8231" in platform.noted, "no answer arrives")
    page.send("tab", id=second)
    page.wait(lambda: page.state["shown"] == second, "the other tab is not shown")


@pytest.mark.usefixtures("host")
def test_second_operator_watches_on_another_web_process_and_cannot_act(
    shop: Shop, open_page: Open, platform: Platform
) -> None:
    ann, cookie = create_operator("ann")
    _, other = create_operator("ben")
    row = start(shop, ann)
    page, watcher = open_page(row, cookie), open_page(row, other, 1)
    control(page, platform)
    watcher.wait(lambda: watcher.pictures and watcher.state, "it sees nothing")
    assert not watcher.controls
    watcher.click(100, 100)
    watcher.send("hello")
    page.click(page.size[0] / 2, page.size[1] * 3 / 4)
    page.send("text", text="mine")
    page.wait(lambda: "/typed/mine" in platform.noted, "nothing is typed")
    assert "/clicked" not in platform.noted

    # A second window of the same operator takes control, and the first one loses it.
    window = open_page(row, cookie, 1)
    window.wait(lambda: window.controls, "the new window does not control")
    page.click(page.size[0] / 2, page.size[1] / 4)
    window.send("text", text="+yours")
    window.wait(lambda: "/typed/mine+yours" in platform.noted, "nothing is typed")
    assert "/clicked" not in platform.noted


@pytest.mark.usefixtures("host")
def test_page_without_permission_origin_or_login_is_refused(shop: Shop, open_page: Open) -> None:
    ann, cookie = create_operator("ann")
    ben, other = create_operator("ben")
    _, viewer = create_operator("viewer", "view_shop", "run_job")
    row = start(shop, ann)
    for words, options in ((viewer, {}), ("sessionid=x", {}), (cookie, {"origin": "http://evil.example"})):
        with pytest.raises(InvalidStatus):
            open_page(row, words, **options)
    page, watcher = open_page(row, cookie), open_page(row, other)
    for each in (page, watcher):
        each.wait(lambda each=each: each.connection, "it is not welcome")
    ben.user_permissions.clear()
    assert watcher.wait_for_close() == 4403
    Session.objects.all().delete()  # a logout
    assert page.wait_for_close() == 4403


@pytest.mark.usefixtures("host")
def test_operator_without_input_or_connection_loses_the_browser(
    shop: Shop, open_page: Open, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, page = open_take_over(shop, open_page)
    page.wait(lambda: page.controls, "it does not control")
    usual, settings.AFTERTOUCH_RPA_TAKEOVER_IDLE = settings.AFTERTOUCH_RPA_TAKEOVER_IDLE, timedelta(seconds=1)
    assert page.wait_for_close() == 4000
    assert wait_for_end(row) == "idle"
    settings.AFTERTOUCH_RPA_TAKEOVER_IDLE = usual

    ben, cookie = create_operator("ben")
    row = start(shop, ben)
    page = open_page(row, cookie)
    page.wait(lambda: page.controls, "it does not control")
    monkeypatch.setattr(host, "CONNECTED_WITHIN", 1.0)
    page.socket.close()
    assert wait_for_end(row) == "disconnected"
    assert read_slot_states() == {"pdd-s1": "idle"}


@pytest.mark.usefixtures("host")
def test_take_over_shares_the_browser_of_a_run_and_ends_with_it(
    shop: Shop, open_page: Open, platform: Platform, run: RunWithBrowser
) -> None:
    ann, cookie = create_operator("ann")
    row = start(shop, ann)
    assert row.task_id == run.pick.claim.task_id
    page = open_page(row, cookie)
    control(page, platform)
    assert len(read_slot_states()) == 1
    run.browser.release()
    assert wait_for_end(row) == "run_ended"
    assert Lane.objects.get(shop=shop).task_id == run.pick.claim.task_id, "the run keeps its lane"


@pytest.mark.usefixtures("host")
def test_operator_controls_browser_elsewhere_and_leaves_it_running(
    shop: Shop, open_page: Open, platform: Platform, elsewhere: Elsewhere
) -> None:
    Shop.objects.filter(pk=shop.pk).update(browser={"cdp_url": elsewhere.launch.cdp_url})
    row, page = open_take_over(shop, open_page)
    control(page, platform)
    assert platform.url in elsewhere.list_pages()
    page.click(page.size[0] / 2, page.size[1] / 4)
    page.wait(lambda: "/clicked" in platform.noted, "the click does not arrive")
    page.send("go", url=f"{platform.url}files")
    page.wait(lambda: any(tab["title"] == "商品" for tab in page.state["tabs"]), "no page")
    page.click(page.size[0] / 2, page.size[1] / 4)
    page.click(page.size[0] / 2, page.size[1] * 3 / 4)
    page.wait(lambda: "/report.csv" in platform.noted, "the click does not arrive")
    assert (page.state["files"]["chooser"], page.state["files"]["downloads"]) == (None, []), "no files are exchanged"
    leases.request_end(row, leases.TakeOverEnd.ENDED)
    assert wait_for_end(row) == "ended"
    assert elsewhere.list_pages() == ["about:blank"]
    assert elsewhere.process.poll() is None


@pytest.mark.usefixtures("host")
def test_lease_is_renewed_while_the_browser_starts(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy pool, the start of a browser and the proof of its proxy may together take longer than the lease."""

    def find_lease() -> Any:
        try:
            return TakeOver.objects.get().lease_until, Lane.objects.get().held_until
        finally:
            connection.close()  # of the thread

    def start_slowly(*_: Any, **__: Any) -> None:
        first = find_lease()
        eventually(lambda: all(map(gt, find_lease(), first)), "the lease is not renewed")
        raise NoBrowser("browser_wait", "Every slot was busy.")

    monkeypatch.setattr(host, "RENEW_INTERVAL", 0.05)
    monkeypatch.setattr(host, "acquire_browser", start_slowly)
    user, _ = create_operator("ann")
    assert wait_for_end(start(shop, user)) == "no_browser"
