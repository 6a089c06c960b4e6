"""End the hub of an event loop that ends."""

from __future__ import annotations

import asyncio

from sessions.websocket.hub import Hub, hub


async def close_hub(ended: Hub | None = None) -> None:
    """Close the connections to Redis, by default those of this loop's hub. A web process leaves that to its exit."""
    ended = ended or hub()
    for task in ended._readers:
        task.cancel()
    await asyncio.gather(*ended._readers, return_exceptions=True)
    if ended._subscription:
        await ended._give_back(ended._subscription)
    await ended._redis.aclose()
