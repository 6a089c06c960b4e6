"""Build the charts of the overview with marks of configuration changes, and its cards of throughput and queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Model
from django.http import HttpRequest
from django.urls import reverse
from django.utils.text import capfirst
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.admin.dashboard.charts import (
    WIDTH,
    Bucket,
    Chart,
    DashboardCard,
    Figure,
    Goal,
    Mark,
    Series,
    Span,
    build_grouped_chart,
    build_ranked_chart,
    build_stacked_chart,
    count_by_span,
    get_span_bounds,
)
from scheduling.admin.labels import translate_reason
from scheduling.admin.page_reads import PageTimeLimit
from scheduling.admin.shown_values import describe_instant
from scheduling.admin.touches.touch import build_span_link
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
from scheduling.monitoring.queues import BrokerReading
from scheduling.monitoring.statistics import GOAL, LatenessCounts, OutcomeCounts, compute_lateness_quantile
from scheduling.queue_names import CORE_QUEUES, TOUCH_QUEUES

TOUCH_LIST = "admin:scheduling_touch_changelist"
OTHERS = 6  #: queues of other apps that are shown, longest first


def build_pace_card(time_limit: PageTimeLimit) -> DashboardCard:
    """Build the card of lateness and rates."""
    lateness, rates = time_limit(statistics.measure_lateness), time_limit(statistics.measure_touch_rates)
    at = now()
    delivered = build_span_link("scheduling_touch", "settled_at", at - timedelta(hours=1), at, state__exact="delivered")
    lately = build_span_link("scheduling_touch", "settled_at", at - statistics.RATE_WINDOW, at)
    return DashboardCard(
        _("Pace"),
        [
            Figure(_("Lateness, median"), lateness and format_seconds(lateness.p50), delivered,
                   hint=_("From due to sent, over the latest deliveries of the last hour.")),
            Figure(_("Lateness, P99"), lateness and format_seconds(lateness.p99), delivered),
            Figure(_("Dispatched per minute"), rates and f"{rates.dispatched:.1f}",
                   reverse(TOUCH_LIST) + "?state__exact=queued", hint=_("To the broker, over the last five minutes.")),
            Figure(_("Ended per minute"), rates and f"{rates.ended:.1f}", lately),
        ],
    )  # fmt: skip


def format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return _("%(ms)s ms") % {"ms": round(seconds * 1000)} if seconds < 1 else _("%(s)s s") % {"s": f"{seconds:.1f}"}


def build_queues_card(reading: BrokerReading | None) -> DashboardCard:
    """Build the card of broker queues; a note replaces the numbers while the broker does not respond."""
    page = reverse("admin:scheduling_touch_workers")
    if reading is None:
        note = _("The broker does not respond. Touches are kept and sent after it recovers.")
        return DashboardCard(_("Queues"), link=page, note=note)
    found = reading.queues
    own = sorted((each for each in found if each.name in CORE_QUEUES), key=lambda each: CORE_QUEUES.index(each.name))
    others = sorted(
        (each for each in found if each.name not in CORE_QUEUES and each.length), key=lambda each: -each.length
    )
    figures = []
    for each in (*own, *others[:OTHERS]):
        link = page
        priority = next((key for key, name in TOUCH_QUEUES.items() if name == each.name), None)
        if priority is not None:
            link = f"{reverse(TOUCH_LIST)}?state__exact=queued&priority__exact={priority}"
        age = timedelta(seconds=round(each.oldest_age)) if each.length and each.oldest_age else None
        hint = _("the oldest for %(span)s") % {"span": describe_duration(age)} if age else ""
        figures.append(Figure(each.name, each.length, link, hint=hint))
    unacked = [each.unacked for each in found if each.unacked is not None]
    if unacked:
        figures.append(Figure(_("Not acknowledged"), sum(unacked), f"{reverse(TOUCH_LIST)}?state__exact=queued"))
    note = ""
    if reading.accepts_messages is False:
        note = _(
            "The broker is short of memory or disk and rejects messages. Touches are kept and sent after it recovers."
        )
    return DashboardCard(_("Queues"), figures, page, note)


MODELS: tuple[type[Model], ...] = (
    Node, Template, TemplateText, ChannelConfig, HarassmentRule, DelayRule, Holdout, Calendar,
)  # fmt: skip
MOST_CHANGES = 40  #: latest markers that a chart shows
MOST_READ = 200  #: latest changes of each table


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """Changes of one row within one bar: when and by whom it changed last, and its history."""

    changed_at: datetime
    words: str
    link: str


def list_config_changes(
    request: HttpRequest, spans: Sequence[Span], time_limit: PageTimeLimit
) -> list[ConfigChange] | None:
    """Return the latest changes that the user may view, latest first; None if reading exceeded its time limit."""
    found: dict[tuple[int, str], ConfigChange] = {}  #: by bar and link
    for model in MODELS:
        owner = Template if model is TemplateText else model
        if not request.user.has_perm(f"scheduling.view_{owner._meta.model_name}"):
            continue
        changes = time_limit(lambda model=model: _read_config_changes(model, spans[0].hours[0]))  # type: ignore[misc]
        if changes is None:
            return None
        for each in changes:
            bar = next((number for number, span in enumerate(spans) if each.changed_at < span.until), len(spans))
            before = found.get((bar, each.link))
            if before is None or before.changed_at < each.changed_at:
                found[bar, each.link] = each
    return sorted(found.values(), key=lambda each: each.changed_at, reverse=True)[:MOST_CHANGES]


def mark_changes(chart: Chart, spans: Sequence[Span], changes: Sequence[ConfigChange]) -> Chart:
    """Return the chart with a marker for each change. Its bars are `spans`."""
    placed = [(_place_instant(each.changed_at, spans), each) for each in changes]
    marks = [
        Mark(x, f"{describe_instant(each.changed_at)} · {each.words}", each.link) for x, each in placed if x is not None
    ]
    return replace(chart, changes=tuple(marks))


def _read_config_changes(model: Any, since: datetime) -> list[ConfigChange]:
    rows = list(
        model.history.filter(history_date__gte=since)
        .select_related("history_user")
        .order_by("-history_date")[:MOST_READ]
    )
    if model is not TemplateText:
        return [_describe_config_change(model, row.id, _name_row(row), row) for row in rows]
    names = dict(Template.objects.filter(pk__in={row.template_id for row in rows}).values_list("pk", "key"))
    return [_describe_config_change(Template, row.template_id, names.get(row.template_id, ""), row) for row in rows]


def _name_row(row: Any) -> str:
    return str(row.get_kind_display()) if hasattr(row, "kind") and not hasattr(row, "key") else getattr(row, "key", "")


def _describe_config_change(model: Any, pk: Any, name: str, row: Any) -> ConfigChange:
    what = f"{capfirst(str(model._meta.verbose_name))} {name}".strip()
    who = row.history_user.get_username() if row.history_user else row.history_change_reason or _("the system")
    link = reverse(f"admin:scheduling_{model._meta.model_name}_history", args=[pk])
    return ConfigChange(row.history_date, f"{what} · {who}", link)


def _place_instant(instant: datetime, spans: Sequence[Span]) -> float | None:
    """Return the place of an instant in a chart whose bars have equal widths; None outside."""
    for number, span in enumerate(spans):
        begins = span.hours[0]
        if begins <= instant < span.until:
            return round((number + (instant - begins) / (span.until - begins)) * WIDTH / len(spans), 2)
    return None


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
    goal = Goal(round(GOAL.total_seconds() * 1000), _("Goal: P99 within %(span)s.") % {"span": describe_duration(GOAL)})
    return build_grouped_chart("lateness", _("Lateness, from due to sent"), legend, buckets, _format_ms, goal)


def _compute_quantile_ms(late: LatenessCounts, part: float) -> int:
    """Return a quantile in milliseconds; at least 1, so that a bar is visible."""
    span = compute_lateness_quantile(late, part)
    return max(1, round(span.total_seconds() * 1000)) if span else 0


def _format_ms(ms: int) -> str:
    return format_seconds(ms / 1000) if ms else "–"


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
