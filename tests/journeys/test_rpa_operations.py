"""A morning with the shops, in a real browser and with real runs: run now, watch, log in again, find the cause, retry
with care, cancel."""

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from django.db import connections
from django.urls import reverse
from django.utils.timezone import now

from config.local.processes import wait_until
from rpa_tasks.jobs import wakeups
from rpa_tasks.models import ExecutionNode, Flow, Job, Lane, LoginState, Platform, Shop
from rpa_tasks.worker import runner
from scheduling.models import FailedTask
from tests.journeys.conftest import visit_layouts
from tests.support.screenshots import save_screenshot
from tests.support.waiting import WAIT_LIMIT, WAIT_LIMIT_MS

if TYPE_CHECKING:
    pass


#: It reports progress, waits for its file, and ends with the code in the shop's file.
COMMAND = """
import json, pathlib, sys, time
home, param = pathlib.Path(sys.argv[2]), json.loads(sys.argv[1])
print(json.dumps({"progress": 0.4, "message": "第 4 页，共 10 页"}, ensure_ascii=False), flush=True)
while not (home / "go").exists():
    time.sleep(0.05)
plan = home / param["shop_id"]
if plan.exists():
    print("BusinessError: 订单页上没有表格")
    sys.exit(int(plan.read_text()))
print(json.dumps({"result": {"read": 40, "written": 12}}))
"""


class Market:
    """A platform whose runs are scripted by the test."""

    def __init__(self, home):
        self.home = home
        self.pdd = Platform.objects.create(key="pdd", name="拼多多")
        command = ["{python}", "-c", COMMAND, "{param}", str(home)]
        Flow.objects.create(
            platform=self.pdd, task_type="sync_order", command=command, needs_browser=False, idempotent=True
        )
        for number, name in enumerate(
            ("旗舰店", "男装专营店", "童装店", "箱包店", "数码配件店", "食品店", "家纺店"), 1
        ):
            Shop.objects.create(platform=self.pdd, shop_id=f"s{number}", name=name)

    def hold(self):
        (self.home / "go").unlink(missing_ok=True)

    def go_on(self):
        (self.home / "go").touch()

    def fail(self, shop_id, code):
        (self.home / shop_id).write_text(str(code))

    def repair(self):
        for plan in self.home.glob("s*"):
            plan.unlink()


@pytest.fixture
def market(transactional_db, tmp_path, settings, monkeypatch):
    settings.AFTERTOUCH_NODE = "exec-1"
    monkeypatch.setattr(wakeups.wakeup_publisher, "submit", lambda _: None)
    monkeypatch.setattr(wakeups, "wake_for_shops", lambda shops: None)
    return Market(tmp_path)


@pytest.fixture
def worker(market):
    """Takes whatever can start, one run at a time, until the test ends."""
    stop = threading.Event()

    def work():
        try:
            while not stop.wait(0.1):
                runner.run_startable_jobs(("high", "normal", "low"))
        finally:
            connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    market.go_on()
    stop.set()
    thread.join()


def open_admin_page(page, name, *args, query=""):
    page.goto(reverse(f"admin:{name}", args=args) + query)


@pytest.mark.usefixtures("worker")
def test_shop_jobs_run_and_are_cancelled_from_browser(ops, market):
    page = ops()
    open_admin_page(page, "index")

    # Two shops are run now; who presses again finds that one waits already.
    page.click("#nav-sidebar-apps >> text=店铺 >> nth=0")
    for name in ("旗舰店", "男装专营店"):
        page.check(f"#result_list tr:has-text('{name}') input.action-select")
    page.select_option("select[name=action]", "run_selected")
    page.click("#changelist-form button[type=submit], #changelist-form button[name=index]")
    page.fill("[name=payload]", '{"day": "today"}')
    page.click("form button:has-text('立即运行')")
    page.wait_for_selector(".at-figure:has-text('已发布') b:text-is('2')")
    assert Job.objects.filter(payload={"day": "today"}, source="admin: ops").count() == 2

    # Its page follows the run without being asked.
    assert wait_until(Job.objects.filter(state="running").exists, WAIT_LIMIT)
    running = Job.objects.get(state="running")  # of two unserved ones, either comes first
    open_admin_page(page, "rpa_tasks_job_change", running.pk)
    page.wait_for_selector(".at-progress:has-text('第 4 页，共 10 页')")
    page.evaluate("window.stayed = true")
    finish_run_and_check(page, market)
    save_screenshot(page, "rpa-job")

    # A run finds no login; a person logs in and confirms it.
    market.fail("s3", 77)
    run_now(page, "s3")
    open_admin_page(page, "rpa_tasks_shop_changelist")
    row = "#result_list tr:has-text('童装店')"
    page.wait_for_selector(f"{row} .at-tag:has-text('需要登录')")
    market.repair()
    page.reload()
    page.click(f"{row} >> text=我已登录，继续")
    page.click("form button:has-text('是的，已登录')")
    open_admin_page(page, "rpa_tasks_shop_changelist")
    page.wait_for_selector(f"{row} .at-tag:has-text('空闲')")
    assert Shop.objects.get(shop_id="s3").login_state == LoginState.OK

    # A running job is cancelled.
    # What runs would be held as well.
    assert wait_until(lambda: not Job.objects.exclude(state="succeeded").exists(), WAIT_LIMIT)
    market.hold()
    run_now(page, "s4")
    doomed = Job.objects.get(shop__shop_id="s4")
    open_admin_page(page, "rpa_tasks_job_change", doomed.pk)
    page.wait_for_selector(".at-progress")
    page.dispatch_event("a.at-button:has-text('取消')", "click")  # the page may put a new one there under the mouse
    page.click("form button:has-text('取消任务')")
    page.wait_for_selector(".at-job-now .at-tag:has-text('已取消')")
    doomed.refresh_from_db()
    assert (doomed.state, doomed.runs.get().outcome) == ("cancelled", "cancelled")


def finish_run_and_check(page, market):
    market.go_on()
    page.wait_for_selector(".at-job-now .at-tag:has-text('成功')")
    assert page.evaluate("window.stayed"), "the page was not loaded again"
    assert '"written": 12' in page.inner_text("#job-body")


def run_now(page, shop_id):
    open_admin_page(page, "rpa_tasks_shop_run_now_many", query=f"?shops={Shop.objects.get(shop_id=shop_id).pk}")
    page.click("form button:has-text('立即运行')")
    page.wait_for_selector(".at-figure:has-text('已发布')")


@pytest.mark.timeout(600)  # six runs
@pytest.mark.usefixtures("worker")
def test_failed_jobs_of_one_cause_are_retried(ops, market):
    page = ops()
    market.go_on()
    shops = list(Shop.objects.all()[:3])
    for shop in shops:
        market.fail(shop.shop_id, 65)
    open_admin_page(page, "rpa_tasks_shop_run_now_many", query=f"?shops={','.join(str(shop.pk) for shop in shops)}")
    page.click("form button:has-text('立即运行')")
    page.wait_for_selector(".at-figure:has-text('已发布') b:text-is('3')")
    open_admin_page(page, "rpa_tasks_job_changelist", query="?state__exact=")
    page.wait_for_function(
        "document.querySelectorAll('#result_list .at-tag.danger').length === 3", timeout=WAIT_LIMIT_MS
    )

    page.click("#nav-sidebar-apps >> text=失败任务")
    page.click("#result_list tbody th a")
    assert "订单页上没有表格" in page.inner_text(".at-error-line")
    save_screenshot(page, "rpa-failed-task")
    page.click("a[href*='fingerprint=']")
    market.repair()
    page.check("#action-toggle")
    page.select_option("select[name=action]", "bulk_retry")
    page.click("button[name=index]")
    page.fill("[name=reason]", "流程已修正")
    page.click("#content button[type=submit]:has-text('重试')")
    page.wait_for_selector("#changelist")
    assert not FailedTask.objects.filter(state="open").exists()
    again = Job.objects.filter(retry_of__isnull=False, state="succeeded")
    assert wait_until(lambda: again.count() == 3, WAIT_LIMIT)


def running_job(market):
    """Some other node's; nothing runs here."""
    shop = Shop.objects.get(shop_id="s1")
    flow = Flow.objects.get()
    job = Job.objects.create(
        shop=shop, flow=flow, state="running", due_at=now(), planned_at=now(), lease_until=now() + timedelta(hours=1),
        lease_no=1, fresh=False, node="exec-1", progress=0.4, progress_message="第 4 页", sending_at=now(),
        source="schedule",
    )  # fmt: skip
    Lane.objects.filter(shop=shop).update(task_id=job.pk, lease_no=1, home="exec-1")
    return job


def test_rpa_pages_fit_in_all_layouts(ops, market):
    """Those that show states, with every state. `test_accessibility` opens all pages."""
    running_job(market)
    create_sample_rows(market)
    pages = {"shops": ("shop_changelist",), "jobs": ("job_changelist",), "node": ("executionnode_change", "exec-1")}
    for looks, language, scheme in (("", "zh-hans", "light"), ("-dark-en", "en", "dark")):
        page = ops(language, scheme)
        for shown, (name, *args) in pages.items():
            for narrow in visit_layouts(page, reverse(f"admin:rpa_tasks_{name}", args=args)):
                save_screenshot(page, f"rpa-{shown}{looks}{narrow}")


def create_sample_rows(market):
    for number, (state, changes) in enumerate(
        (
            ("failed", {"reason": "exit_65", "node": "exec-1"}),
            ("succeeded", {"node": "exec-2", "source": "schedule"}),
            ("scheduled", {"requests": 3, "priority": 0}),
            ("scheduled", {"due_at": now() + timedelta(minutes=8), "reason": "browser_wait"}),
            ("cancelled", {"reason": "by:ops", "priority": 2}),
            ("scheduled", {}),
        ),
        2,
    ):
        shop = Shop.objects.get(shop_id=f"s{number}")
        usual = {"due_at": now(), "planned_at": now(), "fresh": state == "scheduled"}
        Job.objects.create(shop=shop, flow=Flow.objects.get(), state=state, **usual | changes)
    Shop.objects.filter(shop_id="s3").update(login_state=LoginState.NEEDED, login_lost_at=now() - timedelta(minutes=20))
    Shop.objects.filter(shop_id="s5").update(paused=True)
    Lane.objects.exclude(shop__shop_id="s6").update(last_success_at=now() - timedelta(minutes=13))
    told = {"uses": 3, "started_at": (now() - timedelta(minutes=31)).isoformat(), "last_used_at": now().isoformat()}
    browsers = [
        {"slot": 0, "state": "busy", "shop": "pdd/s1", "port": 35211, "rss_mb": 412, **told},
        {"slot": 1, "state": "idle", "shop": "pdd/s4", "port": 35213, "rss_mb": 388, **told},
        *({"slot": slot, "state": "empty"} for slot in range(2, 8)),
    ]
    ExecutionNode.objects.create(
        name="exec-1", seen_at=now(), started_at=now() - timedelta(hours=5), slots=5,
        queues=["high", "normal", "low"], browsers=browsers,
    )  # fmt: skip
