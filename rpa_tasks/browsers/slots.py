"""Find a slot for the browser of a shop, and end a browser before its slot or profile is used again.

Only the holder of a slot's lock changes the slot. Only the holder of a profile's lock starts a browser on it. While
another process evicts a shop's browser, the shop finds its own slot locked. It waits until the record names another
shop; the end of the old browser is proven by then.

Chromium drops session cookies when it ends, and many shops keep a login in one. So they are stored beside the profile
and given to its next browser.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from django.conf import settings

from rpa_tasks.browsers import devtools, registry
from rpa_tasks.browsers.browser_processes import find_browser_family, read_command_line, release_singleton
from rpa_tasks.browsers.registry import BUSY, IDLE, QUARANTINED, Lock, Record
from rpa_tasks.supervisor.processes import Process, end_processes, is_alive

log = structlog.get_logger(__name__)

ANSWER_WITHIN = 2.0  #: seconds for a browser to return its cookies, and to accept the close command
CLOSE_TIMEOUT = 3.0  #: seconds for a browser to close: it writes its cookies
KILL_GRACE = 2.0  #: seconds between SIGTERM and SIGKILL
COOKIE_FIELDS = (
    "name", "value", "domain", "path", "secure", "httpOnly", "sameSite", "priority", "sourceScheme", "partitionKey",
)  # fmt: skip


class Slot:
    """A slot whose lock this process has."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.record: Record | None = None
        self._lock = Lock(registry.slot_lock(number))

    @property
    def held(self) -> bool:
        return self._lock.held

    def try_acquire(self) -> bool:
        """Try to take the slot and read its record."""
        if not self._lock.try_acquire():
            return False
        self.record = registry.read_record(self.number)
        return True

    def write(self, record: Record) -> None:
        registry.write_record(record)
        self.record = record

    def empty(self, why: str) -> bool:
        """End the slot's browser. Returns False, and quarantines the slot, if the end is not proven."""
        if self.record is None:
            return True
        if not end_browser(self.record, why):
            self.write(replace(self.record, state=QUARANTINED, reason=why))
            return False
        registry.delete_record(self.number)
        self.record = None
        return True

    def release(self) -> None:
        self._lock.release()


@contextmanager
def lock_unused_slot(number: int) -> Iterator[Slot | None]:
    """Lock the slot for a moment; None if another process has it."""
    slot = Slot(number)
    if not slot.try_acquire():
        yield None
        return
    try:
        yield slot
    finally:
        slot.release()


def take_slot(profile_id: str, *, may_start: bool = True, kept: Container[str] = ()) -> Slot | None:
    """Try once to take a slot for the shop, without ending the browsers of `kept` profiles. The caller has the
    profile's lock.

    The order is: the shop's own browser, an empty slot, one whose worker process died, the idle browser that was used
    longest ago. The slot is locked and holds the shop's own browser or none. Raises `OSError`, for example on a full
    disk.
    """
    own = registry.records_of_profile(profile_id)
    for number in [record.slot for record in own] or (_slots_by_preference() if may_start else []):
        slot = Slot(number)
        if not slot.try_acquire():
            continue
        usable = False
        try:
            found = slot.record  # it may have changed since the look
            if own:
                usable = found is not None and found.profile == profile_id and found.state != QUARANTINED
            elif found is None or (found.state != QUARANTINED and found.profile not in kept):
                usable = slot.empty("evicted")
        finally:
            if not usable:
                slot.release()
        if usable:
            return slot
    return None


def _slots_by_preference() -> list[int]:
    records = {
        slot: record for slot, record in registry.read_records().items() if slot <= settings.AFTERTOUCH_RPA_BROWSERS
    }
    empty = [slot for slot, record in records.items() if record is None]
    busy = [slot for slot, record in records.items() if record and record.state == BUSY]
    idle = sorted((each.last_used_at, slot) for slot, each in records.items() if each and each.state == IDLE)
    return [*empty, *busy, *(slot for _, slot in idle)]


def end_browser(record: Record, why: str) -> bool:
    """End the slot's browser with all its processes. Returns False if the end of one is not proven.

    The browser is asked to close first. A terminated Chromium loses the cookies of its last 30 seconds, and with them a
    new login. Its session cookies are kept. The port needs no proof: without a process nothing listens.
    """
    record = record if record.pid else _identify_main_process(record)
    if _request_close(record):
        _wait_for_exit(record.pid, CLOSE_TIMEOUT)
    if left := end_processes(lambda: remaining_processes(record), KILL_GRACE):
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
        _save_session_cookies(record)
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


def _save_session_cookies(record: Record) -> None:
    """Store the session cookies before the browser is asked to close. Raises `devtools.NoAnswer`."""
    cookies = devtools.list_cookies(record.port, record.path, timeout=ANSWER_WITHIN)
    lasting = [{key: cookie[key] for key in COOKIE_FIELDS if key in cookie} for cookie in cookies if cookie["session"]]
    try:
        registry.replace_json(session_cookies(record.profile), lasting)
    except OSError as error:
        log.warning("session_cookies_not_kept", profile=record.profile, error=str(error))


def restore_session_cookies(record: Record) -> None:
    """Restore the cookies in the profile's new browser. A cookie that it already has is newer and stays."""

    def key_of(cookie: dict[str, Any]) -> tuple[str, str, str]:
        return cookie["name"], cookie["domain"], cookie["path"]

    try:
        kept = json.loads(registry.read_own(session_cookies(record.profile)))
        present = {key_of(cookie) for cookie in devtools.list_cookies(record.port, record.path)}
        if missing := [cookie for cookie in kept if key_of(cookie) not in present]:
            devtools.send_command(record.port, record.path, "Storage.setCookies", cookies=missing)
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, LookupError, RecursionError, devtools.NoAnswer) as error:
        # Programs of the shop can write the file.
        log.warning("session_cookies_lost", profile=record.profile, error=str(error))


def session_cookies(profile_id: str) -> Path:
    return registry.profile_dir(profile_id) / ".session-cookies.json"
