"""Load the channel kinds from dotted paths in `settings.CHANNELS`, so that other apps can add kinds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from scheduling.channels.base import Channel, SecretSender


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
