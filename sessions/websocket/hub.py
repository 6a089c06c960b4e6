"""Deliver notifications of a session to every connection of it, in all processes.

The channel layer may lose messages while Redis fails over. The inbox has them, and connections read it at the next
message or ping. A process has one channel in the layer, not one per connection, and joins one group per session.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from hashlib import sha256
from itertools import count
from typing import Any, Protocol

import structlog
from channels.layers import get_channel_layer
from channels_redis.pubsub import RedisPubSubChannelLayer
from django.conf import settings

from sessions import tokens
from sessions.event_loops import once_per_loop
from sessions.store import sessions
from sessions.store.client import SHARDS, StoreUnavailable
from sessions.store.inbox import Post, Posted

log = structlog.get_logger(__name__)


RECEIVED_LIMIT = 10_000  #: messages that wait in a process; dropped ones are in the inbox


class BoundedQueue(asyncio.Queue[Any]):
    """A queue that drops new items while full. It neither grows without bound nor raises in the receiver."""

    def __init__(self) -> None:
        super().__init__(RECEIVED_LIMIT)
        self.dropped = False

    def put_nowait(self, item: Any) -> None:
        if self.full():
            self.dropped = True
        else:
            super().put_nowait(item)


class Layer(RedisPubSubChannelLayer):  # type: ignore[misc]  # channels is untyped
    async def new_channel(self, prefix: str = "specific.") -> str:
        layer = self._get_layer()
        channel: str = await layer.new_channel(prefix)
        layer.channels[channel] = BoundedQueue()
        return channel

    def overflowed(self, channel: str) -> bool:
        """Return whether messages of this channel were dropped since the last call. False while messages still wait."""
        queue = self._get_layer().channels.get(channel)
        if not isinstance(queue, BoundedQueue) or not queue.dropped or not queue.empty():
            return False
        queue.dropped = False
        return True

    async def group_send_many(self, messages: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Publish each message to its group. Messages to one group keep their order."""
        layer = self._get_layer()
        by_shard: dict[Any, list[tuple[str, bytes]]] = defaultdict(list)
        for group, message in messages:
            name = layer._get_group_channel_name(group)
            by_shard[layer._get_shard(name)].append((name, self.serialize(message)))
        await asyncio.gather(*(_publish_packets(shard, packets) for shard, packets in by_shard.items()))


async def _publish_packets(shard: Any, packets: Sequence[tuple[str, bytes]]) -> None:
    async with shard._lock:
        shard._ensure_redis()
        async with shard._redis.pipeline(transaction=False) as pipe:
            for name, packet in packets:
                pipe.publish(name, packet)
            await pipe.execute()


NOTIFY_QUEUE_LIMIT = 10_000
NOTIFY_BATCH = 500
YIELD_AFTER = 32

MESSAGE, SIGN, CLOSED, REVOKED, LOST = "message", "sign", "closed", "revoked", "lost"
REVOCATIONS_EVERY = 5.0  #: seconds after which a lost notification of a revocation is made up for
REREAD_US = 60_000_000  #: µs of revocations that are read again, for a failover to a slower clock
API = "api"  #: side of a client that closes a session by the API


class TooManyConnections(Exception):
    """The session or the token has its maximum number of connections in this process."""


class HubListener(Protocol):
    """A connection, as the hub uses it. Its methods must not block."""

    @property
    def side(self) -> str: ...

    @property
    def ticket(self) -> int: ...  # equal for connections with the same token

    def on_notification(self, notification: dict[str, Any]) -> None: ...


class Hub:
    """Notifications of one event loop."""

    def __init__(self) -> None:
        self._layer: Any = get_channel_layer()
        self._channel = ""
        self._listeners: dict[str, set[HubListener]] = {}
        self._queued: deque[tuple[tuple[str, dict[str, Any]], asyncio.Future[None]]] = deque()
        self._listener: asyncio.Task[None] | None = None
        self._publisher_task: asyncio.Task[None] | None = None
        self._revocation_reader: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    async def join(self, session_id: str, listener: HubListener) -> None:
        """Subscribe a connection to its session.

        Raises:
            TooManyConnections: too many connections.
            Exception: errors of the channel layer where Redis is unavailable.
        """
        group = group_of(session_id)
        listeners = self._listeners.setdefault(group, set())
        # Count each side separately: a customer with many tabs must not block the agent.
        if sum(each.side == listener.side for each in listeners) >= settings.AFTERTOUCH_SESSION_SOCKETS:
            raise TooManyConnections("session")
        if sum(each.ticket == listener.ticket for each in listeners) >= settings.AFTERTOUCH_TOKEN_SOCKETS:
            raise TooManyConnections("token")
        listeners.add(listener)
        try:
            async with self._opening:
                if not self._channel:
                    self._channel = await self._layer.new_channel()
                    self._listener = asyncio.get_running_loop().create_task(self._listen())
                    self._revocation_reader = asyncio.get_running_loop().create_task(self._read_revocations())
            await self._layer.group_add(group, self._channel)
        except BaseException:
            await self.leave(session_id, listener)
            raise

    async def leave(self, session_id: str, listener: HubListener) -> None:
        group = group_of(session_id)
        listeners = self._listeners.get(group, set())
        if listener not in listeners:
            return
        listeners.discard(listener)
        if listeners:
            return
        del self._listeners[group]
        try:
            # No await between the line above and the layer's lock: a page that joins now subscribes afterwards.
            await self._layer.group_discard(group, self._channel)
        except Exception as error:
            log.info("group_unsubscribe_failed", error=str(error))

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
        self._queued.append(((group_of(session_id), {"session": session_id, **notification}), published))
        if self._publisher_task is None:
            self._publisher_task = loop.create_task(self._publish_queued())
        return published

    async def _publish_queued(self) -> None:
        try:
            while self._queued:
                batch = [self._queued.popleft() for _ in range(min(NOTIFY_BATCH, len(self._queued)))]
                try:
                    async with asyncio.timeout(settings.TIMEOUTS.session_notify):
                        await self._layer.group_send_many([message for message, _ in batch])
                except Exception as error:
                    log.warning("notification_failed", count=len(batch), error=f"{type(error).__name__}: {error}")
                for _, published in batch:
                    if not published.done():
                        published.set_result(None)
        finally:
            self._publisher_task = None

    async def _listen(self) -> None:
        for number in count():
            try:
                self._pass_on(await self._layer.receive(self._channel))
                if self._layer.overflowed(self._channel):
                    # Make every connection read its inbox, because notifications were dropped.
                    log.warning("notification_rate_exceeded", limit=RECEIVED_LIMIT)
                    for listeners in list(self._listeners.values()):
                        for listener in list(listeners):
                            listener.on_notification({"what": LOST})
            except Exception:
                log.exception("notification_invalid")
            if number % YIELD_AFTER == 0:
                await asyncio.sleep(0)  # a queue that is never empty would not let the outgoing queues send

    def _pass_on(self, notification: dict[str, Any]) -> None:
        for listener in list(self._listeners.get(group_of(notification["session"]), ())):
            listener.on_notification(notification)

    async def _read_revocations(self) -> None:
        """Read revocations whose notification may be lost."""
        read_to = [0] * SHARDS
        while True:
            try:
                server = sessions.live_store().server
                after = [at - REREAD_US for at in read_to]
                for shard, found in enumerate(await asyncio.to_thread(tokens.list_revocations, server, after)):
                    for each in found:
                        self._pass_on({"session": each.session_id, **revoked_notification(each.side, each.at)})
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


def group_of(session_id: str) -> str:
    """Return the group of a session. A hash, because group names permit fewer characters than session ids."""
    return f"session.{sha256(session_id.encode()).hexdigest()[:32]}"


@once_per_loop
def hub() -> Hub:
    return Hub()
