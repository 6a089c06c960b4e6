"""The state of shops over HTTP, and what a person does to them."""

from datetime import UTC, datetime

import psycopg
import pytest
from django.db import transaction
from django.utils.timezone import now

from rpa_tasks.jobs import shops
from rpa_tasks.jobs.publish import PublishRequest, publish_job
from rpa_tasks.models import Breaker, ExecutionNode, Job, Lane, Platform, Shop
from scheduling.ids import new_id
from tests.scheduling.api.serving import database_url
from tests.support.second_connection import run_concurrently
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)


def test_list_shops_returns_login_pause_and_jobs(api, market):
    running = new_id()
    Shop.objects.filter(pk=market.s1.pk).update(login_state="needed", login_lost_at=AT, paused=True)
    Platform.objects.update(paused=True)
    Breaker.objects.update(open_until=AT)
    Lane.objects.filter(shop=market.s1).update(task_id=running, last_success_at=AT, last_served_at=AT)
    for number in range(3):
        Job.objects.create(shop=market.s1, flow=market.sync, due_at=AT, planned_at=AT, dedupe_key=str(number))
    Job.objects.filter(dedupe_key="2").update(state="failed")

    first, second = api.get("/rpa/shops").json()["items"]

    at = "2026-03-01T12:00:00Z"
    assert first == {
        "platform": "pdd", "shop_id": "s1", "name": "", "login": "needed", "login_lost_at": at, "paused": True,
        "platform_paused": True, "breaker_open_until": at, "dedicated_queue": False, "waiting": 2,
        "running": str(running), "last_served_at": at, "last_success_at": at,
    }  # fmt: skip
    assert (second["shop_id"], second["login"], second["waiting"], second["running"]) == ("s2", "ok", 0, None)


def test_list_shops_filters_and_pages(api, market):
    temu = Platform.objects.create(key="temu")
    market.shop("t1", platform=temu, login_state="needed")
    market.shop("gone", retired_at=AT)

    def found(**query):
        return [item["shop_id"] for item in api.get("/rpa/shops", **query).json()["items"]]

    assert found() == ["s1", "s2", "t1"]
    assert found(platform="temu") == found(login="needed") == ["t1"]
    page = api.get("/rpa/shops", limit=2).json()
    assert [item["shop_id"] for item in page["items"]] == ["s1", "s2"]
    assert found(limit=2, cursor=page["next"]) == ["t1"]
    job = Job.objects.create(shop=market.s1, flow=market.sync, due_at=AT, planned_at=AT)
    Job.objects.create(shop=market.s2, flow=market.sync, due_at=AT, planned_at=AT)
    foreign = api.get("/rpa/jobs", limit=1).json()["next"]
    assert api.get("/rpa/shops", cursor=foreign).status_code == 422, job
    assert api.get("/rpa/shops", login="maybe").status_code == 422


def test_logged_in_request_counts_or_starts_the_check_of_the_platform(api, market):
    needed = {"login_state": "needed", "login_lost_at": AT}
    Shop.objects.filter(pk=market.s1.pk).update(**needed)
    answer = api("POST", "/rpa/shops/pdd/s1/logged-in")
    assert (answer.status_code, answer.json()["login"], answer.json()["login_lost_at"]) == (200, "ok", None)
    assert market.s1.history.latest().history_change_reason == "logged in by api:shop"

    Platform.objects.update(check_task_type="sync_order")
    Shop.objects.filter(pk=market.s1.pk).update(**needed)
    for _ in range(2):
        assert api("POST", "/rpa/shops/pdd/s1/logged-in").json()["login"] == "checking"
    assert Job.objects.get().source == "login check by api:shop"
    assert api.get("/rpa/shops").json()["items"][0]["login"] == "checking"
    assert api.get("/rpa/shops", login="needed").json()["items"] == []


def test_nodes_are_listed_drained_and_resumed(api, market):
    ExecutionNode.objects.create(name="n1", seen_at=now(), started_at=AT, slots=3, queues=["high", "n.n1.high"])
    Lane.objects.filter(shop=market.s1).update(home="n1")
    Job.objects.create(shop=market.s1, flow=market.sync, due_at=AT, planned_at=AT)
    Job.objects.create(
        shop=market.s2, flow=market.sync, due_at=AT, planned_at=AT, state="running", node="n1", lease_until=now()
    )
    (node,) = api.get("/rpa/nodes").json()["items"]
    load = {"running": 1, "take_overs": 0, "pinned": 1, "waiting": 1, "empty": False, "slots": 3}
    assert node.items() >= {**load, "name": "n1", "reports": True, "free_slots": 2, "draining_at": None}.items()
    assert node["queues"] == ["high"]
    for _ in range(2):
        drained = api("POST", "/rpa/nodes/n1/drain").json()
        assert drained.items() >= {**load, "free_slots": 0, "drained_by": "api:shop"}.items()
    for _ in range(2):
        assert api("POST", "/rpa/nodes/n1/resume").json()["draining_at"] is None
    assert api("POST", "/rpa/nodes/n9/drain").status_code == 404


def send_until_free(send):
    """Send the request, and again as long as the answer is that another one holds the row: on a slow machine it does
    for more than a second."""
    while (answer := send()).status_code == 503:
        assert "Another transaction" in answer.text
    return answer


def test_concurrent_pause_requests_record_one_change(api, market):
    answers = run_concurrently(8, lambda _: send_until_free(lambda: api("POST", "/rpa/shops/pdd/s1/pause")))
    assert {(answer.status_code, answer.json()["paused"]) for answer in answers} == {(200, True)}
    assert api("POST", "/rpa/shops/pdd/s1/resume").json()["paused"] is False
    said = list(market.s1.history.order_by("pk").values_list("history_change_reason", "version"))
    assert said[1:] == [("paused by api:shop", 2), ("resumed by api:shop", 3)]


def test_action_on_unknown_shop_returns_404(api, market):
    market.shop("gone", retired_at=AT)
    for action in ("logged-in", "pause", "resume"):
        for path in ("pdd/s9", "temu/s1", "pdd/gone"):
            assert api("POST", f"/rpa/shops/{path}/{action}").status_code == 404, path
        assert api("POST", f"/rpa/shops/pdd/%00/{action}").status_code == 422


def test_rebalance_releases_shops_without_running_job(api, market):
    Lane.objects.filter(shop=market.s1).update(home="n1")
    Lane.objects.filter(shop=market.s2).update(home="n1", task_id=new_id())

    assert api("POST", "/rpa/shops/rebalance", {"node": "n2"}).status_code == 404
    ExecutionNode.objects.create(name="n2", seen_at=now(), started_at=AT, slots=1, queues=[])
    assert api("POST", "/rpa/shops/rebalance", {"node": "n2"}).json() == {"released": 0, "running": 0}
    wish = {"platform": "pdd", "shop_ids": ["s1", "s2"], "node": "n1"}
    assert api("POST", "/rpa/shops/rebalance", wish).json() == {"released": 1, "running": 1}
    assert [lane.home for lane in Lane.objects.order_by("shop_id")] == ["", "n1"]


def test_rebalance_waits_for_a_locked_lane_as_briefly_as_other_actions(api, market):
    Lane.objects.update(home="n1")
    with psycopg.connect(database_url()) as other:
        other.execute("SELECT FROM rpa_tasks_lane FOR NO KEY UPDATE")
        assert api("POST", "/rpa/shops/rebalance", {"node": "n1"}).status_code == 503


@each_row(
    "wish, status",
    [
        ({}, 422),
        ({"shop_ids": ["s1"]}, 422),
        ({"platform": "pdd", "shop_ids": ["s1", "s9"]}, 404),
        ({"platform": "pddd"}, 404),
        ({"platform": "pdd", "shop_ids": ["s1"] * 5001}, 422),
        ({"platform": "pdd", "more": 1}, 422),
    ],
)
def test_rebalance_with_invalid_request_releases_nothing(api, market, wish, status):
    Lane.objects.update(home="n1")

    assert api("POST", "/rpa/shops/rebalance", wish).status_code == status
    assert set(Lane.objects.values_list("home", flat=True)) == {"n1"}


# --- what opens a gate ------------------------------------------------------------------------------------------------


@pytest.fixture
def woken_by_work(market, sent_wakeups):
    """The first shop has work, the second one has none."""
    publish_job(PublishRequest(platform="pdd", shop_id="s1", task_type="sync_order"))
    sent_wakeups.clear()
    return sent_wakeups


def test_each_opened_gate_wakes_the_shops_behind_it_once(market, woken_by_work):
    Shop.objects.filter(pk=market.s1.pk).update(login_state="needed", login_lost_at=AT)
    Breaker.objects.filter(platform=market.pdd).update(errors=3, open_until=AT, opened_at=AT, openings=2)
    for close, open_gate, pk in (
        (None, shops.record_login, market.s1.pk),
        (None, shops.close_breaker, market.pdd.pk),
        (shops.pause_shop, shops.resume_shop, market.s1.pk),
        (shops.pause_platform, shops.resume_platform, market.pdd.pk),
    ):
        if close is not None:
            assert close(pk, by="ann")
            assert not close(pk, by="bob")
        with transaction.atomic():
            assert open_gate(pk, by="ann")
            assert woken_by_work == [], "before the commit no node sees that it may start"
        assert [wakeup.owner for wakeup in woken_by_work] == [market.s1.pk]
        assert not open_gate(pk, by="bob")
        woken_by_work.clear()

    shop, breaker = Shop.objects.get(pk=market.s1.pk), Breaker.objects.get(platform=market.pdd)
    assert (shop.login_state, shop.login_lost_at, shop.version) == ("ok", None, 4)
    assert (breaker.errors, breaker.open_until, breaker.opened_at, breaker.openings) == (0, None, None, 0)
    said = ["logged in by ann", "paused by ann", "resumed by ann"]
    assert [each.history_change_reason for each in shop.history.order_by("pk")][1:] == said
    assert [each.history_change_reason for each in market.pdd.history.order_by("pk")][1:] == said[1:]
