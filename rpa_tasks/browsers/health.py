"""A real page in every idle browser, once a minute. A browser can answer its port for hours and be unable to show
anything, or take ten times as long as in its first minute.

The slot is locked only for the page itself, some tens of milliseconds; connecting, which takes longer, comes before. A
browser that hangs is ended when its time is over, however long its shop then waits: it had none anyway.
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
from rpa_tasks.browsers.pool import is_in_order
from rpa_tasks.browsers.recycling import recorded
from rpa_tasks.browsers.registry import IDLE, Record
from rpa_tasks.browsers.slots import Slot, unused

log = structlog.get_logger(__name__)

EVERY = 60.0  #: seconds
START = 60.0  #: seconds for the examiner itself to be there; no browser's fault
PATIENCE = 10.0  #: seconds for connecting, and for the page
SLOWER = 3.0  #: times its first page
NOTICED = 0.5  #: seconds below which slower is only a busy machine


def check_idle() -> None:
    """Examine the idle browsers that are due; end those that do not pass."""
    due = [record for record in recorded(IDLE) if time.time() - record.checked_at >= EVERY]
    if not due:
        return
    with _examiner() as examiner:
        if not _is_ready(examiner):
            log.warning("examiner_not_started")  # which says nothing about the browsers
            return
        for record in due:
            _ask(examiner, record, "connect")
            with unused(record.slot) as slot:
                if slot and slot.record == record:  # not used since
                    _examine(examiner, slot, record)
            if examiner.poll() is not None:
                return  # nobody asked the others: they are due still, and the next look has an examiner of its own


def _examine(examiner: subprocess.Popen[bytes], slot: Slot, record: Record) -> None:
    if not is_in_order(record):
        slot.empty("not in order")
        return
    health = _ask(examiner, record, "navigate")
    if why := _complaint(health, record.baseline):
        log.warning("browser_unhealthy", slot=slot.number, profile=record.profile, why=why)
        slot.empty(why)
    else:
        slot.write(replace(record, checked_at=time.time(), baseline=record.baseline or health["seconds"]))


def _complaint(health: dict[str, Any], baseline: float) -> str:
    if not health["ok"]:
        return f"check: {health['reason']}"[:200]
    if baseline and health["seconds"] >= max(SLOWER * baseline, NOTICED):
        return f"slow: {health['seconds']:.2f} s, at first {baseline:.2f} s"
    return ""


@contextmanager
def _examiner() -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own: whatever a sick browser does to it, the maintainer goes on."""
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
    """Of a helper that speaks to a browser: what a hostile page made of it would find there. No secret of ours."""
    names = ("PATH", "HOME", "TMPDIR", "LANG", "TZ", "PYTHONPATH", "DJANGO_SETTINGS_MODULE")
    return {name: os.environ[name] for name in names if name in os.environ}


def _is_ready(examiner: subprocess.Popen[bytes]) -> bool:
    """Waits for it. Python, Playwright and its driver may need longer than a browser is given."""
    assert examiner.stdout
    return bool(select.select([examiner.stdout], [], [], START)[0] and examiner.stdout.readline())


def _ask(examiner: subprocess.Popen[bytes], record: Record, what: str) -> dict[str, Any]:
    """Its health. The examiner is killed where it does not answer in time; the next question then fails at once."""
    question = {"do": what, "port": record.port, "profile": str(registry.profile(record.profile)), "seconds": PATIENCE}
    assert examiner.stdin
    assert examiner.stdout
    try:
        examiner.stdin.write(json.dumps(question).encode() + b"\n")
        if select.select([examiner.stdout], [], [], PATIENCE + 5)[0]:
            return dict(json.loads(examiner.stdout.readline()))
        examiner.kill()
        examiner.wait()
        return {"ok": False, "reason": "no answer", "seconds": 0.0}
    except (OSError, ValueError) as error:
        return {"ok": False, "reason": f"not examined: {error!r}", "seconds": 0.0}
