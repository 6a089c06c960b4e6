"""Ending a browser, and proving that it is gone before anybody uses its slot or its profile again."""

from __future__ import annotations

import signal
import time

import structlog

from rpa_tasks.pool import devtools, places, processes
from rpa_tasks.pool.processes import Process
from rpa_tasks.pool.registry import Record
from rpa_tasks.pool.singleton import release_singleton

log = structlog.get_logger(__name__)

CLOSING = 5.0  #: seconds for a browser that was asked to close: it writes its cookies
TERMINATING = 2.0
KILLING = 5.0


def end(record: Record, why: str) -> bool:
    """End the slot's browser with everything it started. False: something could not be proven dead.

    Asked to close first: a Chromium that is terminated drops the cookies of its last half minute, and with them a
    fresh login. Where nothing of it is left no process of ours can hold its port either.
    """
    if _asked_to_close(record):
        processes.wait_for_end(record.pid, seconds=CLOSING)
    left = (
        remaining(record)
        and _signalled(record, signal.SIGTERM, TERMINATING)
        and _signalled(record, signal.SIGKILL, KILLING)
    )
    if left:
        log.error("browser.survived", slot=record.slot, profile=record.profile, pids=[each.pid for each in left])
        return False
    if record.profile:
        release_singleton(places.profile(record.profile))
    log.info("browser.ended", slot=record.slot, profile=record.profile, why=why)
    return True


def remaining(record: Record) -> list[Process]:
    """What still lives of the slot's browser."""
    return processes.browser_processes(
        marker=places.marker(record.slot),
        profile=str(places.profile(record.profile)) if record.profile else "",
        leader=(record.pid, record.ticks),
    )


def _asked_to_close(record: Record) -> bool:
    """Only our own browser: on its port somebody else may listen by now."""
    if not (record.port and processes.is_alive(record.pid, record.ticks)):
        return False
    try:
        devtools.call(record.port, record.path, "Browser.close", timeout=2.0)
    except devtools.NoAnswer:
        return False
    return True


def _signalled(record: Record, number: signal.Signals, seconds: float) -> list[Process]:
    """Signal all of it, again and again as it may fork, until nothing is left or the time is over."""
    ends_at = time.monotonic() + seconds
    told: set[int] = set()
    while (left := remaining(record)) and time.monotonic() < ends_at:
        for process in left:
            if process.pid not in told or number == signal.SIGKILL:
                processes.send(process, number)
                told.add(process.pid)
        time.sleep(0.02)
    return left
