"""Load the channel kinds from dotted paths in `settings.CHANNELS`, so that other apps can add kinds.

`send_once` sends without the ledger and its guards, for tests of a channel and alerts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import structlog
from django.conf import settings
from django.utils.module_loading import import_string

from scheduling.channels.base import Channel, Message, Outcome, SecretSender, Unknown
from scheduling.channels.http_client import close_shared_transport

log = structlog.get_logger(__name__)


@cache
def channel_kinds() -> dict[str, type[Channel]]:
    return {kind: import_string(path) for kind, path in settings.CHANNELS.items()}


def list_secret_names() -> list[str]:
    """Return the names that are secret in any kind."""
    return sorted({name for kind in channel_kinds().values() for name in kind.secret_fields})


def redirects_secret(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether the settings `after` send the secret to a host that did not get it with `before`."""
    found = channel_kinds().get(kind)
    if found is None or not issubclass(found, SecretSender):
        return False
    return not found.list_secret_hosts(after) <= found.list_secret_hosts(before)


def thread_pool(name: str, most: int) -> ThreadPoolExecutor:
    """Return the thread pool of this name in this process. It is created on first use."""
    return _process_thread_pool(os.getpid(), name, most)  # a pool does not survive a fork


@cache
def _process_thread_pool(process: int, name: str, most: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(most, thread_name_prefix=name)


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
