"""The demo shop, a real browser, and flows run as the workers run them: as a process of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from config.environment import ROOT
from examples.demo_shop.market import Market
from examples.demo_shop.site import Handler, build_site
from rpa_tasks.flow_sdk.flow import open_browser
from tests.support.chromium import find_chromium
from tests.support.thread_servers import application_in_thread
from tests.support.waiting import WAIT_LIMIT


class Site:
    """A demo shop of this test's own. A request can be held, so that things happen just then."""

    def __init__(self) -> None:
        self.url = ""
        self.market = Market(orders=45, messages=5, first_change=1000)
        self.reached = threading.Event()
        self.released = threading.Event()
        self._held: tuple[str, str, dict[str, str]] | None = None

    def hold(self, method: str, path: str, **fields: str) -> None:
        """The first such request waits for `release`; `reach` waits for it."""
        self._held = (method, path, fields)

    def reach(self) -> None:
        assert self.reached.wait(WAIT_LIMIT)

    def release(self) -> None:
        self.released.set()

    def build(self) -> web.Application:
        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            fields = {**request.query, **await request.post()}
            held = self._held
            if held and held[:2] == (request.method, request.path) and held[2].items() <= fields.items():
                self._held = None
                self.reached.set()
                await asyncio.to_thread(self.released.wait, WAIT_LIMIT)
            return await handler(request)

        application = build_site(self.market)
        application.middlewares.insert(0, answer)
        return application

    def effects(self, shop: str = "s1") -> dict[str, Any]:
        effects: dict[str, Any] = json.loads(self.ask("/effects.json"))["shops"][shop]
        return effects

    def ask(self, path: str, *, post: bool = False) -> str:
        request = urllib.request.Request(self.url + path, method="POST" if post else "GET")
        with urllib.request.urlopen(request, timeout=WAIT_LIMIT) as answer:
            return str(answer.read().decode())


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with application_in_thread(site.build()) as site.url:
        yield site
        site.release()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A browser's debug port."""
    find_chromium()
    with open_browser() as port:
        yield port


@pytest.fixture
def tabs(port) -> Callable[[], list[str]]:
    """The addresses of the browser's pages."""

    def tabs() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=WAIT_LIMIT) as answer:
            return [each["url"] for each in json.load(answer) if each["type"] == "page"]

    return tabs


@dataclass
class Run:
    """A flow in a process of its own, or another of the commands."""

    command: str
    process: subprocess.Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)
    errors: str = ""

    def wait_for(self, word: str) -> None:
        """Read until a line contains this text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))
            if word in line:
                return
        raise AssertionError(f"{word!r} was never said: {self.lines} {self.process.communicate()[1]}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        rest, self.errors = self.process.communicate(timeout=WAIT_LIMIT)
        self.lines += [json.loads(line) for line in rest.splitlines() if self.command in ("run", "try")]
        return self.process.returncode

    @property
    def result(self) -> dict[str, Any] | None:
        found = [line["result"] for line in self.lines if "result" in line]
        assert len(found) <= 1
        return found[0] if found else None


class Flows:
    """Writes flows and runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            "AFTERTOUCH_RPA_FLOWS": str(folder),
        }
        self.started: list[Run] = []

    def write(self, name: str, body: str) -> Path:
        """Write a flow whose `run(flow)` is `body`, after `from rpa_tasks.flow_sdk import *`."""
        path = self.folder / f"{name}.py"
        indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
        path.write_text(f"import sys, time\nfrom rpa_tasks.flow_sdk import *\n\ndef run(flow):\n{indented}\n")
        return path

    def begin(self, name: str, payload: Any = None, *, timeout: float = 600, **fields: Any) -> Run:
        param = {"shop_id": "s1", "platform": "demo", "payload": payload or {}} | fields
        return self.command("run", "--flow", name, "--param", json.dumps(param), "--timeout", str(timeout))

    def run(self, name: str, payload: Any = None, **fields: Any) -> Run:
        run = self.begin(name, payload, **fields)
        run.end()
        return run

    def command(self, *words: str) -> Run:
        process = subprocess.Popen(
            [sys.executable, "-m", "rpa_tasks.flow_sdk", *words],
            env=self.environment, cwd=self.folder.parent, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        run = Run(words[0] if words else "", process)
        self.started.append(run)
        return run


@pytest.fixture
def flows(tmp_path) -> Iterator[Flows]:
    folder = tmp_path / "flows"
    folder.mkdir()
    flows = Flows(folder)
    yield flows
    for run in flows.started:
        run.process.kill()
        run.process.communicate()


@pytest.fixture
def read_stored_orders(transactional_db, flows) -> Callable[[], dict[str, Any]]:
    """The flow gets the database as the workers give it. Returns the shop's orders by number."""
    from rpa_tasks.models import DemoOrder
    from rpa_tasks.supervisor.command import environment_for

    given = environment_for(
        task_id="t", lease_no=1, shop="demo/s1", home=Path("/"), temporary=Path("/"), names=["DATABASE_URL"]
    )
    flows.environment["DATABASE_URL"] = given["DATABASE_URL"]

    def read_stored_orders() -> dict[str, Any]:
        return {order.order_no: order for order in DemoOrder.objects.filter(shop_id="s1")}

    return read_stored_orders
