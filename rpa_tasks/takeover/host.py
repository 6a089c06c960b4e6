"""Host the take-overs of this node, and relay pictures and input between a browser and the operators."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db import close_old_connections, connection
from django.db.models.functions import Now
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from rpa_tasks import isolation
from rpa_tasks.browser_settings import resolve_launch_settings
from rpa_tasks.browsers import devtools, registry
from rpa_tasks.browsers.launch import NoBrowser
from rpa_tasks.browsers.pool import acquire_browser
from rpa_tasks.browsers.registry import BUSY, Record, records_of_profile
from rpa_tasks.jobs.ledger import renew_in_background
from rpa_tasks.models import TakeOver, TakeOverEnd
from rpa_tasks.takeover import leases
from rpa_tasks.takeover.browser_view import BrowserView, Picture
from rpa_tasks.takeover.files import FileExchange, KeptFiles, delete_left_files
from rpa_tasks.takeover.wire import (
    FILE_ACTIONS,
    NOTICE,
    PICTURE,
    WATCHING,
    Sealer,
    run_until_one_ends,
    to_node_channel,
    to_operators_channel,
)
from scheduling import sql
from scheduling.redis_client import RedisError, connect_redis_async

log = structlog.get_logger(__name__)


# Relay pictures and input between one browser and the operators, through Redis.
#
# It runs on the node, in a thread of its own. One operator's connection controls: the last one of the
# user who started the take-over. Input of other connections is dropped. A picture is sent after an operator has
# acknowledged the one before, at most five a second, so the slowest link decides the rate.


INTERVAL = 0.2  #: seconds between pictures
ACKNOWLEDGED_WITHIN = 2.0  #: seconds; a message that Redis lost must not stop the pictures
CONNECTED_WITHIN = 30.0  #: seconds without a sign of the operator who controls; then the take-over ends
WATCHED_WITHIN = 20.0  #: seconds without a sign of any operator; then no pictures are sent
CHECK_INTERVAL = 0.5  #: seconds
CONNECT_LIMIT = 10.0  #: seconds for the browser
REDIS_RETRY_AFTER = 1.0  #: seconds after an error of Redis


class Relay:
    def __init__(self, row: TakeOver, browser: Record, find_end: Callable[[], TakeOverEnd | None]) -> None:
        """Prepare the relay. `find_end` returns why the take-over may no longer use the browser, or None."""
        assert row.key is not None
        self._row, self._browser, self._find_end = row, browser, find_end
        self._address = f"ws://{devtools.HOST}:{browser.port}{browser.path}"
        self._kept = KeptFiles(registry.profile_dir(browser.profile), row.pk)
        self._in, self._out = to_node_channel(row.pk), to_operators_channel(row.pk)
        self._opener, self._sealer = Sealer(bytes(row.key), self._in), Sealer(bytes(row.key), self._out)
        self._controller = ""  #: connection of the operator who controls
        self._controlled_at = self._input_at = time.monotonic()
        self._watched_at = 0.0
        self._latest: Picture | None = None
        self._number = 0  #: of the last picture

    async def relay(self) -> TakeOverEnd:
        """Relay until the take-over is over and return why."""
        self._new_picture, self._acknowledged, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._redis = connect_redis_async(settings.REDIS_URL)
        try:
            async with connect(
                self._address,
                proxy=None,
                compression=None,
                max_size=devtools.LONGEST_ANSWER,  # a browser elsewhere may be any program
                open_timeout=CONNECT_LIMIT,
                close_timeout=0.2,
            ) as socket:
                self._view = BrowserView(
                    socket, self._note_picture, self._changed.set, lambda event: self._files.note_download(event),
                    asks_for_files=not self._browser.remote,
                )  # fmt: skip
                self._files = FileExchange(self._row, self._kept, self._view, self._publish_notice)
                with self._kept.opened():
                    if not self._browser.remote and self._row.task_id is None:  # downloads of a run are its own
                        self._view.keep_downloads(str(self._kept.folder))
                    return await self._run_tasks()
        except (OSError, TimeoutError, WebSocketException) as error:
            log.warning("take_over_browser_lost", take_over=self._row.pk, error=type(error).__name__)
            return TakeOverEnd.BROWSER_LOST
        finally:
            with suppress(RedisError, OSError):
                await self._redis.aclose()

    async def _run_tasks(self) -> TakeOverEnd:
        async def browser() -> TakeOverEnd:
            with suppress(WebSocketException, OSError):
                await self._view.run()
            return TakeOverEnd.BROWSER_LOST

        end: TakeOverEnd = await run_until_one_ends(
            browser(), self._check(), self._receive(), self._send_pictures(), self._send_changes(), self._files.run()
        )
        return end

    async def _check(self) -> TakeOverEnd:
        """Return why the take-over ends."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            now = time.monotonic()
            if now - self._input_at > settings.AFTERTOUCH_RPA_TAKEOVER_IDLE.total_seconds():
                return TakeOverEnd.IDLE
            if now - self._controlled_at > CONNECTED_WITHIN:
                return TakeOverEnd.DISCONNECTED
            if end := self._find_end():
                return end
            self._view.refresh_tabs()

    # --- from operators -----------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as subscription:
                    await subscription.subscribe(self._in)
                    # Each connection that may control greets again: a greeting during the outage was lost.
                    self._controller = ""
                    self._changed.set()
                    while True:
                        message = await subscription.get_message(timeout=REDIS_RETRY_AFTER)
                        if message and (opened := self._opener.open(message["data"])):
                            self._handle(json.loads(opened))
            except (RedisError, OSError) as error:
                log.warning("take_over_redis_unavailable", take_over=self._row.pk, error=type(error).__name__)
                await asyncio.sleep(REDIS_RETRY_AFTER)

    def _handle(self, action: dict[str, Any]) -> None:
        """Handle an action, which the web process has checked. `hello` is the first of a connection."""
        connection, now = action["connection"], time.monotonic()
        self._watched_at = now
        if action["do"] == "hello":
            if action["controls"]:
                self._controller = connection
            self._new_picture.set()
            self._changed.set()
        elif action["do"] == "ack" and action["number"] == self._number:
            self._acknowledged.set()
        if connection != self._controller:
            return
        self._controlled_at = now
        if action["do"] not in WATCHING and action["do"] != "hello":
            self._input_at = now
            if self._find_end() is not None:
                return
            if action["do"] in FILE_ACTIONS:
                self._files.submit(action)
            else:
                self._view.apply(action)

    # --- to operators -------------------------------------------------------------------------------------------

    def _note_picture(self, picture: Picture) -> None:
        self._latest = picture
        self._new_picture.set()

    async def _send_pictures(self) -> None:
        while True:
            await self._new_picture.wait()
            if self._latest is None or time.monotonic() - self._watched_at > WATCHED_WITHIN:
                self._new_picture.clear()
                continue
            self._new_picture.clear()
            self._acknowledged.clear()
            self._number += 1
            sent_at, picture = time.monotonic(), self._latest
            head = struct.pack(">IHH", self._number, picture.width, picture.height)
            if not await self._publish(PICTURE + head + picture.jpeg):
                self._new_picture.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._acknowledged.wait(), ACKNOWLEDGED_WITHIN)
            self._view.acknowledge_pictures()
            await asyncio.sleep(max(0.0, sent_at + INTERVAL - time.monotonic()))

    async def _send_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            tabs = [{"id": tab.id, "title": tab.title, "url": tab.url} for tab in self._view.tabs.values()]
            state = {
                "type": "state", "controller": self._controller, "tabs": tabs, "shown": self._view.shown,
                "dialog": self._view.dialog, "files": self._files.describe(),
            }  # fmt: skip
            if not await self._publish_notice(state):
                self._changed.set()
            await asyncio.sleep(INTERVAL / 2)

    async def _publish_notice(self, notice: dict[str, Any]) -> bool:
        return await self._publish(NOTICE + json.dumps(notice, ensure_ascii=False).encode())

    async def _publish(self, content: bytes) -> bool:
        """Publish and return whether Redis took it. The first message after an outage meets a dead connection."""
        try:
            await self._redis.publish(self._out, self._sealer.seal(content))
        except (RedisError, OSError):
            return False
        return True


# Host the take-overs of this node: in the maintainer, one thread for each, beside one that looks for new ones.
#
# A take-over that holds its shop acquires the browser as a run does, with the locks of profile and slot. One that
# shares the browser of a run takes no lock and ends with the run. Locks end with the process, and the lease with its
# renewals.


POLL_INTERVAL = 0.5  #: seconds between looks for new take-overs and requested ends
RETRY_AFTER = 5.0  #: seconds after an error
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
        self._thread.join(STOP_WITHIN)  # first: it may have just noted a thread that cannot start
        for thread in list(self._hosted.values()):
            thread.join(max(0.0, ends_at - time.monotonic()))

    def _look(self) -> None:
        wait = POLL_INTERVAL
        with suppress(OSError):
            delete_left_files()
        while not self._stopping.wait(wait):
            wait = POLL_INTERVAL
            try:
                close_old_connections()
                rows = TakeOver.objects.filter(node=settings.AFTERTOUCH_NODE, ended_at=None, lease_until__gt=Now())
                for row in rows.exclude(pk__in=list(self._hosted)).select_related("shop__platform"):
                    thread = threading.Thread(target=self._host, args=(row,), name=f"take-over-{row.pk}", daemon=True)
                    self._hosted[row.pk] = thread
                    try:
                        thread.start()
                    except RuntimeError:
                        del self._hosted[row.pk]
                        raise
            except sql.UNAVAILABLE_ERRORS as error:
                log.warning("take_overs_not_read", error=type(error).__name__)
                wait = RETRY_AFTER
            except Exception:  # without this thread the node hosts no take-over
                log.exception("take_overs_not_hosted")
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


def host_take_over(row: TakeOver, stopping: threading.Event) -> None:
    """Carry out one take-over until its end."""
    lease, end = _Lease(row, stopping), TakeOverEnd.NO_BROWSER
    with renew_in_background(lease.check, interval=POLL_INTERVAL):
        try:
            with _take_browser(row) as (record, find_end):
                end = TakeOverEnd.NODE_LOST
                if lease.renew():
                    end = asyncio.run(Relay(row, record, lambda: lease.find_end() or find_end()).relay())
        except (NoBrowser, isolation.CannotIsolate) as error:
            log.warning("take_over_without_browser", take_over=row.pk, error=str(error))
    leases.end_take_over(row, end)


FindEnd = Callable[[], TakeOverEnd | None]


@contextmanager
def _take_browser(row: TakeOver) -> Iterator[tuple[Record, FindEnd]]:
    """Yield the record of the browser, and a test why the take-over may no longer use it. Raises `NoBrowser`."""
    if row.task_id is not None:
        shared = _wait_for_shared_browser(row)
        yield shared, lambda: None if _is_same_use(shared) else TakeOverEnd.RUN_ENDED
        return
    profile, name = row.shop.profile, f"{row.shop.platform.key}/{row.shop.shop_id}"
    wait = min(settings.AFTERTOUCH_RPA_BROWSER_WAIT, ACQUIRE_LIMIT)
    launch = resolve_launch_settings(row.shop)
    with acquire_browser(profile, name, wait=wait, lease_no=row.lease_no, launch=launch) as browser:
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


class _Lease:
    """The lease of a take-over. A thread renews it and asks for a requested end; the relay reads what that found."""

    def __init__(self, row: TakeOver, stopping: threading.Event) -> None:
        self._row, self._stopping = row, stopping
        self._renewed_at = time.monotonic()
        self._end: TakeOverEnd | None = None

    def renew(self) -> bool:
        """Renew the lease. Returns False if it has expired or the take-over has ended."""
        asked_at = time.monotonic()
        if renewed := leases.renew_take_over(self._row):
            self._renewed_at = asked_at
        return renewed

    def check(self) -> bool:
        """Note a requested end, and renew the lease when it is time. Returns False once it is lost."""
        try:
            ends = TakeOver.objects.filter(pk=self._row.pk, ended_at=None).values_list("wanted_end", flat=True)
            wanted = ends.first()
            is_due = time.monotonic() - self._renewed_at >= RENEW_INTERVAL
            if wanted is None or (is_due and not self.renew()):
                self._end = TakeOverEnd.NODE_LOST
                return False
            self._end = TakeOverEnd(wanted) if wanted else None
        except sql.UNAVAILABLE_ERRORS as error:
            log.warning("take_over_not_renewed", take_over=self._row.pk, error=type(error).__name__)
            close_old_connections()
        return True

    def find_end(self) -> TakeOverEnd | None:
        """Return why the take-over must end, also if PostgreSQL hangs."""
        if self._stopping.is_set():
            return TakeOverEnd.NODE_STOPPING
        is_late = time.monotonic() - self._renewed_at >= GIVE_UP_AFTER
        return self._end or (TakeOverEnd.NODE_LOST if is_late else None)
