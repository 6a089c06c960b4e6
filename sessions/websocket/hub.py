"""Deliver notifications of a session to every connection of it, in all processes.

Redis may lose messages to subscribers, at a failover or because a process reads too slowly. The inbox has them:
connections read it at the next message or ping, and when the subscription of their process was interrupted. A process
has one subscription, with one channel per session.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import structlog
from django.conf import settings

from scheduling.redis_client import LOGIN_ERRORS, UNREACHABLE_ERRORS, RedisError, connect_redis_async
from sessions import tokens
from sessions.event_loops import once_per_loop
from sessions.rates import Backoff, Every
from sessions.store import sessions
from sessions.store.client import SHARDS, StoreUnavailable
from sessions.store.inbox import Post, Posted

if TYPE_CHECKING:
    from sessions.websocket.consumer import SessionConsumer

log = structlog.get_logger(__name__)


CHANNEL = "at:ws:"  #: followed by the session id; alone: keeps the subscription open without a session
PINGED_AFTER, DEAD_AFTER = 5.0, 15.0  #: seconds in which the subscription is silent
RECONNECT_AFTER, LONGEST_PAUSE = 0.5, 5.0  #: seconds; the pause grows while Redis refuses, or ends what it confirmed
STEADY_AFTER = 10.0  #: seconds that a subscription must last for the pause after it to be short
COMPLAINS_EVERY = 10.0  #: seconds between two log entries about notifications that cannot be read or handled
NOTIFY_QUEUE_LIMIT = 10_000
NOTIFY_BATCH = 500
YIELD_AFTER = 32

MESSAGE, SIGN, CLOSED, REVOKED, LOST = "message", "sign", "closed", "revoked", "lost"
REVOCATIONS_EVERY = 5.0  #: seconds after which a lost notification of a revocation is made up for
REREAD_US = 60_000_000  #: µs of revocations that are read again, for a failover to a slower clock
API = "api"  #: side of a client that closes a session by the API


class TooManyConnections(Exception):
    """The session or the token has its maximum number of connections in this process."""


class Hub:
    """Notifications of one event loop."""

    def __init__(self) -> None:
        self._redis = connect_redis_async(settings.REDIS_URL)
        self._subscription: Any = None  #: a connection of its own; None: it must be opened
        self._changing = asyncio.Lock()  #: of the subscription
        self._is_open = asyncio.Event()  #: set while there is a subscription
        self._opened_at = 0.0
        self._pauses = Backoff(RECONNECT_AFTER, LONGEST_PAUSE)
        self._listeners: dict[str, set[SessionConsumer]] = {}  #: by session
        self._queued: deque[tuple[str, str, asyncio.Future[None]]] = deque()  #: channel, message
        self._readers: list[asyncio.Task[None]] = []
        self._publisher_task: asyncio.Task[None] | None = None
        self._complaints, self._unhandled = Every(COMPLAINS_EVERY), Every(COMPLAINS_EVERY)

    async def join(self, session_id: str, listener: SessionConsumer) -> None:
        """Subscribe a connection to its session. Its `on_notification` must not block.

        Raises:
            TooManyConnections: too many connections.
            RedisError, OSError: Redis is unavailable.
        """
        listeners = self._listeners.setdefault(session_id, set())
        # Count each side separately: a customer with many tabs must not block the agent.
        if sum(each.side == listener.side for each in listeners) >= settings.AFTERTOUCH_SESSION_SOCKETS:
            raise TooManyConnections("session")
        if sum(each.ticket == listener.ticket for each in listeners) >= settings.AFTERTOUCH_TOKEN_SOCKETS:
            raise TooManyConnections("token")
        listeners.add(listener)
        try:
            async with self._changing:
                if self._subscription is None:
                    await self._open_subscription()
                else:
                    await self._send("SUBSCRIBE", CHANNEL + session_id)
        except BaseException:
            await self.leave(session_id, listener)
            raise
        if not self._readers:
            loop = asyncio.get_running_loop()
            self._readers = [loop.create_task(self._listen()), loop.create_task(self._read_revocations())]

    async def leave(self, session_id: str, listener: SessionConsumer) -> None:
        listeners = self._listeners.get(session_id, set())
        listeners.discard(listener)
        if listeners or session_id not in self._listeners:
            return
        del self._listeners[session_id]
        try:
            async with self._changing:
                if self._subscription and session_id not in self._listeners:  # nobody has joined meanwhile
                    await self._send("UNSUBSCRIBE", CHANNEL + session_id)
        except (RedisError, OSError) as error:
            log.info("session_unsubscribe_failed", error=str(error))

    async def _open_subscription(self) -> None:
        """Subscribe to all sessions, and wait until Redis confirms the first channel.

        Without the wait, a refused subscription (`NOPERM`) would look like one that was interrupted.
        Not by a `PubSub`: each task that meets its broken connection connects again.
        """
        opened = await self._redis.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await opened.send_command("SUBSCRIBE", CHANNEL, *(CHANNEL + session_id for session_id in self._listeners))
            if await opened.read_response(timeout=settings.TIMEOUTS.redis, push_request=True) is None:
                raise TimeoutError("no answer")
        except BaseException:
            await self._give_back(opened)
            raise
        self._subscription, self._opened_at = opened, time.monotonic()
        self._is_open.set()

    async def _give_back(self, connection: Any) -> None:
        try:
            await connection.disconnect()
        finally:
            await self._redis.connection_pool.release(connection)

    async def _send(self, *words: str) -> None:
        if not self._subscription.is_connected:  # it would connect, to no session
            raise ConnectionError("the subscription is interrupted")
        try:
            await self._subscription.send_command(*words, check_health=False)  # the check would read an answer
        except AttributeError as error:  # of redis-py: the listener has disconnected it since
            raise ConnectionError("the subscription is interrupted") from error

    def notify(self, session_id: str, notification: dict[str, Any]) -> asyncio.Future[None]:
        """Queue a notification. Notifications keep their order and are published in batches.

        The future resolves when the batch is published or has failed. Never raises: connections find a lost message in
        the inbox.
        """
        loop = asyncio.get_running_loop()
        published: asyncio.Future[None] = loop.create_future()
        if len(self._queued) >= NOTIFY_QUEUE_LIMIT:
            log.warning("notification_truncated", limit=NOTIFY_QUEUE_LIMIT)
            published.set_result(None)
            return published
        self._queued.append((CHANNEL + session_id, json.dumps(notification), published))
        if self._publisher_task is None:
            self._publisher_task = loop.create_task(self._publish_queued())
        return published

    async def _publish_queued(self) -> None:
        try:
            while self._queued:
                batch = [self._queued.popleft() for _ in range(min(NOTIFY_BATCH, len(self._queued)))]
                try:
                    async with (
                        asyncio.timeout(settings.TIMEOUTS.session_notify),
                        self._redis.pipeline(transaction=False) as pipe,
                    ):
                        for channel, message, _ in batch:
                            pipe.publish(channel, message)
                        await pipe.execute()
                except Exception as error:
                    log.warning("notification_failed", count=len(batch), error=f"{type(error).__name__}: {error}")
                for _, _, published in batch:
                    if not published.done():
                        published.set_result(None)
        finally:
            self._publisher_task = None

    async def _listen(self) -> None:
        heard_at, is_broken = time.monotonic(), False
        for number in count():
            try:
                if is_broken:
                    await self._reopen_subscription()
                    heard_at, is_broken = time.monotonic(), False
                answer = await self._subscription.read_response(timeout=PINGED_AFTER, push_request=True)
                if answer is None:
                    # A TCP connection can be dead without an error.
                    if time.monotonic() - heard_at > DEAD_AFTER:
                        raise TimeoutError("no answer")
                    await self._send("PING")
                    continue
                heard_at = time.monotonic()
                if isinstance(answer, list) and answer[0] == b"message":
                    self._read_notification(answer[1].decode().removeprefix(CHANNEL), answer[2])
            except (RedisError, OSError) as error:
                log.warning("notifications_interrupted", error=f"{type(error).__name__}: {error}")
                is_broken = True
            except Exception:
                log.exception("notifications_interrupted")
                is_broken = True
            if number % YIELD_AFTER == 0:
                await asyncio.sleep(0)  # messages that have arrived would not let the outgoing queues send

    async def _reopen_subscription(self) -> None:
        """Subscribe again as soon as Redis permits. Then every connection reads its inbox: notifications were lost."""
        async with self._changing:
            broken, self._subscription = self._subscription, None
            self._is_open.clear()
            try:
                if broken:
                    await self._give_back(broken)
            except Exception as error:
                log.info("subscription_not_closed", error=f"{type(error).__name__}: {error}")
        if time.monotonic() - self._opened_at >= STEADY_AFTER:
            self._pauses.reset()
        pause = self._pauses.next()
        while self._subscription is None:
            # A connection that joins may open it. Only this task reads it then.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_open.wait(), pause)
            async with self._changing:
                try:
                    if self._subscription is None:
                        await self._open_subscription()
                except Exception as error:  # the end of this task would not be visible
                    log.warning("notifications_unavailable", error=f"{type(error).__name__}: {error}")
                    # One that is away is tried at an even pace. A refusal, also of the login, lets the pauses grow.
                    is_away = isinstance(error, (*UNREACHABLE_ERRORS, OSError)) and not isinstance(error, LOGIN_ERRORS)
                    pause = Backoff(RECONNECT_AFTER, RECONNECT_AFTER).next() if is_away else self._pauses.next()
        for session_id in list(self._listeners):
            self._pass_on(session_id, {"what": LOST})

    def _read_notification(self, session_id: str, raw: bytes) -> None:
        """Pass on a notification. One that is not JSON must not interrupt those of other sessions."""
        try:
            notification = json.loads(raw)
        except (ValueError, RecursionError):
            if self._complaints.is_due():
                log.exception("notification_invalid")
        else:
            self._pass_on(session_id, notification)

    def _pass_on(self, session_id: str, notification: dict[str, Any]) -> None:
        for listener in list(self._listeners.get(session_id, ())):
            try:
                listener.on_notification(notification)
            except Exception:  # the other connections get it
                if self._unhandled.is_due():
                    log.exception("notification_not_handled", session=session_id)

    async def _read_revocations(self) -> None:
        """Read revocations whose notification may be lost."""
        read_to = [0] * SHARDS
        while True:
            try:
                server = sessions.live_store().server
                after = [at - REREAD_US for at in read_to]
                for shard, found in enumerate(await asyncio.to_thread(tokens.list_revocations, server, after)):
                    for each in found:
                        self._pass_on(each.session_id, revoked_notification(each.side, each.at))
                        read_to[shard] = each.at
            except StoreUnavailable as error:
                log.info("revocations_unread", error=str(error))
            except Exception:
                log.exception("revocations_unread")
            await asyncio.sleep(REVOCATIONS_EVERY)


def message_notification(post: Post, posted: Posted) -> dict[str, Any]:
    """Notify about a stored message. Connections of users other than the owner do not get it."""
    return {
        "what": MESSAGE, "cursor": posted.cursor, "before": posted.before, "body": post.body(), "owner": posted.owner,
    }  # fmt: skip


def signal_notification(side: str, kind: str) -> dict[str, Any]:
    """Notify about a transient frame, such as typing. It is not stored, so only open connections receive it."""
    return {"what": SIGN, "side": side, "kind": kind}


def closed_notification(side: str) -> dict[str, Any]:
    return {"what": CLOSED, "side": side}


def revoked_notification(side: str, at: int) -> dict[str, Any]:
    return {"what": REVOKED, "side": side, "at": at}


@once_per_loop
def hub() -> Hub:
    return Hub()
