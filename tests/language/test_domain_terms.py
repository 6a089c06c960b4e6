"""Jobs have their own words beside messages, in failed tasks and schedules."""

import pytest
from django.urls import reverse
from django.utils.translation import override
from django_celery_beat.models import CrontabSchedule

from rpa_tasks.jobs import wakeups
from scheduling.admin.system.schedule import describe_crontab
from scheduling.models import FailedTask
from scheduling.operations.bulk_actions import FAILED_TASK_ACTIONS
from tests.language.catalogue import CATALOGUES, entries
from tests.language.page_texts import words
from tests.rpa_tasks.admin.conftest import Market
from tests.scheduling.core.conftest import deliver
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)
OF_TOUCHES = ("customer", "deliver", "receiver", "sent", "arrive")


@pytest.fixture
def ops(as_member):
    return as_member("admin")


@pytest.fixture
def job(db, monkeypatch):
    """A run of unknown effect, so that every button is there."""
    monkeypatch.setattr(wakeups.wakeup_publisher, "submit", lambda _: None)
    Market().failed("s1", detail="42")
    row = FailedTask.objects.get(origin="rpa_job")
    row.failure = "unknown"
    row.save()
    return row


@pytest.fixture
def touch(matrix, record_event):
    matrix.node("n1", template=matrix.template("t1", body="{{ event.data.no }}"))
    deliver(record_event().task_ids)
    return FailedTask.objects.get(origin="touch")


def page(ops, row, verb):
    answer = ops.get(reverse("admin:scheduling_failedtask_act", args=[row.pk, verb]))
    return " ".join(words(answer.content.decode()))


@override("en")
def test_job_actions_are_described_as_runs():
    for verb, deed in FAILED_TASK_ACTIONS.items():
        said = deed.for_origins("rpa_job")
        text = f"{said.title} {said.explains}".lower().replace("delivery key", "")
        assert [word for word in OF_TOUCHES if word in text] == [], verb
        assert deed.for_origins("touch") == deed.for_origins("touch", "rpa_job") == deed


def test_pages_of_actions_describe_runs_or_messages(ops, job, touch):
    for row in (job, touch):
        said = FAILED_TASK_ACTIONS["retry"].for_origins(row.origin).explains
        with override("en"):
            assert str(said) in page(ops, row, "retry")


@pytest.mark.parametrize(("act", "state"), [("delivered", "succeeded"), ("not_delivered", "no effect")])
def test_resolved_job_shows_effect_or_no_effect(ops, job, act, state):
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
def test_crontab_is_described_in_reader_language(language, said):
    row = CrontabSchedule(minute="*/5", hour="9-18", day_of_week="1-5", timezone="Asia/Shanghai")
    with override(language):
        assert describe_crontab(row) == said


def test_chinese_has_one_term_for_each_concept():
    """A lane is 店铺通道 or 接收通道; a way to reach a receiver is 渠道, the end of a timer 沉默, a chat id 社群 ID."""
    said = {entry.word[1]: entry.translations for path in CATALOGUES for entry in entries(path)}
    texts = [text for translations in said.values() for text in translations]
    other = [text.replace("店铺通道", "").replace("接收通道", "") for text in texts]
    assert [text for text in other if "通道" in text or "静默" in text] == []
    chats = {text: words for text, words in said.items() if "chat id" in text.lower()}
    assert len(chats) > 3
    assert [words for words in chats.values() if "会话 ID" in "".join(words)] == []
