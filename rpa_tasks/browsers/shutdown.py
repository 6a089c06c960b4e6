"""End a browser and prove its end before its slot or profile is used again."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from dataclasses import replace

import structlog

from rpa_tasks.browsers import devtools, profiles, registry
from rpa_tasks.browsers.browser_processes import find_browser_family, read_command_line
from rpa_tasks.browsers.registry import BUSY, Record
from rpa_tasks.browsers.singleton import release_singleton
from rpa_tasks.supervisor import processes
from rpa_tasks.supervisor.processes import Process, is_alive

log = structlog.get_logger(__name__)

ANSWER_WITHIN = 2.0  #: seconds for a browser to accept the close command
CLOSE_TIMEOUT = 3.0  #: seconds for a browser to close: it writes its cookies
KILL_GRACE = 2.0  #: seconds between SIGTERM and SIGKILL


def end_browser(record: Record, why: str) -> bool:
    """End the slot's browser with all its processes. Returns False if the end of one is not proven.

    The browser is asked to close first. A terminated Chromium loses the cookies of its last 30 seconds, and with them a
    new login. `profiles` keeps the session cookies. The port needs no proof: without a process nothing listens.
    """
    record = record if record.pid else _identify_main_process(record)
    if _request_close(record):
        _wait_for_exit(record.pid, CLOSE_TIMEOUT)
    if left := processes.end_processes(lambda: remaining_processes(record), KILL_GRACE):
        log.error("browser_survived", slot=record.slot, profile=record.profile, pids=[each.pid for each in left])
        return False
    if record.profile:
        release_singleton(registry.profile_dir(record.profile))
    log.info("browser_ended", slot=record.slot, profile=record.profile, why=why)
    return True


def remaining_processes(record: Record) -> list[Process]:
    """Return the running processes of the slot's browser."""
    profile = str(registry.profile_dir(record.profile)) if record.profile else ""
    return find_browser_family(
        marker=registry.slot_marker(record.slot), leader=(record.pid, record.ticks), profile=profile
    )


def _identify_main_process(record: Record) -> Record:
    """Return the record with the browser's main process, if its starter was killed before recording it.

    The zygotes have no mark other than its session.
    """
    for process in remaining_processes(record):
        line = read_command_line(process.pid)
        if process.session == process.pid and "--user-data-dir=" in line and "--type=" not in line:
            return replace(record, pid=process.pid, ticks=process.started)
    return record


def _request_close(record: Record) -> bool:
    """Ask the browser to close. Only if it is the recorded one: another program may listen on its port."""
    if not (record.port and is_alive(record.pid, record.ticks)):
        return False
    if record.remote:  # its owner ends it
        if record.state == BUSY:  # an idle one has no pages of ours, but maybe those of a run on another node
            with suppress(devtools.NoAnswer):
                devtools.reset_to_blank_page(record.port)
        return False
    try:
        profiles.save_session_cookies(record.port, record.path, registry.profile_dir(record.profile))
        devtools.send_command(record.port, record.path, "Browser.close", timeout=ANSWER_WITHIN)
    except devtools.NoAnswer:
        return False
    return True


def _wait_for_exit(pid: int, seconds: float) -> None:
    """Wait until the process ends, or the time is over."""
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
