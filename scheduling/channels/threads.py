"""Threads of a channel's own: what blocks in them holds up no other channel, nor the loop's default executor."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache


def threads(name: str, most: int) -> ThreadPoolExecutor:
    """Those of this name in this process, made as they are needed."""
    return _threads_of(os.getpid(), name, most)  # a pool does not survive a fork


@cache
def _threads_of(process: int, name: str, most: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(most, thread_name_prefix=name)
