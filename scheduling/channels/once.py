"""Send one message through a channel without the ledger and its guards, for tests of a channel and alerts."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import structlog

from scheduling.channels.base import Channel, Message, Outcome, Unknown
from scheduling.channels.http_client import close_shared_transport

log = structlog.get_logger(__name__)


def send_once(channel: Channel, message: Message, timeout: timedelta) -> Outcome:
    """Send and block until there is an outcome. The calling thread must not run an event loop.

    A defect of the channel counts as `Unknown`, as in delivery.
    """
    try:
        return asyncio.run(_send_and_close(channel, message, timeout))
    except TimeoutError:
        return Unknown("timeout", f"no end after {timeout.total_seconds():g} s")
    except Exception as error:
        log.exception("channel_call_failed", channel=channel.kind)
        return Unknown("channel_error", f"{type(error).__name__}: {error}"[:500])


async def _send_and_close(channel: Channel, message: Message, timeout: timedelta) -> Outcome:
    try:
        # The channel enforces the deadline itself. This timeout covers one that does not.
        return await asyncio.wait_for(channel.send(message, datetime.now(UTC) + timeout), timeout.total_seconds() + 1)
    finally:
        await close_shared_transport()
