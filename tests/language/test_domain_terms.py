"""Jobs have their own words beside messages, in failed tasks and schedules."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from django.utils.translation import override
from django_celery_beat.models import CrontabSchedule
from pytest_django import Settings

from rpa_tasks.jobs import wakeups
from scheduling.admin.failed_tasks.actions import FAILED_TASK_ACTIONS
from scheduling.admin.system.schedule import describe_crontab
from scheduling.models import FailedTask
from tests.language.catalogue import CATALOGUES, entries
from tests.language.page_texts import words
from tests.rpa_tasks.admin.conftest import Market
from tests.scheduling.core.conftest import deliver
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)
OF_TOUCHES = ("customer", "deliver", "receiver", "sent", "arrive")


@pytest.fixture
def ops(settings: Settings, tmp_path: Path) -> Client:
    settings.STATIC_ROOT = tmp_path
    client = Client()
    client.cookies["django_language"] = "en"
    client.force_login(User.objects.create_superuser("ops", password="x"))
    return client


@pytest.fixture
def job(db: None, monkeypatch: pytest.MonkeyPatch) -> FailedTask:
    """A run of unknown effect, so that every button is there."""
    monkeypatch.setattr(wakeups.wakeup_publisher, "submit", lambda _: None)
    Market().failed("s1", detail="42")
    row = FailedTask.objects.get()
    row.failure = "unknown"
    row.save()
    return row


@pytest.fixture
def touch(matrix: MatrixBuilder, record_event: RecordEvent) -> FailedTask:
    matrix.node("n1", template=matrix.template("t1", body="{{ event.data.no }}"))
    deliver(record_event().task_ids)
    return FailedTask.objects.get()


def english(said: object) -> str:
    """A request leaves the language that it was answered in behind."""
    with override("en"):
        return str(said)


def page(ops: Client, row: FailedTask, verb: str) -> str:
    answer = ops.get(reverse("admin:scheduling_failedtask_act", args=[row.pk, verb]))
    assert answer.status_code == 200
    return " ".join(words(answer.content.decode()))


@each_row("verb", FAILED_TASK_ACTIONS)
def test_job_actions_are_described_as_runs(ops: Client, job: FailedTask, verb: str) -> None:
    said = FAILED_TASK_ACTIONS[verb].for_origins(job.origin)
    text = f"{english(said.title)} {english(said.explains)}".lower()
    assert [word for word in OF_TOUCHES if word in text.replace("delivery key", "")] == []
    assert english(said.explains) in page(ops, job, verb)


@each_row("verb", ["retry", "again", "ignore"])
def test_touch_actions_are_described_as_messages(ops: Client, touch: FailedTask, verb: str) -> None:
    assert FAILED_TASK_ACTIONS[verb].for_origins(touch.origin) == FAILED_TASK_ACTIONS[verb]
    assert english(FAILED_TASK_ACTIONS[verb].explains) in page(ops, touch, verb)


def test_mixed_bulk_actions_use_the_general_text() -> None:
    assert FAILED_TASK_ACTIONS["ignore"].for_origins("touch", "rpa_job") == FAILED_TASK_ACTIONS["ignore"]
    assert FAILED_TASK_ACTIONS["ignore"].for_origins("rpa_job") != FAILED_TASK_ACTIONS["ignore"]


@pytest.mark.parametrize(("act", "state"), [("delivered", "succeeded"), ("not_delivered", "no effect")])
def test_resolved_job_shows_effect_or_no_effect(ops: Client, job: FailedTask, act: str, state: str) -> None:
    ops.post(reverse("admin:scheduling_failedtask_act", args=[job.pk, act]), {"reason": "looked it up"})
    said = " ".join(words(ops.get(reverse("admin:scheduling_failedtask_change", args=[job.pk])).content.decode()))
    assert f"Resolved: {state}" in said
    job.refresh_from_db()
    assert job.state == f"resolved_{act}"


@each_row(
    "language, said",
    [
        ("zh-hans", "每 5 分钟，在 09:00 和 18:59 之间，星期一到星期五 (Asia/Shanghai)"),
        ("en", "Every 5 minutes, between 09:00 and 18:59, Monday through Friday (Asia/Shanghai)"),
    ],
)
def test_crontab_is_described_in_reader_language(language: str, said: str) -> None:
    row = CrontabSchedule(minute="*/5", hour="9-18", day_of_week="1-5", timezone="Asia/Shanghai")
    with override(language):
        assert describe_crontab(row) == said


@each_row("term", ["通道", "静默"])
def test_chinese_uses_one_term_for_channel_and_silence(term: str) -> None:
    """A lane is 店铺通道 or 接收通道; a way to reach a receiver is 渠道, the end of a timer 沉默."""
    used = [text for path in CATALOGUES for entry in entries(path) for text in entry.translations if term in text]
    assert [text for text in used if not any(lane in text for lane in ("店铺通道", "接收通道"))] == []


def test_chinese_names_a_chat_id_by_its_community() -> None:
    said = {entry.word[1]: entry.translations for path in CATALOGUES for entry in entries(path)}
    chats = {text: words for text, words in said.items() if "chat id" in text.lower()}
    assert len(chats) > 3
    assert [words for words in chats.values() if "会话 ID" in "".join(words)] == []
