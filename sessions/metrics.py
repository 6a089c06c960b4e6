"""Cluster metrics of live chats and the need for watchers. A source that does not answer has no series, not zero."""

from __future__ import annotations

from collections.abc import Iterator

from django.conf import settings
from prometheus_client.core import CounterMetricFamily, Metric

from scheduling.db_timeouts import Deadline
from scheduling.monitoring.collectors import build_gauges
from scheduling.monitoring.wanted_numbers import BUSY_GOAL, round_up
from sessions.checks import find_eviction_policy
from sessions.store import stats
from sessions.store.sessions import live_store


def read_sessions(deadline: Deadline) -> Iterator[Metric]:
    """Read Redis only, so that the metrics are there while PostgreSQL is unavailable."""
    store = live_store()
    found, silences, week = stats.read_overview(store), stats.count_recorded_silences(store), stats.read_week(store)
    chats = [
        (each.policy, *count) for each in found.policies for count in (("armed", each.armed), ("paused", each.paused))
    ]
    yield from build_gauges(
        ["policy", "state"], {"aftertouch_sessions": "Live chats by silence policy and state."}, chats
    )
    recorded = CounterMetricFamily("aftertouch_silences", "Recorded silences.", labels=["policy"])
    for policy, count in silences.items():
        recorded.add_metric([policy], count)
    yield recorded
    text = f"Guide messages of the last {stats.DAYS} days, by silence policy and outcome."
    nudges = [(policy, outcome, counts[outcome]) for policy, counts in week.items() for outcome in stats.OUTCOMES]
    yield from build_gauges(["policy", "outcome"], {"aftertouch_nudges": text}, nudges)
    texts = {
        "aftertouch_silence_lag_seconds":
            "Delay of the oldest due deadline that no watcher has claimed, in seconds.",
        "aftertouch_silences_in_flight": "Silences that a watcher claimed and has not recorded yet.",
        "aftertouch_watchers": "Watchers seen within the last minute.",
        "aftertouch_sessions_redis_evicts": "1 if the Redis of live chats deletes keys when it is full.",
    }  # fmt: skip
    row = (found.lag_ms / 1000, found.in_flight, len(found.watchers), bool(find_eviction_policy()))
    yield from build_gauges([], texts, [row])


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
