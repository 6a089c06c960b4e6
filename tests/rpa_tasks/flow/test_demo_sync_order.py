"""Orders are read by a real browser and stored once in a real database, with the right to do so."""

import signal

import pytest

from rpa_tasks.models import DemoOrder, DemoWatermark

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def start_sync(flows, site, port, read_stored_orders):
    """Start a run."""

    def start_sync(lease_no=1, *, login=True, shop_id="s1"):
        payload = {"site": site.url, "login": login}
        return flows.begin("demo_sync_order", payload, debug_port=port, lease_no=lease_no, shop_id=shop_id)

    return start_sync


def end_run(run):
    run.end()
    assert run.process.returncode == 0, run.errors
    return run.result


def writes():
    return set(DemoOrder.objects.values_list("writes", flat=True))


def test_sync_order_reads_all_then_changes(start_sync, site, read_stored_orders):
    assert end_run(start_sync(1)) == {"read": 45, "written": 45, "position": 1045}
    order = read_stored_orders()["s1-10002"]
    assert (order.version, order.status, order.buyer, str(order.amount)) == (1, "to ship", "陈宇航", "37.20")
    assert site.effects()["order_pages"] == 3 + 1  # the login shows one, too

    assert end_run(start_sync(1)) == {"read": 0, "written": 0, "position": 1045}  # its lease is not stale
    site.ask("/admin/ship?shop=s1&order=s1-10002,s1-10003", post=True)
    assert end_run(start_sync(3)) == {"read": 2, "written": 2, "position": 1047}
    assert site.effects()["order_pages"] == 3 + 1 + 1 + 1  # no further than to what was known

    orders = read_stored_orders()
    assert {number: order.writes for number, order in orders.items() if order.writes != 1} == {
        "s1-10002": 2, "s1-10003": 2,
    }  # fmt: skip
    assert (orders["s1-10002"].version, orders["s1-10002"].status) == (2, "shipped")
    mark = DemoWatermark.objects.get()
    assert (mark.shop_id, mark.position, mark.lease_no) == ("s1", 1047, 3)


def test_sync_order_resumed_after_newer_run_is_refused(start_sync, site, read_stored_orders):
    site.hold("GET", "/orders", page="3")
    early = start_sync(1)
    site.reach()
    early.signal(signal.SIGSTOP)
    site.release()
    site.ask("/admin/ship?shop=s1", post=True)
    assert end_run(start_sync(2))["written"] == 45

    early.signal(signal.SIGCONT)
    assert early.end() == 65
    assert "stale lease" in early.errors
    assert writes() == {1}
    assert {order.status for order in read_stored_orders().values()} == {"to pay", "shipped", "delivered"}
    assert DemoWatermark.objects.get().lease_no == 2


def test_concurrent_sync_orders_store_each_order_once(start_sync, read_stored_orders):
    runs = [start_sync(number) for number in (1, 2, 2)]
    codes = [run.end() for run in runs]
    assert codes[1:] == [0, 0], [run.errors for run in runs]
    assert codes[0] in (0, 65), runs[0].errors
    assert len(read_stored_orders()) == 45
    assert writes() == {1}
    assert sum(run.result["written"] for run in runs if run.result) == 45


def test_killed_sync_order_stores_nothing(start_sync, site, read_stored_orders):
    site.hold("GET", "/orders", page="3")
    run = start_sync(1)
    site.reach()
    run.signal(signal.SIGKILL)
    run.end()
    site.release()
    assert read_stored_orders() == {}
    assert DemoWatermark.objects.get().position == 0
    assert end_run(start_sync(2)) == {"read": 45, "written": 45, "position": 1045}
    assert writes() == {1}


def test_order_moved_during_sync_is_read_next_time(start_sync, site, read_stored_orders):
    site.hold("GET", "/orders", page="3")
    run = start_sync(1)
    site.reach()
    site.ask("/admin/ship?shop=s1&order=s1-10002,s1-10003", post=True)  # from the last page to the first
    site.release()
    # What they pushed from the second page to the third is seen twice, and they themselves not at all.
    assert end_run(run) == {"read": 43, "written": 43, "position": 1045}
    assert end_run(start_sync(2)) == {"read": 2, "written": 2, "position": 1047}
    assert len(read_stored_orders()) == 45
    assert {order.order_no for order in read_stored_orders().values() if order.version == 2} == {"s1-10002", "s1-10003"}


def test_sync_order_needs_login_of_its_shop(start_sync, site, read_stored_orders):
    end_run(start_sync(1, shop_id="s2"))
    stranger = start_sync(1, login=False)
    assert stranger.end() == 77
    assert "SessionExpired: s1 is not logged in" in stranger.errors
    assert end_run(start_sync(2))["written"] == 45
    assert {(order.shop_id, order.order_no[:2]) for order in DemoOrder.objects.all()} == {("s1", "s1"), ("s2", "s2")}
    assert end_run(start_sync(3, login=False))["read"] == 0  # the browser is still logged in


def test_sync_order_with_captcha_exits_as_platform(start_sync, site, read_stored_orders):
    site.ask("/switch?captcha=1")
    run = start_sync(1)
    assert run.end() == 75
    assert "PlatformError" in run.errors
    assert read_stored_orders() == {}


def test_sync_order_with_unreachable_site_exits_as_transient(flows, port, read_stored_orders):
    run = flows.run("demo_sync_order", {"site": "http://127.0.0.1:1", "login": True}, debug_port=port)
    assert run.process.returncode == 70
    assert "ERR_" in run.errors


@pytest.mark.parametrize("payload", [{}, {"site": "file:///etc/passwd"}])
def test_sync_order_with_invalid_payload_exits_as_business(flows, port, read_stored_orders, payload):
    run = flows.run("demo_sync_order", payload, debug_port=port)
    assert run.process.returncode == 65
    assert "payload: site" in run.errors


def test_sync_order_without_database_exits_by_cause(flows, site, port, read_stored_orders):
    flows.environment["DATABASE_URL"] = "postgresql://nobody:hunter2@127.0.0.1:1/nowhere"
    away = flows.run("demo_sync_order", {"site": site.url, "login": True}, debug_port=port)
    assert away.process.returncode == 70
    assert "hunter2" not in away.errors
    del flows.environment["DATABASE_URL"]
    missing = flows.run("demo_sync_order", {"site": site.url, "login": True}, debug_port=port)
    assert missing.process.returncode == 65
    assert "DATABASE_URL" in missing.errors
