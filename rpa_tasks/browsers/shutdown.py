"""Ending a browser, and proving that it is gone before anybody uses its slot or its profile again."""

from __future__ import annotations

import os
import select
from dataclasses import replace

import structlog

from rpa_tasks.browsers import devtools, profiles, registry
from rpa_tasks.browsers.browser_processes import command_line, family, is_alive
from rpa_tasks.browsers.registry import Record
from rpa_tasks.browsers.singleton import release_singleton
from rpa_tasks.supervisor import processes
from rpa_tasks.supervisor.processes import Process

log = structlog.get_logger(__name__)

ANSWER_WITHIN = 2.0  #: seconds for a browser to take in that it is to close
CLOSING = 3.0  #: seconds for a browser that was asked to close: it writes its cookies
GRACE = 2.0  #: seconds between SIGTERM and SIGKILL


def end(record: Record, why: str) -> bool:
    """End the slot's browser with everything it started. False: something could not be proven dead.

    Asked to close first: a Chromium that is terminated drops the cookies of its last half minute, and with them a
    fresh login. What it would forget in any case is kept by `logins`. Its port needs no proof of its own: where nothing
    of it is left, nothing of it listens.
    """
    record = record if record.pid else _recognised(record)
    if _asked_to_close(record):
        _wait_for(record.pid, CLOSING)
    if left := processes.end(lambda: remaining(record), GRACE):
        log.error("browser_survived", slot=record.slot, profile=record.profile, pids=[each.pid for each in left])
        return False
    if record.profile:
        release_singleton(registry.profile(record.profile))
    log.info("browser_ended", slot=record.slot, profile=record.profile, why=why)
    return True


def remaining(record: Record) -> list[Process]:
    """What still lives of the slot's browser."""
    profile = str(registry.profile(record.profile)) if record.profile else ""
    return family(marker=registry.marker(record.slot), leader=(record.pid, record.ticks), profile=profile)


def _recognised(record: Record) -> Record:
    """With the browser's main process, where its starter was killed before it could record it: the zygotes carry no
    other mark than its session."""
    for process in remaining(record):
        line = command_line(process.pid)
        if process.session == process.pid and "--user-data-dir=" in line and "--type=" not in line:
            return replace(record, pid=process.pid, ticks=process.started)
    return record


def _asked_to_close(record: Record) -> bool:
    """Only our own browser: on its port somebody else may listen by now."""
    if not (record.port and is_alive(record.pid, record.ticks)):
        return False
    try:
        profiles.keep(record.port, record.path, registry.profile(record.profile))
        devtools.call(record.port, record.path, "Browser.close", timeout=ANSWER_WITHIN)
    except devtools.NoAnswer:
        return False
    return True


def _wait_for(pid: int, seconds: float) -> None:
    """Sleep until the process ends, or the time is over."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        gone = select.poll()
        gone.register(handle, select.POLLIN)
        gone.poll(seconds * 1000)
    finally:
        os.close(handle)
