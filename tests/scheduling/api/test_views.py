"""Probes, metrics, the API's page and the way out."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import requests
import time_machine
from django.db import connection
from django.test import Client as Browser
from django.utils.timezone import now
from pytest_django import Settings

from scheduling.channels.email import make_token
from scheduling.models import Customer
from tests.scheduling.api.serving import PATIENCE, Client, eventually, told

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _static_files(settings: Settings, tmp_path: Path) -> None:
    settings.STATIC_ROOT = tmp_path


def test_a_live_process_asks_nobody(client: Browser, django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(0):
        assert client.get("/health/live").json() == {"status": "ok"}


def test_a_ready_node_says_what_it_found(server: str) -> None:
    answer = requests.get(f"{server}/health/ready", timeout=PATIENCE)
    found = answer.json()
    assert (answer.status_code, found["status"]) == (200, "ok")
    assert {found[part]["status"] for part in ("database", "redis", "broker")} == {"ok"}


def test_a_browsers_requests_leave_no_connection_behind(gated: str) -> None:
    before = _connections()
    for _ in range(10):
        requests.get(f"{gated}/health/ready", timeout=PATIENCE)
    eventually(lambda: _connections() <= before)


def _connections() -> set[int]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database()")
        return {pid for (pid,) in cursor.fetchall()}


def test_a_clock_that_is_wrong_makes_a_node_not_ready(client: Browser) -> None:
    with time_machine.travel(now() + timedelta(seconds=3)):
        answer = client.get("/health/ready")
    assert (answer.status_code, answer.json()["database"]["status"]) == (503, "skewed")


def test_metrics_count_events(api: Client, server: str) -> None:
    api.event(told("e1", subject="somebody-4711"))
    api.event(told("e1", subject="somebody-4711"))
    text = requests.get(f"{server}/metrics", timeout=PATIENCE).text
    assert 'aftertouch_events_ingested_total{result="accepted"}' in text
    assert 'aftertouch_api_request_duration_seconds_bucket{le="0.005",route="api/v1/events",status="202"}' in text
    assert "somebody-4711" not in text


def test_the_api_describes_itself(server: str) -> None:
    assert requests.get(f"{server}/api/v1/docs", timeout=PATIENCE).status_code == 200
    described = requests.get(f"{server}/api/v1/openapi.json", timeout=PATIENCE).json()
    assert (
        "application/cloudevents-batch+json" in described["paths"]["/api/v1/events"]["post"]["requestBody"]["content"]
    )


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("DELETE", "/events", 405)])
def test_a_wrong_address_is_a_problem_too(api: Client, method: str, path: str, status: int) -> None:
    answer = api(method, path)
    assert answer.status_code == answer.json()["status"] == status
    assert answer.headers["Content-Type"] == "application/problem+json"


# --- the way out -----------------------------------------------------------------------------------------------------


@pytest.fixture
def link() -> str:
    Customer.objects.create(user_id="ann 安")
    return f"/u/{make_token('ann 安')}"


def test_following_the_link_only_asks(client: Browser, link: str) -> None:
    answer = client.get(link)
    assert answer.status_code == 200
    assert b'<form method="post">' in answer.content
    assert not Customer.objects.get().opted_out


def test_one_click_opts_out_without_cookie_or_token(link: str) -> None:
    strict = Browser(enforce_csrf_checks=True)
    answer = strict.post(link, "List-Unsubscribe=One-Click", content_type="application/x-www-form-urlencoded")
    assert answer.status_code == 200
    assert Customer.objects.get().opted_out
    assert Customer.objects.get().opted_out_at
    assert not answer.cookies
    assert strict.post(link).status_code == 200


@pytest.mark.parametrize("token", ["nonsense", "Im5vYm9keSI:forged:signature", "a" * 5000])
def test_a_forged_link_does_nothing(client: Browser, link: str, token: str) -> None:
    assert client.post(f"/u/{token}").status_code == 404
    assert not Customer.objects.get().opted_out
