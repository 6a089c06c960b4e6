"""The channel layer, with many messages in one round trip.

channels_redis publishes one message at a time under a lock: 5,000 guide messages that fall due together would be told
in three seconds. A pipeline tells them in a fraction of one. This knows the inside of channels_redis 4.3.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from channels_redis.pubsub import RedisPubSubChannelLayer

RECEIVED_LIMIT = 10_000  #: messages that wait in a process; the inbox has what is not taken


class BoundedQueue(asyncio.Queue[Any]):
    """Drops what comes while it is full, instead of growing until memory ends or of raising in the receiver."""

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
        """Whether messages of this channel were dropped since the last time that this was asked, and none waits."""
        queue = self._get_layer().channels.get(channel)
        if not isinstance(queue, BoundedQueue) or not queue.dropped or not queue.empty():
            return False
        queue.dropped = False
        return True

    async def group_send_many(self, messages: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Each to its group, those to one group in their order."""
        layer = self._get_layer()
        by_shard: dict[Any, list[tuple[str, bytes]]] = defaultdict(list)
        for group, message in messages:
            name = layer._get_group_channel_name(group)
            by_shard[layer._get_shard(name)].append((name, self.serialize(message)))
        await asyncio.gather(*(_publish(shard, packets) for shard, packets in by_shard.items()))


async def _publish(shard: Any, packets: Sequence[tuple[str, bytes]]) -> None:
    async with shard._lock:
        shard._ensure_redis()
        async with shard._redis.pipeline(transaction=False) as pipe:
            for name, packet in packets:
                pipe.publish(name, packet)
            await pipe.execute()
