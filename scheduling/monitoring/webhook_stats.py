"""Count the messages of outgoing webhooks that wait, for metrics, lists and the API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduling import sql
from scheduling.webhooks.leases import FAILURES_TO_REST

MOST_COUNTED = 10_000  #: messages of one subscription; this value means this many or more


class WebhookBacklog(NamedTuple):
    key: str
    waiting: int
    oldest_age: float  #: seconds since the event of the oldest one
    resting: bool  #: its receiver fails: it rests, is probed, or is disabled


def read_webhook_backlogs() -> dict[int, WebhookBacklog]:
    """Return the backlog of each enabled subscription by its id."""
    given = {"most": MOST_COUNTED, "failures": FAILURES_TO_REST}
    return {row[0]: WebhookBacklog(*row[1:]) for row in sql.rows(_BACKLOGS, given)}


def count_failing_webhooks() -> int:
    """Return the number of enabled subscriptions whose receiver rests, is probed, or is disabled."""
    return sum(each.resting for each in read_webhook_backlogs().values())


class WebhookCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "aftertouch_webhook_messages_waiting",
            f"Messages of outgoing webhooks that wait, at most {MOST_COUNTED} of each.", labels=["webhook"],
        )  # fmt: skip
        oldest = GaugeMetricFamily(
            "aftertouch_webhook_oldest_age_seconds",
            "Age of the event of the oldest waiting message of an outgoing webhook, in seconds.", labels=["webhook"],
        )  # fmt: skip
        resting = GaugeMetricFamily(
            "aftertouch_webhook_resting",
            "1 while the receiver of an outgoing webhook rests, is probed, or is disabled.", labels=["webhook"],
        )  # fmt: skip
        for backlog in read_webhook_backlogs().values():
            waiting.add_metric([backlog.key], backlog.waiting)
            oldest.add_metric([backlog.key], backlog.oldest_age)
            resting.add_metric([backlog.key], float(backlog.resting))
        yield from (waiting, oldest, resting)


# A rest ends before each probe. The failures without a success show that it goes on.
_BACKLOGS = """
SELECT s.id, s.key, found.count, COALESCE(extract(epoch FROM statement_timestamp() - found.oldest), 0)::float8,
       e.disabled_at IS NOT NULL OR e.failures >= %(failures)s OR COALESCE(e.rest_until > statement_timestamp(), false)
FROM scheduling_webhooksubscription AS s JOIN scheduling_webhookendpoint AS e ON e.subscription_id = s.id
CROSS JOIN LATERAL (
    SELECT count(*), min(occurred_at) AS oldest FROM (
        SELECT occurred_at FROM scheduling_webhookmessage AS m
        WHERE m.state = 'waiting' AND m.subscription_id = s.id ORDER BY due_at LIMIT %(most)s
    ) AS first
) AS found
WHERE s.enabled AND s.retired_at IS NULL
"""
