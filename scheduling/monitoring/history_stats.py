"""Report what holds up the history: ends that a reader has not read, and rows outside the partitions of their time."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduling import sql
from scheduling.ledger import ends, partitions

MOST = 100_000  #: rows counted; this value means this many or more


class HistoryCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        unread = GaugeMetricFamily(
            "aftertouch_ends_unread_seconds",
            "Age of the ends of touches up to which a reader has read, in seconds.", labels=["reader"],
        )  # fmt: skip
        for reader, age in ends.list_mark_ages():
            unread.add_metric([reader], age)
        rest = GaugeMetricFamily(
            "aftertouch_touches_rest", f"Ended touches in the partition `rest`. At most {MOST} are counted."
        )
        ((count,),) = sql.rows(_REST, {"most": MOST})
        rest.add_metric([], count)
        yield from (unread, rest)


_REST = f"SELECT count(*) FROM (SELECT FROM {partitions.REST} LIMIT %(most)s) AS batch"  # noqa: S608 (a constant)
