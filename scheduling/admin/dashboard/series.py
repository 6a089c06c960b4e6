"""Build the overview's charts of ended touches, lateness and events, and the sums below them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.admin.count_time_limits import PageTimeLimit
from scheduling.admin.dashboard.charts import (
    Bucket,
    Chart,
    CodeLabels,
    Goal,
    Series,
    Span,
    build_grouped_chart,
    build_ranked_chart,
    build_stacked_chart,
    count_by_span,
    get_span_bounds,
)
from scheduling.admin.dashboard.throughput import format_seconds
from scheduling.admin.labels import translate_reason
from scheduling.admin.touches.touch import build_span_link
from scheduling.models import EventType
from scheduling.monitoring import statistics
from scheduling.monitoring.duration_text import describe_duration
from scheduling.monitoring.statistics import GOAL, LatenessCounts, OutcomeCounts, compute_lateness_quantile

TOUCHES = "scheduling_touch"
STATES = (
    Series("delivered", gettext_lazy("Delivered"), "good"),
    Series("suppressed", gettext_lazy("Suppressed"), "wait"),
    Series("cancelled", gettext_lazy("Cancelled"), "quiet"),
    Series("failed", gettext_lazy("Failed"), "bad"),
    Series("unknown", gettext_lazy("Unknown"), "doubt"),
)


@dataclass(frozen=True, slots=True)
class EndedTouches:
    """`tallies` by bar; None where counting exceeded its time limit."""

    spans: list[Span]
    tallies: list[OutcomeCounts | None]

    @property
    def since(self) -> datetime:
        return self.spans[0].hours[0]

    @property
    def whole(self) -> OutcomeCounts | None:
        """Return the sum; None if a bar is missing."""
        return None if None in self.tallies else sum(filter(None, self.tallies), OutcomeCounts())

    def link(self, span: Span | None = None, **filters: str) -> str:
        since, until = get_span_bounds(self.spans, span)
        return build_span_link(TOUCHES, "settled_at", since, until, **filters)


def count_ended_by_span(spans: list[Span], time_limit: PageTimeLimit) -> EndedTouches:
    """Count ended touches by bar."""
    return EndedTouches(spans, count_by_span(statistics.ended_cache, spans, time_limit))


def chart_outcomes(ended: EndedTouches) -> Chart:
    def bucket(span: Span, tally: OutcomeCounts | None) -> Bucket:
        links = {each.key: ended.link(span, state__exact=each.key) for each in STATES}
        return Bucket(span.label, None if tally is None else sum_by_state(tally), links)

    buckets = [bucket(*each) for each in zip(ended.spans, ended.tallies, strict=True)]
    title = _("Outcomes")
    return build_stacked_chart("ended", title, STATES, buckets, lambda key: ended.link(state__exact=key))


def chart_suppression_reasons(ended: EndedTouches) -> Chart:
    """Chart the most frequent reasons of suppressed touches, and the others together."""
    return _chart_reasons(
        "reasons", _("Why touches were not sent"), ended, ["suppressed"], {"state__exact": "suppressed"}
    )


def chart_failure_reasons(ended: EndedTouches) -> Chart:
    """Chart the most frequent reasons of failed and unknown touches."""
    return _chart_reasons("failures", _("Why touches failed"), ended, ["failed", "unknown"], {"status": "bad"})


def _chart_reasons(
    key: str, title: str, ended: EndedTouches, states: Collection[str], filters: dict[str, str]
) -> Chart:
    def link(code: str, span: Span | None) -> str:
        return ended.link(span, **filters, **({"reason": code} if code else {}))

    counts = [None if tally is None else sum_by_reason(tally, states) for tally in ended.tallies]
    return build_ranked_chart(key, title, ended.spans, counts, CodeLabels(translate_reason, _("Other reasons"), link))


def sum_by_state(tally: OutcomeCounts) -> Counter[str]:
    """Count by state."""
    found: Counter[str] = Counter()
    for (state, _reason, _node), count in tally.items():
        found[state] += count
    return found


def sum_by_reason(tally: OutcomeCounts, states: Collection[str]) -> Counter[str]:
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


def chart_lateness(spans: list[Span], time_limit: PageTimeLimit) -> Chart:
    """Chart the lateness of delivered touches, from due to sent."""
    found = count_by_span(statistics.lateness_cache, spans, time_limit)

    def link(span: Span | None = None) -> str:
        since, until = get_span_bounds(spans, span)
        return build_span_link("scheduling_touch", "settled_at", since, until, state__exact="delivered")

    def bucket(span: Span, late: LatenessCounts | None) -> Bucket:
        counts = (
            None
            if late is None
            else {each.key: _compute_quantile_ms(late, part) for part, each in QUANTILES.items() if late}
        )
        return Bucket(span.label, counts, {each.key: link(span) for each in QUANTILES.values()} if late else {})

    buckets = [bucket(*each) for each in zip(spans, found, strict=True)]
    whole = None if None in found else sum(filter(None, found), LatenessCounts())
    legend = [
        (each, "?" if whole is None else _format_ms(_compute_quantile_ms(whole, part) if whole else 0), link())
        for part, each in QUANTILES.items()
    ]
    goal = Goal(
        _convert_to_ms(GOAL.total_seconds()), _("Goal: P99 within %(span)s.") % {"span": describe_duration(GOAL)}
    )
    return build_grouped_chart("lateness", _("Lateness, from due to sent"), legend, buckets, _format_ms, goal)


def _compute_quantile_ms(late: LatenessCounts, part: float) -> int:
    """Return a quantile in milliseconds; at least 1, so that a bar is visible."""
    span = compute_lateness_quantile(late, part)
    return max(1, _convert_to_ms(span.total_seconds())) if span else 0


def _convert_to_ms(span: float) -> int:
    return round(span * 1000)


def _format_ms(ms: int) -> str:
    return format_seconds(ms / 1000) if ms else "–"


def chart_events(spans: list[Span], time_limit: PageTimeLimit) -> Chart:
    """Chart received events by type."""

    def link(kind: str, span: Span | None) -> str:
        since, until = get_span_bounds(spans, span)
        return build_span_link("scheduling_event", "received_at", since, until, **({"type": kind} if kind else {}))

    counts = count_by_span(statistics.event_cache, spans, time_limit)
    words = dict(EventType.objects.exclude(name="").values_list("key", "name")[:TYPES])
    names = CodeLabels(lambda kind: words.get(kind, kind), _("Other types"), link)
    return build_ranked_chart("events", _("Events received"), spans, counts, names)
