"""Cluster metrics of live chats and the need for watchers. A source that does not answer has no series, not zero."""

from __future__ import annotations

from collections.abc import Iterator

import structlog
from django.conf import settings
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduling.db_timeouts import Deadline
from scheduling.monitoring.wanted_numbers import BUSY_GOAL, round_up
from sessions.checks import find_eviction_policy
from sessions.store import stats
from sessions.store.client import StoreUnavailable
from sessions.store.sessions import live_store

log = structlog.get_logger(__name__)


class SessionMetrics(Collector):
    asks_database = False  #: exported while PostgreSQL is unavailable

    def collect(self) -> Iterator[Metric]:
        try:
            store = live_store()
            found, silences = stats.read_overview(store), stats.count_recorded_silences(store)
            week = stats.read_week(store)
        except StoreUnavailable as error:
            log.warning("session_metrics_missing", error=str(error))
            return
        family = GaugeMetricFamily(
            "aftertouch_sessions", "Live chats by silence policy and state.", labels=["policy", "state"]
        )
        for each in found.policies:
            family.add_metric([each.policy, "armed"], each.armed)
            family.add_metric([each.policy, "paused"], each.paused)
        yield family
        recorded = CounterMetricFamily("aftertouch_silences", "Recorded silences.", labels=["policy"])
        for policy, count in silences.items():
            recorded.add_metric([policy], count)
        yield recorded
        nudges = GaugeMetricFamily(
            "aftertouch_nudges", f"Guide messages of the last {stats.DAYS} days, by silence policy and outcome.",
            labels=["policy", "outcome"],
        )  # fmt: skip
        for policy, counts in week.items():
            for outcome in stats.OUTCOMES:
                nudges.add_metric([policy, outcome], counts[outcome])
        yield nudges
        yield GaugeMetricFamily(
            "aftertouch_silence_lag_seconds",
            "Delay of the oldest due deadline that no watcher has claimed, in seconds.",
            value=found.lag_ms / 1000,
        )
        yield GaugeMetricFamily(
            "aftertouch_silences_in_flight",
            "Silences that a watcher claimed and has not recorded yet.",
            value=found.in_flight,
        )
        yield GaugeMetricFamily(
            "aftertouch_watchers", "Watchers seen within the last minute.", value=len(found.watchers)
        )
        yield GaugeMetricFamily(
            "aftertouch_sessions_redis_evicts",
            "1 if the Redis of live chats deletes keys when it is full.",
            value=float(bool(find_eviction_policy())),
        )


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
