"""RabbitMQ with quorum queues: everything is delivered, and due touches do not wait behind later ones."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import psycopg
import pytest
from kombu import Connection

from config.local.isolated import RunningStack, running_stack
from config.local.processes import wait_until
from scheduling.queue_names import CORE_QUEUES, RPA_QUEUES
from tests.faults.brokers import rabbitmq
from tests.support.waiting import WAIT_LIMIT

WAITING = 40  #: touches that wait in the worker; two processes would have room for four by Celery's own count
NODE = {"stage": "presale", "template": "hi", "channel": "log"}
FREE = {"guards": {"cap": "ignore", "dedupe": "ignore", "conversation": "ignore"}}
CONFIG: dict[str, Any] = {
    "version": 1,
    "channels": [{"key": "log", "kind": "log"}],
    "templates": [{"key": "hi", "content_type": "hi", "category": "service", "body": "hi"}],
    "stages": [{"key": "presale"}],
    "nodes": [
        {**NODE, **FREE, "key": "later", "trigger": "order.paid", "delay": "25s"},
        {**NODE, **FREE, "key": "now", "trigger": "signup.succeeded", "delay": "0s"},
    ],
    "platforms": [{"key": "pdd", "name": "pdd"}],
    "flows": [{
        "platform": "pdd", "task_type": "look", "command": ["true", "{param}"], "timeout": "60s", "idempotent": True,
        "needs_browser": False,
    }],
    "shops": [
        {"platform": "pdd", "shop_id": "s1", "name": "s1"},
        {"platform": "pdd", "shop_id": "own", "name": "own", "dedicated_queue": True},
    ],
}  # fmt: skip


@pytest.mark.campaign
def test_quorum_queues_deliver_due_touches_before_waiting_ones() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="quorum-", ignore_cleanup_errors=True) as name,
        rabbitmq(Path(name)) as broker,
    ):
        env = {
            "CELERY_BROKER_URL": broker.url, "AFTERTOUCH_RABBITMQ_QUORUM": "true", "AFTERTOUCH_RPA_SLOTS": "1",
            "DJANGO_SETTINGS_MODULE": "config.settings.test",
        }  # fmt: skip
        with running_stack(env, ["web", "core", "ticks", "execution", "beat"]) as stack:
            file = stack.state_dir / "configuration.yaml"
            file.write_text(json.dumps(CONFIG))
            stack.manage("apply_config", str(file))
            key = stack.manage("create_api_key", "quorum", "--scope", "events", "--scope", "rpa").split()[-1]
            _post(stack, key, "events", [_event("order.paid", number) for number in range(WAITING)])
            assert wait_until(lambda: _query_value(stack, HANDED_OVER) == WAITING, WAIT_LIMIT, 0.1)
            _post(stack, key, "events", _event("signup.succeeded", WAITING))
            for shop in ("s1", "own"):
                _post(stack, key, "rpa/jobs", {"shop_id": shop, "platform": "pdd", "task_type": "look", "payload": {}})
            delivered = wait_until(lambda: _query_value(stack, DELIVERED) == WAITING + 1, WAIT_LIMIT, 0.2)
            assert delivered, stack.log("core")[-3000:]
            assert _query_value(stack, OVERTOOK), "what was due at once came after what was not due yet"
            succeeded = wait_until(lambda: _query_value(stack, SUCCEEDED) == 1, WAIT_LIMIT, 0.2)
            assert succeeded, stack.log("execution")[-3000:]
            home = _query_value(
                stack, "SELECT 'n.' || replace(name, '.', ':') || '.normal' FROM rpa_tasks_executionnode"
            )
            assert "native delayed delivery" not in stack.log("core") + stack.log("beat") + stack.log("web")
        for queue in (*CORE_QUEUES, *RPA_QUEUES, home, "s.pdd.own"):
            assert _is_quorum(broker.url, str(queue)), queue
        assert _message_count_after(broker.url, "task.pdd.own", "s.pdd.own") > 0


HANDED_OVER = "SELECT count(*) FROM scheduling_touch WHERE state = 'queued'"
DELIVERED = "SELECT count(*) FROM scheduling_touch WHERE state = 'delivered'"
SUCCEEDED = "SELECT count(*) FROM rpa_tasks_job WHERE state = 'succeeded'"
OVERTOOK = """
SELECT (SELECT max(settled_at) FROM scheduling_touch t JOIN scheduling_node n ON n.id = t.node_id WHERE n.key = 'now')
     < (SELECT min(settled_at) FROM scheduling_touch t JOIN scheduling_node n ON n.id = t.node_id WHERE n.key = 'later')
"""


def _event(kind: str, number: int) -> dict[str, Any]:
    return {"specversion": "1.0", "id": str(number), "source": "/s", "type": kind, "subject": f"user-{number}"}


def _post(stack: RunningStack, key: str, path: str, body: Any) -> None:
    kind = "application/cloudevents-batch+json" if isinstance(body, list) else "application/json"
    headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
    request = urllib.request.Request(f"{stack.base_url}/api/v1/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status < 300


def _query_value(stack: RunningStack, statement: str) -> Any:
    with psycopg.connect(stack.endpoints.database_url) as database:
        row = database.execute(statement.encode()).fetchone()
    return row and row[0]


def _message_count_after(url: str, routing_key: str, queue: str) -> int:
    """Publish to the topic exchange and return how many messages then wait in the queue, which has no consumer."""
    with Connection(url, transport_options={"confirm_publish": True}) as connection:
        connection.default_channel.queue_purge(queue)
        connection.Producer().publish({}, exchange="tasks", routing_key=routing_key)
        return int(connection.default_channel.queue_declare(queue, passive=True)[1])


def _is_quorum(url: str, queue: str) -> bool:
    """A queue may be declared again only as what it is."""
    with Connection(url) as connection:
        try:
            connection.default_channel.queue_declare(
                queue, durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"}
            )
        except connection.channel_errors:
            return False
    return True
