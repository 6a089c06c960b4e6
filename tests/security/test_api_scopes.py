"""Every operation of the HTTP API × every scope, with a body that the operation takes.

The table `OPERATIONS` names the one scope of each operation. Keys of all other scopes are refused before anything is
written; then the key of that scope is answered, so a refusal has no other reason than the scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from rpa_tasks.models import Evidence, Job
from scheduling.api.app import api
from scheduling.models import INCLUDED, BulkAction, Configuration, FailedTask, Scope, Touch
from scheduling.operations.commands import create_api_key
from tests.rpa_tasks.admin.conftest import Market
from tests.scheduling.api.serving import serving
from tests.security.test_admin_rights import rows

pytestmark = pytest.mark.django_db(transaction=True)

EVENT = {"specversion": "1.0", "id": "e1", "source": "shop", "type": "signup.succeeded", "subject": "bob", "data": {}}
SINGLE = sorted(set(Scope.values) - set(INCLUDED))


def task(place: int) -> Callable[[], dict[str, Any]]:
    """Each operation has a failed task of its own."""
    return lambda: {"failed_id": FailedTask.objects.filter(origin="touch").order_by("pk")[place].pk}


def unknown_task() -> dict[str, Any]:
    found = task(1)()
    FailedTask.objects.filter(pk=found["failed_id"]).update(failure="unknown")
    return found


def waiting_touch() -> dict[str, Any]:
    return {"task_id": Touch.objects.filter(state="scheduled").latest("pk").pk}


def evidence() -> dict[str, Any]:
    piece = Evidence.objects.all()[0]
    return {"task_id": piece.run.job_id, "evidence_id": piece.pk}


def job(state: str) -> Callable[[], dict[str, Any]]:
    return lambda: {"task_id": Job.objects.filter(state=state).latest("pk").pk}


def bulk_action() -> dict[str, Any]:
    return {"action_id": BulkAction.objects.all()[0].pk}


def none() -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Operation:
    scope: str
    place: Callable[[], dict[str, Any]] = none
    body: Any = None


SHOP = {"platform": "pdd", "shop_id": "s2"}
FRAME = {"user_id": "bob"}

OPERATIONS: dict[str, Operation] = {
    "POST /events": Operation("events", body=EVENT),
    "GET /touches": Operation("touches"),
    "GET /touches/{task_id}": Operation("touches", waiting_touch),
    "POST /touches/{task_id}/cancel": Operation("touches", waiting_touch),
    "POST /preview": Operation("touches", body=EVENT),
    "PUT /customers/{user_id}": Operation("customers", lambda: {"user_id": "bob"}, {"name": "Bob"}),
    "GET /customers/{user_id}": Operation("customers", lambda: {"user_id": "ann"}),
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
    "POST /failed-tasks/{failed_id}/ignore": Operation("failed-tasks", task(2), {"reason": "r"}),
    "POST /failed-tasks/{failed_id}/archive": Operation("failed-tasks", task(3), {"reason": "r"}),
    "POST /pause": Operation("touches", body={"scope": "node:later"}),
    "POST /resume": Operation("touches", body={"scope": "node:later"}),
    "GET /scaling": Operation("metrics"),
    "POST /rpa/jobs": Operation("rpa.publish", body={**SHOP, "task_type": "sync_order", "payload": {"no": 1}}),
    "GET /rpa/jobs": Operation("rpa.read"),
    "GET /rpa/jobs/{task_id}": Operation("rpa.read", job("failed")),
    "POST /rpa/jobs/{task_id}/cancel": Operation("rpa.operate", job("scheduled")),
    "GET /rpa/jobs/{task_id}/evidence/{evidence_id}": Operation("rpa.read", evidence),
    "GET /rpa/shops": Operation("rpa.read"),
    "POST /rpa/shops/rebalance": Operation("rpa.operate", body={"platform": "pdd"}),
    "POST /rpa/shops/{platform}/{shop_id}/logged-in": Operation("rpa.operate", lambda: SHOP),
    "POST /rpa/shops/{platform}/{shop_id}/pause": Operation("rpa.operate", lambda: SHOP),
    "POST /rpa/shops/{platform}/{shop_id}/resume": Operation("rpa.operate", lambda: SHOP),
    "POST /sessions/activity": Operation("sessions", body=[{**FRAME, "session_id": "c1"}]),
    "POST /sessions/{session_id}/activity": Operation("sessions", lambda: {"session_id": "c1"}, FRAME),
    "POST /sessions/{session_id}/token": Operation("sessions", lambda: {"session_id": "c1"}, FRAME),
    "GET /sessions/{session_id}": Operation("sessions", lambda: {"session_id": "c1"}),
    "DELETE /sessions/{session_id}": Operation("sessions", lambda: {"session_id": "c1"}),
}


def described_operations() -> set[str]:
    paths = api.get_openapi_schema()["paths"]
    return {f"{method.upper()} {path.removeprefix('/api/v1')}" for path, methods in paths.items() for method in methods}


def test_each_api_operation_has_a_table_row() -> None:
    assert described_operations() == set(OPERATIONS)
    assert {each.scope for each in OPERATIONS.values()} == set(SINGLE)


@pytest.fixture
def web(matrix: Any, record_event: Callable[..., Any]) -> Iterator[str]:
    from datetime import timedelta

    from scheduling.delivery.pipeline import deliver_touches

    Configuration.objects.get_or_create(pk=1)  # the row that migrations made went with the tables
    matrix.node("broken", trigger="order.paid", template=matrix.template("broken", body="{{ event.data.order_no }}"))
    matrix.node("later", trigger="signup.succeeded", template=matrix.template("later"), delay=timedelta(days=1))
    for user in ("ann", "bob", "cid", "dan"):
        deliver_touches(record_event("order.paid", user).task_ids)
    record_event("signup.succeeded")
    BulkAction.objects.create(
        action="ignore", actor_name="u", reason="r", filter={"state": "open"}, per_second=1, total=3
    )
    market = Market()
    market.waiting("s1", delay=timedelta(hours=1), payload={"secret": 1})
    market.failed("s2")
    with serving(DJANGO_SETTINGS_MODULE="config.settings.test") as address:
        yield f"{address}/api/v1"


def send(web: str, name: str, key: str = "") -> requests.Response:
    operation = OPERATIONS[name]
    method, path = name.split()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = web + path.format(**operation.place())
    return requests.request(method, url, json=operation.body, headers=headers, timeout=90)


def test_each_scope_permits_only_its_operations(web: str) -> None:
    keys = {scope: create_api_key(scope, [scope]) for scope in Scope.values}
    for name in OPERATIONS:
        OPERATIONS[name].place()  # what a row needs is there before the digest is taken
    before = rows()
    wrong = [f"{name}: no key: {status}" for name in OPERATIONS if (status := send(web, name).status_code) != 401]
    for name, operation in OPERATIONS.items():
        for scope in Scope.values:
            if operation.scope not in {scope, *INCLUDED.get(scope, ())}:
                status = send(web, name, keys[scope]).status_code
                if status != 403:
                    wrong.append(f"{name}: {scope}: {status}")
    assert wrong == [], "\n".join(wrong)
    assert rows() == before
    for name, operation in OPERATIONS.items():
        answer = send(web, name, keys[operation.scope])
        if not answer.ok:
            wrong.append(f"{name}: {operation.scope}: {answer.status_code} {answer.text}")
    assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize("name", ["POST /rpa/jobs", "GET /rpa/jobs", "POST /rpa/jobs/{task_id}/cancel"])
def test_old_rpa_scope_includes_new_scopes(web: str, name: str) -> None:
    assert send(web, name, create_api_key("old", ["rpa"])).ok


def test_cancel_without_read_hides_payload(web: str) -> None:
    shown = send(web, "POST /rpa/jobs/{task_id}/cancel", create_api_key("ops", ["rpa.operate"])).json()
    assert (shown["state"], shown["payload"], shown["result"], shown["runs"]) == ("cancelled", None, None, [])


def test_cancel_with_read_scope_shows_payload(web: str) -> None:
    key = create_api_key("ops", ["rpa.operate", "rpa.read"])
    assert send(web, "POST /rpa/jobs/{task_id}/cancel", key).json()["payload"] == {"secret": 1}
