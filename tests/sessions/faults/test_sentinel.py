"""The primary behind three Sentinels is killed: store, inboxes, channel layer and broker go over to its replica."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.brokers import sentinels
from tests.sessions.faults.conftest import Crowded
from tests.sessions.faults.house import house

pytestmark = pytest.mark.faults


def test_sentinels_name_another_primary(folder: Callable[[], Path], crowded: Crowded) -> None:
    home = folder()
    with sentinels(home / "redis") as watched:
        env = {"REDIS_URL": watched.broker_url, "CELERY_BROKER_URL": watched.broker_url}
        with house(home, env) as made:
            made.send_by("inapp")
            one, other, watcher = made.web("web-a"), made.web("web-b"), made.watcher()
            before = watched.primary_port()
            assert before == watched.primary.port
            with (
                made.running(one, other, watcher),
                crowded(made, "Sentinel fail-over of the store", one, other, in_order=False) as run,
            ):
                made.await_watcher(watcher)
                run.go_on()
                struck_at, silences = time.monotonic(), run.silences()
                watched.primary.kill()
                made.wait(lambda: watched.primary_port() not in (0, before), "another primary is named")
                run.notes.append(f"new primary after {time.monotonic() - struck_at:.1f} s")
                run.go_on()
                answered = [at for each in run.crowd.people for at in each.acknowledged.values() if at > struck_at + 1]
                run.notes.append(f"first message taken after {min(answered) - struck_at:.1f} s")
                made.wait(lambda: run.silences() > silences, "silences are found again")
                run.notes.append(f"first silence handed in within {time.monotonic() - struck_at:.1f} s")
