"""Show the service-node matrix (stage × trigger, one card per node), change a node from its card, and edit stages."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.db import IntegrityError, transaction
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.text import slugify
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop, ngettext

from scheduling import sql
from scheduling.admin.base import CheckedForm, Confirmation, Retirable, ops_display
from scheduling.admin.dashboard.charts import (
    add_up,
    count_by_span,
    format_capped_count,
    join_spans,
    link_ended,
    split_period,
)
from scheduling.admin.matrix.template import summarize_text
from scheduling.admin.page_reads import PageTimeLimit, count_within, read_for_page
from scheduling.admin.row_edits import VERSION_FIELD, OptimisticLockForm
from scheduling.admin.touches.pause import is_paused, load_paused_scopes
from scheduling.admin.undo import create_undo_link
from scheduling.error_text import ErrorText
from scheduling.errors import Conflict
from scheduling.models import WAITING, EventType, Node, Stage, Touch
from scheduling.models.versioned import lock_for_write
from scheduling.monitoring import statistics
from scheduling.monitoring.duration_text import describe_duration
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
            for name in ("stage", "enabled"):  # the confirmation shows the reason only
                form.fields[name].widget = forms.HiddenInput()
            if "enabled" in form.changed_data:
                title, button = _("Switch off “%(node)s”?") % {"node": row}, _("Switch off")
            else:
                words = _("Move “%(node)s” to the stage “%(stage)s”?")
                title, button = words % {"node": row, "stage": row.stage}, _("Move")
            asked = Confirmation(
                title=title, facts=facts, form=form, hidden=[("confirmed", "1")], button=button, back=back,
                danger="enabled" in form.changed_data,
            )  # fmt: skip
            return nodes_admin.ask(request, asked)  # type: ignore[no-any-return]
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
            if "stage" in form.changed_data:
                text = _("“%(node)s” was moved to the stage “%(stage)s”.") % {"node": row, "stage": row.stage}
            else:
                words = _("“%(node)s” was switched on.") if row.enabled else _("“%(node)s” was switched off.")
                text = words % {"node": row}
            messages.success(request, text, extra_tags=link)
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


def copy_node(nodes_admin: Any, request: HttpRequest, row: Node) -> HttpResponse:
    """Store a copy of a node, with a new key and switched off."""
    if problem := nodes_admin.explain_restoration_block(row):  # of a retired node
        messages.error(request, problem)
        return redirect(nodes_admin.url("change", row.pk))
    try:
        with transaction.atomic():  # it keeps the lock of the key, which a configuration file does not take
            made = Node.objects.get(pk=row.pk)
            made.pk = None
            made._state.adding = True
            made.key = derive_node_key(row.key, row.stage.key, row.trigger)
            made.name = _("%(name)s (copy)") % {"name": str(row)[:LONGEST_NAME]}
            made.enabled, made.version, made.retired_at = False, 1, None
            nodes_admin.save_model(request, made, None, change=False)
            nodes_admin.log_addition(request, made, [{"added": {}}])
    except IntegrityError:
        words = _("“%(node)s” was not copied: another change took its key or deleted what it names. Copy it again.")
        messages.error(request, words % {"node": row})
        return redirect(build_card_link(nodes_admin, row))
    messages.success(request, _("“%(node)s” was stored with the key %(key)s. It is switched off.") % {
        "node": made, "key": made.key,
    })  # fmt: skip
    return redirect(build_card_link(nodes_admin, made))


DAYS = 7  #: today included
#: Tone, label, states, and filters of the list of touches.
CARD_OUTCOMES: tuple[tuple[str, Any, tuple[str, ...], dict[str, str]], ...] = (
    ("good", gettext_lazy("Sent"), ("delivered",), {"state__exact": "delivered"}),
    ("wait", gettext_lazy("Suppressed"), ("suppressed",), {"state__exact": "suppressed"}),
    ("bad", gettext_lazy("Failed"), ("failed", "unknown"), {"status": "bad"}),
)


def _count_outcomes(nodes: list[Node]) -> dict[int, list[dict[str, Any]]]:
    """Return the figures of each node by period, from one count that the page's time limit bounds.

    A figure is None if counting exceeded the limit.
    """
    spans = split_period(DAYS)
    ended = count_by_span(statistics.ended_cache, spans, PageTimeLimit(settings.TIMEOUTS.overview))
    found: dict[int, list[dict[str, Any]]] = {node.pk: [] for node in nodes}
    for title, span, tally in (
        (_("Yesterday"), spans[-2], ended[-2]), (_("7 days"), join_spans(spans), add_up(ended)),
    ):  # fmt: skip
        counts: Counter[tuple[int, str]] = Counter()
        for (state, _reason, node_id), count in (tally or {}).items():
            counts[node_id, state] += count
        for node in nodes:
            figures = [
                {
                    "tone": tone, "words": words,
                    "count": None if tally is None else sum(counts[node.pk, state] for state in states),
                    "link": link_ended(span, node__id__exact=str(node.pk), **filters),
                }
                for tone, words, states, filters in CARD_OUTCOMES
            ]  # fmt: skip
            found[node.pk].append({"title": title, "figures": figures})
    return found


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
    nodes = list(
        Node.objects.filter(retired_at=None)
        .select_related("stage", "template", "channel", "canary_template")
        .prefetch_related("template__texts")
        .order_by("delay", "key")
    )
    periods: dict[int, list[dict[str, Any]]] = {}
    if request.user.has_perm("scheduling.view_touch"):
        periods = read_for_page(request, lambda: _count_outcomes(nodes))
    paused = load_paused_scopes()
    cards: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)  #: by stage and trigger
    for node in nodes:
        state, state_text = describe_node_state(node, is_paused(paused, node.channel.key, node.key))
        cards[node.stage_id, node.trigger].append({
            "node": node, "summary": summarize_text(node.template), "wait": format_node_delay(node),
            "state": state, "state_text": state_text,
            "row_version": CardForm(instance=node)[VERSION_FIELD].value(), "periods": periods.get(node.pk),
        })  # fmt: skip
    names = dict(EventType.objects.values_list("key", "name"))
    triggers = [(each, names.get(each) or "") for each in sorted({node.trigger for node in nodes})]
    stages = Stage.objects.filter(retired_at=None)
    shown_stages = stages | Stage.objects.filter(pk__in={node.stage_id for node in nodes})
    return nodes_admin.page(  # type: ignore[no-any-return]
        request,
        "ops/matrix.html",
        _("Service-node matrix"),
        triggers=triggers,
        rows=[
            {
                "stage": stage,
                "cells": [
                    {"trigger": trigger, "name": name or trigger, "cards": cards[stage.pk, trigger]}
                    for trigger, name in triggers
                ],
            }
            for stage in shown_stages.distinct()
        ],
        may_add=nodes_admin.has_add_permission(request),
        may_change=nodes_admin.has_change_permission(request),
        stages=stages,
        add_link=reverse("admin:scheduling_node_add"),
        list_link=reverse("admin:scheduling_node_changelist"),
        is_fullwidth="1",
    )


class StageForm(OptimisticLockForm):
    class Meta:
        model = Stage
        fields = "__all__"
        help_texts: ClassVar[Any] = {"position": gettext_lazy("Small numbers come first in the matrix.")}


@admin.register(Stage)
class StageAdmin(Retirable):
    form = StageForm
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
