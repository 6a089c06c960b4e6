"""The search of every page finds what the user may view, by parts, in both languages, and escapes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import unescape

import pytest
from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now

from rpa_tasks.models import Flow, Platform, Shop
from rpa_tasks.models import Job as RpaJob
from scheduling.admin import navigation
from scheduling.admin.navigation import Found
from scheduling.customers.changes import find_first_customers
from scheduling.models import ChannelConfig, Customer, Event, FailedTask, Node, Pause, Template
from scheduling.operations.commands import update_customer
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db


def search(client: Client, term: str, language: str = "en") -> dict[str, str]:
    """Return the titles of the results by their links."""
    client.cookies["django_language"] = language
    page = client.get(reverse("admin:search"), {"s": term})
    assert page.status_code == 200
    found = re.findall(r'<a role="option".*?href="([^"]*)".*?</span>\s*<span>(.*?)</span>', page.content.decode(), re.S)
    return {unescape(link): title for link, title in found}


def change_link(name: str, row: object) -> str:
    return reverse(f"admin:{name}_change", args=[row.pk])  # type: ignore[attr-defined]


@pytest.fixture
def rows(matrix: MatrixBuilder, record_event: RecordEvent, failed: Callable[..., FailedTask]) -> FailedTask:
    """A row of what is searched for."""
    matrix.node("guide-first", name="资料下载指南")
    ChannelConfig.objects.update(name="运维群")
    record_event("material.downloaded", "ann", event_id="ev-1", data={"order_no": "SO-77", "phone": "13800138000"})
    update_customer("wang", {"name": "欧阳小明"})
    shop = Shop.objects.create(platform=Platform.objects.create(key="pdd", name="拼多多"), shop_id="s1", name="旗舰店")
    flow = Flow.objects.create(platform=shop.platform, task_type="sync_order", command=["true"])
    RpaJob.objects.create(shop=shop, flow=flow, due_at=now(), planned_at=now())
    return failed()


CASES: dict[str, tuple[str, str, Callable[[FailedTask], object]]] = {
    "part of a name": ("阳小", "scheduling_customer", lambda row: Customer.objects.get(user_id="wang")),
    "start of a user id": ("wan", "scheduling_customer", lambda row: Customer.objects.get(user_id="wang")),
    "event id": ("ev-1", "scheduling_event", lambda row: Event.objects.get(event_id="ev-1")),
    "order id": ("SO-77", "scheduling_event", lambda row: Event.objects.get(event_id="ev-1")),
    "node": ("guide first", "scheduling_node", lambda row: Node.objects.get(key="guide-first")),
    "name of a node": ("下载指南", "scheduling_node", lambda row: Node.objects.get(key="guide-first")),
    "name of a channel": ("运维", "scheduling_channelconfig", lambda row: ChannelConfig.objects.get()),
    "node of an event type": ("downloaded", "scheduling_node", lambda row: Node.objects.get(key="guide-first")),
    "template": ("GUIDE-F", "scheduling_template", lambda row: Template.objects.get(key="guide-first")),
    "shop": ("旗舰", "rpa_tasks_shop", lambda row: Shop.objects.get()),
    "shop of a platform": ("拼多多 s1", "rpa_tasks_shop", lambda row: Shop.objects.get()),
}


@each_row("case", CASES)
def test_search_part_of_record_finds_it_for_viewer(viewer: Client, rows: FailedTask, case: str) -> None:
    term, name, read = CASES[case]
    assert change_link(name, read(rows)) in search(viewer, term)


def test_search_full_id_finds_touch_task_and_job_and_reads_order_fields_only(viewer: Client, rows: FailedTask) -> None:
    found = search(viewer, f" {rows.task_id} ")
    assert found[reverse("admin:scheduling_touch_change", args=[rows.task_id])] == "broken → ann"
    assert change_link("scheduling_failedtask", rows) in found
    job = RpaJob.objects.get()
    assert search(viewer, str(job.pk)) == {change_link("rpa_tasks_job", job): "旗舰店 · sync_order"}
    assert search(viewer, "13800138000") == {}, "other fields of an event's data may be hidden on its page"


@each_row("term, name, language", [
    ("失败任务", "scheduling_failedtask_changelist", "en"), ("live", "chat_sessions_silencepolicy_live", "en"),
    ("failed task", "scheduling_failedtask_changelist", "zh-hans"),
    ("规则 日历", "scheduling_calendar_changelist", "zh-hans"),
])  # fmt: skip
def test_search_page_name_of_either_language_finds_page(viewer: Client, term: str, name: str, language: str) -> None:
    assert reverse(f"admin:{name}") in search(viewer, term, language)


@each_row("term", ["pause channel log", "暂停渠道 LOG"])
def test_search_action_leads_to_its_page(operator: Client, matrix: MatrixBuilder, term: str) -> None:
    add, end = reverse("admin:scheduling_pause_add"), reverse("admin:scheduling_pause_end")
    assert search(operator, term)[f"{add}?scope=channel%3Alog"] == "Pause channel log"
    Pause.objects.create(scope="channel:log")
    assert f"{add}?scope=channel%3Alog" not in search(operator, term)
    assert search(operator, "恢复 log", "zh-hans")[f"{end}?scope=channel%3Alog"] == "恢复渠道 log"


def test_search_add_finds_forms_that_the_user_may_fill(editor: Client, viewer: Client) -> None:
    form = reverse("admin:scheduling_node_add")
    assert (form in search(editor, "add node"), form in search(viewer, "add node")) == (True, False)


def test_search_result_needs_permission_to_view(rows: FailedTask, static_root: None) -> None:
    """A user without rights finds nothing, and one right finds the rows of its kind only."""
    job = RpaJob.objects.get()
    terms = [*(term for term, _name, _read in CASES.values()), str(rows.task_id), str(job.pk), "pause", "add", "log"]
    user = User.objects.create_user("new", password="x", is_staff=True)
    client = Client(headers={"accept-language": "en"})
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    assert {link for term in terms for link in search(client, term)} <= {reverse("admin:index")}
    every = {change_link(name, read(rows)) for _term, name, read in CASES.values()}
    for kind in ("customer", "event", "touch", "shop"):
        user = User.objects.get(pk=user.pk)
        user.user_permissions.set(Permission.objects.filter(codename=f"view_{kind}"))
        links = {link for term in terms for link in search(client, term)}
        assert links
        assert {link for link in links & every if f"/{kind}/" not in link} == set(), kind


def test_search_reads_only_the_customers_that_it_shows(viewer: Client, db: None) -> None:
    for number in range(1, 20):
        update_customer(f"u-{number}", {"name": "王小明"})
    found = [title for link, title in search(viewer, "u-1").items() if "/customer/" in link]
    assert (len(found), find_first_customers("u-1", 1)) == (6, [Customer.objects.get(user_id="u-1").pk])
    assert len(find_first_customers("小明", 6)) == 6


@each_row("stored, term", [(77, "77"), ('A"\\1', 'A"\\1'), ("订单-9", "订单-9"), ("a\tb", "a\tb")])
def test_search_finds_an_order_as_its_data_write_it(
    viewer: Client, matrix: MatrixBuilder, record_event: RecordEvent, stored: object, term: str
) -> None:
    record_event("order.paid", data={"order": {"no": 1}, "trade_no": stored, "note": "x"})
    assert len([link for link in search(viewer, term) if "/scheduling/event/0" in link]) == 1


def test_search_result_is_escaped(viewer: Client, matrix: MatrixBuilder) -> None:
    update_customer("x1", {"name": "<b onclick=x>bold</b>"})
    page = viewer.get(reverse("admin:search"), {"s": "bold"}).content.decode()
    assert "&lt;b onclick=x&gt;bold" in page
    assert "<b onclick" not in page
    assert viewer.get(reverse("admin:search"), {"s": "<i>%_\\'"}).status_code == 200


def test_search_beyond_time_limit_keeps_other_results(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(request: object, term: str) -> Iterator[Found]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(60)")
        yield from ()

    limits = replace(settings.TIMEOUTS, search=3.0, count=3.0)
    monkeypatch.setattr(settings, "TIMEOUTS", limits)
    monkeypatch.setattr(navigation, "SLOW_FINDERS", (("", sleep),))
    page = viewer.get(reverse("admin:search"), {"s": "calendar"}).content.decode()
    assert reverse("admin:scheduling_calendar_changelist") in page
    assert "Some results are missing" in page
