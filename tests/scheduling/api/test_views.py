"""Probes, metrics, the API's page and the way out."""

from datetime import timedelta
from uuid import UUID

import pytest
import requests
import time_machine
from django.db import connection
from django.test import Client as Browser
from django.utils.timezone import now

from scheduling.channels.email import make_token
from scheduling.models import Customer
from tests.scheduling.api.serving import cloud_event
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT, eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("static_root")]


def test_live_probe_runs_no_query(client, django_assert_num_queries):
    with django_assert_num_queries(0):
        assert client.get("/health/live").json() == {"status": "ok"}


def test_ready_probe_reports_each_part(server):
    answer = requests.get(f"{server}/health/ready", timeout=WAIT_LIMIT)
    found = answer.json()
    assert (answer.status_code, found["status"]) == (200, "ok")
    assert {found[part]["status"] for part in ("database", "redis", "broker")} == {"ok"}


def test_ready_probe_leaves_no_database_connection(server):
    before = _connections()
    for _ in range(10):
        requests.get(f"{server}/health/ready", timeout=WAIT_LIMIT)
    eventually(lambda: _connections() <= before)


def _connections():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database()")
        return {pid for (pid,) in cursor.fetchall()}


def test_clock_skew_makes_node_not_ready(client):
    with time_machine.travel(now() + timedelta(seconds=3)):
        answer = client.get("/health/ready")
    assert (answer.status_code, answer.json()["database"]["status"]) == (503, "skewed")


def test_metrics_count_events_without_user_ids(api, server):
    api.event(cloud_event("e1", subject="somebody-4711"))
    api.event(cloud_event("e1", subject="somebody-4711"))
    text = requests.get(f"{server}/metrics", timeout=WAIT_LIMIT).text
    assert 'aftertouch_events_ingested_total{result="accepted"}' in text
    assert 'aftertouch_api_request_duration_seconds_bucket{le="0.005",route="api/v1/events",status="202"}' in text
    assert "somebody-4711" not in text


def test_api_serves_docs_and_schema(server):
    assert requests.get(f"{server}/api/v1/docs", timeout=WAIT_LIMIT).status_code == 200
    described = requests.get(f"{server}/api/v1/openapi.json", timeout=WAIT_LIMIT).json()
    assert (
        "application/cloudevents-batch+json" in described["paths"]["/api/v1/events"]["post"]["requestBody"]["content"]
    )
    names = [operation["operationId"] for methods in described["paths"].values() for operation in methods.values()]
    assert {"events_post_events", "customers_put_customer", "rpa_publish"} < set(names)
    assert len(set(names)) == len(names)


@each_row("method, path, status", [("GET", "/nowhere", 404), ("DELETE", "/events", 405)])
def test_unknown_path_or_method_is_a_problem(api, method, path, status):
    answer = api(method, path)
    assert answer.status_code == answer.json()["status"] == status
    assert answer.headers["Content-Type"] == "application/problem+json"


# --- the way out -----------------------------------------------------------------------------------------------------


@each_row(
    "method, path, field, message",
    [
        ("GET", "/touches?usr=ann", "usr", "is no parameter here"),
        ("GET", "/touches?user=ann&user=bob", "user", "is given twice"),
        ("GET", "/failed-tasks?State=open", "State", "is no parameter here"),
        ("GET", "/customers?tag=a&tag=b", "tag", "is given twice"),
        ("POST", "/events?Partial=true", "Partial", "is no parameter here"),
        ("GET", f"/touches/{UUID(int=1)}?user=ann", "user", "is no parameter here"),
        ("POST", "/preview?lvl=vip", "lvl", "is no parameter here"),
    ],
)
def test_parameter_that_cannot_be_meant_is_refused(api, method, path, field, message):
    """A misspelt filter would list every row, and a misspelt `partial` would refuse a whole batch."""
    answer = api(method, path, cloud_event() if method == "POST" else None)
    assert (answer.status_code, answer.json().get("errors")) == (422, [{"field": field, "message": message}])


@each_row(
    "method, path, body, field, message",
    [
        ("POST", "/preview?tag=a&tag=%20", cloud_event(), "tag", "a tag has 1 to 64 characters"),
        ("POST", "/preview?tag=" + "x" * 65, cloud_event(), "tag", "a tag has 1 to 64 characters"),
        ("PUT", "/customers/ann", {"7": "x"}, "7", "not permitted"),
        ("PUT", "/customers/ann", {"k" * 9_000: "x"}, "k" * 200, "not permitted"),
        ("PUT", "/customers/ann", {"name": "\x01"}, "name", "contains"),
        ("POST", "/customers", {"customers": [{"user_id": "ann", "level": 7}]}, "customers.0.level", "valid string"),
        ("GET", "/customers?q=%00", None, "q", "contains U+0000"),
        ("GET", "/touches/abc", None, "task_id", "should be a valid UUID"),
    ],
)
def test_error_names_the_field_as_the_client_wrote_it(api, method, path, body, field, message):
    (error,) = api(method, path, body).json()["errors"]
    assert error["field"] == field
    assert message in error["message"]
    assert "Value error" not in error["message"]


def test_query_of_too_many_parameters_is_refused(api):
    assert api("GET", "/customers?" + "&".join(f"a{number}" for number in range(1_001))).status_code == 400


def test_opt_out_link_asks_and_then_needs_no_cookie_or_token():
    Customer.objects.create(user_id="ann 安")
    link, strict = f"/u/{make_token('ann 安')}", Browser(enforce_csrf_checks=True)
    page = strict.get(link)
    assert page.status_code == 200
    assert b'<form method="post">' in page.content
    for forged in ("nonsense", "Im5vYm9keSI:forged:signature", "a" * 5000):
        assert strict.post(f"/u/{forged}").status_code == 404
    assert not Customer.objects.get().opted_out
    answer = strict.post(link, "List-Unsubscribe=One-Click", content_type="application/x-www-form-urlencoded")
    assert answer.status_code == 200
    assert Customer.objects.get().opted_out
    assert Customer.objects.get().opted_out_at
    assert not answer.cookies
    assert strict.post(link).status_code == 200
