"""Orders are stored once, by whoever has the right to: a real browser reads them, and they go to a real database."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from rpa_tasks.models import DemoOrder, DemoWatermark

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

Stored = Callable[[], dict[str, Any]]


@pytest.fixture
def sync(flows: Any, site: Any, port: int, stored: Stored) -> Callable[..., Any]:
    """Begin a run."""

    def sync(lease_no: int = 1, *, login: bool = True, shop_id: str = "s1") -> Any:
        payload = {"site": site.url, "login": login}
        return flows.begin("demo_sync_order", payload, debug_port=port, lease_no=lease_no, shop_id=shop_id)

    return sync


def ended(run: Any) -> Any:
    run.end()
    assert run.process.returncode == 0, run.errors
    return run.result


def writes() -> set[int]:
    return set(DemoOrder.objects.values_list("writes", flat=True))


def test_the_first_run_reads_everything_and_the_next_what_changed(
    sync: Callable[..., Any], site: Any, stored: Stored
) -> None:
    assert ended(sync(1)) == {"read": 45, "written": 45, "position": 1045}
    order = stored()["s1-10002"]
    assert (order.version, order.status, order.buyer, str(order.amount)) == (1, "to ship", "陈宇航", "37.20")
    assert site.effects()["order_pages"] == 3 + 1  # the login shows one, too

    assert ended(sync(2)) == {"read": 0, "written": 0, "position": 1045}
    site.ask("/admin/ship?shop=s1&order=s1-10002,s1-10003", post=True)
    assert ended(sync(3)) == {"read": 2, "written": 2, "position": 1047}
    assert site.effects()["order_pages"] == 3 + 1 + 1 + 1  # no further than to what was known

    orders = stored()
    assert {number: order.writes for number, order in orders.items() if order.writes != 1} == {
        "s1-10002": 2, "s1-10003": 2,
    }  # fmt: skip
    assert (orders["s1-10002"].version, orders["s1-10002"].status) == (2, "shipped")
    mark = DemoWatermark.objects.get()
    assert (mark.shop_id, mark.position, mark.lease_no) == ("s1", 1047, 3)


def test_a_late_run_is_refused_by_its_lease_number(sync: Callable[..., Any], stored: Stored) -> None:
    ended(sync(5))
    late = sync(4)
    assert late.end() == 65
    assert "stale lease" in late.errors
    assert DemoWatermark.objects.get().lease_no == 5
    assert ended(sync(5))["written"] == 0  # the same run once more is no stranger


@pytest.mark.faults
def test_what_a_stopped_run_read_is_refused_when_it_wakes(sync: Callable[..., Any], site: Any, stored: Stored) -> None:
    site.hold("GET", "/orders", page="3")
    early = sync(1)
    site.reach()
    early.signal(signal.SIGSTOP)
    site.release()
    site.ask("/admin/ship?shop=s1", post=True)
    assert ended(sync(2))["written"] == 45

    early.signal(signal.SIGCONT)
    assert early.end() == 65
    assert "stale lease" in early.errors
    assert writes() == {1}
    assert {order.status for order in stored().values()} == {"to pay", "shipped", "delivered"}
    assert DemoWatermark.objects.get().lease_no == 2


def test_a_double_click_stores_each_order_once(sync: Callable[..., Any], stored: Stored) -> None:
    runs = [sync(number) for number in (1, 2, 2)]
    codes = [run.end() for run in runs]
    assert codes[1:] == [0, 0], [run.errors for run in runs]
    assert codes[0] in (0, 65), runs[0].errors
    assert len(stored()) == 45
    assert writes() == {1}
    assert sum(run.result["written"] for run in runs if run.result) == 45


@pytest.mark.faults
def test_a_killed_run_leaves_nothing_half_done(sync: Callable[..., Any], site: Any, stored: Stored) -> None:
    site.hold("GET", "/orders", page="3")
    run = sync(1)
    site.reach()
    run.signal(signal.SIGKILL)
    run.end()
    site.release()
    assert stored() == {}
    assert DemoWatermark.objects.get().position == 0
    assert ended(sync(2)) == {"read": 45, "written": 45, "position": 1045}
    assert writes() == {1}


def test_an_order_that_moves_while_pages_are_turned_is_read_next_time(
    sync: Callable[..., Any], site: Any, stored: Stored
) -> None:
    site.hold("GET", "/orders", page="3")
    run = sync(1)
    site.reach()
    site.ask("/admin/ship?shop=s1&order=s1-10002,s1-10003", post=True)  # from the last page to the first
    site.release()
    # What they pushed from the second page to the third is seen twice, and they themselves not at all.
    assert ended(run) == {"read": 43, "written": 43, "position": 1045}
    assert ended(sync(2)) == {"read": 2, "written": 2, "position": 1047}
    assert len(stored()) == 45
    assert {order.order_no for order in stored().values() if order.version == 2} == {"s1-10002", "s1-10003"}


def test_without_a_login_the_shop_waits_for_a_person(sync: Callable[..., Any], site: Any, stored: Stored) -> None:
    stranger = sync(1, login=False)
    assert stranger.end() == 77
    assert "SessionExpired: s1 is not logged in" in stranger.errors
    ended(sync(2))
    assert ended(sync(3, login=False))["read"] == 0  # the browser is still logged in
    site.ask("/switch?expire_sessions=1")
    assert sync(4, login=False).end() == 77


def test_another_shops_login_is_not_used(sync: Callable[..., Any], site: Any, stored: Stored) -> None:
    ended(sync(1, shop_id="s2"))
    assert sync(1, login=False).end() == 77
    assert ended(sync(2))["written"] == 45
    assert {(order.shop_id, order.order_no[:2]) for order in DemoOrder.objects.all()} == {("s1", "s1"), ("s2", "s2")}


def test_a_captcha_is_the_platforms_matter(sync: Callable[..., Any], site: Any, stored: Stored) -> None:
    site.ask("/switch?captcha=1")
    run = sync(1)
    assert run.end() == 75
    assert "PlatformError" in run.errors
    assert stored() == {}


def test_a_site_that_is_away_may_come_back(flows: Any, port: int, stored: Stored) -> None:
    run = flows.run("demo_sync_order", {"site": "http://127.0.0.1:1", "login": True}, debug_port=port)
    assert run.process.returncode == 70
    assert "ERR_" in run.errors


@pytest.mark.parametrize("payload", [{}, {"site": 7}, {"site": ""}, {"site": "file:///etc/passwd"}])
def test_a_payload_that_does_not_fit_needs_a_person(flows: Any, port: int, stored: Stored, payload: Any) -> None:
    run = flows.run("demo_sync_order", payload, debug_port=port)
    assert run.process.returncode == 65
    assert "payload: site" in run.errors


def test_a_database_that_is_away_may_come_back_and_a_missing_one_is_named(
    flows: Any, site: Any, port: int, stored: Stored
) -> None:
    flows.environment["DATABASE_URL"] = "postgresql://nobody:hunter2@127.0.0.1:1/nowhere"
    away = flows.run("demo_sync_order", {"site": site.url, "login": True}, debug_port=port)
    assert away.process.returncode == 70
    assert "hunter2" not in away.errors
    del flows.environment["DATABASE_URL"]
    missing = flows.run("demo_sync_order", {"site": site.url, "login": True}, debug_port=port)
    assert missing.process.returncode == 65
    assert "DATABASE_URL" in missing.errors
