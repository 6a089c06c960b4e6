"""The channel kinds, by dotted path from `settings.CHANNELS`, so that other apps can add theirs."""

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


def threads(name: str, most: int) -> ThreadPoolExecutor:
    """Those of this name in this process, made as they are needed."""
    return _threads_of(os.getpid(), name, most)  # a pool does not survive a fork


@cache
def _threads_of(process: int, name: str, most: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(most, thread_name_prefix=name)
