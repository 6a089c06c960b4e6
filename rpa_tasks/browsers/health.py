"""Check every idle browser once a minute with a real page.

A browser can answer its port for hours but show no page, or take ten times as long as at first. The slot is locked for
the whole check, some hundred milliseconds: a run must not share its browser with the examiner, which dismisses dialogs.
A browser that hangs is ended after its time limit.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import structlog
from django.conf import settings

from rpa_tasks.browsers import registry
from rpa_tasks.browsers.pool import is_recorded_browser
from rpa_tasks.browsers.recycling import records_in
from rpa_tasks.browsers.registry import IDLE, Record
from rpa_tasks.browsers.slots import Slot, lock_unused_slot

log = structlog.get_logger(__name__)

CHECK_INTERVAL = 60.0  #: seconds
EXAMINER_START_LIMIT = 60.0  #: seconds for the start of the examiner process, which does not count against a browser
PAGE_TIME_LIMIT = 10.0  #: seconds for connecting, and for the page
SLOWER = 3.0  #: times its first page
MIN_SLOWDOWN = 0.5  #: seconds; a slower page below this only shows a busy machine


def check_idle() -> None:
    """Check the idle browsers that are due; end those that fail. A check in the future counts as due: the clock was set
    back.
    """
    due = [record for record in records_in(IDLE) if abs(time.time() - record.checked_at) >= CHECK_INTERVAL]
    if not due:
        return
    with run_examiner() as examiner:
        if not _wait_for_examiner(examiner):
            log.warning("browser_check_not_started")  # the state of the browsers is unknown
            return
        for record in due:
            with lock_unused_slot(record.slot) as slot:
                if slot and slot.record == record:  # not used since
                    _check_slot(examiner, slot, record)
            if examiner.poll() is not None:
                return  # the others were not asked and stay due; the next check starts a new examiner


def _check_slot(examiner: subprocess.Popen[bytes], slot: Slot, record: Record) -> None:
    if not is_recorded_browser(record):
        slot.empty("not in order")
        return
    if record.remote:  # it answers; a run on another node may use its pages
        slot.write(replace(record, checked_at=time.time()))
        return
    health = _ask_examiner(examiner, record)
    if why := _health_problem(health, record.baseline):
        log.warning("browser_unhealthy", slot=slot.number, profile=record.profile, why=why)
        slot.empty(why)
    else:
        slot.write(replace(record, checked_at=time.time(), baseline=record.baseline or health["seconds"]))


def _health_problem(health: dict[str, Any], baseline: float) -> str:
    if not health["ok"]:
        return f"check: {health['reason']}"[:200]
    if baseline and health["seconds"] >= max(SLOWER * baseline, MIN_SLOWDOWN):
        return f"slow: {health['seconds']:.2f} s, at first {baseline:.2f} s"
    return ""


@contextmanager
def run_examiner() -> Iterator[subprocess.Popen[bytes]]:
    """Start the examiner as a separate process, so that a broken browser cannot affect the maintainer."""
    with subprocess.Popen(
        [sys.executable, "-m", "rpa_tasks.browsers.playwright_driver", "examine"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        cwd=settings.BASE_DIR,
        env=minimal_environment(),
    ) as examiner:
        try:
            yield examiner
        finally:
            examiner.kill()


def minimal_environment() -> dict[str, str]:
    """Return an environment without secrets for a helper that a hostile page might take over."""
    names = ("PATH", "HOME", "TMPDIR", "LANG", "TZ", "PYTHONPATH", "DJANGO_SETTINGS_MODULE")
    return {name: os.environ[name] for name in names if name in os.environ}


def _wait_for_examiner(examiner: subprocess.Popen[bytes]) -> bool:
    """Wait for the examiner. Python, Playwright and its driver may need longer than the time limit of a browser."""
    assert examiner.stdout
    return bool(select.select([examiner.stdout], [], [], EXAMINER_START_LIMIT)[0] and examiner.stdout.readline())


def _ask_examiner(examiner: subprocess.Popen[bytes], record: Record) -> dict[str, Any]:
    """Return the browser's health.

    An examiner that does not answer in time is killed; the next question then fails at once.
    """
    question = {
        "port": record.port,
        "profile": str(registry.profile_dir(record.profile)),
        "seconds": PAGE_TIME_LIMIT,
    }
    assert examiner.stdin
    assert examiner.stdout
    try:
        examiner.stdin.write(json.dumps(question).encode() + b"\n")
        if select.select([examiner.stdout], [], [], 2 * PAGE_TIME_LIMIT + 5)[0]:
            return dict(json.loads(examiner.stdout.readline()))
        examiner.kill()
        examiner.wait()
        return {"ok": False, "reason": "no answer", "seconds": 0.0}
    except (OSError, ValueError) as error:
        return {"ok": False, "reason": f"not examined: {error!r}", "seconds": 0.0}
