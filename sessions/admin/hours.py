"""The chart of who fell silent and what was sent to them, and what it counts."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling import sql
from scheduling.admin.dashboard.charts import Bucket, Chart, Series, paired
from scheduling.admin.dashboard.columns import Span, tallies
from scheduling.admin.patience import Patience
from scheduling.admin.touches.spans import span_link
from scheduling.configuration.snapshot import current
from scheduling.monitoring import statistics
from scheduling.monitoring.past import Past, hours_between
from sessions.detection.presence import SILENT

SILENCES = Series("silences", gettext_lazy("Silences"), "hue0")
GUIDES = Series("guides", gettext_lazy("Guide messages"), "hue1")


def guides_sent(since: datetime, until: datetime) -> dict[datetime, Counter[str]]:
    """By the hour in which they were delivered, counted from `since`: read from what is counted anyway."""
    found: dict[datetime, Counter[str]] = {hour: Counter() for hour in hours_between(since, until)}
    for hour, count in sql.rows(_SENT, {"since": since, "until": until}):
        found[hour][GUIDES.key] += count
    return found


_SENT = """
SELECT date_bin('1 hour', at, %(since)s), sum(sent)::bigint FROM chat_sessions_nudgetally
WHERE at >= %(since)s AND at < %(until)s GROUP BY 1
"""

past_guides = Past(guides_sent)


def silences(spans: list[Span], patience: Patience) -> Chart:
    events = tallies(statistics.past_events, spans, patience)
    guides = tallies(past_guides, spans, patience)
    buckets = []
    for span, taken, sent in zip(spans, events, guides, strict=True):
        counts = None
        if taken is not None and sent is not None:
            counts = {SILENCES.key: taken[SILENT], GUIDES.key: sent[GUIDES.key]}
        buckets.append(Bucket(span.label, counts, _links(span.hours[0], span.until)))
    whole = _links(spans[0].hours[0], spans[-1].until)
    legend = [
        (each, sum(bucket.counts[each.key] for bucket in buckets if bucket.counts), whole.get(each.key, ""))
        for each in (SILENCES, GUIDES)
    ]
    return paired("silences", _("Silences and guide messages"), legend, buckets)


def _links(since: datetime, until: datetime) -> dict[str, str]:
    """A list has the guide messages where one node sends them."""
    links = {SILENCES.key: span_link("scheduling_event", "received_at", since, until, type=SILENT)}
    nodes = current().triggered.get(SILENT, ())
    if len(nodes) == 1:
        delivered = {"state__exact": "delivered", "node__id__exact": str(nodes[0].id)}
        links[GUIDES.key] = span_link("scheduling_touch", "settled_at", since, until, **delivered)
    return links
