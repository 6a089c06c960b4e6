"""Many that failed for one cause, published again with care."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.contrib.messages import get_messages
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils.timezone import now

from scheduling.admin.failed_tasks import retry_sample
from scheduling.admin.failed_tasks.retry_sample import FEW
from scheduling.models import FailedTask, Touch

pytestmark = pytest.mark.django_db

Url = Callable[..., str]


@pytest.fixture
def group(failed: Callable[..., Any]) -> list[Any]:
    """Eight touches that failed for the same cause, the oldest first."""
    rows = [failed(f"user{number}") for number in range(FEW + 3)]
    assert len({row.fingerprint for row in rows}) == 1
    return rows


@pytest.fixture
def page(group: list[Any], admin_url: Url) -> str:
    return admin_url("failedtask_replay", group[0].fingerprint)


def again() -> Any:
    return Touch.objects.filter(retry_of__isnull=False).order_by("due_at")


def advice(client: Client, page: str) -> str:
    return str(client.get(page).context["advice"][0])


def test_sample_retries_the_oldest_at_once(operator: Client, group: list[Any], page: str, admin_url: Url) -> None:
    assert page in operator.get(admin_url("failedtask_groups")).content.decode()
    operator.post(page, {"few": "1", "reason": "mended", "per_second": "5"})
    assert {touch.retry_of for touch in again()} == {row.task_id for row in group[:FEW]}
    assert all(touch.due_at <= now() for touch in again())
    retried = FailedTask.objects.filter(state="retried")
    assert {(row.actor_name, row.action_reason) for row in retried} == {("operator", "mended")}


def test_replay_page_reports_the_sample_result(operator: Client, page: str) -> None:
    assert advice(operator, page) == ""
    operator.post(page, {"few": "1", "reason": "mended", "per_second": "5"})
    assert advice(operator, page) == "wait"
    assert "data-live-again" in operator.get(page).content.decode()
    again().update(state="delivered")
    assert advice(operator, page) == "good"
    assert "data-live-again" not in operator.get(page).content.decode()
    Touch.objects.filter(pk=again()[0].pk).update(state="failed")
    assert advice(operator, page) == "bad"


def test_next_step_keeps_reason_and_pace_of_its_user(operator: Client, editor: Client, page: str) -> None:
    answer = operator.post(page, {"few": "1", "reason": "mended", "per_second": "2"})
    form = operator.get(answer["location"]).context["form"]
    assert (form["reason"].value(), form["per_second"].value()) == ("mended", "2.0")
    assert editor.get(answer["location"]).context["form"]["reason"].value() is None
    assert operator.get(page).context["form"]["reason"].value() is None


def test_rest_is_retried_at_pace_with_same_keys(operator: Client, group: list[Any], page: str) -> None:
    operator.post(page, {"few": "1", "reason": "mended", "per_second": "5"})
    operator.post(page, {"rest": "1", "reason": "the first went well", "per_second": "0.5"})
    assert again().count() == len(group)
    rest = list(again().filter(retry_of__in=[row.task_id for row in group[FEW:]]))
    assert [later.due_at - sooner.due_at for sooner, later in pairwise(rest)] == [timedelta(seconds=2)] * 2
    roots = {row.task_id: row.root_id for row in group}
    assert all(touch.root_id == roots[touch.retry_of] for touch in again())


def test_replay_skips_later_failures(operator: Client, group: list[Any], page: str) -> None:
    shown_at = operator.get(page).context["asked_at"]
    FailedTask.objects.filter(pk=group[0].pk).update(failed_at=now() + timedelta(seconds=1))
    operator.post(page, {"rest": "1", "reason": "x", "per_second": "5", "asked_at": shown_at})
    group[0].refresh_from_db()
    assert (group[0].state, again().count()) == ("open", len(group) - 1)


def test_sample_replaces_a_task_taken_by_another_user(
    operator: Client, group: list[Any], page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scheduling.errors import Conflict
    from scheduling.operations import failed_tasks

    real = failed_tasks.retry_failed_task

    def taken_first(failed_id: Any, actor: Any, **more: Any) -> Any:
        if failed_id == group[0].pk:
            raise Conflict
        return real(failed_id, actor, **more)

    monkeypatch.setattr(failed_tasks, "retry_failed_task", taken_first)
    answer = operator.post(page, {"few": "1", "reason": "x", "per_second": "5"})
    told = " ".join(str(each) for each in get_messages(answer.wsgi_request))
    assert "5 were published again." in told
    assert "1 failed task was skipped" in told
    assert {touch.retry_of for touch in again()} == {row.task_id for row in group[1 : FEW + 1]}


def test_large_cause_is_not_counted_but_retried(
    operator: Client, group: list[Any], page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("8 open ones have this cause", "Retry all 8 at this pace")
    assert all(each in operator.get(page).content.decode() for each in words)
    monkeypatch.setattr(retry_sample, "MOST_COUNTED", 6)
    with CaptureQueriesContext(connection) as asked:
        shown = operator.get(page).content.decode()
    assert "More than 6 open ones have this cause" in shown
    assert "Retry all of them at this pace" in shown
    counts = [each["sql"] for each in asked if "COUNT(*)" in each["sql"] and "scheduling_failedtask" in each["sql"]]
    assert counts
    assert all("LIMIT 7" in each or "LIMIT 100" in each for each in counts)  # 100: of the badge in the menu
    operator.post(page, {"rest": "1", "reason": "mended", "per_second": "5"})
    assert again().count() == len(group)


def test_replay_needs_reason_and_pace(operator: Client, page: str) -> None:
    for given in ({"reason": "", "per_second": "5"}, {"reason": "x", "per_second": "0"}):
        assert operator.post(page, {"rest": "1", **given}).context["form"].errors
    assert not again().exists()


def test_viewer_cannot_open_the_replay_page(viewer: Client, group: list[Any], page: str, admin_url: Url) -> None:
    assert viewer.get(page).status_code == 403
    assert viewer.post(page, {"rest": "1", "reason": "x", "per_second": "5"}).status_code == 403
    assert page not in viewer.get(admin_url("failedtask_groups")).content.decode()
    assert page not in viewer.get(admin_url("failedtask_change", group[0].pk)).content.decode()
    assert not again().exists()


def test_replay_page_unknown_cause_is_not_found(operator: Client, admin_url: Url) -> None:
    FailedTask.objects.create(origin="message", failure="unreadable", reason="x", fingerprint="m" * 32)
    for fingerprint in ("m" * 32, "nobody"):
        assert operator.get(admin_url("failedtask_replay", fingerprint)).status_code == 404
    assert "retry in steps" not in operator.get(admin_url("failedtask_groups")).content.decode()
