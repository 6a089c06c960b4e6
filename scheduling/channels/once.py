"""One message through a channel, outside of the ledger and its guards: a test, an alert."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import structlog

from scheduling.channels.base import Channel, ImmediateChannel, Message, Outcome, Unknown
from scheduling.channels.http_client import close_shared_transport

log = structlog.get_logger(__name__)


def send_once(channel: Channel, message: Message, timeout: timedelta) -> Outcome:
    """Blocks until there is an outcome. For threads that run no loop; a bug of the channel counts as unknown, here as
    in delivery."""
    if isinstance(channel, ImmediateChannel):
        return channel.send_now(message)
    try:
        return asyncio.run(_once(channel, message, timeout))
    except TimeoutError:
        return Unknown("timeout", f"no end after {timeout.total_seconds():g} s")
    except Exception as error:
        log.exception("channel_broke", channel=channel.kind)
        return Unknown("channel_error", f"{type(error).__name__}: {error}"[:500])


async def _once(channel: Channel, message: Message, timeout: timedelta) -> Outcome:
    try:
        # The channel keeps the deadline itself; this is for the one that does not.
        return await asyncio.wait_for(channel.send(message, datetime.now(UTC) + timeout), timeout.total_seconds() + 1)
    finally:
        await close_shared_transport()
