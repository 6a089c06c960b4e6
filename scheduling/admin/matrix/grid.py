"""Show the service-node matrix (stage × trigger, one card per node) with the touches of the last week, and stages."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.admin.base import ops_display
from scheduling.admin.count_time_limits import PageTimeLimit
from scheduling.admin.dashboard.charts import Span, split_period
from scheduling.admin.dashboard.series import EndedTouches, count_ended_by_span
from scheduling.admin.matrix.card_actions import CardForm
from scheduling.admin.optimistic_lock import VERSION_FIELD
from scheduling.admin.replica_pages import read_for_page
from scheduling.admin.retirement import Retirable, RetiredFilter
from scheduling.models import EventType, Node, Pause, Stage
from scheduling.monitoring.duration_text import describe_duration
from scheduling.monitoring.statistics import OutcomeCounts

DAYS = 7  #: today included


@dataclass(frozen=True, slots=True)
class CardOutcome:
    tone: str
    words: str | Promise
    states: frozenset[str]
    filters: dict[str, str]  #: of the list of touches


CARD_OUTCOMES = (
    CardOutcome("good", gettext_lazy("Sent"), frozenset({"delivered"}), {"state__exact": "delivered"}),
    CardOutcome("wait", gettext_lazy("Suppressed"), frozenset({"suppressed"}), {"state__exact": "suppressed"}),
    CardOutcome("bad", gettext_lazy("Failed"), frozenset({"failed", "unknown"}), {"status": "bad"}),
)


@dataclass(frozen=True, slots=True)
class CardFigure:
    outcome: CardOutcome
    count: int | None  #: None if counting exceeded its time limit
    link: str


@dataclass(frozen=True, slots=True)
class CardPeriod:
    title: str
    figures: list[CardFigure]


class CardFigures:
    """Figures of all nodes, from one count that the page's time limit bounds."""

    def __init__(self) -> None:
        self._ended = count_ended_by_span(split_period(DAYS), PageTimeLimit(settings.TIMEOUTS.overview))
        yesterday = self._ended.spans[-2]
        self._periods = [
            (_("Yesterday"), yesterday, _sum_by_node(self._ended.tallies[-2])),
            (_("7 days"), None, _sum_by_node(self._ended.whole)),
        ]

    def list_periods(self, node_id: int) -> list[CardPeriod]:
        return [
            CardPeriod(title, [_build_figure(self._ended, span, counts, each, node_id) for each in CARD_OUTCOMES])
            for title, span, counts in self._periods
        ]


def _sum_by_node(tally: OutcomeCounts | None) -> Counter[tuple[int, str]] | None:
    """Count by node and tone of the outcome; None if the tally is missing."""
    if tally is None:
        return None
    found: Counter[tuple[int, str]] = Counter()
    for (state, _reason, node_id), count in tally.items():
        for each in CARD_OUTCOMES:
            if state in each.states:
                found[node_id, each.tone] += count
    return found


def _build_figure(
    ended: EndedTouches, span: Span | None, counts: Counter[tuple[int, str]] | None, outcome: CardOutcome, node_id: int
) -> CardFigure:
    count = None if counts is None else counts[node_id, outcome.tone]
    return CardFigure(outcome, count, ended.link(span, node__id__exact=str(node_id), **outcome.filters))


@dataclass(frozen=True, slots=True)
class NodeCard:
    node: Node
    wait: str
    state: str  #: "on", "off", "paused"
    state_text: str
    link: str
    row_version: str
    periods: list[CardPeriod] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MatrixCell:
    trigger: str
    trigger_name: str
    cards: list[NodeCard]
    add_link: str


@dataclass(frozen=True, slots=True)
class MatrixRow:
    stage: Stage
    cells: list[MatrixCell]


def format_node_delay(node: Node) -> str:
    return _("dynamic") if node.dynamic else describe_duration(node.delay)


def describe_node_state(node: Node, paused: bool) -> tuple[str, str]:
    """Return a node's state and its label."""
    if node.retired_at:
        return "retired", _("Retired")
    if not node.enabled:
        return "off", _("Switched off")
    return ("paused", _("Paused")) if paused else ("on", _("Enabled"))


def matrix_page(nodes_admin: Any, request: HttpRequest) -> TemplateResponse:
    may_add = nodes_admin.has_add_permission(request)
    nodes = list(
        Node.objects.filter(retired_at=None)
        .select_related("stage", "template", "channel", "canary_template")
        .prefetch_related("template__texts")
        .order_by("delay", "key")
    )
    names = dict(EventType.objects.values_list("key", "name"))
    triggers = sorted({node.trigger for node in nodes})
    figures = read_for_page(request, CardFigures) if request.user.has_perm("scheduling.view_touch") else None
    rows = _build_matrix_rows(_build_cards(nodes, figures), triggers, names, may_add)
    return nodes_admin.page(  # type: ignore[no-any-return]
        request,
        "ops/matrix.html",
        _("Service-node matrix"),
        triggers=[(each, names.get(each) or "") for each in triggers],
        rows=rows,
        may_add=may_add,
        may_change=nodes_admin.has_change_permission(request),
        stages=Stage.objects.filter(retired_at=None),
        add_link=reverse("admin:scheduling_node_add"),
        list_link=reverse("admin:scheduling_node_changelist"),
        is_fullwidth="1",
    )


def _build_cards(nodes: list[Node], figures: CardFigures | None) -> list[NodeCard]:
    paused = set(Pause.objects.values_list("scope", flat=True))
    found = []
    for node in nodes:
        stopped = bool(paused & {"all", f"channel:{node.channel.key}", f"node:{node.key}"})
        state, text = describe_node_state(node, stopped)
        link = reverse("admin:scheduling_node_change", args=[node.pk])
        version = CardForm(instance=node)[VERSION_FIELD].value()
        periods = figures.list_periods(node.pk) if figures else []
        found.append(NodeCard(node, format_node_delay(node), state, text, link, version, periods))
    return found


def _build_matrix_rows(
    cards: list[NodeCard], triggers: list[str], names: dict[str, str], may_add: bool
) -> list[MatrixRow]:
    by_cell: dict[tuple[int, str], list[NodeCard]] = defaultdict(list)
    for card in cards:
        by_cell[card.node.stage_id, card.node.trigger].append(card)
    in_use = Stage.objects.filter(pk__in={card.node.stage_id for card in cards})
    stages = Stage.objects.filter(retired_at=None) | in_use
    return [
        MatrixRow(
            stage,
            [
                MatrixCell(
                    each,
                    names.get(each) or each,
                    by_cell[stage.pk, each],
                    _build_add_link(stage, each) if may_add else "",
                )
                for each in triggers
            ],
        )
        for stage in stages.distinct()
    ]


def _build_add_link(stage: Stage, trigger: str) -> str:
    return f"{reverse('admin:scheduling_node_add')}?{urlencode({'stage': str(stage.pk), 'trigger': trigger})}"


@admin.register(Stage)
class StageAdmin(Retirable):
    list_display = ("name_or_key", "key", "position", "node_count")
    list_filter = (RetiredFilter,)
    list_filter_submit = False
    search_fields = ("key", "name")
    fields = ("key", "name", "position")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Stage]:
        alive = Q(nodes__retired_at=None)
        return super().get_queryset(request).annotate(node_count=Count("nodes", filter=alive))  # type: ignore[no-any-return]

    @ops_display(description=gettext_lazy("name"), ordering="position")
    def name_or_key(self, row: Stage) -> str:
        return str(row)

    @ops_display(description=gettext_lazy("nodes"))
    def node_count(self, row: Any) -> int:
        return int(row.node_count)

    def in_use(self, row: Stage) -> bool:
        return row.nodes.exists()

    def explain_retirement_block(self, row: Stage) -> str:
        return (
            _("Nodes still belong to this stage. Retire or move them first.")
            if row.nodes.filter(retired_at=None)
            else ""
        )

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> forms.Field | None:
        field: forms.Field | None = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field and db_field.name == "position":
            field.help_text = gettext_lazy("Small numbers come first in the matrix.")
        return field
