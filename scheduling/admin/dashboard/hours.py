"""Charts of how late the house is and of what it takes in."""

from __future__ import annotations

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.admin.dashboard.charts import Bucket, Chart, Goal, Series, paired
from scheduling.admin.dashboard.columns import Span, reach, tallies
from scheduling.admin.dashboard.pace import seconds
from scheduling.admin.dashboard.ranked import Names, ranked
from scheduling.admin.labels import spoken
from scheduling.admin.patience import Patience
from scheduling.admin.touches.spans import span_link
from scheduling.models import EventType
from scheduling.monitoring import statistics
from scheduling.monitoring.statistics import GOAL, Late, quantile

TYPES = 1000  #: whose names are looked up
QUANTILES = {
    0.5: Series("p50", gettext_lazy("Median"), "hue1"),
    0.99: Series("p99", gettext_lazy("99 of 100 below"), "hue0"),
}


def lateness(spans: list[Span], patience: Patience) -> Chart:
    """From due to sent, of what was delivered."""
    found = tallies(statistics.past_lateness, spans, patience)

    def link(span: Span | None = None) -> str:
        since, until = reach(spans, span)
        return span_link("scheduling_touch", "settled_at", since, until, state__exact="delivered")

    def bucket(span: Span, late: Late | None) -> Bucket:
        counts = None if late is None else {each.key: _ms(late, part) for part, each in QUANTILES.items() if late}
        return Bucket(span.label, counts, {each.key: link(span) for each in QUANTILES.values()} if late else {})

    buckets = [bucket(*each) for each in zip(spans, found, strict=True)]
    whole = None if None in found else sum(filter(None, found), Late())
    legend = [
        (each, "?" if whole is None else _words(_ms(whole, part) if whole else 0), link())
        for part, each in QUANTILES.items()
    ]
    goal = Goal(_in_ms(GOAL.total_seconds()), _("Goal: 99 of 100 within %(span)s.") % {"span": spoken(GOAL)})
    return paired("lateness", _("Lateness, from due to sent"), legend, buckets, _words, goal)


def _ms(late: Late, part: float) -> int:
    """At least 1: what is on time is seen as well."""
    span = quantile(late, part)
    return max(1, _in_ms(span.total_seconds())) if span else 0


def _in_ms(span: float) -> int:
    return round(span * 1000)


def _words(ms: int) -> str:
    return seconds(ms / 1000) if ms else "–"


def events(spans: list[Span], patience: Patience) -> Chart:
    """Taken in, by type."""

    def link(kind: str, span: Span | None) -> str:
        since, until = reach(spans, span)
        return span_link("scheduling_event", "received_at", since, until, **({"type": kind} if kind else {}))

    counts = tallies(statistics.past_events, spans, patience)
    words = dict(EventType.objects.exclude(name="").values_list("key", "name")[:TYPES])
    names = Names(lambda kind: words.get(kind, kind), _("Other types"), link)
    return ranked("events", _("Events taken in"), spans, counts, names)
