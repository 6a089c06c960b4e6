"""No page mixes two languages."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.template.response import TemplateResponse
from django.test import Client, RequestFactory
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import override
from django.views.defaults import server_error
from django_celery_beat.models import CrontabSchedule, IntervalSchedule, PeriodicTask
from pytest_django import Settings

from rpa_tasks.jobs import wakeups
from rpa_tasks.models import ExecutionNode
from scheduling.management.commands.bootstrap import Command
from scheduling.models import BulkAction, Community, FailedTask, Pause
from tests.language.catalogue import CATALOGUES, entries
from tests.language.page_texts import every_page, words
from tests.rpa_tasks.admin.conftest import Market
from tests.scheduling.core.conftest import deliver
from tests.security import admin_pages
from tests.security.test_lookups import accepts, address
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db(transaction=True)

HAN = re.compile(r"[\u4e00-\u9fff]")
#: Names, in any language.
NAMES = {"JSON Schema", "command editor", "format: markdown", "Webhook", "Aftertouch", "简体中文", "English", "GitHub"}


@pytest.fixture(autouse=True)
def static_root(settings: Settings, tmp_path: Path) -> None:
    """WhiteNoise warns if no files are collected; the finders serve them here."""
    settings.STATIC_ROOT = tmp_path


@pytest.fixture
def all_model_rows(matrix: MatrixBuilder, record_event: RecordEvent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of everything. What would be words in a language is named by keys and numbers."""
    monkeypatch.setattr(wakeups.wakeup_publisher, "submit", lambda _: None)
    Command().grant_permissions()
    matrix.node("n1", template=matrix.template("t1", body="1"), rollout_percent=50, rollout_communities=["c1"])
    matrix.node("n2", trigger="order.paid", template=matrix.template("t2", body="{{ event.data.no }}"))
    for kind in ("material.downloaded", "order.paid", "complaint.received", "material.downloaded"):
        deliver(record_event(kind, user="u1", chat_id="c1", source="s0").task_ids)
    FailedTask.objects.update(detail="42")
    Community.objects.get_or_create(chat_id="c1")
    Pause.objects.create(scope="node:n1")
    market = Market()
    market.pdd.name, market.s1.name = "P1", "S1"
    market.pdd.save()
    market.s1.save()
    market.running("s1", message="1/2")
    market.waiting("s1", dedupe_key="a1")
    market.failed("s2", detail="42")
    ExecutionNode.objects.create(name="x1", seen_at=now(), started_at=now(), slots=5, queues=["high"])
    hourly = CrontabSchedule.objects.create(minute="0", day_of_week="1-5")
    PeriodicTask.objects.create(name="p1", task="scheduling.tasks.x", crontab=hourly)
    IntervalSchedule.objects.create(every=5, period="minutes")
    BulkAction.objects.create(
        action="retry", actor_name="u1", reason="1", filter={"state": "all"}, per_second=1, total=3, done=1
    )
    FailedTask.objects.create(origin="message", failure="unreadable", reason="not_json", fingerprint="f1")


def member(language: str, *, staff: bool = True) -> Client:
    client = Client(headers={"accept-language": language})
    client.cookies["django_language"] = language
    if staff:
        client.force_login(User.objects.create_superuser("u0", password="x"))
    return client


def english_in(said: str) -> str:
    """Two words in a row that are nothing but letters: no key, no name of a file, no address."""
    for part in re.split(r"[^\x21-\x7e ]+", said):
        row: list[str] = []
        for token in [*part.split(" "), ""]:
            if re.fullmatch(r"[(“\"']?[A-Za-z][a-z'’]+[)”\"',.:;!?]*", token):
                row.append(token)
                continue
            if len(row) > 1 and " ".join(row) not in NAMES:
                return " ".join(row)
            row = []
    return ""


def untranslated() -> set[str]:
    """Return single words of the catalogues that a Chinese page must translate."""
    found = {entry.said["msgid"] for path in CATALOGUES for entry in entries(path) if entry.said["msgid"].isalpha()}
    return {word for word in found if word.istitle() and len(word) > 3} - NAMES


#: The audit log shows titles and reasons in the language of the user who acted.
STORED_WORDS = "/admin/scheduling/auditentry/"


def read(client: Client, pages: list[str]) -> dict[str, str]:
    found = {}
    for page in pages:
        answer = client.get(page)
        if answer.status_code != 302 and "html" in answer.get("content-type", ""):
            found[page] = answer.content.decode()
    return found


@pytest.mark.usefixtures("all_model_rows")
def test_chinese_pages_show_no_english() -> None:
    known = untranslated()
    pages = read(member("zh-hans"), [page for page in every_page() if not page.startswith(STORED_WORDS)])
    assert len(pages) > 100
    said = {(each, page) for page, text in pages.items() for each in words(text)}
    foreign = sorted((text, page) for text, page in said if english_in(text) or text.rstrip(":") in known)
    assert foreign == [], "\n".join(f"{text}   {page}" for text, page in foreign)


def test_english_pages_show_no_chinese_and_link_to_lists_that_take_the_filter(
    matrix: MatrixBuilder, record_event: RecordEvent
) -> None:
    """Each link with a filter, and each choice of each filter. Of orders and pages one stands for all."""
    admin_pages.build(matrix, record_event)
    pages = read(member("en"), every_page())
    assert len(pages) > 150
    said = {(each, page) for page in pages if not page.startswith(STORED_WORDS) for each in words(pages[page])}
    assert sorted((text, page) for text, page in said if HAN.search(text) and text not in NAMES) == []
    links = list_filter_links(pages)
    assert len(links) > 40
    user = User.objects.get(username="u0")
    assert [link for link in sorted(links) if not accepts(user, link)] == []


def list_filter_links(pages: dict[str, str]) -> Iterable[str]:
    lists = {address(model) for model in admin.site._registry}
    links: dict[tuple[str, frozenset[tuple[str, str]]], str] = {}
    for page, text in pages.items():
        for found in re.findall(r'href="([^"]*\?[^"]+)"', text):
            path, _, query = html.unescape(found).partition("?")
            path = path or page.partition("?")[0]
            if path in lists:
                chosen = frozenset((name, "" if name in "op" else value) for name, value in parse_qsl(query, True))
                links[path, chosen] = f"{path}?{query}"
    return links.values()


def errors(language: str) -> dict[str, Any]:
    """Return the error pages by status."""
    stranger = member(language, staff=False)
    User.objects.create_user("u9", password="x", is_staff=True)
    nobody = member(language, staff=False)
    nobody.login(username="u9", password="x")
    strict = Client(enforce_csrf_checks=True, headers={"accept-language": language})
    strict.cookies["django_language"] = language
    with override(language):
        broken = server_error(RequestFactory().get("/"))
    return {
        "login": stranger.get(reverse("admin:login")),
        "refused": stranger.post(reverse("admin:login"), {"username": "u9", "password": "y"}),
        "403": nobody.get(reverse("admin:scheduling_node_changelist")),
        "403 csrf": strict.post(reverse("admin:login"), {}),
        "404": stranger.get("/nowhere"),
        "500": broken,
    }


@pytest.mark.parametrize("language", ["zh-hans", "en"])
def test_login_and_error_pages_use_one_language(language: str) -> None:
    answers = errors(language)
    assert [int(name[:3]) for name in answers if name[0].isdigit()] == [
        answer.status_code for name, answer in answers.items() if name[0].isdigit()
    ]
    for name, answer in answers.items():
        if isinstance(answer, TemplateResponse):
            answer.render()
        texts = words(answer.content.decode())
        assert len(texts) > 3, name
        foreign = [
            text for text in texts if text not in NAMES and (HAN.search(text) if language == "en" else english_in(text))
        ]
        assert foreign == [], name
