"""Pages of periodic tasks stay usable beside rows that beat cannot use, and name what is wrong with them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import current_app
from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now
from django_celery_beat.models import CrontabSchedule, IntervalSchedule, PeriodicTask, SolarSchedule
from kombu.exceptions import OperationalError

from scheduling.models import AuditEntry
from tests.scheduling.admin.conftest import read_messages
from tests.support.tables import each_row

LIST = "admin:django_celery_beat_periodictask_changelist"
FORM = "admin:django_celery_beat_periodictask_change"
TASK = "rpa_tasks.publish_for_shops"
CRONTAB = {
    "minute": "0", "hour": "9", "day_of_month": "*", "month_of_year": "*", "day_of_week": "*",
    "periodictask_set-TOTAL_FORMS": "0", "periodictask_set-INITIAL_FORMS": "0",
}  # fmt: skip


@pytest.fixture
def stored() -> dict[str, PeriodicTask]:
    """A usable row, one of the sun, and one in a time zone that this machine does not know."""
    hourly = IntervalSchedule.objects.create(every=1, period="hours")
    solar = SolarSchedule.objects.create(event="solar_noon", latitude=31.2, longitude=121.5)
    crontab = CrontabSchedule.objects.create(minute="0", hour="9", timezone="Asia/Shanghai")
    schedules: dict[str, dict[str, Any]] = {
        "hourly": {"interval": hourly}, "sun": {"solar": solar}, "mars": {"crontab": crontab},
    }  # fmt: skip
    rows = {name: PeriodicTask.objects.create(name=name, task=TASK, **each) for name, each in schedules.items()}
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_celery_beat_crontabschedule SET timezone = 'Mars/Olympus'")
    return rows


def test_list_and_forms_work_beside_rows_that_beat_cannot_use(
    administrator: Client, stored: dict[str, PeriodicTask]
) -> None:
    page = administrator.get(reverse(LIST)).content.decode()
    assert all(name in page for name in stored)
    assert "Solar schedules are not supported" in page
    assert "Mars/Olympus" in page
    for name in ("hourly", "mars"):
        page = administrator.get(reverse(FORM, args=[stored[name].pk])).content.decode()
        assert ("Mars/Olympus" in page, 'name="solar"' in page) == (True, False)


def test_unknown_time_zone_is_replaced_in_the_form(administrator: Client, stored: dict[str, PeriodicTask]) -> None:
    pk = stored["mars"].crontab_id
    crontabs = administrator.get(reverse("admin:django_celery_beat_crontabschedule_changelist"))
    assert "Mars/Olympus" in crontabs.content.decode()
    address = reverse("admin:django_celery_beat_crontabschedule_change", args=[pk])
    assert administrator.get(address).status_code == 200
    assert administrator.post(address, CRONTAB | {"timezone": settings.TIME_ZONE}).status_code == 302
    assert str(CrontabSchedule.objects.get(pk=pk).timezone) == settings.TIME_ZONE


def test_form_refuses_what_beat_would_skip_and_repairs_a_row(
    administrator: Client, stored: dict[str, PeriodicTask]
) -> None:
    row = stored["sun"]
    IntervalSchedule.objects.update(every=0)
    form = {
        "name": row.name, "regtask": "", "task": "shop.unknown", "enabled": "on",
        "interval": stored["hourly"].interval_id, "args": "[]", "kwargs": "{}", "headers": "{}", "priority": "",
    }  # fmt: skip
    address = reverse(FORM, args=[row.pk])
    assert "There is no task shop.unknown." in administrator.post(address, form).content.decode()
    assert "at most 200 characters" in administrator.post(address, form | {"task": "x" * 201}).content.decode()
    for empty in ({"task": ""}, {"expires_0": "2030-01-01", "expires_1": "00:00", "expire_seconds": "5"}):
        assert administrator.post(address, form | empty).status_code == 200
    old = administrator.post(address, form | {"task": "x" * 201, "row_version": "old"}).content.decode()
    assert "Changed after you opened the page" in old
    other = reverse(FORM, args=[stored["hourly"].pk])
    assert "must be set" in administrator.post(other, form | {"name": "other", "interval": ""}).content.decode()
    form |= {"task": "scheduling.dispatch_due"}
    assert "shorter than a second" in administrator.post(address, form).content.decode()
    answer = administrator.post(address, form | {"enabled": ""})
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    row.refresh_from_db()
    assert (row.solar_id, row.interval_id) == (None, stored["hourly"].interval_id)


def test_wrong_arguments_of_a_schedule_are_named_in_the_language_of_the_reader(
    administrator: Client, stored: dict[str, PeriodicTask]
) -> None:
    row = stored["hourly"]
    form = {
        "name": row.name, "regtask": "", "task": TASK, "interval": row.interval_id, "args": "[]",
        "kwargs": '{"platform": "nowhere", "task_type": "x"}', "headers": "{}", "priority": "",
    }  # fmt: skip
    address = reverse(FORM, args=[row.pk])
    for language, words in (("en", "there is no platform"), ("zh-hans", "不存在“nowhere”")):
        administrator.cookies["django_language"] = language
        page = administrator.post(address, form)
        assert words in str(page.context["adminform"].form.errors), page.context["adminform"].form.errors


@each_row("action, enabled", [("enable_tasks", True), ("toggle_tasks", True), ("disable_tasks", False)])
@each_row("chosen", ["", "?enabled__exact={}"])
def test_enabled_schedule_publishes_no_earlier_round(
    administrator: Client, stored: dict[str, PeriodicTask], action: str, enabled: bool, chosen: str
) -> None:
    """Also in a list of the disabled ones, in which it is no more after the act."""
    row, long_ago = stored["hourly"], now() - timedelta(days=90)
    before = {"enabled": not enabled, "last_run_at": long_ago, "date_changed": long_ago}
    PeriodicTask.objects.filter(pk=row.pk).update(**before)
    address = reverse(LIST) + chosen.format(int(not enabled))
    administrator.post(address, {"action": action, "_selected_action": [str(row.pk)]})
    row.refresh_from_db()
    assert row.enabled == enabled
    entry = AuditEntry.objects.get(action="changed")
    assert (entry.object_id, entry.changes) == (str(row.pk), [["enabled", str(not enabled), str(enabled)]])
    if enabled:
        assert row.last_run_at is None
        assert now() - row.date_changed < timedelta(hours=1)


def test_changed_crontab_publishes_no_earlier_round(administrator: Client) -> None:
    crontab, long_ago = CrontabSchedule.objects.create(minute="0", hour="9"), now() - timedelta(days=90)
    row = PeriodicTask.objects.create(name="daily", task=TASK, crontab=crontab)
    PeriodicTask.objects.update(last_run_at=long_ago, date_changed=long_ago)
    address = reverse("admin:django_celery_beat_crontabschedule_change", args=[crontab.pk])
    assert administrator.post(address, CRONTAB | {"hour": "14", "timezone": "Asia/Shanghai"}).status_code == 302
    row.refresh_from_db()
    assert row.last_run_at is None
    assert now() - row.date_changed < timedelta(hours=1)


def test_task_that_cannot_run_stops_no_other_and_is_named(
    administrator: Client, stored: dict[str, PeriodicTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    hourly = stored["hourly"]
    sent: list[Any] = []
    PeriodicTask.objects.filter(name="sun").update(task="shop.unknown")
    for name, task, args in (("sent", "scheduling.delete_expired", "[]"), ("odd", "scheduling.delete_expired", "[1]")):
        PeriodicTask.objects.create(name=name, task=task, args=args, interval=hourly.interval, queue="long")
    monkeypatch.setattr(
        current_app.tasks["scheduling.delete_expired"], "apply_async", lambda **given: sent.append(given)
    )
    administrator.cookies["django_language"] = "zh-hans"
    chosen = [str(row.pk) for row in PeriodicTask.objects.filter(name__in=["odd", "sent", "sun"])]
    answer = administrator.post(reverse(LIST), {"action": "run_tasks", "_selected_action": chosen})
    problem, done = read_messages(answer).split(" sun: ")
    assert problem.startswith("odd: 任务不接受这些参数：")
    assert done == "没有名为 shop.unknown 的任务。 已执行 1 个定时任务，任务已发布。"
    headers = {"periodic_task_name": "sent"}
    assert sent == [{"args": [], "kwargs": {}, "queue": "long", "headers": headers}]
    assert LogEntry.objects.get().object_repr.startswith("sent")


def test_run_waits_for_a_dead_broker_once_and_goes_on_with_rounds(
    administrator: Client, stored: dict[str, PeriodicTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Any] = []

    def refuse(**given: Any) -> None:
        tries.append(given)
        raise OperationalError("connection refused")

    monkeypatch.setattr(current_app.tasks["scheduling.dispatch_due"], "apply_async", refuse)
    PeriodicTask.objects.all().delete()
    for name, task in (("a", "scheduling.dispatch_due"), ("b", "scheduling.dispatch_due"), ("c", TASK)):
        PeriodicTask.objects.create(name=name, task=task, interval=stored["hourly"].interval)
    chosen = [str(row.pk) for row in PeriodicTask.objects.all()]
    answer = administrator.post(reverse(LIST), {"action": "run_tasks", "_selected_action": chosen})
    messages = read_messages(answer)
    assert all(f"{name}: The broker does not respond." in messages for name in "ab")
    assert "c: platform: is missing" in messages, messages
    assert len(tries) == 1
