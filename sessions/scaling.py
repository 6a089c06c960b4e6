"""Measure the need for watchers (see `scheduling.monitoring.wanted_numbers`)."""

from __future__ import annotations

from django.conf import settings

from scheduling.db_timeouts import Deadline
from scheduling.monitoring.wanted_numbers import BUSY_GOAL, round_up
from sessions.store import stats
from sessions.store.sessions import live_store

SILENCE_LATE = 2_000  #: milliseconds; a watcher sleeps at most a second
SILENCE_SPAN = 60.0  #: seconds in which all live chats may fall silent


def measure_watchers(deadline: Deadline) -> tuple[int, int]:
    """Return the watchers that run and those that are needed, at least one. Reads only Redis.

    Raises `StoreUnavailable`.
    """
    found = stats.read_overview(live_store())
    running = len(found.watchers)
    needed = max(found.a_second, found.armed / SILENCE_SPAN) / (settings.AFTERTOUCH_SILENCE_RATE * BUSY_GOAL)
    # While guide messages are held back, more watchers would wait too.
    is_late = found.lag_ms > SILENCE_LATE and not any(watcher.waits for watcher in found.watchers)
    return running, max(round_up(needed), 2 * running if is_late else 1, 1)
