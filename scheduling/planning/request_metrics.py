"""Metrics of API requests and group commits. Labels are bounded: a route, not a path; never a user.

Not in `scheduling.metrics`: an instrument without labels creates its file on import, before the process knows where.
"""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from scheduling.metrics import never_raises

events_ingested = Counter("aftertouch_events_ingested", "Events answered with 202.", ["result"])
commits = Histogram(
    "aftertouch_ingest_group_events", "Events stored per transaction.", buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500)
)
requests = Histogram(
    "aftertouch_api_request_duration_seconds",
    "Duration from the last request byte to the first response byte, in seconds.",
    ["route", "status"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10),
)


@never_raises
def count_ingested(accepted: int, duplicates: int) -> None:
    events_ingested.labels("accepted").inc(accepted)
    events_ingested.labels("duplicate").inc(duplicates)


@never_raises
def count_commit(events: int) -> None:
    commits.observe(events)


@never_raises
def observe_request(route: str, status: int, seconds: float) -> None:
    requests.labels(route, status).observe(seconds)
