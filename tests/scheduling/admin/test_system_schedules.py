"""Schedules of the system are shown, and no page changes, disables or deletes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.conf import settings
from django.test import Client
from django.urls import reverse
from django_celery_beat.models import IntervalSchedule, PeriodicTask

from scheduling.admin.system.schedule import SYSTEM_NAMES

LIST = "admin:django_celery_beat_periodictask_changelist"


@pytest.fixture
def administrator(as_member: Callable[[str], Client]) -> Client:
    return as_member("admin")


@pytest.fixture
def dispatch(db: None) -> PeriodicTask:
    interval = IntervalSchedule.objects.create(every=5, period="seconds")
    return PeriodicTask.objects.create(name="dispatch due touches", task="scheduling.dispatch_due", interval=interval)


@pytest.fixture
def nightly(dispatch: PeriodicTask) -> PeriodicTask:
    return PeriodicTask.objects.create(name="nightly", task="rpa_tasks.publish", interval=dispatch.interval)


def test_every_system_schedule_has_a_translated_name() -> None:
    assert SYSTEM_NAMES.keys() == settings.CELERY_BEAT_SCHEDULE.keys()


def test_list_hides_system_schedules_until_selected(
    administrator: Client, dispatch: PeriodicTask, nightly: PeriodicTask
) -> None:
    assert [row.name for row in administrator.get(reverse(LIST)).context["cl"].result_list] == ["nightly"]
    page = administrator.get(f"{reverse(LIST)}?system=yes")
    assert [row.name for row in page.context["cl"].result_list] == ["dispatch due touches"]
    assert "Dispatch due touches" in page.content.decode()


@pytest.mark.parametrize("action", ["disable_tasks", "toggle_tasks", "delete_selected"])
@pytest.mark.parametrize("query", ["", "?system=yes"])
def test_action_leaves_system_schedule(administrator: Client, dispatch: PeriodicTask, action: str, query: str) -> None:
    data = {"action": action, "_selected_action": [str(dispatch.pk)], "post": "yes"}
    administrator.post(f"{reverse(LIST)}{query}", data)
    dispatch.refresh_from_db()
    assert dispatch.enabled


def test_own_schedule_is_disabled_by_action(administrator: Client, nightly: PeriodicTask) -> None:
    administrator.post(reverse(LIST), {"action": "disable_tasks", "_selected_action": [str(nightly.pk)]})
    nightly.refresh_from_db()
    assert not nightly.enabled


def test_system_schedule_and_its_interval_are_read_only(
    administrator: Client, dispatch: PeriodicTask, nightly: PeriodicTask
) -> None:
    for name, pk in (("periodictask", dispatch.pk), ("intervalschedule", dispatch.interval.pk)):
        change = reverse(f"admin:django_celery_beat_{name}_change", args=[pk])
        assert administrator.get(change).status_code == 200
        assert administrator.post(change, {"name": "x", "every": "9", "period": "days"}).status_code == 403
        delete = reverse(f"admin:django_celery_beat_{name}_delete", args=[pk])
        assert administrator.post(delete, {"post": "yes"}).status_code == 403
    intervals = reverse("admin:django_celery_beat_intervalschedule_changelist")
    chosen = {"action": "delete_selected", "_selected_action": [str(dispatch.interval.pk)], "post": "yes"}
    administrator.post(intervals, chosen)
    dispatch.refresh_from_db()
    assert dispatch.interval.every == 5
