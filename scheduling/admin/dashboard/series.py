"""Build the overview's charts of ended touches, lateness and events, and the sums below them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.admin.dashboard.charts import (
    Bucket,
    Chart,
    Goal,
    Names,
    Series,
    Span,
    paired,
    ranked,
    reach,
    stacked,
    tallies,
)
from scheduling.admin.dashboard.pace import seconds
from scheduling.admin.labels import reason, spoken
from scheduling.admin.patience import Patience
from scheduling.admin.touches.touch import span_link
from scheduling.models import EventType
from scheduling.monitoring import statistics
from scheduling.monitoring.statistics import GOAL, Late, Tally, quantile

TOUCHES = "scheduling_touch"
STATES = (
    Series("delivered", gettext_lazy("Delivered"), "good"),
    Series("suppressed", gettext_lazy("Suppressed"), "wait"),
    Series("cancelled", gettext_lazy("Cancelled"), "quiet"),
    Series("failed", gettext_lazy("Failed"), "bad"),
    Series("unknown", gettext_lazy("Unknown"), "doubt"),
)


@dataclass(frozen=True, slots=True)
class Ended:
    """`tallies` by bar; None where counting exceeded its time limit."""

    spans: list[Span]
    tallies: list[Tally | None]

    @property
    def since(self) -> datetime:
        return self.spans[0].hours[0]

    @property
    def whole(self) -> Tally | None:
        """Return the sum; None if a bar is missing."""
        return None if None in self.tallies else sum(filter(None, self.tallies), Tally())

    def link(self, span: Span | None = None, **filters: str) -> str:
        since, until = reach(self.spans, span)
        return span_link(TOUCHES, "settled_at", since, until, **filters)


def read(spans: list[Span], patience: Patience) -> Ended:
    """Count ended touches by bar."""
    return Ended(spans, tallies(statistics.past, spans, patience))


def by_state(ended: Ended) -> Chart:
    def bucket(span: Span, tally: Tally | None) -> Bucket:
        links = {each.key: ended.link(span, state__exact=each.key) for each in STATES}
        return Bucket(span.label, None if tally is None else counted(tally), links)

    buckets = [bucket(*each) for each in zip(ended.spans, ended.tallies, strict=True)]
    title = _("Outcomes")
    return stacked("ended", title, STATES, buckets, lambda key: ended.link(state__exact=key))


def by_reason(ended: Ended) -> Chart:
    """Chart the most frequent reasons of suppressed touches, and the others together."""
    return _reasons("reasons", _("Why touches were not sent"), ended, ["suppressed"], {"state__exact": "suppressed"})


def by_cause(ended: Ended) -> Chart:
    """Chart the most frequent reasons of failed and unknown touches."""
    return _reasons("failures", _("Why touches failed"), ended, ["failed", "unknown"], {"stands": "bad"})


def _reasons(key: str, title: str, ended: Ended, states: Collection[str], filters: dict[str, str]) -> Chart:
    def link(code: str, span: Span | None) -> str:
        return ended.link(span, **filters, **({"reason": code} if code else {}))

    counts = [None if tally is None else reasons(tally, states) for tally in ended.tallies]
    return ranked(key, title, ended.spans, counts, Names(reason, _("Other reasons"), link))


def counted(tally: Tally) -> Counter[str]:
    """Count by state."""
    found: Counter[str] = Counter()
    for (state, _reason, _node), count in tally.items():
        found[state] += count
    return found


def reasons(tally: Tally, states: Collection[str]) -> Counter[str]:
    """Count the reasons of touches that ended in one of `states`."""
    found: Counter[str] = Counter()
    for (state, code, _node), count in tally.items():
        if state in states:
            found[code] += count
    return found


TYPES = 1000  #: event types whose names are looked up
QUANTILES = {
    0.5: Series("p50", gettext_lazy("Median"), "hue1"),
    0.99: Series("p99", gettext_lazy("P99"), "hue0"),
}


def lateness(spans: list[Span], patience: Patience) -> Chart:
    """Chart the lateness of delivered touches, from due to sent."""
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
    goal = Goal(_in_ms(GOAL.total_seconds()), _("Goal: P99 within %(span)s.") % {"span": spoken(GOAL)})
    return paired("lateness", _("Lateness, from due to sent"), legend, buckets, _words, goal)


def _ms(late: Late, part: float) -> int:
    """Return a quantile in milliseconds; at least 1, so that a bar is visible."""
    span = quantile(late, part)
    return max(1, _in_ms(span.total_seconds())) if span else 0


def _in_ms(span: float) -> int:
    return round(span * 1000)


def _words(ms: int) -> str:
    return seconds(ms / 1000) if ms else "–"


def events(spans: list[Span], patience: Patience) -> Chart:
    """Chart received events by type."""

    def link(kind: str, span: Span | None) -> str:
        since, until = reach(spans, span)
        return span_link("scheduling_event", "received_at", since, until, **({"type": kind} if kind else {}))

    counts = tallies(statistics.past_events, spans, patience)
    words = dict(EventType.objects.exclude(name="").values_list("key", "name")[:TYPES])
    names = Names(lambda kind: words.get(kind, kind), _("Other types"), link)
    return ranked("events", _("Events received"), spans, counts, names)
