"""The overview: its counts, its links, and its text during outages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from celery import current_app
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils.timezone import localtime, now
from pytest_django import DjangoAssertNumQueries, Settings

from scheduling.admin.dashboard.charts import (
    COLOURS,
    Chart,
    DashboardCard,
    Figure,
)
from scheduling.ids import first_id_at
from scheduling.models import Customer, Event, EventType, Touch
from scheduling.monitoring import statistics
from scheduling.monitoring.statistics import HourlyCache
from tests.support.matrix import MatrixBuilder
from tests.support.tables import each_row
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db

RecordEvent = Callable[..., Any]
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


@pytest.fixture
def touch(matrix: MatrixBuilder, record_event: RecordEvent) -> Callable[..., Touch]:
    """Create a touch with these values."""
    matrix.node(delay=HOUR)
    matrix.node("paid", trigger="order.paid", delay=HOUR)

    def touch(state: str = "scheduled", *, ago: timedelta | None = None, **changes: Any) -> Touch:
        (task_id,) = record_event(changes.pop("type", "material.downloaded")).task_ids
        if ago is not None:
            at = now() - ago
            changes |= {"settled_at": at, "sending_at": at, "due_at": at, "lease_until": None}
        if state in ("queued", "running"):
            changes |= {"lease_until": now() + HOUR}
        Touch.objects.filter(pk=task_id).update(state=state, **changes)
        return Touch.objects.get(pk=task_id)

    return touch


@pytest.fixture
def store_event() -> Callable[..., Event]:
    """An event that was taken in at an instant."""
    customer = Customer.objects.create(user_id="taken")

    def store_event(at: datetime, **facts: Any) -> Event:
        number = Event.objects.count()
        name = {"source": "shop", "event_id": str(number), "type": "material.downloaded", "user_id": "taken"} | facts
        key = UUID(int=first_id_at(at).int + number)
        found: Event = Event.objects.create(id=key, customer=customer, occurred_at=at, received_at=at, **name)
        return found

    return store_event


def chart_of(client: Client, key: str, days: int = 1) -> Chart:
    found = page(client, days)
    return next(each for each in [*found["charts"], *found["more_charts"]] if each.key == key)


def page(client: Client, days: int = 1) -> Any:
    return read_context(client, reverse("admin:index"), {"days": days})


def values(figures: list[Figure]) -> dict[str, Any]:
    return {str(each.words): each.value for each in figures}


def link_of(figures: list[Figure], words: str) -> str:
    return next(each.link for each in figures if str(each.words) == words)


def rows(client: Client, link: str) -> set[Any]:
    return {row.pk for row in read_context(client, link)["cl"].result_list}


# --- numbers and where they lead -------------------------------------------------------------------------------------


def test_figures_link_to_their_rows(touch: Callable[..., Touch], viewer: Client) -> None:
    delivered = {touch("delivered", ago=5 * MINUTE).pk for _ in range(3)}
    failed = {touch("failed", ago=2 * HOUR).pk, touch("unknown", ago=3 * HOUR).pk}
    touch("delivered", ago=30 * HOUR)
    late = {touch(due_at=now() - 2 * HOUR).pk, touch("queued", due_at=now() - HOUR).pk}
    soon = touch(due_at=now() + 30 * MINUTE).pk
    touch(due_at=now() + 90 * MINUTE)
    touch(due_at=now() - 3 * HOUR, paused_by="all")
    found = page(viewer)
    figures = found["figures"]
    assert values(figures) == {"Due within the hour": "2", "Overdue": "2", "Open failed tasks": "0"}
    sums = {series.key: (count, link) for series, count, link in found["charts"][0].legend}
    assert {key: count for key, (count, _) in sums.items()} == {
        "delivered": 3, "suppressed": 0, "cancelled": 0, "failed": 1, "unknown": 1,
    }  # fmt: skip
    assert rows(viewer, sums["delivered"][1]) == delivered
    assert rows(viewer, sums["failed"][1]) | rows(viewer, sums["unknown"][1]) == failed
    assert rows(viewer, link_of(figures, "Overdue")) == late
    assert soon in rows(viewer, link_of(figures, "Due within the hour"))
    assert len(rows(viewer, link_of(figures, "Due within the hour"))) == 2
    hint = next(str(each.hint) for each in figures if str(each.words) == "Overdue")
    assert hint.startswith("the oldest for 2 hours")


@pytest.mark.usefixtures("fixed_hour")
def test_week_chart_counts_by_day(touch: Callable[..., Touch], viewer: Client) -> None:
    wanted = {touch("suppressed", ago=DAY * days, reason="cap").pk for days in (1, 3, 5)}
    touch("suppressed", ago=9 * DAY, reason="cap")
    found = page(viewer, 7)
    ended, reasons = found["charts"]
    assert len(ended.spans) == 7
    assert [(str(series.words), count) for series, count, _ in reasons.legend] == [("Customer's limit reached", 3)]
    assert [sum(count for count, _ in cells) for _, cells in reasons.rows] == [0, 1, 0, 1, 0, 1, 0]
    assert rows(viewer, reasons.legend[0][2]) == wanted
    (_, link) = reasons.rows[1][1][0]
    assert len(rows(viewer, link)) == 1


@pytest.mark.usefixtures("fixed_hour")
def test_chart_columns_link_to_their_hour(touch: Callable[..., Touch], viewer: Client) -> None:
    here = now().replace(minute=0, second=0, microsecond=0)
    edges = [here - HOUR, here - timedelta(microseconds=1), here]
    first, second, present = (touch("delivered", ago=now() - at).pk for at in edges)
    for pk, at in zip((first, second, present), edges, strict=True):
        Touch.objects.filter(pk=pk).update(settled_at=at)
    ended = page(viewer)["charts"][0]
    delivered = [cells[0] for _, cells in ended.rows]
    assert (delivered[-2][0], delivered[-1][0]) == (2, 1)
    assert rows(viewer, delivered[-2][1]) == {first, second}
    assert rows(viewer, delivered[-1][1]) == {present}
    data = json.loads(ended.data)
    drawn = data["datasets"][0]
    assert (drawn["label"], drawn["data"], drawn["links"][-1]) == ("Delivered", [0] * 22 + [2, 1], delivered[-1][1])
    assert data["labels"][-1] == f"{localtime(here):%m-%d %H:%M}"


@pytest.mark.usefixtures("fixed_hour")
def test_lateness_chart_shows_hourly_quantiles(touch: Callable[..., Touch], viewer: Client) -> None:
    for hours, late in ((1, timedelta(milliseconds=200)), (1, timedelta(0)), (1, timedelta(0)), (3, 5 * MINUTE)):
        row = touch("delivered", ago=hours * HOUR)
        Touch.objects.filter(pk=row.pk).update(due_at=row.sending_at - late)
    chart = chart_of(viewer, "lateness")
    assert [told for told, _ in chart.rows[-2][1]] == ["1 ms", "200 ms"]
    assert [told for told, _ in chart.rows[-1][1]] == ["–", "–"]
    assert [told for told, _ in chart.rows[-4][1]] == ["301.4 s", "301.4 s"]  # to within 3 in 100
    assert [told for _, told, _ in chart.legend] == ["1 ms", "301.4 s"]
    colours = [each["backgroundColor"] for each in json.loads(chart.data)["datasets"][:2]]
    assert {each[-4] for each in colours} == {COLOURS["bad"]}
    assert {each[-2] for each in colours} == {COLOURS["hue0"], COLOURS["hue1"]}
    assert len(rows(viewer, chart.rows[-2][1][0][1])) == 3
    assert "Goal: P99 within 3 seconds." in viewer.get(reverse("admin:index")).content.decode()


@pytest.mark.usefixtures("fixed_hour")
def test_failure_chart_counts_by_hour_and_cause(touch: Callable[..., Touch], viewer: Client) -> None:
    wanted = {touch("failed", ago=2 * HOUR, reason="timeout").pk, touch("unknown", ago=2 * HOUR, reason="timeout").pk}
    for _ in range(4):
        touch("failed", ago=HOUR, reason="timeout")
    touch("suppressed", ago=2 * HOUR, reason="cap")
    for number in range(6):
        for _ in range(6 - number if number < 4 else 1):
            touch("failed", ago=MINUTE, reason=f"vendor_{number}")
    chart = chart_of(viewer, "failures")
    told = [(str(series.words), count) for series, count, _ in chart.legend]
    assert [count for _, count in told] == [6, 6, 5, 4, 3, 1 + 1]
    assert told[-1][0] == "Other reasons"
    ((link,),) = [[link for count, link in chart.rows[-3][1] if count]]
    assert rows(viewer, link) == wanted
    assert len(chart_of(viewer, "failures", days=7).spans) == 7


@pytest.mark.usefixtures("fixed_hour")
def test_event_chart_counts_by_hour_and_type(store_event: Callable[..., Event], viewer: Client) -> None:
    here = now().replace(minute=0, second=0, microsecond=0)
    for number in range(6):
        store_event(here, type=f"rare.{number}")
    before = {store_event(here - timedelta(milliseconds=1)).pk, store_event(here - HOUR).pk}
    store_event(here - HOUR - timedelta(milliseconds=1))
    store_event(here, type="order.paid")
    store_event(here - 30 * HOUR)
    EventType.objects.create(key="material.downloaded", name="Catalogue fetched")
    chart = chart_of(viewer, "events")
    told = [(str(series.words), count) for series, count, _ in chart.legend]
    assert (told[0], told[-1], len(told)) == (("Catalogue fetched", 3), ("Other types", 3), 6)
    count, link = chart.rows[-2][1][0]
    assert (count, rows(viewer, link)) == (2, before)
    assert len(rows(viewer, chart.legend[0][2])) == 3
    assert sum(count for count, _ in chart.rows[-1][1]) == 7


def test_unreachable_broker_keeps_the_charts(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_app.conf, "broker_url", "redis://127.0.0.1:1/0")
    found = page(viewer)
    assert "The broker does not respond." in [str(each.words) for each in found["actions"]]
    assert len(found["charts"]) == 2


# --- where something is missing ---------------------------------------------------------------------------------------


def test_slow_count_is_shown_as_gap(viewer: Client, settings: Settings) -> None:
    settings.TIMEOUTS = replace(settings.TIMEOUTS, overview=0.0)
    answer = viewer.get(reverse("admin:index"))
    assert answer.status_code == 200
    assert {each.value for each in answer.context["figures"]} == {None}
    assert set(json.loads(answer.context["charts"][0].data)["datasets"][0]["data"]) == {None}
    assert "Missing bars are not counted yet" in answer.content.decode()
    assert "too much to count now" in answer.content.decode()


def test_slow_statement_is_cancelled(monkeypatch: pytest.MonkeyPatch, settings: Settings, viewer: Client) -> None:
    def slow() -> Any:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(60)")

    monkeypatch.setattr(statistics, "count_overdue", slow)
    settings.TIMEOUTS = replace(settings.TIMEOUTS, overview=0.3)
    assert values(page(viewer)["figures"])["Overdue"] is None


@each_row("past", [statistics.ended_cache, statistics.lateness_cache, statistics.event_cache])
def test_hourly_cache_reads_past_hours_once(
    past: HourlyCache,
    touch: Callable[..., Touch],
    store_event: Callable[..., Event],
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    store_event(now() - 5 * HOUR)
    touch("delivered", ago=5 * HOUR)
    at = now().replace(minute=0, second=0, microsecond=0)
    hours = [at - HOUR * back for back in range(1, 24)]

    def count(read: Callable[[], Any]) -> Any:
        return read()

    later = at + 10 * MINUTE
    first = past.hours(hours, later, count)
    with django_assert_num_queries(0):
        assert past.hours(hours, later, count) == first
    assert sum(sum(tally.values()) for tally in first.values() if tally) == 1
    with django_assert_num_queries(4):  # they are not believed for ever
        past.hours(hours, later + HourlyCache.KEPT, count)


def test_failing_card_keeps_other_cards(integrate: Callable[..., None], viewer: Client) -> None:
    integrate(cards=(broken, hidden, whole))
    others = page(viewer)["cards"]
    assert [(str(card.title), bool(card.note)) for card in others] == [(__name__.split(".")[0], True), ("Whole", False)]


def broken(request: Any) -> DashboardCard | None:
    raise RuntimeError("no")


def hidden(request: Any) -> DashboardCard | None:
    return None


def whole(request: Any) -> DashboardCard | None:
    return DashboardCard("Whole", [Figure("a", 1)])


def test_overview_hides_parts_without_permission(as_member: Callable[[str], Client]) -> None:
    client = as_member("viewer")
    user = User.objects.get(username="viewer")
    user.groups.clear()
    found = client.get(reverse("admin:index"))
    assert found.status_code == 200
    assert (found.context["figures"], found.context["cards"]) == ([], [])
    assert "charts" not in found.context
    user.user_permissions.set(Permission.objects.filter(codename="view_touch"))
    charts = [chart.key for chart in page(client)["more_charts"]]
    assert (charts[0], "events" in charts) == ("lateness", False)


# --- the drawing ------------------------------------------------------------------------------------------------------


def test_charts_have_text_alternatives(touch: Callable[..., Touch], viewer: Client) -> None:
    touch("delivered", ago=5 * MINUTE)
    text = viewer.get(reverse("admin:index")).content.decode()
    assert re.search(r'<canvas[^>]+role="img" aria-labelledby="chart-ended"', text)
    assert '<table class="at-grid-table">' in text
    board = text[text.index('id="dashboard"') :]
    assert not re.search(r'\s(style|on\w+)="|<script', board[: board.index("</section>\n</div>")])


# --- many rows --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_tables")
@pytest.mark.parametrize(
    ("read", "index", "rival"),
    [
        (lambda: statistics.ended_cache.read(now() - HOUR, now()), "touch_ended", ""),
        (lambda: statistics.lateness_cache.read(now() - HOUR, now()), "touch_ended", ""),
        (lambda: statistics.event_cache.read(now() - 6 * HOUR, now()), "scheduling_event_pkey", "event_of_type"),
    ],
)
def test_overview_figures_use_indexes(
    read: Callable[[], Any], index: str, rival: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few rows there are here, an index fits, and nothing reads the whole table."""
    plans = []
    rows = statistics.sql.rows

    def explained(statement: str, parameters: Any) -> Any:
        plans.extend(str(row[0]) for row in rows(f"EXPLAIN {statement}", parameters))
        return rows(statement, parameters)

    monkeypatch.setattr(statistics.sql, "rows", explained)
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        if rival:  # with few rows both indexes cost the same, and the choice depends on the last vacuum
            cursor.execute(f"DROP INDEX {rival}")
    read()
    assert index in "\n".join(plans)
    assert "Seq Scan on scheduling_" not in "\n".join(plans)
