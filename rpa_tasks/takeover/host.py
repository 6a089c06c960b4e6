"""Host the take-overs of this node: in the maintainer, one thread for each, beside one that looks for new ones.

A take-over that holds its shop acquires the browser as a run does, with the locks of profile and slot. One that shares
the browser of a run takes no lock and ends with the run. Locks end with the process, and the lease with its renewals.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import structlog
from django.conf import settings
from django.db import close_old_connections, connection
from django.db.models.functions import Now

from rpa_tasks import isolation
from rpa_tasks.browsers import registry
from rpa_tasks.browsers.browser_errors import NoBrowser
from rpa_tasks.browsers.pool import acquire_browser
from rpa_tasks.browsers.registry import BUSY, Record, records_of_profile
from rpa_tasks.configuration.browser_settings import resolve_launch_settings
from rpa_tasks.lease_renewal import renew_in_background
from rpa_tasks.models import TakeOver, TakeOverEnd
from rpa_tasks.takeover import leases
from rpa_tasks.takeover.kept_files import delete_left_files
from rpa_tasks.takeover.relay import Relay
from scheduling import sql

log = structlog.get_logger(__name__)

POLL_INTERVAL = 0.5  #: seconds between looks for new take-overs and requested ends
RETRY_AFTER = 5.0  #: seconds after an error of PostgreSQL
RENEW_INTERVAL = 10.0  #: seconds
GIVE_UP_AFTER = 30.0  #: seconds without a renewal; the browser is released before the lease ends
ACQUIRE_LIMIT = timedelta(seconds=30)  #: the operator waits for it
SHARED_WITHIN = 20.0  #: seconds for a run to acquire the browser that a take-over shares
STOP_WITHIN = 20.0  #: seconds for all take-overs to end when the node stops


class TakeOverHost:
    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._hosted: dict[int, threading.Thread] = {}
        self._thread = threading.Thread(target=self._look, name="take-overs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End all take-overs of this process and wait for them."""
        self._stopping.set()
        ends_at = time.monotonic() + STOP_WITHIN
        for thread in [self._thread, *self._hosted.values()]:
            thread.join(max(0.0, ends_at - time.monotonic()))

    def _look(self) -> None:
        wait = POLL_INTERVAL
        with suppress(OSError):
            delete_left_files()
        while not self._stopping.wait(wait):
            wait = POLL_INTERVAL
            try:
                close_old_connections()
                for row in find_new_take_overs(settings.AFTERTOUCH_NODE, list(self._hosted)):
                    thread = threading.Thread(target=self._host, args=(row,), name=f"take-over-{row.pk}", daemon=True)
                    self._hosted[row.pk] = thread
                    thread.start()
            except sql.UNAVAILABLE_ERRORS as error:
                log.warning("take_overs_not_read", error=type(error).__name__)
                wait = RETRY_AFTER
        connection.close()

    def _host(self, row: TakeOver) -> None:
        try:
            host_take_over(row, self._stopping)
        except Exception:
            log.exception("take_over_failed", take_over=row.pk)
            with suppress(*sql.UNAVAILABLE_ERRORS):
                leases.end_take_over(row, TakeOverEnd.BROWSER_LOST)
        finally:
            connection.close()
            self._hosted.pop(row.pk, None)


def find_new_take_overs(node: str, known: list[int]) -> list[TakeOver]:
    rows = TakeOver.objects.filter(node=node, ended_at=None, lease_until__gt=Now()).exclude(pk__in=known)
    return list(rows.select_related("shop__platform"))


def host_take_over(row: TakeOver, stopping: threading.Event) -> None:
    """Carry out one take-over until its end."""
    lease = _RenewedLease(row, stopping)
    end: TakeOverEnd | None = TakeOverEnd.NO_BROWSER
    try:
        with _take_browser(row, lease) as (record, find_end):
            if not lease.renew():
                return
            end = lease.renew_while(Relay(row, record, lambda: lease.find_end() or find_end()))
    except (NoBrowser, isolation.CannotIsolate) as error:
        log.warning("take_over_without_browser", take_over=row.pk, error=str(error))
    if end is not None:
        leases.end_take_over(row, end)


FindEnd = Callable[[], TakeOverEnd | None]


@contextmanager
def _take_browser(row: TakeOver, lease: _RenewedLease) -> Iterator[tuple[Record, FindEnd]]:
    """Yield the record of the browser, and a test why the take-over may no longer use it. Raises `NoBrowser`."""
    if row.task_id is not None:
        shared = _wait_for_shared_browser(row)
        yield shared, lambda: None if _is_same_use(shared) else TakeOverEnd.RUN_ENDED
        return
    profile, name = row.shop.profile, f"{row.shop.platform.key}/{row.shop.shop_id}"
    wait = min(settings.AFTERTOUCH_RPA_BROWSER_WAIT, ACQUIRE_LIMIT)
    launch = resolve_launch_settings(row.shop)
    with renew_in_background(lease.try_renewal, interval=RENEW_INTERVAL):
        browser = acquire_browser(profile, name, wait=wait, lease_no=row.lease_no, launch=launch)
    with browser:
        leases.pin_profile(row)
        record = registry.read_record(browser.slot)
        assert record is not None
        yield record, lambda: None


def _wait_for_shared_browser(row: TakeOver) -> Record:
    ends_at = time.monotonic() + SHARED_WITHIN
    while time.monotonic() < ends_at:
        for record in records_of_profile(row.shop.profile):
            if record.state == BUSY and record.lease_no == row.lease_no and record.port:
                return record
        time.sleep(POLL_INTERVAL)
    raise NoBrowser("browser_wait", "The run has no browser.")


def _is_same_use(record: Record) -> bool:
    """Return whether the run that the take-over shares still has its browser."""
    found = registry.read_record(record.slot)
    return found is not None and (found.state, found.pid, found.lease_no) == (BUSY, record.pid, record.lease_no)


class _RenewedLease:
    """Renew the lease while a relay works, and stop the relay at a requested end or without renewals."""

    def __init__(self, row: TakeOver, stopping: threading.Event) -> None:
        self._row, self._stopping = row, stopping
        self._renewed_at = time.monotonic()

    def renew(self) -> bool:
        asked_at = time.monotonic()
        if renewed := leases.renew_take_over(self._row):
            self._renewed_at = asked_at
        return renewed

    def try_renewal(self) -> bool:
        """Renew the lease. Return whether it is held, or PostgreSQL is unavailable."""
        try:
            return self.renew()
        except sql.UNAVAILABLE_ERRORS as error:
            self._note_outage(error)
            return True

    def _note_outage(self, error: Exception) -> None:
        log.warning("take_over_not_renewed", take_over=self._row.pk, error=type(error).__name__)
        close_old_connections()

    def find_end(self) -> TakeOverEnd | None:
        """Return an end if the lease was not renewed for too long, for example while PostgreSQL hangs."""
        return TakeOverEnd.NODE_LOST if time.monotonic() - self._renewed_at >= GIVE_UP_AFTER else None

    def renew_while(self, relay: Relay) -> TakeOverEnd | None:
        """Return why the take-over ends; None if it has ended without this process."""
        result: list[TakeOverEnd | None] = []
        loop, stop = asyncio.new_event_loop(), asyncio.Event()

        def work() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                result.append(runner.run(relay.relay(stop)))

        thread = threading.Thread(target=work, name=f"relay-{self._row.pk}", daemon=True)
        thread.start()
        requested: TakeOverEnd | None = None
        while thread.is_alive():
            requested, over = self._next_request()
            if over:
                with suppress(RuntimeError):  # the relay has ended meanwhile
                    loop.call_soon_threadsafe(stop.set)
                break
            thread.join(POLL_INTERVAL)
        thread.join()
        return (result[0] if result else TakeOverEnd.BROWSER_LOST) or requested

    def _next_request(self) -> tuple[TakeOverEnd | None, bool]:
        """Return the requested end and whether the relay must stop. Renews the lease when it is time."""
        if self._stopping.is_set():
            return TakeOverEnd.NODE_STOPPING, True
        try:
            ends = TakeOver.objects.filter(pk=self._row.pk, ended_at=None).values_list("wanted_end", flat=True)
            wanted = ends.first()
            if wanted is None:
                return None, True
            if wanted:
                return TakeOverEnd(wanted), True
            is_due = time.monotonic() - self._renewed_at >= RENEW_INTERVAL
            return None, is_due and not self.renew()
        except sql.UNAVAILABLE_ERRORS as error:
            self._note_outage(error)
            return None, False
