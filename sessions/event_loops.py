"""Objects that belong to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


def once_per_loop(make: Callable[[], T]) -> Callable[[], T]:
    """Call `make` once in each running event loop, and return that object afterwards."""
    made: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    @wraps(make)
    def of_running_loop() -> T:
        loop = asyncio.get_running_loop()
        if loop not in made:
            made[loop] = make()
        return made[loop]

    return of_running_loop
