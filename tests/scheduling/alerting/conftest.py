"""A group robot, an alert receiver that uses it, and a condition that holds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import redis
from django.utils.timezone import now
from pytest_django import Settings

from scheduling.models import AlertReceiver, ChannelConfig, Community, Pause
from scheduling.monitoring.alerting import messages

BEGAN = datetime(2026, 11, 21, 8, 0, tzinfo=UTC)  #: 16:00 in Shanghai


class Robot(ThreadingHTTPServer):
    """Respond with 200 always, and with the result in the body."""

    daemon_threads = True

    def __init__(self) -> None:
        self.verdicts: list[dict[str, Any]] = []  #: of the next requests; then all is taken
        self.taken: list[str] = []
        self.asked: list[Any] = []
        self.headers: list[Any] = []
        self.waits = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        super().__init__(("127.0.0.1", 0), Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/cgi-bin/webhook/send?key=k"


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        robot: Any = self.server
        document = json.loads(self.rfile.read(int(self.headers["content-length"])))
        robot.asked.append(document)
        robot.headers.append(self.headers)
        robot.waits.set()
        robot.may_answer.wait(120)
        verdict = robot.verdicts.pop(0) if robot.verdicts else {"errcode": 0, "errmsg": "ok"}
        if verdict["errcode"] == 0:
            robot.taken.append(document["text"]["content"] if "text" in document else document["data"]["body"])
        body = json.dumps(verdict).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Discard the log line."""


@pytest.fixture
def robot(settings: Settings) -> Iterator[Robot]:
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1"]
    settings.AFTERTOUCH_BASE_URL = "https://touch.example.com"
    with Robot() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.may_answer.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def create_alert_receiver(robot: Robot, valkey: redis.Redis) -> Callable[..., AlertReceiver]:
    """Create an alert receiver."""
    messages.get_alert_quota.cache_clear()  # it keeps the server of the first caller's settings

    def create_alert_receiver(name: str = "on duty", **changes: Any) -> AlertReceiver:
        channel, _ = ChannelConfig.objects.get_or_create(
            key="ops", kind="wecom", defaults={"timeout": timedelta(seconds=80)}
        )
        place, _ = Community.objects.get_or_create(chat_id="ops", defaults={"targets": {"ops": {"url": robot.url}}})
        given = {"channel": channel, "community": place, "limits": {"paused": 3600}, **changes}
        return AlertReceiver.objects.create(name=name, **given)

    return create_alert_receiver


@pytest.fixture
def create_old_pause() -> Callable[[str], Pause]:
    """Makes something wrong: a pause that was forgotten. Its removal mends it."""

    def create_old_pause(scope: str = "all") -> Pause:
        return Pause.objects.create(scope=scope, paused_at=now() - timedelta(days=2, minutes=5))

    return create_old_pause
