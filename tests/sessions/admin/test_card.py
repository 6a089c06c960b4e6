"""Live chats on the overview."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import RequestFactory

from sessions import reports, store
from sessions.cards import card
from sessions.reports import Report

pytestmark = pytest.mark.django_db


@pytest.fixture
def request_of_ops(rf: RequestFactory) -> Any:
    request = rf.get("/admin/")
    request.user = User.objects.create_superuser("ops", password="x")
    return request


def told(request: Any) -> dict[str, tuple[Any, str]]:
    found = card(request)
    assert found is not None
    return {str(each.words): (each.value, each.tone) for each in found.figures}


def test_chats_and_watchers_are_counted(chats: Any, request_of_ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "live", lambda: chats.store)
    for session in ("s1", "s2"):
        chats.user(session)
    alone = card(request_of_ops)
    assert alone is not None
    assert alone.note
    reports.send(chats.store, Report(), (), waits=False)
    found = list(told(request_of_ops).values())
    assert [value for value, _tone in found] == [2, 0, 0, 1]
    assert [tone for _value, tone in found] == ["", "", "", ""]


def test_watchers_that_fall_behind_are_told(chats: Any, request_of_ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "live", lambda: chats.store)
    chats.user("s1")
    chats.pass_time(300)
    assert [tone for _value, tone in told(request_of_ops).values()][-1] == "bad"


def test_a_store_that_is_away_costs_the_card_only(request_of_ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    away = store._on("redis://127.0.0.1:1/0")
    monkeypatch.setattr(store, "live", lambda: away)
    found = card(request_of_ops)
    assert found is not None
    assert found.note
    assert found.figures == []
