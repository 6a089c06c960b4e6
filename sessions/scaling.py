"""Measure the need for watchers (see `scheduling.monitoring.wanted_numbers`)."""

from __future__ import annotations

from django.conf import settings

from scheduling.db_timeouts import Deadline
from scheduling.policy.scaling import Need, WatcherDemand, compute_needed_watchers
from sessions.store import stats
from sessions.store.sessions import live_store


def measure_watchers(deadline: Deadline) -> tuple[int, Need]:
    """Return the running watchers and the need for them. Reads only Redis. Raises `StoreUnavailable`."""
    found = stats.read_overview(live_store())
    running = len(found.watchers)
    need = compute_needed_watchers(
        WatcherDemand(
            running,
            limit=settings.AFTERTOUCH_SILENCE_RATE,
            silences=found.a_second,
            live=found.armed,
            lag=found.lag_ms / 1000,
            holds_back=any(watcher.waits for watcher in found.watchers),
        )
    )
    return running, need
