"""A database that hangs: it takes connections and questions, and answers nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from django.db import connection


class HangingDatabase:
    """A TCP gate before PostgreSQL. While it `hangs`, it takes connections and what is sent, and answers nothing."""

    def __init__(self, behind: int) -> None:
        self._behind = behind
        self._passes = threading.Event()
        self._passes.set()
        self._open: list[socket.socket] = []
        self.taken = 0  #: connections
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
                self.taken += 1
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


@contextmanager
def proxy_database() -> Iterator[HangingDatabase]:
    """Run this before every connection that a thread opens in the block."""
    connection.ensure_connection()
    gate = HangingDatabase(int(connection.settings_dict["PORT"]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(connection.settings_dict, "PORT", str(gate.port))
        patched.setitem(connection.settings_dict["OPTIONS"], "connect_timeout", 2)
        yield gate
    gate.end()
