"""The thread beside a worker that sees to it that there is a maintainer."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpa_tasks.maintainer import process
from rpa_tasks.maintainer.process import Supervision
from tests.rpa_tasks.browsers.browser_processes import is_gone
from tests.support.waiting import WAIT_LIMIT, eventually


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configured path of Python; no file exists there yet."""
    path = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(process, "INTERVAL", 0.02)
    return path


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that a maintainer was to be started."""
    tries: list[None] = []
    launch = Supervision.launch

    def launched(self: Supervision) -> subprocess.Popen[bytes]:
        tries.append(None)
        return launch(self)

    monkeypatch.setattr(Supervision, "launch", launched)
    return tries


@pytest.fixture
def supervision(interpreter: Path, tries: list[None]) -> Iterator[Supervision]:
    supervision = Supervision([])
    yield supervision
    supervision.stop()


def test_maintainer_start_failure_is_retried(supervision: Supervision, interpreter: Path, tries: list[None]) -> None:
    """The machine was short of memory or descriptors for a moment; the worker goes on for days."""
    eventually(lambda: len(tries) >= 3, "it was not tried again")
    assert supervision.pid is None

    lives_as_long_as_its_input = interpreter.with_name("new")
    lives_as_long_as_its_input.write_text("#!/bin/sh\nexec cat\n")
    lives_as_long_as_its_input.chmod(0o700)
    lives_as_long_as_its_input.rename(interpreter)
    pid = eventually(lambda: supervision.pid, "it was not started")
    supervision.stop()
    assert is_gone(pid)


def test_supervision_stop_does_not_wait_for_retry(
    supervision: Supervision, tries: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "INTERVAL", 1000.0)
    eventually(lambda: tries, "it was not tried")
    supervision.stop()
    assert not supervision._thread.is_alive()


def test_supervision_stop_ends_although_its_thread_hangs(
    interpreter: Path, tries: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the node does not answer. A stop of the worker must not wait for it."""
    interpreter.write_text("#!/bin/sh\nexec sleep 1000\n")
    interpreter.chmod(0o700)
    over = threading.Event()
    monkeypatch.setattr(process, "reap_orphans", lambda known: over.wait(WAIT_LIMIT))
    monkeypatch.setattr(process, "STOP_WITHIN", 0.05)
    monkeypatch.setattr(process, "STOP_MARGIN", 0.05, raising=False)
    supervision = Supervision([])
    try:
        pid = eventually(lambda: supervision.pid, "it was not started")
        stop = threading.Thread(target=supervision.stop, daemon=True)
        stop.start()
        stop.join(8.0)
        assert not stop.is_alive()
        eventually(lambda: is_gone(pid), "it was not ended")
    finally:
        over.set()
        supervision._thread.join()
