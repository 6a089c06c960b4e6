"""Acquire the browser of a shop for one run, and release it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog
from django.conf import settings
from websockets.sync.client import ClientConnection

from rpa_tasks.browsers import devtools, registry
from rpa_tasks.browsers.browser_errors import (
    BROWSER_FAILED,
    BROWSER_WAIT,
    DISK_FULL,
    PROFILE_BUSY,
    NoBrowser,
    is_disk_full,
)
from rpa_tasks.browsers.browser_processes import (
    has_listener,
    listens_on,
    memory_by_session,
    names_profile,
    read_command_line,
    writes_downloads,
)
from rpa_tasks.browsers.chromium import attach_browser, start_browser
from rpa_tasks.browsers.launch_settings import LaunchSettings
from rpa_tasks.browsers.proxy import prove_proxy
from rpa_tasks.browsers.registry import BUSY, IDLE, Lock, Record, records_of_profile
from rpa_tasks.browsers.slots import Slot, restore_session_cookies, session_cookies, take_slot
from rpa_tasks.supervisor.processes import is_alive

log = structlog.get_logger(__name__)

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
        self.profile_id = record.profile
        self.profile_dir: Path = registry.profile_dir(record.profile)
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
            record = replace(record, uses=record.uses + 1, last_used_at=time.time())
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
            session_cookies(self.profile_id).unlink(missing_ok=True)
        except devtools.NoAnswer as error:
            raise NoBrowser(BROWSER_FAILED, f"Cookies were not cleared: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.release(dirty=kind is not None)


def acquire_browser(
    profile_id: str, shop: str, *, wait: timedelta, lease_no: int, launch: LaunchSettings
) -> AcquiredBrowser:
    """Acquire the shop's browser exclusively. Waits at most `wait` for profile and slot.

    A browser with other launch settings is replaced. Starting one may take `chromium.START_TIMEOUT` more, and the proof
    of its proxy `PROOF_TIMEOUT`. Raises `NoBrowser`.
    """
    began = time.monotonic()
    ends_at = began + wait.total_seconds()
    with ExitStack() as held:
        try:
            held.callback(_wait_for_profile(profile_id, ends_at).release)
            slot = _wait_for_slot(profile_id, ends_at)
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


def _wait_for_slot(profile_id: str, ends_at: float) -> Slot:
    for look in _poll(ends_at):
        may_start = look == 0 or time.monotonic() + TIME_TO_START < ends_at
        if slot := take_slot(profile_id, may_start=may_start):
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
    return start_in_slot(slot, profile_id, shop, launch, lease_no), False


def start_in_slot(slot: Slot, profile_id: str, shop: str, launch: LaunchSettings, lease_no: int = 0) -> Record:
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
        slot.empty("did not start")
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
