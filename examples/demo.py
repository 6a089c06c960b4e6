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
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row
from standardwebhooks import Webhook, WebhookVerificationError

from config.environment import ROOT
from config.local.isolated import RunningStack, running_stack
from config.local.processes import select_port, wait_until
from config.local.reaper import bounded_run
from scheduling.strict_text import read_yaml, write_yaml

TIME_SCALE = 43_200  # half a day per second: 7 days take 14 s, 24 hours 2 s
SECRET = "whsec_" + "ZGVtby1vbmx5LXNlY3JldC1vZi10aGlydHktdHdvLWI="
SCOPES = ("events", "touches", "customers", "sessions", "rpa")
WAIT_LIMIT = 90.0
REMINDER = "aftersale-reminder"
FIRST_ORDER = "insale-first-order"
LATE_AFTER = timedelta(seconds=2)
SILENT_AFTER = 3  #: seconds
POLICIES = [
    {"tag": "default", "threshold": "60s", "jitter": "5s"},
    {"tag": "demo", "threshold": f"{SILENT_AFTER}s", "after": "agent"},
]
GUIDE_WITHIN = 40.0  #: seconds
SHOPS = ("s1", "s2", "s3")
JOB_WITHIN = 120.0  #: seconds
#: Prints the reason if no browser is found.
CHROMIUM_TEST = """
from rpa_tasks.browsers.chromium import find_chromium
from rpa_tasks.browsers.launch import NoBrowser
try:
    find_chromium()
except NoBrowser as error:
    print(error.detail)
"""


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
    demo: Demo
    user_id: str

    def does(self, event_type: str, *, at: datetime | None = None) -> str | None:
        """Send an event. Returns the first touch that it planned."""
        touches = self.demo.call("POST", "/api/v1/events", self.event(event_type, at=at))["touches"]
        return str(touches[0]) if touches else None

    def event(self, event_type: str, *, at: datetime | None = None) -> dict[str, Any]:
        return {
            "specversion": "1.0",
            "id": f"{self.user_id}-{next(self.demo.numbers)}",
            "source": "/demo-shop",
            "type": event_type,
            "subject": self.user_id,
            "time": (at or datetime.now(UTC)).isoformat(),
            "data": {"chat_id": f"chat-of-{self.user_id}"},
        }


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
        touch = self.await_end(f"/api/v1/touches/{task_id}", WAIT_LIMIT)
        verdict = touch["verdicts"][-1] if touch["verdicts"] else {}
        why = self._lateness(touch) if touch["state"] == "delivered" else describe_verdict(verdict) or touch["reason"]
        print_line(f"  {who:<6} {touch['event']['type']:<22} {touch['node']:<20} {touch['state']:<11} {why}")
        if touch["state"] != state or (rule and verdict.get("rule", touch["reason"]) != rule):
            self.problems.append(f"{who}: {what} should be {state} {rule}, is {touch['state']} ({touch.get('reason')})")

    def await_end(self, path: str, seconds: float) -> dict[str, Any]:
        """Return the touch or job when it has ended, or as it is after the seconds."""
        deadline = time.monotonic() + seconds
        while True:
            row: dict[str, Any] = self.call("GET", path)
            if row["state"] not in ("scheduled", "queued", "running") or time.monotonic() > deadline:
                return row
            time.sleep(0.1)

    def touches_of(self, user_id: str, node: str = "") -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.call("GET", f"/api/v1/touches?user={user_id}{node and f'&node={node}'}")[
            "items"
        ]
        return items

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
        four_rows(demo)
        same_content(demo)
        new_conversation(demo)
        first_order(demo)
        journey(demo)
        silent_chat(demo)
        order_sync(demo)
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


def first_order(demo: Demo) -> None:
    print_line("\nA welcome after the first order only, inside the send window of the next working day:")
    demo.apply_matrix(FIRST_ORDER)
    hal = DemoCustomer(demo, "hal")
    for number, wanted in ((1, 1), (2, 0)):
        order = hal.event("order.paid")
        previewed = demo.call("POST", "/api/v1/preview", order)["items"]
        (shown,) = (each for each in previewed if each["node"] == FIRST_ORDER)
        receipt = demo.call("POST", "/api/v1/events", order)
        touches = [demo.call("GET", f"/api/v1/touches/{task_id}") for task_id in receipt["touches"]]
        planned = [touch["due_at"] for touch in touches if touch["node"] == FIRST_ORDER]
        print_line(f"  hal    order {number}: {explain_preview(shown)}")
        if len(planned) != wanted or (planned and planned != [shown["due_at"]]):
            demo.problems.append(f"order {number} of hal should plan {wanted} welcomes as previewed, not {planned}")
        if wanted and [each["step"] for each in shown["steps"]][:2] != ["delay", "at"]:
            demo.problems.append(f"the welcome should wait for its time of day, not {shown['steps']}")


def explain_preview(shown: dict[str, Any]) -> str:
    if not shown["planned"]:
        verdict = shown["verdict"]
        return f"no welcome, {verdict['rule']}: {verdict['limit']}, observed {verdict['observed']}"
    return " → ".join(f"{each['step']} {each['at'][:16].replace('T', ' ')} UTC" for each in shown["steps"])


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


def silent_chat(demo: Demo) -> None:
    print_line(f"\nTwo live chats with an agent; fay falls silent, gus goes on writing (guide after {SILENT_AFTER} s):")
    ask_and_answer(demo, "fay")
    began_at = time.monotonic()
    while not (touches := demo.touches_of("fay")) and time.monotonic() < began_at + GUIDE_WITHIN:
        ask_and_answer(demo, "gus")
        time.sleep(0.25)
    demo.expect("fay", "the guide message", str(touches[0]["task_id"]) if touches else None, "delivered")
    ask_and_answer(demo, "gus")
    for who, wanted in (("fay", 1), ("gus", 0)):
        found = len(demo.touches_of(who))
        print_line(f"  {who:<6} {found} guide message{'s' * (found != 1)}")
        if found != wanted:
            demo.problems.append(f"{who} should get {wanted} guide messages, not {found}")


def ask_and_answer(demo: Demo, who: str) -> None:
    """Post a message of the customer, then one of an agent. The timer runs after the agent's."""
    for side in ("user", "agent"):
        frame = {"user_id": who, "chat_id": f"chat-of-{who}", "from": side, "kind": "message", "tag": "demo"}
        demo.call("POST", f"/api/v1/sessions/live-{who}/activity", frame)


def order_sync(demo: Demo) -> None:
    print_line("\nThree shops' orders, read in Chromium; each requested twice:")
    if why := demo.stack.manage("shell", "--no-imports", "-c", CHROMIUM_TEST).strip():
        print_line(f"  Not shown. {why} Debian: apt-get install chromium libatomic1")
        return
    demo.stack.manage("apply_config", str(ROOT / "examples" / "demo_shop" / "shops.yaml"))
    with demo_shop() as site, ThreadPoolExecutor(2 * len(SHOPS)) as clicks:
        # Both requests of all shops are concurrent.
        requests = {shop: [clicks.submit(publish_sync, demo, site, shop) for _ in range(2)] for shop in SHOPS}
        for shop, pair in requests.items():
            print_jobs(demo, shop, {request.result()["task_id"]: None for request in pair})
    check_orders(demo)


@contextmanager
def demo_shop() -> Iterator[str]:
    """Run the site of the demo's shops on a free port. Yields its address."""
    # `select_port` avoids the ports that browsers use and that a flow may not connect to.
    words = [sys.executable, "-m", "examples.demo_shop", "--port", str(select_port())]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as site:  # noqa: S603
        try:
            assert site.stdout is not None
            yield next(word for word in site.stdout.readline().split() if word.startswith("http"))
        finally:
            site.terminate()


def publish_sync(demo: Demo, site: str, shop: str) -> Any:
    job = {
        "platform": "demo", "shop_id": shop, "task_type": "sync_order", "priority": "high",
        "payload": {"site": site, "login": True},
    }  # fmt: skip
    return demo.call("POST", "/api/v1/rpa/jobs", job)


def print_jobs(demo: Demo, shop: str, task_ids: Collection[str]) -> None:
    merged = "the second click joined the first" if len(task_ids) == 1 else "the second run came behind the first"
    for task_id in task_ids:
        job = demo.await_end(f"/api/v1/rpa/jobs/{task_id}", JOB_WITHIN)
        result = job.get("result") or {}
        counts = f"{result['read']} read, {result['written']} written" if "read" in result else job["reason"]
        print_line(f"  {shop:<6} {'sync_order':<22} {job['state']:<11} {counts}; {merged}")
        if job["state"] != "succeeded":
            demo.problems.append(f"{shop}: its orders should be read, the job is {job['state']} ({job['reason']})")


def check_orders(demo: Demo) -> None:
    """Check that every order is stored and was written once."""
    with psycopg.connect(demo.stack.endpoints.database_url, row_factory=dict_row) as connection:
        row = connection.execute(
            "SELECT count(*) AS orders, count(DISTINCT shop_id) AS shops, coalesce(max(writes), 0) AS writes"
            " FROM rpa_tasks_demoorder"
        ).fetchone()
    assert row is not None
    print_line(f"  {row['orders']} orders of {row['shops']} shops are stored, each written {row['writes']} time.")
    if row["shops"] != len(SHOPS) or row["writes"] != 1:
        demo.problems.append(f"each order of each shop should be stored once: {row}")


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
    wait_until(lambda: bool(demo.touches_of(user_id, node)), 30, pause=0.1)
    return next((str(touch["task_id"]) for touch in demo.touches_of(user_id, node)), None)


def print_result(demo: Demo) -> None:
    print_line(
        f"\n{len(demo.receiver.bodies)} messages reached the receiver, {demo.receiver.forged} with a wrong signature."
    )
    if demo.receiver.forged:
        demo.problems.append("a signature did not verify")
    if demo.problems:
        sys.exit("NOT as promised:\n" + "\n".join(f"  {problem}" for problem in demo.problems))
    print_line("All of it happened as promised.")


def describe_verdict(verdict: dict[str, Any]) -> str:
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
