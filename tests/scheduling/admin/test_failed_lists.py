"""Failed tasks by the hundred thousand: their lists look at the latest, and at no more than they show."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from scheduling.admin import base, lists
from scheduling.admin.failed_tasks import failed_task
from scheduling.models import FailedTask
from tests.scheduling.admin.conftest import Url
from tests.support.tables import each_row
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db


def fail(reason: str, fingerprint: str = "", **changes: Any) -> FailedTask:
    given = {"origin": "touch", "failure": "failed", "reason": reason, "fingerprint": fingerprint or reason}
    return FailedTask.objects.create(**given | changes)


def test_failed_task_count_stops_at_the_limit(viewer: Client, admin_url: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MOST_COUNTED", 2)
    rows = [fail("connect") for _ in range(2)]
    shown = read_context(viewer, admin_url("failedtask_changelist"))["cl"]
    assert (shown.result_count, shown.full_result_count) == (2, None)
    rows += [fail("connect") for _ in range(3)]
    shown = read_context(viewer, admin_url("failedtask_changelist"))["cl"]
    assert shown.result_count == 3
    assert [row.pk for row in shown.result_list] == [row.pk for row in reversed(rows)][: len(shown.result_list)]


def test_reason_filter_lists_latest_reasons(viewer: Client, admin_url: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    for reason in ("oldest", "later", "latest", "later"):
        fail(reason)
    fail("handled", state="ignored")
    monkeypatch.setattr(lists, "LOOKED_AT", 3)
    specs = read_context(viewer, admin_url("failedtask_changelist"))["cl"].filter_specs
    (causes,) = [each for each in specs if isinstance(each, failed_task.CauseFilter)]
    assert [code for code, _ in causes.lookup_choices] == ["later", "latest"]


@each_row("state", ["open", "ignored"])
def test_cause_groups_cover_the_latest_rows(
    viewer: Client, admin_url: Url, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    for reason in ("oldest", "later", "latest", "later"):
        fail(reason, state=state)
    url = f"{admin_url('failedtask_groups')}?state={state}"
    page = viewer.get(url)
    assert next((group["reason"], group["count"]) for group in page.context["groups"]) == ("later", 2)
    assert (len(page.context["groups"]), page.context["most"]) == (3, 0)
    monkeypatch.setattr(failed_task, "GROUPED", 3)
    page = viewer.get(url)
    assert [(group["reason"], group["count"]) for group in page.context["groups"]] == [("later", 2), ("latest", 1)]
    assert "There are more: these are the causes of the latest 3." in page.content.decode()
