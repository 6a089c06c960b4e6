"""Build the charts of the overview, and read the configuration changes that they mark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Model
from django.http import HttpRequest
from django.urls import reverse
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.admin.dashboard.charts import (
    Bucket,
    Chart,
    ConfigChange,
    Series,
    Span,
    build_ranked_chart,
    build_stacked_chart,
    count_by_span,
    get_span_bounds,
)
from scheduling.admin.labels import translate_reason
from scheduling.admin.lists import build_span_link
from scheduling.admin.page_reads import PageTimeLimit
from scheduling.models import (
    Calendar,
    ChannelConfig,
    DelayRule,
    EventType,
    HarassmentRule,
    Holdout,
    Node,
    Template,
    TemplateText,
)
from scheduling.monitoring import statistics
from scheduling.monitoring.duration_text import describe_duration
from scheduling.monitoring.statistics import GOAL, LatenessCounts, OutcomeCounts, compute_lateness_quantile

TOUCH_LIST = "admin:scheduling_touch_changelist"
MODELS: tuple[type[Model], ...] = (
    Node, Template, TemplateText, ChannelConfig, HarassmentRule, DelayRule, Holdout, Calendar,
)  # fmt: skip
MOST_CHANGES = 40  #: latest markers that a chart shows
MOST_READ = 200  #: latest changes of each table


def list_config_changes(
    request: HttpRequest, spans: Sequence[Span], time_limit: PageTimeLimit
) -> list[ConfigChange] | None:
    """Return the latest changes that the user may view, latest first; None if reading exceeded its time limit."""
    latest: dict[tuple[int, str], ConfigChange] = {}  #: by bar and link
    for model in MODELS:
        owner = Template if model is TemplateText else model
        if not request.user.has_perm(f"scheduling.view_{owner._meta.model_name}"):
            continue
        changes = time_limit(lambda model=model: _read_config_changes(model, spans))  # type: ignore[misc]
        if changes is None:
            return None
        for each in changes:
            before = latest.get((each.bar, each.link))
            if before is None or before.changed_at < each.changed_at:
                latest[each.bar, each.link] = each
    return sorted(latest.values(), key=lambda each: each.changed_at, reverse=True)[:MOST_CHANGES]


def _read_config_changes(model: Any, spans: Sequence[Span]) -> list[ConfigChange]:
    found = model.history.filter(history_date__gte=spans[0].hours[0]).select_related("history_user")
    rows = list(found.order_by("-history_date")[:MOST_READ])
    ids, names = {row: row.id for row in rows}, {row: _name_row(row) for row in rows}
    if model is TemplateText:
        model, ids = Template, {row: row.template_id for row in rows}
        keys = dict(Template.objects.filter(pk__in=ids.values()).values_list("pk", "key"))
        names = {row: keys.get(row.template_id, "") for row in rows}
    changes = []
    for row in rows:
        what = f"{capfirst(str(model._meta.verbose_name))} {names[row]}".strip()
        who = row.history_user.get_username() if row.history_user else row.history_change_reason or _("the system")
        link = reverse(f"admin:scheduling_{model._meta.model_name}_history", args=[ids[row]])
        bar = next((number for number, span in enumerate(spans) if row.history_date < span.until), len(spans) - 1)
        changes.append(ConfigChange(row.history_date, bar, f"{what} · {who}", link))
    return changes


def _name_row(row: Any) -> str:
    return str(row.get_kind_display()) if hasattr(row, "kind") and not hasattr(row, "key") else getattr(row, "key", "")


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
    buckets = []
    for span, tally in zip(ended.spans, ended.tallies, strict=True):
        links = {each.key: ended.link(span, state__exact=each.key) for each in STATES}
        buckets.append(Bucket(span.label, None if tally is None else sum_by_state(tally), links))
    return build_stacked_chart("ended", _("Outcomes"), STATES, buckets, lambda key: ended.link(state__exact=key))


def chart_reasons(key: str, title: str, ended: EndedTouches, states: Collection[str], **filters: str) -> Chart:
    """Chart the most frequent reasons of touches that ended in one of `states`, the rows of a list with `filters`."""

    def link(code: str, span: Span | None) -> str:
        return ended.link(span, **filters, **({"reason": code} if code else {}))

    counts = [None if tally is None else sum_by_reason(tally, states) for tally in ended.tallies]
    return build_ranked_chart(
        key, title, ended.spans, counts, words=translate_reason, others=_("Other reasons"), link=link
    )


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


def chart_lateness(ended: EndedTouches, time_limit: PageTimeLimit) -> Chart:
    """Chart the lateness of delivered touches, from due to sent."""
    found = count_by_span(statistics.lateness_cache, ended.spans, time_limit)
    buckets = []
    for span, late in zip(ended.spans, found, strict=True):
        counts: dict[str, int] | None = None if late is None else {}
        links = {}
        if late:
            counts = {each.key: _compute_quantile_ms(late, part) for part, each in QUANTILES.items()}
            links = dict.fromkeys(counts, ended.link(span, state__exact="delivered"))
        buckets.append(Bucket(span.label, counts, links))
    whole = None if None in found else sum(filter(None, found), LatenessCounts())
    delivered = ended.link(state__exact="delivered")
    legend = [
        (each, "?" if whole is None else _format_ms(_compute_quantile_ms(whole, part) if whole else 0), delivered)
        for part, each in QUANTILES.items()
    ]
    return Chart(
        "lateness", _("Lateness, from due to sent, in ms"), legend, buckets, is_stacked=False, words=_format_ms,
        goal=round(GOAL.total_seconds() * 1000),
        note=_("Goal: P99 within %(span)s.") % {"span": describe_duration(GOAL)},
    )  # fmt: skip


def _compute_quantile_ms(late: LatenessCounts, part: float) -> int:
    """Return a quantile in milliseconds; at least 1, so that a bar is visible."""
    span = compute_lateness_quantile(late, part)
    return max(1, round(span.total_seconds() * 1000)) if span else 0


def _format_ms(ms: int) -> str:
    if not ms:
        return "–"
    return _("%(ms)s ms") % {"ms": ms} if ms < 1000 else _("%(s)s s") % {"s": f"{ms / 1000:.1f}"}


def chart_events(spans: list[Span], time_limit: PageTimeLimit) -> Chart:
    """Chart received events by type."""

    def link(kind: str, span: Span | None) -> str:
        since, until = get_span_bounds(spans, span)
        return build_span_link("scheduling_event", "received_at", since, until, **({"type": kind} if kind else {}))

    counts = count_by_span(statistics.event_cache, spans, time_limit)
    words = dict(EventType.objects.exclude(name="").values_list("key", "name")[:TYPES])
    return build_ranked_chart(
        "events", _("Events received"), spans, counts,
        words=lambda kind: words.get(kind, kind), others=_("Other types"), link=link,
    )  # fmt: skip
