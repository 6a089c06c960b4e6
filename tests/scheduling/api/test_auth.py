"""Scopes, rate limits, and responses to unknown callers."""

from datetime import UTC, datetime, timedelta

import pytest
import requests
import time_machine
from django.core.management import CommandError, call_command
from django.test import Client as Browser

from config.environment import environment
from rpa_tasks.models import Flow, Job, Platform, Shop
from scheduling.api import auth
from scheduling.api.auth import ApiKeyCache, RateLimits
from scheduling.ids import new_id
from scheduling.models import ApiKey, Customer, DeliveryReceipt, Event
from scheduling.operations.commands import create_api_key
from tests.scheduling.api.serving import NOWHERE, Client, cloud_event
from tests.support.second_connection import run_concurrently
from tests.support.waiting import WAIT_LIMIT, eventually

pytestmark = pytest.mark.django_db(transaction=True)


def test_request_without_key_is_unauthorized(server, transactional_db):
    for header in (None, "", "Bearer", "Bearer ", "Basic eDp5", "Bearer nonsense", "Bearer at_ключ"):
        headers = {} if header is None else {"Authorization": header.encode()}
        answer = requests.get(f"{server}/api/v1/touches", headers=headers, timeout=WAIT_LIMIT)
        assert answer.status_code == 401, header
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        assert answer.headers["Content-Type"] == "application/problem+json"


def test_refusal_names_the_scope_that_the_key_lacks(key_for):
    """A bulk action admits keys of failed tasks and of jobs."""
    shop = key_for("events")
    for method, path, scope in (("GET", "/touches", "touches"), ("POST", "/failed-tasks/bulk", "failed-tasks")):
        answer = shop(method, path, {})
        assert answer.status_code == 403
        assert scope in answer.json()["detail"]
        assert scope in answer.headers["WWW-Authenticate"].partition('scope="')[2].rstrip('"').split()


@pytest.mark.parametrize("end", ["revoked_at", "expires_at"])
def test_revoked_key_is_refused(key_for, end):
    """And one that has expired."""
    shop = key_for("events")
    ApiKey.objects.update(**{end: datetime.now(UTC)})
    assert shop.event(cloud_event()).status_code == 401


# --- remembering keys ------------------------------------------------------------------------------------------------


def test_cached_key_costs_no_query_and_is_refused_after_expiry(django_assert_num_queries):
    soon = datetime.now(UTC) + timedelta(minutes=1)
    key, ring = create_api_key("shop", ["events"], expires_at=soon), ApiKeyCache()
    found = ring.load_key(key)
    with django_assert_num_queries(0):
        assert ring.get_cached(key) == (True, found)
    with time_machine.travel(soon + timedelta(microseconds=1)):
        assert ring.get_cached(key)[1] is None


def test_unknown_keys_are_cached_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(auth, "CACHED_KEYS", 3)
    cache, key = ApiKeyCache(), create_api_key("shop", ["events"])
    unknown = [f"at_nobody-{number}" for number in range(5)]
    for each in (unknown[0], key, *unknown[1:3], key, *unknown[3:]):
        cache.load_key(each)
    assert [cache.get_cached(each)[0] for each in unknown] == [False, False, False, True, True]
    assert cache.get_cached(key)[1], "known keys are asked for again before strangers push them out"


# --- rates -----------------------------------------------------------------------------------------------------------


def test_rate_limit_returns_retry_after(key_for, valkey):
    eager = key_for("events", rate_per_minute=5)
    answers = run_concurrently(20, lambda number: eager.event(cloud_event(f"e{number}")))

    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 15
    assert len(refused) + sum(answer.status_code == 202 for answer in answers) == 20
    assert all(1 <= int(answer.headers["Retry-After"]) <= 61 for answer in refused)
    assert Event.objects.count() == 20 - len(refused)


def test_rate_limit_of_one_key_spares_others(key_for, valkey):
    flood, calm = key_for("events", rate_per_minute=1), key_for("events", "touches")
    spent = (
        flood.get("/touches").status_code == 403 and flood.event(cloud_event("flood")).status_code == 429
        for _ in range(50)
    )
    assert any(spent)
    assert calm.event(cloud_event("calm")).status_code == 202


def test_rate_limit_counts_events_of_a_batch(key_for, valkey):
    shop = key_for("events", rate_per_minute=100)
    batch = [cloud_event(f"e{number}") for number in range(500)]  # events that are known count as well
    accepted = 0
    while (status := shop.event(*batch).status_code) == 202 and accepted < 25:
        accepted += 1
    assert status == 429
    assert accepted in range(10, 21)  # in one minute, or at the border of two


BATCHES = [
    ("rpa.publish", "/rpa/jobs/batch", "jobs", lambda n: RPA_JOB | {"dedupe_key": f"k{n}"}, Job),
    ("customers", "/customers", "customers", lambda n: {"user_id": f"user-{n}"}, Customer),
    ("receipts", "/receipts", "receipts", lambda n: {"type": "read", "delivery_key": str(new_id())}, DeliveryReceipt),
]
RPA_JOB = {"platform": "pdd", "shop_id": "s1", "task_type": "sync", "delay_seconds": 3600}


@pytest.mark.parametrize(("scope", "path", "what", "make", "model"), BATCHES, ids=[each[2] for each in BATCHES])
def test_rate_limit_counts_the_items_of_a_batch(valkey, monkeypatch, scope, path, what, make, model):
    """A batch of 500 counted as one request. A refused one stores nothing."""
    monkeypatch.setattr(auth, "SMALLEST_BATCH_LIMIT", 5)
    platform = Platform.objects.create(key="pdd")
    Shop.objects.create(platform=platform, shop_id="s1")
    Flow.objects.create(platform=platform, task_type="sync", command=["true"])
    key = create_api_key("shop", [scope], rate_per_minute=3)  # 30 items
    browser = Browser(headers={"authorization": f"Bearer {key}"})

    def send(count):
        return browser.post(f"/api/v1{path}", {what: [make(n) for n in range(count)]}, "application/json")

    assert send(20).status_code == 200
    stored = model.objects.count()
    refused = send(21)

    assert (refused.status_code, refused["Content-Type"]) == (429, "application/problem+json")
    assert refused.json()["detail"] == f"This key may send 30 {what} a minute."
    assert 1 <= int(refused["Retry-After"]) <= 61
    assert model.objects.count() == stored
    assert send(10).status_code == 200


def test_rate_budget_is_shared_by_processes(valkey):
    taken = 0
    for process in (RateLimits(environment().redis), RateLimits(environment().redis)) * 200:
        wait = process.consume("7:requests", 1)
        if wait is None:
            wait = process.take_and_consume("7:requests", 1, 100)
        taken += wait == 0
    assert taken == 100


def test_rest_of_a_former_minute_pays_for_no_batch(valkey, monkeypatch):
    """A batch that the rest would only help to pay was admitted without any charge."""
    rates, name = RateLimits(environment().redis), "at:rate:{10:events}"
    monkeypatch.setattr(auth, "MINUTE", 1)
    assert rates.take_and_consume("10:events", 1, 5_000) == 0  # of a slice of 50
    eventually(lambda: not valkey.exists(name))
    monkeypatch.undo()
    assert rates.consume("10:events", 1) is None
    assert rates.take_and_consume("10:events", 500, 5_000) == 0
    assert rates.consume("10:events", 1) is None
    assert valkey.get(name) == b"500"


def test_rate_budget_ignores_the_clocks_of_nodes(valkey):
    """A node whose clock was a minute ahead had budgets of its own, and used those of the others' next minute."""
    for ahead in (0, 60):
        with time_machine.travel(datetime.now(UTC) + timedelta(seconds=ahead)):
            node = RateLimits(environment().redis)
            waits = [node.take_and_consume("11:requests", 1, 60) for _ in range(60)]
            assert [wait == 0 for wait in waits] == [ahead == 0] * 60


def test_rate_limit_without_redis_admits_requests():
    rates = RateLimits(NOWHERE)
    assert rates.consume("9:requests", 1) is None
    assert rates.take_and_consume("9:requests", 1, 1) == 0
    assert [rates.consume("9:requests", 1) for _ in range(50)] == [0] * 50, "Redis is not asked again at once"


# --- the command -----------------------------------------------------------------------------------------------------


def test_create_api_key_prints_a_working_key(server, transactional_db, capsys):
    call_command("create_api_key", "shop", "--scope", "events", "--scope", "touches")
    key = capsys.readouterr().out.strip()
    assert Client(server, key).event(cloud_event()).status_code == 202
    assert ApiKey.objects.get().scopes == ["events", "touches"]
    with pytest.raises(CommandError, match="name"):
        call_command("create_api_key", "shop", "--scope", "events")
    for arguments, field in ((["x" * 101], "name"), (["other", "--rate-per-minute", str(2**31)], "rate_per_minute")):
        with pytest.raises(CommandError, match=field):
            call_command("create_api_key", *arguments, "--scope", "events")
