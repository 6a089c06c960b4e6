"""A PostgreSQL that is alive for TCP and says nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
from django.db import connection, connections

from scheduling.alerts.watchman import Watchman
from scheduling.models import Alert, AlertReceiver
from tests.scheduling.alerts.conftest import Robot
from tests.scheduling.api.serving import PATIENCE

TOLD, OVER = "【告警】PostgreSQL 没有及时响应", "【已恢复】PostgreSQL 没有及时响应"


class Hanging:
    """A TCP gate before PostgreSQL. While it `hangs`, it takes connections and what is sent, and answers nothing."""

    def __init__(self, behind: int) -> None:
        self._behind = behind
        self._passes = threading.Event()
        self._passes.set()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def hangs(self) -> None:
        self._passes.clear()

    def answers(self) -> None:
        self._passes.set()

    def end(self) -> None:
        self._passes.set()
        for each in (self._listener, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._behind))
                self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=[one, other], daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._passes.wait()
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def gate(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    """Before every connection that is made from now on."""
    connection.ensure_connection()
    made = Hanging(int(connection.settings_dict["PORT"]))
    monkeypatch.setitem(connection.settings_dict, "PORT", str(made.port))
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "connect_timeout", 2)
    yield made
    made.end()


@pytest.fixture
def rounds(gate: Hanging) -> Iterator[Callable[[float], bool]]:
    """The watchman's, one by one, in a thread of his own that waits so many seconds for the database."""
    watchman = Watchman()
    watchman._leads.set()

    def one(seconds: float) -> bool:
        watchman._patience.seconds = seconds
        return thread.submit(watchman._round).result(PATIENCE)

    with ThreadPoolExecutor(1) as thread:
        yield one
        gate.end()
        thread.submit(lambda: connections["default"].close()).result(PATIENCE)


def test_a_database_that_hangs_is_told_once_and_then_that_it_is_over(
    robot: Robot, on_duty: Callable[..., AlertReceiver], gate: Hanging, rounds: Callable[[float], bool]
) -> None:
    on_duty(limits={"database": 0}, holds_for=timedelta(0))
    rounds(PATIENCE)
    assert robot.taken == []
    gate.hangs()
    for _ in range(3):  # a question that nobody answers, then connections that nobody greets
        rounds(1)
    assert [each.splitlines()[0] for each in robot.taken] == [TOLD]
    gate.answers()
    rounds(PATIENCE)
    assert [each.splitlines()[0] for each in robot.taken] == [TOLD, OVER]
    assert not Alert.objects.exists()
