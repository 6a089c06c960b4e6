"""Show the service-node matrix (stage × trigger, one card per node), change a node from its card, and edit stages."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.db import transaction
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.http import urlencode
from django.utils.text import slugify
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop, ngettext

from scheduling import sql
from scheduling.admin.base import CheckedForm, Retirable, ops_display
from scheduling.admin.dashboard.charts import Span, format_capped_count, split_period
from scheduling.admin.dashboard.series import EndedTouches, count_ended_by_span
from scheduling.admin.page_reads import PageTimeLimit, count_within, read_for_page
from scheduling.admin.row_edits import VERSION_FIELD
from scheduling.admin.shown_values import find_address
from scheduling.admin.undo import create_undo_link
from scheduling.error_text import ErrorText
from scheduling.errors import Conflict
from scheduling.models import WAITING, EventType, Node, Pause, Stage, Touch
from scheduling.models.versioned import lock_for_write
from scheduling.monitoring.duration_text import describe_duration
from scheduling.monitoring.statistics import OutcomeCounts
from scheduling.operations import commands
from scheduling.operations.failed_tasks import Actor
from scheduling.operations.undo import Reversal

LONGEST = 58  #: characters; a number of up to five digits follows
_LOCK = "SELECT pg_advisory_xact_lock(hashtext('scheduling_node.key'))"


def derive_node_key(name: str, stage: str, trigger: str) -> str:
    """Return a free key from the name, or from stage and trigger if the name has other letters than a to z.

    The transaction of the caller keeps a lock until its end: concurrent forms derive different keys.
    """
    sql.execute(_LOCK, {})
    base = _shorten(slugify(name)) if name.isascii() else ""
    base = base or _shorten(re.sub(r"[^a-z0-9]+", "-", f"{stage}-{trigger}".lower())) or "node"
    taken = set(Node.objects.filter(key__startswith=base).values_list("key", flat=True))
    keys = (base if number == 1 else f"{base}-{number}" for number in range(1, len(taken) + 2))
    return next(key for key in keys if key not in taken)


def _shorten(text: str) -> str:
    return text[:LONGEST].strip("-_")


MOST_COUNTED = 20_000  #: waiting touches of a node
LONGEST_NAME = 90  #: characters of a copied name; the word for a copy follows


class CardForm(CheckedForm):
    """The place and the switch of a node. The whole row is checked, the version covers these two columns."""

    class Meta:
        model = Node
        fields: ClassVar[Any] = ("stage", "enabled")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stages = Stage.objects.filter(retired_at=None) | Stage.objects.filter(pk=self.instance.stage_id)
        self.fields["stage"].queryset = stages  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        if "enabled" not in self.data:  # a form without the box would switch the node off
            self.add_error("enabled", self.fields["stage"].error_messages["required"])
        return super().clean()

    def hide_fields(self) -> None:
        """Leave only the reason visible, for the confirmation."""
        for name in ("stage", "enabled"):
            self.fields[name].widget = forms.HiddenInput()


def build_card_link(nodes_admin: Any, node: Node) -> str:
    """Return the address of the node's card in the matrix."""
    return f"{nodes_admin.url('matrix')}#node-{node.pk}"


def place_card(nodes_admin: Any, request: HttpRequest, row: Node) -> HttpResponse:
    """Store stage and switch of a card. Show the impact first if touches wait and the node moves or is switched off."""
    back = build_card_link(nodes_admin, row)
    with transaction.atomic():
        form = CardForm(request.POST, instance=row)
        if not form.is_valid():
            for lines in form.errors.values():
                for line in lines:
                    messages.error(request, f"{row}: {line}")
            return redirect(back)
        if "confirmed" not in request.POST and (facts := _list_facts_to_confirm(form, row)):
            form.hide_fields()
            if "enabled" in form.changed_data:
                title, button = _("Switch off “%(node)s”?") % {"node": row}, _("Switch off")
            else:
                words = _("Move “%(node)s” to the stage “%(stage)s”?")
                title, button = words % {"node": row, "stage": row.stage}, _("Move")
            return nodes_admin.page(  # type: ignore[no-any-return]
                request, "ops/confirm.html", title, facts=facts, form=form, hidden=[("confirmed", "1")],
                button=button, back=back, danger="enabled" in form.changed_data,
            )  # fmt: skip
        if form.has_changed():
            at = sql.now()
            saved = form.save(commit=False)
            nodes_admin.save_model(request, saved, form, change=True)
            nodes_admin.log_change(request, saved, nodes_admin.construct_change_message(request, form, [], False))
            link = ""
            if "enabled" in form.changed_data and not row.enabled:
                link = create_undo_link(
                    request, "node.off", [row.pk], label=str(row), version=row.version, since=at.isoformat()
                )
            messages.success(request, _describe_card_change(form, row), extra_tags=link)
    return redirect(back)


def switch_on_again(node_id: str, actor: Actor, *, version: int, since: str) -> None:
    """Switch a node on through the checks of the form.

    Raises:
        Conflict: the node changed since it was switched off, or the checks refuse it.
    """
    row = lock_for_write(Node.objects.all()).filter(pk=node_id, version=version, enabled=False, retired_at=None).first()
    if row is None:
        raise Conflict(ErrorText(gettext_noop("the node changed since it was switched off")))
    form = CardForm({"stage": row.stage_id, "enabled": "on", "change_reason": _("Undone")}, instance=row)
    if not form.is_valid():
        raise Conflict("; ".join(str(line) for lines in form.errors.values() for line in lines))
    form.save()


REVERSAL = Reversal(
    Node._meta.label_lower, "scheduling.change_node", switch_on_again, follow_up=commands.plan_suppressed_again
)


def _list_facts_to_confirm(form: CardForm, row: Node) -> list[str]:
    """Return what the edit means if touches wait or other nodes follow; [] if nothing needs a confirmation."""
    is_moved, is_switched_off = "stage" in form.changed_data, "enabled" in form.changed_data and not row.enabled
    if not is_moved and not is_switched_off:
        return []
    waiting = describe_waiting_touches(row)
    facts = [waiting] if waiting else []
    if is_switched_off and (keys := list_followers(row)):
        text = _("These nodes follow it and plan no more touches: %(nodes)s.")
        facts.append(text % {"nodes": ", ".join(keys)})
    if is_moved and waiting:
        facts.append(_("They keep their time, content and channel. Only the row of the matrix changes."))
    if is_switched_off and waiting:
        facts.append(_("They are suppressed when they fall due, unless the node is enabled again by then."))
    return facts


def describe_waiting_touches(row: Node) -> str:
    """Return how many touches wait at a node; "" for none."""
    waiting = Touch.objects.filter(node_id=row.pk, state__in=WAITING)
    count = count_within(lambda: waiting[: MOST_COUNTED + 1].count())
    if count is None:
        return _("Too many touches wait at this node to count them now.")
    words = ngettext("%(count)s touch waits at this node.", "%(count)s touches wait at this node.", count)
    return words % {"count": format_capped_count(count, MOST_COUNTED)} if count else ""


def list_followers(row: Node) -> list[str]:
    """Return the keys of the nodes in use that follow this one."""
    followers = Node.objects.filter(retired_at=None, from_nodes__contains=row.key).exclude(pk=row.pk)
    return list(followers.values_list("key", flat=True))


def _describe_card_change(form: CardForm, row: Node) -> str:
    if "stage" in form.changed_data:
        return _("“%(node)s” was moved to the stage “%(stage)s”.") % {"node": row, "stage": row.stage}
    words = _("“%(node)s” was switched on.") if row.enabled else _("“%(node)s” was switched off.")
    return words % {"node": row}


def copy_node(nodes_admin: Any, request: HttpRequest, row: Node) -> HttpResponse:
    """Store a copy of a node, with a new key and switched off."""
    with transaction.atomic():
        made = build_copy(row)
        nodes_admin.save_model(request, made, None, change=False)
        nodes_admin.log_addition(request, made, [{"added": {}}])
    messages.success(request, _("“%(node)s” was stored with the key %(key)s. It is switched off.") % {
        "node": made, "key": made.key,
    })  # fmt: skip
    return redirect(build_card_link(nodes_admin, made))


def build_copy(row: Node) -> Node:
    """Return an unsaved copy of a node. The transaction keeps the lock of its key."""
    made = Node.objects.get(pk=row.pk)
    made.pk = None
    made._state.adding = True
    made.key = derive_node_key(row.key, row.stage.key, row.trigger)
    made.name = _("%(name)s (copy)") % {"name": str(row)[:LONGEST_NAME]}
    made.enabled, made.version, made.retired_at = False, 1, None
    return made


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
        version = CardForm(instance=node)[VERSION_FIELD].value()
        periods = figures.list_periods(node.pk) if figures else []
        found.append(NodeCard(node, format_node_delay(node), state, text, find_address(node), version, periods))
    return found


def _build_matrix_rows(
    cards: list[NodeCard], triggers: list[str], names: dict[str, str], may_add: bool
) -> list[MatrixRow]:
    by_cell: dict[tuple[int, str], list[NodeCard]] = defaultdict(list)
    for card in cards:
        by_cell[card.node.stage_id, card.node.trigger].append(card)
    in_use = Stage.objects.filter(pk__in={card.node.stage_id for card in cards})
    stages = Stage.objects.filter(retired_at=None) | in_use
    add_page = reverse("admin:scheduling_node_add")
    return [
        MatrixRow(
            stage,
            [
                MatrixCell(
                    each,
                    names.get(each) or each,
                    by_cell[stage.pk, each],
                    f"{add_page}?{urlencode({'stage': str(stage.pk), 'trigger': each})}" if may_add else "",
                )
                for each in triggers
            ],
        )
        for stage in stages.distinct()
    ]


@admin.register(Stage)
class StageAdmin(Retirable):
    list_display = ("name_or_key", "key", "position", "node_count")
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
