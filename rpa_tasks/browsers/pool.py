"""Acquire a slot and the browser of a shop for one run, and release it."""

from __future__ import annotations

import json
import time
from collections.abc import Container, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog
from django.conf import settings
from websockets.sync.client import ClientConnection

from rpa_tasks.browsers import devtools, registry
from rpa_tasks.browsers.browser_processes import (
    find_browser_family,
    has_listener,
    listens_on,
    memory_by_session,
    names_profile,
    read_command_line,
    release_singleton,
    writes_downloads,
)
from rpa_tasks.browsers.chromium import attach_browser, prove_proxy, start_browser
from rpa_tasks.browsers.launch import (
    BROWSER_FAILED,
    BROWSER_WAIT,
    DISK_FULL,
    PROFILE_BUSY,
    LaunchSettings,
    NoBrowser,
    is_disk_full,
)
from rpa_tasks.browsers.registry import BUSY, IDLE, QUARANTINED, Lock, Record, records_of_profile
from rpa_tasks.supervisor.processes import Process, end_processes, is_alive

log = structlog.get_logger(__name__)


# Find a slot for the browser of a shop, and end a browser before its slot or profile is used again.
#
# Only the holder of a slot's lock changes the slot. Only the holder of a profile's lock starts a browser on it. While
# another process evicts a shop's browser, the shop finds its own slot locked. It waits until the record names another
# shop; the end of the old browser is proven by then.
#
# Chromium drops session cookies when it ends, and many shops keep a login in one. So they are stored beside the
# profile and given to its next browser.


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
        """Try to take the slot and read its record. Raises `OSError`; the slot is not taken then."""
        if not self._lock.try_acquire():
            return False
        try:
            self.record = registry.read_record(self.number)
        except BaseException:
            self._lock.release()
            raise
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


def take_slot(profile_id: str, *, may_start: bool, kept: Container[str]) -> Slot | None:
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
        for _ in _poll(time.monotonic() + CLOSE_TIMEOUT):
            if not is_alive(record.pid, record.ticks):
                break
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
        # Store the session cookies before the browser is asked to close. Raises `devtools.NoAnswer`.
        cookies = devtools.list_cookies(record.port, record.path, timeout=ANSWER_WITHIN)
        lasting = [
            {key: cookie[key] for key in COOKIE_FIELDS if key in cookie} for cookie in cookies if cookie["session"]
        ]
        try:
            registry.replace_json(session_cookies(record.profile), lasting)
        except OSError as error:
            log.warning("session_cookies_not_kept", profile=record.profile, error=str(error))
        devtools.send_command(record.port, record.path, "Browser.close", timeout=ANSWER_WITHIN)
    except devtools.NoAnswer:
        return False
    return True


def restore_session_cookies(record: Record) -> None:
    """Restore the cookies in the profile's new browser. A cookie that it already has is newer and stays.

    Raises `NoBrowser` if the browser does not answer: the end of a used one overwrites the only copy of a login.
    """

    def key_of(cookie: dict[str, Any]) -> tuple[str, str, str]:
        return cookie["name"], cookie["domain"], cookie["path"]

    try:
        kept = json.loads(registry.read_own(session_cookies(record.profile)))
        present = {key_of(cookie) for cookie in devtools.list_cookies(record.port, record.path)}
        if missing := [cookie for cookie in kept if key_of(cookie) not in present]:
            devtools.send_command(record.port, record.path, "Storage.setCookies", cookies=missing)
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, LookupError, RecursionError, devtools.Refused) as error:
        # Programs of the shop can write the file.
        log.warning("session_cookies_lost", profile=record.profile, error=str(error))
    except devtools.NoAnswer as error:
        raise NoBrowser(BROWSER_FAILED, f"Session cookies were not restored: {error}") from error


def session_cookies(profile_id: str) -> Path:
    return registry.profile_dir(profile_id) / ".session-cookies.json"


POLL_INTERVAL = 0.03  #: seconds
DOWNLOADS = "Downloads"  #: folder of a run for downloads, unless the shop names one
ALIVE_WITHIN = 1.0  #: seconds in which a healthy browser returns its address
TIME_TO_START = 1.0  #: seconds of the wait that must remain to start a browser, except at the first attempt


class AcquiredBrowser:
    """A browser that this process holds until its release.

    As a context manager it releases the browser at the end, as dirty after an exception.
    """

    def __init__(
        self, slot: Slot, record: Record, held: ExitStack, *, download_folder: str, waited: timedelta, warm: bool
    ) -> None:
        """`held` releases the locks of slot and profile."""
        self.port = record.port
        self.pid = record.pid
        self.slot = record.slot
        self.profile = record.profile
        self.download_folder = download_folder  #: name of the folder in the working directory of a run
        self.waited = waited  #: from the request to the browser
        self.warm = warm  #: it was already running
        self._slot = slot
        self._held = held
        self._downloads: ClientConnection | None = None  #: what it says about downloads counts while it is open
        self._given_back = False

    def release(self, dirty: bool = False) -> None:
        """Release the browser. Idempotent. `dirty`: its state is unknown, so it is ended."""
        if self._given_back or not self._slot.held:
            return
        self._given_back = True  # before any step that can be interrupted
        try:
            record = self._slot.record
            assert record is not None
            uses = record.uses + (record.lease_no > 0)  # a start ahead of a run is none
            record = replace(record, uses=uses, last_used_at=time.time())
            if why := "dirty" if dirty else recycling_reason(record) or _cleanup_problem(record):
                self._slot.empty(why)
            else:
                self._slot.write(replace(record, state=IDLE, lease_no=0))
        except OSError as error:
            # Its record is still busy and its lock free: the next process that takes the slot ends it.
            log.warning("browser_not_recorded", slot=self.slot, error=str(error))
        finally:
            self._held.close()  # after the pages, which would download into the profile without its connection

    def keep_downloads(self, folder: Path) -> None:
        """Let pages download into this folder until `stop_downloads`, or into that of a client which names one.

        A browser that runs elsewhere cannot write here. Raises `NoBrowser` if the browser does not answer.
        """
        record = self._slot.record
        assert record is not None
        if record.remote:
            return
        try:
            self._downloads = self._held.enter_context(devtools.open_connection(record.port, record.path))
            devtools.ask(self._downloads, "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        except devtools.NoAnswer as error:
            raise NoBrowser(BROWSER_FAILED, f"Downloads were not set up: {error}") from error

    def stop_downloads(self) -> None:
        """Refuse downloads until the release. One that runs goes on, and the release ends its browser."""
        if self._downloads:
            with suppress(devtools.NoAnswer):  # the release finds out
                devtools.ask(self._downloads, "Browser.setDownloadBehavior", behavior="deny")

    def clear_cookies(self) -> None:
        """Delete all cookies of the profile. Raises `NoBrowser` if the browser does not answer."""
        try:
            devtools.send_command(self.port, devtools.websocket_path(self.port), "Storage.clearCookies")
            session_cookies(self.profile).unlink(missing_ok=True)
        except devtools.NoAnswer as error:
            raise NoBrowser(BROWSER_FAILED, f"Cookies were not cleared: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.release(dirty=kind is not None)


def acquire_browser(
    profile_id: str,
    shop: str,
    *,
    wait: timedelta,
    lease_no: int,
    launch: LaunchSettings,
    kept: Container[str] = (),
) -> AcquiredBrowser:
    """Acquire the shop's browser exclusively. Waits at most `wait` for profile and slot, which is never that of an idle
    browser on one of the `kept` profiles.

    A browser with other launch settings is replaced. Starting one may take `chromium.START_TIMEOUT` more, and the proof
    of its proxy `PROOF_TIMEOUT`. Raises `NoBrowser`.
    """
    began = time.monotonic()
    ends_at = began + wait.total_seconds()
    with ExitStack() as held:
        try:
            held.callback(_wait_for_profile(profile_id, ends_at).release)
            slot = _wait_for_slot(profile_id, ends_at, kept)
            held.callback(slot.release)
            record, warm = _prepare_browser(slot, profile_id, shop, lease_no, launch)
        except OSError as error:
            raise NoBrowser(DISK_FULL if is_disk_full(error) else BROWSER_FAILED, str(error)) from error
        waited = timedelta(seconds=time.monotonic() - began)
        folder = launch.downloads or DOWNLOADS
        return AcquiredBrowser(slot, record, held.pop_all(), download_folder=folder, waited=waited, warm=warm)


def _wait_for_profile(profile_id: str, ends_at: float) -> Lock:
    lock = Lock(registry.profile_lock(profile_id))
    for _ in _poll(ends_at):
        if lock.try_acquire():
            return lock
    raise NoBrowser(PROFILE_BUSY, "Another run or the maintainer has the shop's profile.")


def _wait_for_slot(profile_id: str, ends_at: float, kept: Container[str]) -> Slot:
    for look in _poll(ends_at):
        may_start = look == 0 or time.monotonic() + TIME_TO_START < ends_at
        if slot := take_slot(profile_id, may_start=may_start, kept=kept):
            return slot
    if records_of_profile(profile_id):
        raise NoBrowser(PROFILE_BUSY, "The shop's former browser is still being ended, or could not be.")
    raise NoBrowser(BROWSER_WAIT, "Every slot was busy.")


def _poll(ends_at: float) -> Iterator[int]:
    """Yield at once, then every 30 ms until the time is over."""
    look = 0
    while look == 0 or time.monotonic() < ends_at:
        yield look
        look += 1
        time.sleep(max(0.0, min(POLL_INTERVAL, ends_at - time.monotonic())))


def _prepare_browser(
    slot: Slot, profile_id: str, shop: str, lease_no: int, launch: LaunchSettings
) -> tuple[Record, bool]:
    """Mark the slot busy with its own browser if that is healthy and has these settings, otherwise with a new one."""
    found = slot.record
    if found and found.state == IDLE and found.launch == launch.fingerprint and is_recorded_browser(found):
        slot.write(replace(found, state=BUSY, shop=shop, lease_no=lease_no))
        assert slot.record is not None
        return slot.record, True
    if not slot.empty("its user died" if found and found.state == BUSY else "not in order"):
        raise NoBrowser(PROFILE_BUSY, "The shop's former browser could not be ended.")
    return _start_in_slot(slot, profile_id, shop, launch, lease_no), False


def _start_in_slot(slot: Slot, profile_id: str, shop: str, launch: LaunchSettings, lease_no: int) -> Record:
    """Start the shop's browser in this empty slot, marked busy.

    Raises: `NoBrowser`. The slot is empty then, or quarantined.
    """
    slot.write(Record(slot=slot.number, state=BUSY, shop=shop, profile=profile_id, lease_no=lease_no))
    assert slot.record is not None
    try:
        running = (attach_browser if launch.cdp_url else start_browser)(slot.record, launch)
        address = prove_proxy(running.port) if running.proxy_port else ""
        if not running.remote:
            restore_session_cookies(running)
        now = time.time()
        slot.write(replace(running, launch=launch.fingerprint, started_at=now, last_used_at=now))
    except (NoBrowser, OSError):
        slot.empty("did not start")  # its record has no port yet, so the stored session cookies stay
        raise
    log.info("browser_started", slot=slot.number, profile=profile_id, port=running.port, address=address)
    return slot.record


def is_recorded_browser(record: Record) -> bool:
    """Return whether it is the recorded browser, by process, profile, port and its random address.

    The forwarder to its proxy must live too.
    """
    profile = str(registry.profile_dir(record.profile))
    if not (
        is_alive(record.pid, record.ticks)
        and names_profile(read_command_line(record.pid), profile)
        and listens_on(record.pid, record.port)
        and (not record.proxy_port or has_listener(record.proxy_port))
    ):
        return False
    try:
        return devtools.websocket_path(record.port, timeout=ALIVE_WITHIN) == record.path
    except devtools.NoAnswer:
        return False


def recycling_reason(record: Record) -> str:
    """Return why the browser must be recycled (uses, age or memory), or ""."""
    if record.uses >= settings.AFTERTOUCH_RPA_BROWSER_USES:
        return "uses"
    if time.time() - record.started_at >= settings.AFTERTOUCH_RPA_BROWSER_AGE.total_seconds():
        return "age"
    if memory_by_session().get(record.pid, 0) // 2**20 >= settings.AFTERTOUCH_RPA_BROWSER_MEMORY_MB:
        return "memory"
    return ""


def _cleanup_problem(record: Record) -> str:
    try:
        if not devtools.reset_to_blank_page(record.port):
            return "a page would not close"
    except devtools.NoAnswer:
        return "does not answer"
    runs = str(registry.shop_runs_dir(record.profile))
    return "a download runs" if not record.remote and writes_downloads(record.pid, runs) else ""
