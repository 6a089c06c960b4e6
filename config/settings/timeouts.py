"""Time limits of calls to PostgreSQL, Redis and the broker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits in seconds. Code reads `settings.TIMEOUTS` at each use, so that tests can replace it."""

    redis: float = 1.0  #: connecting, and each response
    redis_quota: float = 1.0  #: a channel's quota
    redis_rates: float = 0.2  #: the budget of an API key; a request waits for it
    session_notify: float = 2.0  #: one publication to the connections of a session
    probe: float = 1.0  #: each of Redis and the broker, in a health probe
    broker_producer: float = 1.0  #: a free connection for publishing
    broker_stats: float = 1.0  #: connecting, and each response about queues
    broker_age: float = 2.0  #: connecting, to read the age of the oldest message

    event_lock: float = 1.0  #: one lock while events are stored
    list_page: float = 5.0  #: one statement of an API list
    count: float = 2.0  #: one count for an admin page
    search: float = 1.0  #: all statements of the search of every page together
    overview: float = 4.0  #: all counts of the overview together, so that it loads under overload
    dashboard: float = 1.0  #: one count of another dashboard card; all counts of a chart together
    export: float = 20.0  #: finding the rows of a CSV export
    complaint_rates: float = 15.0  #: longer than `overview`: the user requested these numbers
    conversion: float = 20.0  #: longer than `overview`: the user requested these numbers
    receivers: float = 2.0  #: each statement of the page of receivers
    rollout: float = 20.0  #: each statement that counts the results of a roll-out
    bulk_count: float = 5.0  #: counting the rows of a bulk action
    bulk_batch: float = 20.0  #: each statement of a batch; beyond it the try has failed
    bulk_cancel: float = 3.0  #: a cancellation's wait for the current batch
    metrics_statement: float = 2.0  #: one statement for metrics
    #: all statements for metrics together: Prometheus waits for 10 s, and the broker and Redis have their own limits
    metrics: float = 4.0
