"""RPA on the overview."""

from datetime import timedelta

import pytest
from django.db import connection
from django.urls import reverse
from django.utils.timezone import now

from rpa_tasks.admin.dashboard import run_cache
from rpa_tasks.models import ExecutionNode, Job, Lane, LoginState, Run, Shop
from scheduling import sql
from scheduling.monitoring.statistics import HourlyCache, hours_between
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db


HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def cleared_hourly_cache():
    HourlyCache.clear_all()
    yield
    HourlyCache.clear_all()


def card_for(client):
    cards = read_context(client, reverse("admin:index"))["cards"]
    return next((card for card in cards if str(card.title) == "RPA"), None)


def test_card_shows_shops_jobs_and_browsers(market, viewer):
    due = {market.waiting("s1", priority=0).pk, market.waiting("s2", priority=0).pk}
    market.waiting("s2", priority=2, dedupe_key="b", delay=timedelta(hours=1))
    market.waiting("s2", priority=0, dedupe_key="dispatched before its time", delay=timedelta(seconds=20))
    Shop.objects.filter(shop_id="s2").update(login_state=LoginState.NEEDED)
    checked = market.shop("s3", login_state=LoginState.NEEDED)
    Lane.objects.filter(shop=checked).update(check_id=market.waiting("s3", priority=2, delay=HOUR).pk)
    for name, seen_at in (("n1", now()), ("gone", now() - timedelta(days=1))):
        ExecutionNode.objects.create(
            name=name, slots=5, seen_at=seen_at, started_at=seen_at,
            browsers=[{"state": "busy"}, {"state": "busy"}, {"state": "idle"}, {"state": "quarantined"}, {}],
        )  # fmt: skip
    card = card_for(viewer)
    assert card is not None
    told = {str(each.words): (each.value, each.tone) for each in card.figures}
    assert told == {
        "Shops": (3, ""), "Running": (0, ""), "Login needed": (1, "bad"),
        "Jobs due, High priority": ("2", ""), "Jobs due, Normal priority": ("0", ""),
        "Jobs due, Low priority": ("0", ""),
        "Execution nodes": (1, ""), "Browsers in use": ("2 / 5", ""), "Browsers pre-warmed": (1, ""),
        "Browsers quarantined": (1, "bad"),
    }  # fmt: skip
    links = {str(each.words): each.link for each in card.figures}
    assert {row.pk for row in read_context(viewer, links["Jobs due, High priority"])["cl"].result_list} == due
    assert {row.shop_id for row in read_context(viewer, links["Login needed"])["cl"].result_list} == {"s2"}


def test_shops_that_need_a_login_are_named_with_their_take_over(market, viewer, operator):
    for number in range(4):
        lost = now() - timedelta(hours=number)
        market.shop(f"x{number}", login_state=LoginState.NEEDED, login_lost_at=lost)
    links = {}
    for client in (operator, viewer):
        actions = read_context(client, reverse("admin:index"))["actions"]
        links[client] = [each.link for each in actions if "needs a login" in str(each.words)]
    shops = [Shop.objects.get(shop_id=f"x{number}").pk for number in (3, 2, 1, 0)]
    assert links[operator] == [reverse("admin:rpa_tasks_shop_take_over", args=[pk]) for pk in shops]
    assert links[viewer] == [reverse("admin:rpa_tasks_shop_change", args=[pk]) for pk in shops]


@pytest.fixture
def make_ended_run(market):
    """A run that ended in the hour before this one, or later."""
    here = now().replace(minute=0, second=0, microsecond=0)

    def make_ended_run(job, lease_no, outcome, at=-HOUR):
        return Run.objects.create(
            job=job, number=lease_no, lease_no=lease_no, started_at=here + at, ended_at=here + at, outcome=outcome
        )

    return make_ended_run


@pytest.mark.usefixtures("fixed_hour")
def test_card_charts_ended_runs_by_hour_and_outcome(market, make_ended_run, viewer):
    failed, done, cancelled = market.failed("s1"), market.waiting("s2"), market.waiting("s2", dedupe_key="b")
    Run.objects.all().delete()
    Job.objects.filter(pk=failed.pk).update(lease_no=3)
    Job.objects.filter(pk=done.pk).update(state="succeeded", lease_no=3, lease_until=None)
    for lease_no in (1, 2, 3):
        make_ended_run(failed, lease_no, "transient")
    for lease_no, outcome in ((1, "session"), (2, "held"), (3, "succeeded")):
        make_ended_run(done, lease_no, outcome)
    make_ended_run(cancelled, 1, "cancelled")
    make_ended_run(done, 0, "transient", at=-30 * HOUR)
    card = card_for(viewer)
    assert card is not None
    (chart,) = card.charts
    assert [str(series.words) for series in chart.series] == ["Done", "Tried again", "Cancelled", "Failed"]
    assert [count for count, _ in chart.rows[-2][1]] == [1, 3, 1, 1]
    assert [count for _, count, _ in chart.legend] == [1, 3, 1, 1]
    links = {series.key: link for series, _, link in chart.legend}
    assert {key for key, link in links.items() if link} == {"failed"}
    assert [row.task_id for row in read_context(viewer, links["failed"])["cl"].result_list] == [failed.pk]
    text = viewer.get(reverse("admin:index")).content.decode()
    assert 'href=""' not in text


@pytest.mark.usefixtures("fresh_tables")
def test_count_of_ended_runs_uses_index(market, monkeypatch):
    plans = []
    rows = sql.rows

    def explained(statement, parameters):
        plans.extend(str(row[0]) for row in rows(f"EXPLAIN {statement}", parameters))
        return rows(statement, parameters)

    monkeypatch.setattr(sql, "rows", explained)
    job = market.waiting("s1")
    Run.objects.bulk_create(
        Run(job=job, number=n, lease_no=n, started_at=now() - n * HOUR, ended_at=now() - n * HOUR, outcome="succeeded")
        for n in range(3_000)
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE rpa_tasks_run")
    since = now() - HOUR
    assert list(run_cache.read(since, now())) == hours_between(since, now())
    assert "rpa_run_ended" in "\n".join(plans)
