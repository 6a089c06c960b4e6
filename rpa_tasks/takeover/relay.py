"""Relay pictures and input between one browser and the operators, through Redis.

It runs on the node, in the event loop of its own thread. One operator's connection controls: the last one of the user
who started the take-over. Input of other connections is dropped. A picture is sent after an operator has acknowledged
the one before, at most five a second, so the slowest link decides the rate.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog
from django.conf import settings
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from rpa_tasks.browsers import devtools, registry
from rpa_tasks.browsers.registry import Record
from rpa_tasks.models import TakeOver, TakeOverEnd
from rpa_tasks.takeover.browser_view import BrowserView, Picture
from rpa_tasks.takeover.file_exchange import FileExchange
from rpa_tasks.takeover.kept_files import KeptFiles
from rpa_tasks.takeover.wire import (
    FILE_ACTIONS,
    NOTICE,
    PICTURE,
    WATCHING,
    Sealer,
    to_node_channel,
    to_operators_channel,
)
from scheduling.redis_client import RedisError, connect_redis_async

log = structlog.get_logger(__name__)

INTERVAL = 0.2  #: seconds between pictures
ACKNOWLEDGED_WITHIN = 2.0  #: seconds; a message that Redis lost must not stop the pictures
CONNECTED_WITHIN = 30.0  #: seconds without a sign of the operator who controls; then the take-over ends
WATCHED_WITHIN = 20.0  #: seconds without a sign of any operator; then no pictures are sent
CHECK_INTERVAL = 1.0  #: seconds
CONNECT_LIMIT = 10.0  #: seconds for the browser
RETRY_AFTER = 1.0  #: seconds after an error of Redis


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

    async def relay(self, stop: asyncio.Event) -> TakeOverEnd | None:
        """Relay until the take-over is over and return why; None if `stop` was set."""
        self._new_picture, self._acknowledged, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._redis = connect_redis_async(settings.REDIS_URL)
        try:
            async with connect(
                self._address,
                proxy=None,
                compression=None,
                max_size=None,
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
                    return await self._run_tasks(stop)
        except (OSError, TimeoutError, WebSocketException) as error:
            log.warning("take_over_browser_lost", take_over=self._row.pk, error=type(error).__name__)
            return TakeOverEnd.BROWSER_LOST
        finally:
            with suppress(RedisError, OSError):
                await self._redis.aclose()

    async def _run_tasks(self, stop: asyncio.Event) -> TakeOverEnd | None:
        async def browser() -> TakeOverEnd:
            with suppress(WebSocketException, OSError):
                await self._view.run()
            return TakeOverEnd.BROWSER_LOST

        async def stopped() -> None:
            await stop.wait()

        steps = (
            browser(), stopped(), self._check(), self._receive(), self._send_pictures(), self._send_changes(),
            self._files.run(),
        )  # fmt: skip
        tasks = [asyncio.create_task(step) for step in steps]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _check(self) -> TakeOverEnd:
        """Return why the take-over ends by itself."""
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
                        message = await subscription.get_message(timeout=RETRY_AFTER)
                        if message and (opened := self._opener.open(message["data"])):
                            self._handle(json.loads(opened))
            except (RedisError, OSError) as error:
                log.warning("take_over_redis_unavailable", take_over=self._row.pk, error=type(error).__name__)
                await asyncio.sleep(RETRY_AFTER)

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
