"""The overview in a real browser: it updates itself, shows outages, and pauses in a hidden tab.

Its numbers link to rows, and the keyboard reaches all of them.
"""

import base64
import random
import threading
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from django.utils.timezone import now

from tests.journeys.conftest import check_width, visit_layouts
from tests.support.screenshots import save_screenshot
from tests.support.thread_servers import serving_in_thread

if TYPE_CHECKING:
    pass

CHARTS = ("ended", "reasons", "lateness", "events", "failures", "runs", "silences")


@pytest.fixture(autouse=True)
def cleared_hourly_cache():
    from scheduling.monitoring.statistics import HourlyCache

    HourlyCache.clear_all()
    yield
    HourlyCache.clear_all()


@pytest.fixture
def busy_week(matrix):
    """A week of touches, with a spike of failures two hours ago."""
    from scheduling.admin.dashboard.overview import MODELS
    from scheduling.ids import first_id_at
    from scheduling.models import Complaint, Customer, Event, FailedTask, Node, Touch

    dice = random.Random(7)
    # Changed an hour before the spike. The rest of the configuration is older than every chart.
    changed_at = now() - timedelta(hours=3, minutes=10)
    nodes = [matrix.node(key, trigger=key) for key in ("presale-download", "insale-paid", "aftersale-survey")]
    for model in MODELS:
        older = changed_at if model is Node else now() - timedelta(days=40)
        model.history.update(history_date=older)
    ann = Customer.objects.create(user_id="ann", name="王小安", level="vip")
    touches, events = [], []
    reasons = ["cap"] * 6 + ["dedupe"] * 4 + ["conversation"] * 3 + ["quiet_hours", "opted_out", "rollout"]
    kinds = ["order.paid"] * 5 + ["material.downloaded"] * 3 + ["session.silent"] * 2 + ["service.completed"]
    for number in range(1500):
        ago = timedelta(hours=dice.random() * 24 if number < 900 else 24 + dice.random() * 130)
        state = dice.choices(["delivered", "suppressed", "cancelled", "failed"], [70, 24, 4, 2])[0]
        if number < 60:
            ago, state = timedelta(hours=2, minutes=dice.random() * 20), "failed"
        at = now() - ago
        event = Event(
            id=UUID(int=first_id_at(at).int + number), source="shop", event_id=f"e{number}", type=dice.choice(kinds),
            customer=ann, user_id="ann", occurred_at=at, received_at=at,
        )  # fmt: skip
        late = timedelta(milliseconds=dice.expovariate(1 / 120))
        touches.append(Touch(
            event=event, node=dice.choice(nodes), customer=ann, state=state, node_version=1, due_at=at - late,
            planned_at=at - late, expires_at=at + timedelta(days=3), settled_at=at, sending_at=at, queued_at=at,
            reason=dice.choice(reasons) if state == "suppressed" else "timeout" if state == "failed" else "",
        ))  # fmt: skip
        events.append(event)
    for number, minutes in enumerate((-30, -3, 5, 20, 50, 400)):
        at = now() + timedelta(minutes=minutes)
        event = Event(
            source="shop", event_id=f"w{number}", type="order.paid", customer=ann, user_id="ann", occurred_at=at
        )
        touches.append(Touch(event=event, node=nodes[0], customer=ann, node_version=1, due_at=at, planned_at=at,
                             expires_at=at + timedelta(days=3)))  # fmt: skip
        events.append(event)
    Event.objects.bulk_create(events)
    Touch.objects.bulk_create(touches)
    for touch in [each for each in touches if each.state == "failed"]:
        FailedTask.objects.create(
            origin="touch", task_id=touch.pk, failure="failed", reason="timeout", channel="hook",
            failed_at=touch.settled_at,
            detail="crm.example.com 10 s", fingerprint="f" * 32, payload={"node": touch.node.key, "user_id": "ann"},
        )  # fmt: skip
    for number, touch in enumerate([each for each in touches if each.state == "delivered"][:9]):
        event = Event.objects.create(source="crm", event_id=f"c{number}", type="complaint.received", customer=ann,
                                     user_id="ann", occurred_at=now())  # fmt: skip
        Complaint.objects.create(event=event, customer=ann, touch=touch, complained_at=now())


@pytest.fixture
def busy_shops_and_chats(transactional_db):
    """A day of runs, and of guide messages."""
    from rpa_tasks.models import Flow, Job, Platform, Run, Shop

    dice = random.Random(11)
    platform = Platform.objects.create(key="pdd", name="Pinduoduo")
    flow = Flow.objects.create(platform=platform, task_type="sync_order", command=["true"])
    shop = Shop.objects.create(platform=platform, shop_id="s1")
    lost = Shop.objects.create(platform=platform, shop_id="s2", name="Spring Tea")
    Shop.objects.filter(pk=lost.pk).update(login_state="needed", login_lost_at=now() - timedelta(minutes=20))
    jobs, runs = [], []
    for _ in range(400):
        at = now() - timedelta(hours=dice.random() * 24)
        outcomes = dice.choices([["succeeded"], ["transient", "succeeded"], ["business"]], [80, 14, 6])[0]
        state = "succeeded" if outcomes[-1] == "succeeded" else "failed"
        job = Job(shop=shop, flow=flow, state=state, lease_no=len(outcomes), due_at=at, planned_at=at, settled_at=at)
        jobs.append(job)
        runs += [Run(job=job, number=number, lease_no=number, started_at=at, ended_at=at, outcome=outcome)
                 for number, outcome in enumerate(outcomes, 1)]  # fmt: skip
    Job.objects.bulk_create(jobs)
    Run.objects.bulk_create(runs)


def advance_clock_until(page, selector, state="visible"):
    """Ten seconds after ten seconds: a look that is still under way plans the next one only when it is over."""
    from playwright.sync_api import TimeoutError as TooLate

    for _ in range(60):
        page.clock.run_for(10_000)
        with suppress(TooLate):
            page.wait_for_selector(selector, state=state, timeout=1_000)
            return
    raise AssertionError(f"{selector} never came")


@pytest.mark.usefixtures("busy_week", "busy_shops_and_chats", "valkey")
def test_dashboard_shows_charts_and_fits_in_all_layouts(ops):
    from django.contrib.auth.models import User

    from scheduling.models import DismissedChecklist

    pages = {"dashboard": ops(), "dashboard-dark-en": ops("en", "dark")}
    DismissedChecklist.objects.create(user=User.objects.get(username="ops"))
    for name, page in pages.items():
        for look in visit_layouts(page, "/admin/"):
            assert [page.locator(f"#chart-{key}").count() for key in CHARTS] == [1] * len(CHARTS)
            save_screenshot(page, f"{name}{look}", full_page=True)
    page.goto("/admin/?days=7")
    for key in CHARTS:
        page.click(f"#table-{key} summary")
        assert page.locator(f"#table-{key} tbody tr").count() == 7
    check_width(page)
    save_screenshot(page, "dashboard-week", full_page=True)


class Flower(BaseHTTPRequestHandler):
    """A page behind a login, as Flower is."""

    def do_GET(self):
        known = self.headers.get("Authorization") == "Basic " + base64.b64encode(b"ops:hush").decode()
        self.send_response(200 if known else 401)
        self.send_header("WWW-Authenticate", 'Basic realm="flower"')
        self.end_headers()
        self.wfile.write(b"the workers" if known else b"")

    def log_message(self, *args):
        """Discard the log line."""


@pytest.fixture
def report_worker():
    """Report a worker every second until the test ends, as workers do every five: a report counts for 20 s."""
    from scheduling.monitoring.queues import WorkerReport, send_worker_report

    names = []
    stop = threading.Event()

    def send_all():
        for name in names:
            send_worker_report(WorkerReport(name, 4, 0.5, ["touch.high", "touch.normal", "touch.low"], running=2))

    def report(name):
        names.append(name)
        send_all()

    def repeat():
        while not stop.wait(1):
            send_all()

    thread = threading.Thread(target=repeat)
    thread.start()
    yield report
    stop.set()
    thread.join()


@pytest.mark.usefixtures("busy_week", "busy_shops_and_chats", "valkey")
def test_operator_starts_with_waiting_work_then_sees_workers_and_flower(ops, settings, report_worker):
    from scheduling.models import Pause

    report_worker("core@host1")
    Pause.objects.create(scope="node:insale-paid", reason="new text")
    settings.FLOWER_LOGIN = "ops:hush"
    page = ops("en")
    page.goto("/admin/scheduling/touch/workers/")
    page.wait_for_selector("#workers td:has-text('host1')")
    check_width(page)
    save_screenshot(page, "workers", full_page=True)

    page.goto("/admin/")
    page.wait_for_selector("#actions li")
    check_width(page)
    save_screenshot(page, "first-page", full_page=True)
    assert page.locator("#first-hour li").count() == 4
    page.click("#actions a:has-text('open failed tasks')")
    page.wait_for_selector("#result_list tbody tr")
    page.goto("/admin/")
    page.click("#first-hour button")
    page.wait_for_selector("#first-hour", state="detached")
    page.wait_for_selector("#actions")

    # The page of workers refreshes itself.
    page.click("nav.at-tabs a:has-text('Queues and workers')")
    page.wait_for_selector("#workers td:has-text('host1')")
    report_worker("core@host2")
    page.wait_for_selector("#workers td:has-text('host2')")

    # Flower opens from the menu without a second login.
    flower = ThreadingHTTPServer(("127.0.0.1", 0), Flower)
    with serving_in_thread(flower):
        settings.FLOWER_URL = f"http://127.0.0.1:{flower.server_port}/"
        page.click("#nav-sidebar-apps a:has-text('Flower')")
        page.wait_for_selector("body:has-text('the workers')")


@pytest.mark.usefixtures("busy_week", "valkey")
def test_dashboard_refreshes_pauses_and_reports_errors(ops, record_event):
    from scheduling.models import Touch

    page = ops("en")
    page.clock.install()
    page.goto("/admin/")
    due = page.locator("a.at-figure:has-text('Due within the hour') b")
    assert due.inner_text() == "5"
    page.click("#table-ended summary")

    # New figures come by themselves, also into the charts, and what was unfolded stays so.
    drawn = "canvas => Chart.getChart(canvas).data.datasets[0].data.at(-1)"
    delivered = page.locator("#chart-ended ~ .at-plot canvas").evaluate(drawn)
    Touch.objects.filter(state="delivered").update(settled_at=now())
    Touch.objects.filter(state="scheduled").update(due_at=now() + timedelta(days=1))
    advance_clock_until(page, "a.at-figure:has-text('Due within the hour') b:text-is('0')")
    assert page.locator("#table-ended[open]").count() == 1
    assert page.locator("#chart-ended ~ .at-plot canvas").evaluate(drawn) > delivered

    # It looks every ten seconds. A look that is under way would not be counted, and hold up the next one.
    with page.expect_response(lambda response: "x-live" in response.request.headers):
        page.clock.run_for(10_000)
    asked, answered = [], []
    page.on("request", lambda request: asked.append(request.url) if request.headers.get("x-live") else None)
    page.on("requestfinished", lambda request: answered.append(request.url) if request.headers.get("x-live") else None)
    until = page.evaluate("Date.now()") + 30_000
    while page.evaluate("Date.now()") < until:
        page.clock.run_for(1_000)
        for _ in range(900):
            if len(answered) >= len(asked):
                break
            page.wait_for_timeout(100)
    assert 0 < len(asked) <= 4

    # In a hidden tab nothing is asked; a look follows when it is seen again.
    asked.clear()
    see = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true}); document.dispatchEvent(new Event('visibilitychange')) }"  # noqa: E501
    page.evaluate(see, True)
    page.clock.run_for(120_000)
    assert asked == []
    with page.expect_response(lambda response: "x-live" in response.request.headers):
        page.evaluate(see, False)

    # Without a response it shows that, and keeps the last figures.
    page.route("**/admin/", lambda route: route.abort())
    advance_clock_until(page, "#live-failed:has-text('The last refresh failed')")
    assert page.locator("#chart-ended").count() == 1
    page.unroute("**/admin/")
    advance_clock_until(page, "#live-failed", state="hidden")

    # It can be paused. `r` still reloads, also while an earlier request runs.
    page.click("#live-hold")
    page.wait_for_selector("#live-held:has-text('Refresh stopped')")

    under_way = []
    page.route("**/admin/", lambda route: under_way.append((route, route.fetch(timeout=90_000))), times=1)
    page.keyboard.press("r")
    for _ in range(900):
        if under_way:
            break
        page.wait_for_timeout(100)
    ((look, answer),) = under_way
    Touch.objects.filter(state="scheduled").update(due_at=now() + timedelta(minutes=1))
    page.keyboard.press("r")
    look.fulfill(response=answer)
    page.wait_for_selector("a.at-figure:has-text('Due within the hour') b:text-is('6')")

    # A chart that was kept follows the width of the window.
    page.set_viewport_size({"width": 500, "height": 900})
    for _ in range(100):
        page.clock.run_for(100)
        if page.evaluate(
            "[...document.querySelectorAll('canvas.chart')].every(each => Chart.getChart(each).width < 500)"
        ):
            break
        page.wait_for_timeout(100)
    else:
        raise AssertionError("a chart kept its width")


@pytest.mark.usefixtures("valkey")
def test_chart_with_greater_sign_stays_until_its_data_change(ops):
    """Pauses after half an hour have the label `> 1800 s`, which the canvas has in an attribute."""
    from django.urls import reverse

    from sessions.models import SilencePolicy
    from sessions.store import sessions, stats
    from tests.sessions.conftest import count_nudges

    SilencePolicy.objects.update_or_create(key="default", defaults={"threshold": timedelta(seconds=45)})
    count_nudges(sessions.live_store(), "default", **{"3": 2, str(len(stats.PAUSE_ENDS) + 1): 3})
    page = ops("en")
    page.clock.install()
    page.goto(reverse("admin:chat_sessions_silencepolicy_live"))
    canvas = page.locator("#chart-pauses-default ~ .at-plot canvas")
    assert "> 1800 s" in canvas.get_attribute("data-value")
    page.set_default_timeout(20_000)

    def look_again():
        with page.expect_request_finished(lambda request: "x-live" in request.headers):
            page.clock.run_for(10_000)
        page.wait_for_timeout(200)

    # A refresh without news leaves the page as it is.
    page.evaluate("window.heading = document.querySelector('#chart-pauses-default')")
    look_again()
    assert page.evaluate("window.heading.isConnected")

    # The data alone change: a bar of the chart, but no text of the page.
    page.evaluate("window.drawn = Chart.getChart(document.querySelector('canvas.chart'))")
    see = "() => { const { data } = Chart.getChart(document.querySelector('canvas.chart')); return data.labels.at(-1) }"

    def rename_bar(route):
        answer = route.fetch()
        text = answer.text()
        value = text.partition('data-value="')[2].partition('"')[0]
        route.fulfill(response=answer, body=text.replace(value, value.replace("1800 s", "1900 s")))

    page.route("**/live/", rename_bar)
    for _ in range(2):
        look_again()
        assert page.evaluate(see) == "> 1900 s"
    assert page.evaluate("window.drawn === Chart.getChart(document.querySelector('canvas.chart'))")
    page.evaluate("window.heading = document.querySelector('#chart-pauses-default')")
    look_again()
    assert page.evaluate("window.heading.isConnected")

    # A canvas without a chart is not kept.
    page.evaluate("Chart.getChart(document.querySelector('canvas.chart')).destroy()")
    page.unroute("**/live/")
    look_again()
    assert page.evaluate(see) == "> 1800 s"


@pytest.mark.usefixtures("busy_week", "valkey")
def test_chart_link_opens_rows_and_keyboard_navigates(ops):
    page = ops("en")
    page.goto("/admin/")
    canvas = page.locator("#chart-ended ~ .at-plot canvas")
    tallest = canvas.evaluate(
        """canvas => {
            const chart = Chart.getChart(canvas);
            const place = chart.data.datasets.findIndex(each => each.label === "Failed");
            const { data } = chart.data.datasets[place];
            const { x, y } = chart.getDatasetMeta(place).data[data.indexOf(Math.max(...data))].getCenterPoint();
            return { x, y };
        }"""
    )
    canvas.click(position=tallest)
    page.wait_for_selector("#result_list tbody tr")
    rows = page.locator("#result_list tbody tr")
    assert rows.count() >= 20
    assert rows.locator(":text('Failed')").count() == rows.count()

    for key in "jjjk":
        page.keyboard.press(key)
    assert (
        page.locator("tr.at-here").evaluate(
            "row => [...document.querySelectorAll('#result_list tbody tr')].indexOf(row)"
        )
        == 1
    )
    page.keyboard.press("?")
    page.wait_for_selector("#keyboard-help[open]")
    save_screenshot(page, "keyboard")
    page.keyboard.press("Escape")
    page.keyboard.press("f")
    page.keyboard.type("jk?")
    assert page.input_value("#searchbar") == "jk?"
    page.fill("#searchbar", "")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".at-timeline")


@pytest.mark.usefixtures("customer_with_nodes", "valkey")
def test_customer_page_fits_and_leads_to_touches(ops, record_event):
    from scheduling.models import Customer
    from tests.scheduling.core.conftest import deliver

    for kind in ("material.downloaded", "order.paid", "service.completed", "order.paid"):
        deliver(record_event(kind, data={"order_no": "202611210042"}).task_ids)
    record_event("signup.succeeded")
    page = ops()
    page.goto(f"/admin/scheduling/customer/{Customer.objects.get(user_id='ann').pk}/change/")
    page.wait_for_selector("#customer-nodes[open]")
    check_width(page)
    save_screenshot(page, "customer", full_page=True)
    page.click("text=查看全部触达")
    page.wait_for_selector("#result_list")
    page.wait_for_load_state("domcontentloaded")
    assert page.locator("#result_list tbody tr").count() == 5
    with page.expect_download() as download:
        page.click("text=导出为 CSV")
    assert "王小安" in download.value.path().read_text("utf-8-sig")


@pytest.fixture
def customer_with_nodes(matrix):
    """Nodes that have sent as much as the limit allows, and one whose time comes tomorrow."""
    from scheduling.models import Customer

    Customer.objects.create(user_id="ann", name="王小安", level="vip", addresses={"email": "ann@example.com"})
    for key, trigger in (
        ("presale-download", "material.downloaded"), ("insale-paid", "order.paid"),
        ("aftersale-survey", "service.completed"),
    ):  # fmt: skip
        matrix.node(key, trigger=trigger)
    matrix.node("welcome", trigger="signup.succeeded", delay=timedelta(days=1))
