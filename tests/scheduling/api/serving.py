"""A real web process, a client with a key, and a gate before PostgreSQL that can be shut."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import requests
from django.db import connection

from config.environment import ROOT, environment
from tests.support.waiting import WAIT_LIMIT

NOWHERE = "redis://127.0.0.1:1/0"
FLAGS = (
    "--http config.http_protocol:BoundedHttpProtocol --ws websockets-sansio --ws-max-size 65536"
    " --ws-per-message-deflate false --timeout-graceful-shutdown 2 --log-level warning --no-access-log"
)


def database_url(port: int | None = None) -> str:
    """The test database, as another process names it."""
    found = connection.settings_dict
    user, password = quote(found["USER"]), quote(found["PASSWORD"])
    return f"postgresql://{user}:{password}@{found['HOST']}:{port or found['PORT']}/{found['NAME']}"


@contextmanager
def process(*words: str, pass_fds: Sequence[int] = (), **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of the product on the test database, ended with the test."""
    env = {**os.environ, "DATABASE_URL": database_url(), "REDIS_URL": environment().redis, **environ}
    running = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env, pass_fds=pass_fds)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(WAIT_LIMIT)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


@contextmanager
def listening() -> Iterator[socket.socket]:
    """A port that outlives the web processes that serve it, one after the other."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4096)
        yield listener


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def web_on(listener: socket.socket, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """uvicorn as the stack starts it."""
    words = ["-m", "uvicorn", "tests.support.longer_limits_asgi:application", "--fd", str(listener.fileno())]
    with process(*words, *FLAGS.split(), pass_fds=[listener.fileno()], **environ) as running:
        yield running


@contextmanager
def serving(**environ: str) -> Iterator[str]:
    """A web process; yields its address. It need not be awaited: connections wait in the backlog."""
    with listening() as listener, web_on(listener, **environ):
        yield f"http://{address_of(listener)}"


@dataclass(frozen=True)
class Client:
    """Call one server with one key."""

    address: str
    key: str

    def __call__(self, method: str, path: str, body: Any = None, **options: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer {self.key}"} | options.pop("headers", {})
        url = f"{self.address}/api/v1{path}"
        return requests.request(method, url, json=body, headers=headers, timeout=WAIT_LIMIT, **options)

    def get(self, path: str, **params: Any) -> requests.Response:
        return self("GET", path, params=params)

    def event(self, *events: dict[str, Any], **options: Any) -> requests.Response:
        """One event in structured mode, several as a batch."""
        kind = "application/cloudevents+json" if len(events) == 1 else "application/cloudevents-batch+json"
        body = events[0] if len(events) == 1 else list(events)
        return self("POST", "/events", body, headers={"Content-Type": kind}, **options)

    def raw(self, body: bytes, content_type: str = "application/cloudevents+json", **headers: str) -> requests.Response:
        sent = {"Authorization": f"Bearer {self.key}", "Content-Type": content_type} | headers
        return requests.post(f"{self.address}/api/v1/events", data=body, headers=sent, timeout=WAIT_LIMIT)


def cloud_event(id: str = "e1", **changes: Any) -> dict[str, Any]:
    """A CloudEvent about Ann."""
    event = {
        "specversion": "1.0", "id": id, "source": "/shop", "type": "material.downloaded", "subject": "ann",
        "data": {"chat_id": "c1"},
    }  # fmt: skip
    return {name: value for name, value in (event | changes).items() if value is not ...}


class Gate:
    """A TCP gate before a server. Open, it lets through; shut, it refuses. While it hangs, it takes what is sent, and
    answers nothing.
    """

    def __init__(self, port: int) -> None:
        self._behind = port
        self.taken = 0  #: connections
        self._passes = threading.Event()
        self._passes.set()
        self._open: list[socket.socket] = []
        self._pumps: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._listen()

    def hang(self) -> None:
        self._passes.clear()

    def go_on(self) -> None:
        self._passes.set()

    def shut(self) -> None:
        self.go_on()
        # Shutting down first wakes the thread that accepts.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_LIMIT)
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for pump in self._pumps:
            pump.join(WAIT_LIMIT)
        for each in self._open:
            each.close()
        self._open.clear()
        self._pumps.clear()

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._listen()

    def _listen(self) -> None:
        self._thread = threading.Thread(target=self._accept, args=[self._listener], daemon=True)
        self._thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            self.taken += 1
            far = socket.create_connection(("127.0.0.1", self._behind))
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                pump = threading.Thread(target=self._pump, args=[one, other], daemon=True)
                self._pumps.append(pump)
                pump.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._passes.wait()
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
