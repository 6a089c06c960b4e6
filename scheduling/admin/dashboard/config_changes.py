"""Mark changes of nodes, rules, templates and channels in the charts of the overview."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.db.models import Model
from django.http import HttpRequest
from django.urls import reverse
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from scheduling.admin.count_time_limits import PageTimeLimit
from scheduling.admin.dashboard.charts import WIDTH, Chart, Mark, Span
from scheduling.admin.shown_values import describe_instant
from scheduling.models import Calendar, ChannelConfig, DelayRule, HarassmentRule, Holdout, Node, Template, TemplateText

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
