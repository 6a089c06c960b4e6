"""Build the charts of the overview, and read the configuration changes that they mark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from django.db.models import Model
from django.http import HttpRequest
from django.urls import reverse
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.admin.dashboard.charts import (
    Chart,
    ConfigChange,
    Counts,
    Series,
    Span,
    add_up,
    build_ranked_chart,
    count_by_span,
    regroup,
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
from scheduling.monitoring.statistics import GOAL, LatenessCounts, compute_lateness_quantile

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
    found = model.history.filter(history_date__gte=spans[0].since).select_related("history_user")
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


STATES = (
    Series("delivered", gettext_lazy("Delivered"), "good"),
    Series("suppressed", gettext_lazy("Suppressed"), "wait"),
    Series("cancelled", gettext_lazy("Cancelled"), "quiet"),
    Series("failed", gettext_lazy("Failed"), "bad"),
    Series("unknown", gettext_lazy("Unknown"), "doubt"),
)


def link_ended(span: Span, **filters: str) -> str:
    """Return the address of the touches that ended in a span."""
    return build_span_link("scheduling_touch", "settled_at", span.since, span.until, **filters)


def chart_outcomes(spans: Sequence[Span], ended: Counts) -> Chart:
    counts = regroup(ended, lambda key: key[0])  # state, reason, node
    return Chart("ended", _("Outcomes"), STATES, spans, counts, lambda key, span: link_ended(span, state__exact=key))


def chart_reasons(
    key: str, title: str, spans: Sequence[Span], ended: Counts, states: Collection[str], **filters: str
) -> Chart:
    """Chart the most frequent reasons of touches that ended in one of `states`, the rows of a list with `filters`."""

    def link(code: str, span: Span) -> str:
        return link_ended(span, **filters, **({"reason": code} if code else {}))

    counts = regroup(ended, lambda key: key[1] if key[0] in states else None)
    return build_ranked_chart(key, title, spans, counts, words=translate_reason, others=_("Other reasons"), link=link)


TYPES = 1000  #: event types whose names are looked up
QUANTILES = ((0.5, Series("p50", gettext_lazy("Median"), "hue1")), (0.99, Series("p99", gettext_lazy("P99"), "hue0")))


def chart_lateness(spans: Sequence[Span], time_limit: PageTimeLimit) -> Chart:
    """Chart the lateness of delivered touches, from due to sent."""
    found = count_by_span(statistics.lateness_cache, spans, time_limit)
    whole = add_up(found)
    sums = {key: _format_ms(ms) for key, ms in _compute_quantiles_ms(whole or Counter()).items()}
    return Chart(
        "lateness", _("Lateness, from due to sent, in ms"), [each for _part, each in QUANTILES], spans,
        [None if late is None else _compute_quantiles_ms(late) for late in found],
        lambda key, span: link_ended(span, state__exact="delivered"),
        dict.fromkeys(sums, "?") if whole is None else sums,
        is_stacked=False, words=_format_ms, goal=round(GOAL.total_seconds() * 1000),
        note=_("Goal: P99 within %(span)s.") % {"span": describe_duration(GOAL)},
    )  # fmt: skip


def _compute_quantiles_ms(late: LatenessCounts) -> dict[str, int]:
    """Return the quantiles in milliseconds, at least 1, so that a bar is visible; 0 without deliveries."""
    spans = {each.key: compute_lateness_quantile(late, part) for part, each in QUANTILES}
    return {key: max(1, round(span.total_seconds() * 1000)) if span else 0 for key, span in spans.items()}


def _format_ms(ms: int) -> str:
    if not ms:
        return "–"
    return _("%(ms)s ms") % {"ms": ms} if ms < 1000 else _("%(s)s s") % {"s": f"{ms / 1000:.1f}"}


def chart_events(spans: Sequence[Span], time_limit: PageTimeLimit) -> Chart:
    """Chart received events by type."""

    def link(kind: str, span: Span) -> str:
        chosen = {"type": kind} if kind else {}
        return build_span_link("scheduling_event", "received_at", span.since, span.until, **chosen)

    counts = count_by_span(statistics.event_cache, spans, time_limit)
    names = dict(EventType.objects.exclude(name="").values_list("key", "name")[:TYPES])
    return build_ranked_chart(
        "events", _("Events received"), spans, counts,
        words=lambda kind: names.get(kind, kind), others=_("Other types"), link=link,
    )  # fmt: skip
