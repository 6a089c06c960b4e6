"""Load the channel kinds from dotted paths in `settings.CHANNELS`, so that other apps can add kinds."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from django.conf import settings
from django.utils.module_loading import import_string

from scheduling.channels.base import Channel


@cache
def channel_kinds() -> dict[str, type[Channel]]:
    return {kind: import_string(path) for kind, path in settings.CHANNELS.items()}


def thread_pool(name: str, most: int) -> ThreadPoolExecutor:
    """Return the thread pool of this name in this process. It is created on first use."""
    return _process_thread_pool(os.getpid(), name, most)  # a pool does not survive a fork


@cache
def _process_thread_pool(process: int, name: str, most: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(most, thread_name_prefix=name)
