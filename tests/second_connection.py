"""Act over a second database connection, like another process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from django.db import connection

Answer = TypeVar("Answer")
WAIT_LIMIT = 60  #: seconds


def act_on_second_connection(act: Callable[[], Answer]) -> Answer:
    """Call `act` in a thread with its own connection, and wait for it."""

    def run() -> Answer:
        try:
            return act()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(WAIT_LIMIT)
