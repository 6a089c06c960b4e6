"""Renew the lease of a run or of a take-over from a thread, during a step that may take longer than the lease."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.db import connection


@contextmanager
def renew_in_background(renew: Callable[[], bool], *, interval: float) -> Iterator[None]:
    """Call `renew` every `interval` seconds until the block ends.

    Args:
        renew: return whether the lease can be renewed again. It uses a database connection of its own.
    """
    over = threading.Event()

    def renew_until_over() -> None:
        while not over.wait(interval) and renew():
            pass
        connection.close()

    keeper = threading.Thread(target=renew_until_over, name="lease", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
