"""Every operation of the HTTP API × every scope, with a body that the operation takes.

The table `OPERATIONS` names the one scope of each operation. A key of all other scopes is refused before anything is
written; then the key of that scope is answered, so a refusal has no other reason than the scope.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import requests
from django.utils.timezone import now

from config.urls import api
from rpa_tasks.models import Evidence, ExecutionNode, Job
from scheduling.models import (
    INCLUDED,
    BulkAction,
    FailedTask,
    Scope,
    Touch,
    WebhookSubscription,
)
from scheduling.operations.commands import create_api_key
from tests.rpa_tasks.admin.conftest import Market
from tests.security.test_admin_rights import rows
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)

EVENT = {"specversion": "1.0", "id": "e1", "source": "shop", "type": "signup.succeeded", "subject": "bob", "data": {}}
#: They extend an operation of another scope (`tests/scheduling/api/test_failed_tasks.py`, `test_config.py`).
EXTENDING = {Scope.FAILED_TASKS_EDIT.value, Scope.RPA_COMMANDS.value}
SINGLE = sorted(set(Scope.values) - set(INCLUDED) - EXTENDING)


def task(place):
    """Each operation has a failed task of its own."""
    return lambda: {"failed_id": FailedTask.objects.filter(origin="touch").order_by("pk")[place].pk}


def unknown_task():
    found = task(1)()
    FailedTask.objects.filter(pk=found["failed_id"]).update(failure="unknown")
    return found


def waiting_touch():
    return {"task_id": Touch.objects.filter(state="scheduled").latest("pk").pk}


def evidence():
    piece = Evidence.objects.all()[0]
    return {"task_id": piece.run.job_id, "evidence_id": piece.pk}


def job(state):
    return lambda: {"task_id": Job.objects.filter(state=state).latest("pk").pk}


def bulk_action():
    return {"action_id": BulkAction.objects.all()[0].pk}


def node():
    return {"name": ExecutionNode.objects.all()[0].pk}


def none():
    return {}


@dataclass(frozen=True, slots=True)
class Operation:
    scope: str
    place: Callable[[], dict[str, Any]] = none
    body: Any = None
    content: str = ""  #: of a request that is not JSON
    query: str = ""


SHOP = {"platform": "pdd", "shop_id": "s2"}
FRAME = {"user_id": "bob"}
WEBHOOK = {
    "url": "https://example.com/in", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "events": ["job.ended"],
}  # fmt: skip

BOUNCE = """Content-Type: multipart/report; report-type=delivery-status; boundary=b

--b
Content-Type: message/delivery-status

Reporting-MTA: dns; mx

Final-Recipient: rfc822; a@b.example
Action: failed
Status: 5.1.1

--b
Content-Type: text/rfc822-headers

Message-ID: <01890000-0000-7000-8000-000000000000@shop.example>

--b--
"""

OPERATIONS = {
    "POST /events": Operation("events", body=EVENT),
    "GET /touches": Operation("touches"),
    "GET /touches/{task_id}": Operation("touches", waiting_touch),
    "POST /touches/{task_id}/cancel": Operation("touches", waiting_touch),
    "POST /preview": Operation("touches", body=EVENT),
    "PUT /customers/{user_id}": Operation("customers", lambda: {"user_id": "bob"}, {"name": "Bob"}),
    "GET /customers/{user_id}": Operation("customers", lambda: {"user_id": "ann"}),
    "POST /customers": Operation("customers", body={"customers": [{"user_id": "bob", "name": "Bob"}]}),
    "GET /customers": Operation("customers"),
    "GET /customers/{user_id}/export": Operation("customers.erase", lambda: {"user_id": "ann"}),
    "DELETE /customers/{user_id}": Operation("customers.erase", lambda: {"user_id": "dan"}),
    "POST /failed-tasks/bulk": Operation(
        "failed-tasks", body={"action": "ignore", "filter": {"fingerprint": "none"}, "reason": "r"}
    ),
    "GET /bulk-actions/{action_id}": Operation("failed-tasks", bulk_action),
    "POST /bulk-actions/{action_id}/cancel": Operation("failed-tasks", bulk_action, {"reason": "r"}),
    "GET /failed-tasks": Operation("failed-tasks"),
    "POST /failed-tasks/{failed_id}/retry": Operation("failed-tasks", task(0), {"reason": "r"}),
    "POST /failed-tasks/{failed_id}/resolve": Operation(
        "failed-tasks", unknown_task, {"delivered": True, "reason": "r"}
    ),
    "POST /failed-tasks/{failed_id}/comments": Operation("failed-tasks", task(2), {"text": "note"}),
    "POST /failed-tasks/{failed_id}/assign": Operation("failed-tasks", task(2), {"user": None}),
    "POST /failed-tasks/{failed_id}/ignore": Operation("failed-tasks", task(2), {"reason": "r"}),
    "POST /failed-tasks/{failed_id}/archive": Operation("failed-tasks", task(3), {"reason": "r"}),
    "POST /pause": Operation("touches", body={"scope": "node:later"}),
    "POST /resume": Operation("touches", body={"scope": "node:later"}),
    "GET /config": Operation("config.read"),
    "PUT /config": Operation("config.write", body={"version": 1}, query="?dry_run=true"),
    "GET /scaling": Operation("metrics"),
    "GET /receivers": Operation("metrics"),
    "GET /webhooks": Operation("webhooks"),
    "PUT /webhooks/{key}": Operation("webhooks", lambda: {"key": "new"}, WEBHOOK),
    "GET /webhooks/{key}": Operation("webhooks", lambda: {"key": "crm"}),
    "GET /webhooks/{key}/deliveries": Operation("webhooks", lambda: {"key": "crm"}),
    "POST /webhooks/{key}/replay": Operation(
        "webhooks", lambda: {"key": "crm"}, {"from": "2026-11-01T00:00:00Z", "to": "2026-11-02T00:00:00Z"}
    ),
    "POST /webhooks/{key}/test": Operation("webhooks", lambda: {"key": "crm"}),
    "DELETE /webhooks/{key}": Operation("webhooks", lambda: {"key": "crm"}),
    "POST /receipts": Operation(
        "receipts",
        body={"receipts": [{"delivery_key": "01890000-0000-7000-8000-000000000000", "type": "read"}]},
    ),
    "POST /bounces": Operation("receipts", content=BOUNCE),
    "POST /rpa/jobs": Operation("rpa.publish", body={**SHOP, "task_type": "sync_order", "payload": {"no": 1}}),
    "POST /rpa/jobs/batch": Operation("rpa.publish", body={"jobs": [{**SHOP, "task_type": "sync_order"}]}),
    "POST /rpa/jobs/bulk": Operation("rpa.operate", body={"action": "cancel", "filter": {"q": "none"}, "reason": "r"}),
    "GET /rpa/jobs": Operation("rpa.read"),
    "GET /rpa/jobs/{task_id}": Operation("rpa.read", job("failed")),
    "POST /rpa/jobs/{task_id}/cancel": Operation("rpa.operate", job("scheduled")),
    "GET /rpa/jobs/{task_id}/evidence/{evidence_id}": Operation("rpa.read", evidence),
    "GET /rpa/shops": Operation("rpa.read"),
    "GET /rpa/nodes": Operation("rpa.read"),
    "POST /rpa/nodes/{name}/drain": Operation("rpa.operate", node),
    "POST /rpa/nodes/{name}/resume": Operation("rpa.operate", node),
    "POST /rpa/shops/rebalance": Operation("rpa.operate", body={"platform": "pdd"}),
    "POST /rpa/shops/{platform}/{shop_id}/logged-in": Operation("rpa.operate", lambda: SHOP),
    "GET /rpa/platforms/{platform}/browser": Operation("rpa.read", lambda: SHOP),
    "PUT /rpa/platforms/{platform}/browser": Operation("rpa.configure", lambda: SHOP, body={"language": "zh-CN"}),
    "GET /rpa/shops/{platform}/{shop_id}/browser": Operation("rpa.read", lambda: SHOP),
    "PUT /rpa/shops/{platform}/{shop_id}/browser": Operation("rpa.configure", lambda: SHOP, body={"language": "zh-CN"}),
    "POST /rpa/shops/{platform}/{shop_id}/pause": Operation("rpa.operate", lambda: SHOP),
    "POST /rpa/shops/{platform}/{shop_id}/resume": Operation("rpa.operate", lambda: SHOP),
    "POST /sessions/activity": Operation("sessions", body=[{**FRAME, "session_id": "c1"}]),
    "POST /sessions/{session_id}/activity": Operation("sessions", lambda: {"session_id": "c1"}, FRAME),
    "POST /sessions/{session_id}/token": Operation("sessions", lambda: {"session_id": "c1"}, FRAME),
    "DELETE /sessions/{session_id}/token": Operation("sessions", lambda: {"session_id": "c1"}),
    "POST /sessions/{session_id}/messages": Operation("sessions", lambda: {"session_id": "c1"}, {"text": "hi"}),
    "GET /sessions/{session_id}": Operation("sessions", lambda: {"session_id": "c1"}),
    "DELETE /sessions/{session_id}": Operation("sessions", lambda: {"session_id": "c1"}),
}


def list_other_scopes(*needed):
    """Return the scopes that contain none of these. A key of all of them may do what a key of each may."""
    return [scope for scope in Scope.values if not {scope, *INCLUDED.get(scope, ())} & set(needed)]


def described_operations():
    paths = api.get_openapi_schema()["paths"]
    return {f"{method.upper()} {path.removeprefix('/api/v1')}" for path, methods in paths.items() for method in methods}


def test_each_api_operation_has_a_table_row():
    assert described_operations() == set(OPERATIONS)
    assert {each.scope for each in OPERATIONS.values()} == set(SINGLE)


@pytest.fixture
def web(server, matrix, record_event):
    from datetime import timedelta

    from tests.scheduling.core.conftest import deliver

    matrix.node("broken", trigger="order.paid", template=matrix.template("broken", body="{{ event.data.order_no }}"))
    matrix.node("later", trigger="signup.succeeded", template=matrix.template("later"), delay=timedelta(days=1))
    for user in ("ann", "bob", "cid", "dan"):
        deliver(record_event("order.paid", user).task_ids)
    record_event("signup.succeeded")
    BulkAction.objects.create(
        action="ignore", actor_name="u", reason="r", filter={"state": "open"}, per_second=1, total=3
    )
    WebhookSubscription.objects.create(
        key="crm", config={name: WEBHOOK[name] for name in ("url", "secret")}, events=["job.ended"]
    )
    market = Market()
    market.failed("s2")
    for key in ("a", "b"):
        market.waiting("s1", dedupe_key=key, delay=timedelta(hours=1), payload={"secret": 1})
    ExecutionNode.objects.create(name="n1", seen_at=now(), started_at=now(), slots=2)
    return f"{server}/api/v1"


def send(web, name, key=""):
    operation = OPERATIONS[name]
    method, path = name.split()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = web + path.format(**operation.place()) + operation.query
    return requests.request(
        method, url, data=operation.content, json=operation.body, headers=headers, timeout=WAIT_LIMIT
    )


def test_each_scope_permits_only_its_operations(web):
    keys = {scope: create_api_key(scope, [scope]) for scope in SINGLE}
    others = {scope: create_api_key(f"not {scope}", list_other_scopes(scope)) for scope in SINGLE}
    for name in OPERATIONS:
        OPERATIONS[name].place()  # what a row needs is there before the digest is taken
    before = rows()
    wrong = [f"{name}: no key: {status}" for name in OPERATIONS if (status := send(web, name).status_code) != 401]
    for name, operation in OPERATIONS.items():
        status = send(web, name, others[operation.scope]).status_code
        if status != 403:
            wrong.append(f"{name}: all scopes but {operation.scope}: {status}")
    assert wrong == [], "\n".join(wrong)
    assert rows() == before
    for name, operation in OPERATIONS.items():
        answer = send(web, name, keys[operation.scope])
        if not answer.ok:
            wrong.append(f"{name}: {operation.scope}: {answer.status_code} {answer.text}")
    assert wrong == [], "\n".join(wrong)


def test_old_rpa_scope_includes_new_scopes(web):
    key = create_api_key("old", ["rpa"])
    for name in ("POST /rpa/jobs", "GET /rpa/jobs", "POST /rpa/jobs/{task_id}/cancel"):
        assert send(web, name, key).ok, name


def test_cancel_shows_the_payload_only_to_keys_that_read(web):
    operate = create_api_key("ops", ["rpa.operate"])
    shown = send(web, "POST /rpa/jobs/{task_id}/cancel", operate).json()
    assert (shown["state"], shown["payload"], shown["result"], shown["runs"]) == ("cancelled", None, None, [])
    key = create_api_key("all", ["rpa.operate", "rpa.read"])
    assert send(web, "POST /rpa/jobs/{task_id}/cancel", key).json()["payload"] == {"secret": 1}
