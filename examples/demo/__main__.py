"""Run the demo: a complete stack on free ports, events through the API, and a webhook receiver.

Exits with 0 only if every expectation is met. Delays are divided by `AFTERTOUCH_TIME_SCALE`; guard windows, leases
and retries are not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

from standardwebhooks import Webhook, WebhookVerificationError

from config.environment import ROOT
from config.local.isolated import RunningStack, running_stack
from config.local.reaper import bounded_run
from examples.demo.first_order import NODE as FIRST_ORDER
from examples.demo.first_order import first_order
from examples.demo.order_sync import order_sync
from examples.demo.silent_chat import POLICIES, silent_chat
from scheduling.strict_text import read_yaml, write_yaml

TIME_SCALE = 43_200  # half a day per second: 7 days take 14 s, 24 hours 2 s
SECRET = "whsec_" + "ZGVtby1vbmx5LXNlY3JldC1vZi10aGlydHktdHdvLWI="
SCOPES = ("events", "touches", "customers", "sessions", "rpa")
WAIT_LIMIT = 90.0
REMINDER = "aftersale-reminder"
LATE_AFTER = timedelta(seconds=2)


class WebhookReceiver:
    """HTTP server for webhooks. Verifies signatures and stores bodies by idempotency key."""

    def __init__(self) -> None:
        self.bodies: dict[str, dict[str, Any]] = {}
        self.forged = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(receiver.store_webhook(dict(self.headers.items()), raw))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Log nothing: the demo prints its own table."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def store_webhook(self, headers: dict[str, str], raw: bytes) -> int:
        try:
            Webhook(SECRET).verify(raw, {name.lower(): value for name, value in headers.items()})
        except (WebhookVerificationError, ValueError):
            self.forged += 1
            return 401
        self.bodies[headers.get("webhook-id") or headers["Webhook-Id"]] = json.loads(raw)
        return 204


@dataclass
class DemoCustomer:
    """A customer of the demo with their touches."""

    demo: Demo
    user_id: str
    touches: list[str] = field(default_factory=list)

    def does(self, event_type: str, *, at: datetime | None = None) -> str | None:
        """Send an event. Returns the first touch that it planned."""
        event = {
            "specversion": "1.0",
            "id": f"{self.user_id}-{next(self.demo.numbers)}",
            "source": "/demo-shop",
            "type": event_type,
            "subject": self.user_id,
            "time": (at or datetime.now(UTC)).isoformat(),
            "data": {"chat_id": f"chat-of-{self.user_id}"},
        }
        receipt = self.demo.call("POST", "/api/v1/events", event)
        self.touches += receipt["touches"]
        return receipt["touches"][0] if receipt["touches"] else None


class Demo:
    def __init__(self, stack: RunningStack, receiver: WebhookReceiver) -> None:
        self.stack = stack
        self.receiver = receiver
        self.numbers = count(1)
        self.problems: list[str] = []
        self.key = stack.manage(
            "create_api_key", "demo", *(word for scope in SCOPES for word in ("--scope", scope))
        ).split()[-1]

    def apply_matrix(self, *enabled: str) -> None:
        """Apply the shipped matrix with the demo's receiver as channel, and these of its examples enabled."""
        shipped = read_yaml((ROOT / "scheduling" / "shipped.yaml").read_text(encoding="utf-8"))
        url = f"http://{self.receiver.address}/"
        hook = {"key": "hook", "kind": "webhook", "url": url, "secret": SECRET, "idempotent": True}
        shipped["channels"].append(hook)
        shipped["silence_policies"] = POLICIES
        for node in shipped["nodes"]:
            node["channel"] = "hook"
            node["enabled"] = node.get("enabled", True) or node["key"] in enabled
        path = Path(self.stack.state_dir) / "demo.yaml"
        path.write_text(write_yaml(shipped), encoding="utf-8")
        self.stack.manage("apply_config", str(path))

    def call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(  # noqa: S310  (our own server)
            self.stack.base_url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return json.load(answer)

    def expect(self, who: str, what: str, task_id: str | None, state: str, rule: str = "") -> None:
        """Wait for the end of the touch and print it. Records a problem for another end than expected."""
        if task_id is None:
            self.problems.append(f"{who}: {what} planned no touch")
            return
        touch = self._ended(task_id)
        verdict = touch["verdicts"][-1] if touch["verdicts"] else {}
        why = self._lateness(touch) if touch["state"] == "delivered" else _describe_verdict(verdict) or touch["reason"]
        print_line(f"  {who:<6} {touch['event']['type']:<22} {touch['node']:<20} {touch['state']:<11} {why}")
        if touch["state"] != state or (rule and verdict.get("rule", touch["reason"]) != rule):
            self.problems.append(f"{who}: {what} should be {state} {rule}, is {touch['state']} ({touch.get('reason')})")

    def _ended(self, task_id: str) -> dict[str, Any]:
        waiting_until = time.monotonic() + WAIT_LIMIT
        while True:
            touch: dict[str, Any] = self.call("GET", f"/api/v1/touches/{task_id}")
            if touch["state"] not in ("scheduled", "queued", "running") or time.monotonic() > waiting_until:
                return touch
            time.sleep(0.1)

    def _lateness(self, touch: dict[str, Any]) -> str:
        # A follow-up may be planned after its time, because its delay is divided and the pass that plans it is not.
        due_at = max(datetime.fromisoformat(touch[name]) for name in ("due_at", "created_at"))
        late = datetime.fromisoformat(touch["attempts"][-1]["started_at"]) - due_at
        if not timedelta(0) <= late <= LATE_AFTER:
            self.problems.append(f"{touch['node']} was sent {late.total_seconds():+.3f} s from its time")
        if touch["delivery_key"] not in self.receiver.bodies:
            self.problems.append(f"{touch['node']} never reached the receiver")
        return f"{late.total_seconds() * 1000:.0f} ms after its time"


def main() -> None:
    with bounded_run():
        run_demo()


def run_demo() -> None:
    receiver = WebhookReceiver()
    print_line("Starting a stack of its own (PostgreSQL, Valkey, web, workers, watcher, beat) …")
    env = {
        "AFTERTOUCH_TIME_SCALE": str(TIME_SCALE),
        "AFTERTOUCH_ALLOWED_PRIVATE_HOSTS": receiver.address,
        "DJANGO_SETTINGS_MODULE": "config.settings.local",
    }
    with running_stack(env, programs=["web", "core", "ticks", "execution", "beat", "watcher"]) as stack:
        for worker in ("core", "ticks", "execution"):
            stack.await_worker(worker)
        demo = Demo(stack, receiver)
        demo.apply_matrix()
        print_line(f"It answers at {stack.base_url}. One second is {timedelta(seconds=TIME_SCALE)} of node delay.\n")
        for scene in SCENES:
            scene(demo)
        print_result(demo)


def four_rows(demo: Demo) -> None:
    print_line("The four rows of the matrix, and a fourth push within 24 hours:")
    ann, eve = DemoCustomer(demo, "ann"), DemoCustomer(demo, "eve")
    guide = ann.does("material.downloaded")
    parcel = ann.does("order.paid")
    survey = ann.does("service.completed")
    demo.expect("ann", "the guide", guide, "delivered")
    demo.expect("ann", "the parcel", parcel, "delivered")
    eve.does("signup.succeeded", at=datetime.now(UTC) - timedelta(days=31))
    scan_for_inactivity(demo)
    demo.expect("eve", "the offer after 30 days of inactivity", first_touch_of(demo, "eve"), "delivered")
    demo.expect("ann", "the survey", survey, "delivered")
    demo.expect("ann", "a fourth push", ann.does("customer.inactive"), "suppressed", "cap")


def same_content(demo: Demo) -> None:
    print_line("\nThe same content again within 72 hours:")
    cat = DemoCustomer(demo, "cat")
    demo.expect("cat", "the guide", cat.does("material.downloaded"), "delivered")
    demo.expect("cat", "the guide again", cat.does("material.downloaded"), "suppressed", "dedupe")


def new_conversation(demo: Demo) -> None:
    print_line("\nA conversation started while the touch waited:")
    dan = DemoCustomer(demo, "dan")
    survey = dan.does("service.completed")
    dan.does("conversation.started", at=datetime.now(UTC) + timedelta(seconds=1))
    demo.expect("dan", "the survey", survey, "suppressed", "conversation")


def conditions_and_windows(demo: Demo) -> None:
    first_order(demo, print_line)


def journey(demo: Demo) -> None:
    print_line("\nA reminder two days after the survey; jan answers before:")
    demo.apply_matrix(FIRST_ORDER, REMINDER)
    ida, jan = DemoCustomer(demo, "ida"), DemoCustomer(demo, "jan")
    for who in (ida, jan):
        demo.call("PUT", f"/api/v1/customers/{who.user_id}", {"level": "vip"})
    answered, unanswered = jan.does("service.completed"), ida.does("service.completed")
    demo.expect("jan", "the survey", answered, "delivered")
    jan.does("conversation.started")
    demo.expect("ida", "the survey", unanswered, "delivered")
    reminder = first_touch_of(demo, "ida", REMINDER)
    demo.expect("ida", "the reminder", reminder, "delivered")
    reminder = first_touch_of(demo, "jan", REMINDER)
    demo.expect("jan", "the reminder", reminder, "cancelled", "event:conversation.started")


def chats(demo: Demo) -> None:
    silent_chat(demo, print_line)


def shops(demo: Demo) -> None:
    order_sync(demo, print_line)


SCENES: tuple[Callable[[Demo], None], ...] = (
    four_rows, same_content, new_conversation, conditions_and_windows, journey, chats, shops,
)  # fmt: skip


def scan_for_inactivity(demo: Demo) -> None:
    """Run the scan for inactive customers, which beat runs every minute."""
    subprocess.run(
        [sys.executable, "-m", "celery", "-A", "config", "call", "scheduling.scan_inactive", "--queue", "ticks"],
        cwd=ROOT,
        env=demo.stack.environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def first_touch_of(demo: Demo, user_id: str, node: str = "") -> str | None:
    waiting_until = time.monotonic() + 30
    while time.monotonic() < waiting_until:
        items = demo.call("GET", f"/api/v1/touches?user={user_id}{node and f'&node={node}'}")["items"]
        if items:
            return str(items[0]["task_id"])
        time.sleep(0.1)
    return None


def print_result(demo: Demo) -> None:
    print_line(
        f"\n{len(demo.receiver.bodies)} messages reached the receiver, {demo.receiver.forged} with a wrong signature."
    )
    if demo.receiver.forged:
        demo.problems.append("a signature did not verify")
    if demo.problems:
        sys.exit("NOT as promised:\n" + "\n".join(f"  {problem}" for problem in demo.problems))
    print_line("All of it happened as promised.")


def _describe_verdict(verdict: dict[str, Any]) -> str:
    parts = [verdict.get("rule", "")]
    if verdict.get("observed"):
        parts.append(
            f"{verdict['observed']} against {verdict['limit']}" if verdict.get("limit") else verdict["observed"]
        )
    if verdict.get("next_eligible_at"):
        parts.append(f"next at {verdict['next_eligible_at']}")
    return ", ".join(part for part in parts if part)


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
