"""Live chats on the overview."""

from datetime import timedelta
from uuid import UUID

import pytest
from django.contrib.auth.models import User
from django.utils.timezone import now

from scheduling.ids import first_id_at
from scheduling.models import Customer, Event, EventType, Touch
from scheduling.monitoring.statistics import HourlyCache
from sessions.admin.dashboard import live_chats_card
from sessions.detection.presence import SILENT
from sessions.store import sessions, stats
from sessions.store.stats import WatcherReport

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def cleared_hourly_cache():
    HourlyCache.clear_all()
    yield
    HourlyCache.clear_all()


@pytest.fixture
def ops_request(rf):
    request = rf.get("/admin/")
    request.user = User.objects.create_superuser("ops", password="x")
    return request


def told(request):
    found = live_chats_card(request)
    assert found is not None
    return {str(each.words): (each.value, each.tone) for each in found.figures}


def test_card_counts_chats_and_marks_missing_and_late_watchers(chats, ops_request, monkeypatch):
    monkeypatch.setattr(sessions, "live_store", lambda: chats.store)
    for session in ("s1", "s2"):
        chats.user(session)
    alone = live_chats_card(ops_request)
    assert alone is not None
    assert alone.note
    stats.send_report(chats.store, WatcherReport(), waits=False)
    assert list(told(ops_request).values()) == [(2, ""), (0, ""), (0, ""), (1, "")]
    chats.pass_time(300)
    assert [tone for _value, tone in told(ops_request).values()][-1] == "bad"


@pytest.mark.usefixtures("fixed_hour")
def test_card_charts_silences_and_guide_messages_by_hour(ops_request, monkeypatch, client, matrix):
    monkeypatch.setattr(sessions, "live_store", lambda: sessions._store_of_url("redis://127.0.0.1:1/0"))
    here = now().replace(minute=0, second=0, microsecond=0)
    ann = Customer.objects.create(user_id="ann")
    EventType.objects.create(key=SILENT)
    for number, (kind, hours) in enumerate([(SILENT, 1), (SILENT, 1), ("order.paid", 1), (SILENT, 30)]):
        at = here - timedelta(hours=hours)
        Event.objects.create(
            id=UUID(int=first_id_at(at).int + number), source="s", event_id=str(number), type=kind, customer=ann,
            user_id="ann", occurred_at=at, received_at=at,
        )  # fmt: skip
    guide, other = matrix.node("guide", SILENT), matrix.node("other", "order.paid")
    off, retired = matrix.node("off", SILENT, enabled=False), matrix.node("retired", SILENT, retired_at=now())
    event = Event.objects.first()
    for node, state, minutes, count in (
        (guide, "delivered", -60, 1), (guide, "delivered", -5, 1), (guide, "delivered", 0, 4),
        (guide, "delivered", -65, 7), (guide, "suppressed", -5, 1), (other, "delivered", -5, 1),
        (off, "delivered", -60, 1), (off, "delivered", -5, 1), (retired, "delivered", -5, 1),
    ):  # fmt: skip
        at = here + timedelta(minutes=minutes)
        Touch.objects.bulk_create(
            Touch(event=event, node=node, customer=ann, node_version=1, state=state, due_at=at, planned_at=at,
                  expires_at=at, settled_at=at)
            for _ in range(count)
        )  # fmt: skip
    found = live_chats_card(ops_request)
    assert found is not None
    (chart,) = found.charts
    told = [[count for count, _ in cells] for _, cells in chart.rows[-3:]]
    assert told == [[0, 7], [2, 5], [0, 4]]
    assert [count for _, count, _ in chart.legend] == [2, 16]
    client.force_login(ops_request.user)
    (count, link), _ = chart.rows[-2][1]
    # A link filters by one node, and three sent the messages of the second bar.
    assert [bool(link) for _, (_, (_, link)) in chart.rows[-3:]] == [True, False, True]
    rows = client.get(link).context["cl"].result_list
    assert (count, [row.type for row in rows]) == (2, [SILENT] * 2)


def test_card_without_store_shows_a_note(ops_request, monkeypatch):
    away = sessions._store_of_url("redis://127.0.0.1:1/0")
    monkeypatch.setattr(sessions, "live_store", lambda: away)
    found = live_chats_card(ops_request)
    assert found is not None
    assert found.note
    assert found.figures == []
