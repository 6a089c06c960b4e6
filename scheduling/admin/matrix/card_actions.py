"""Change a node from its card in the matrix: switch it and undo that, move it to another stage, copy it."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from scheduling import sql
from scheduling.admin.base import CheckedForm
from scheduling.admin.matrix.node_impact import list_impact_lines
from scheduling.admin.matrix.node_keys import derive_node_key
from scheduling.admin.undo import create_undo_link
from scheduling.error_text import ErrorText
from scheduling.errors import Conflict
from scheduling.models import Node, Stage
from scheduling.models.versioned import lock_for_write
from scheduling.operations import commands
from scheduling.operations.failed_tasks import Actor
from scheduling.operations.undo import Reversal

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
            title, button = _describe_question(form, row)
            return nodes_admin.page(  # type: ignore[no-any-return]
                request, "ops/confirm.html", title, facts=facts, form=form, hidden=[("confirmed", "1")],
                button=button, back=back, danger="enabled" in form.changed_data,
            )  # fmt: skip
        if form.has_changed():
            at = sql.now()
            _save_card(nodes_admin, request, form)
            messages.success(
                request, _describe_card_change(form, row), extra_tags=_offer_switch_undo(request, form, row, at)
            )
    return redirect(back)


def _offer_switch_undo(request: HttpRequest, form: CardForm, row: Node, at: datetime) -> str:
    if "enabled" not in form.changed_data or row.enabled:
        return ""
    return create_undo_link(request, "node.off", [row.pk], label=str(row), version=row.version, since=at.isoformat())


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
    """Return the impact if touches wait or other nodes follow; [] if nothing needs a confirmation."""
    if "stage" not in form.changed_data and row.enabled:
        return []
    lines = list_impact_lines(form, row)
    return [text for _tone, text in lines] if len(lines) > 1 else []


def _describe_question(form: CardForm, row: Node) -> tuple[str, str]:
    """Return the question of the confirmation and its button."""
    if "enabled" in form.changed_data:
        return _("Switch off “%(node)s”?") % {"node": row}, _("Switch off")
    words = _("Move “%(node)s” to the stage “%(stage)s”?")
    return words % {"node": row, "stage": row.stage}, _("Move")


def _describe_card_change(form: CardForm, row: Node) -> str:
    if "stage" in form.changed_data:
        return _("“%(node)s” was moved to the stage “%(stage)s”.") % {"node": row, "stage": row.stage}
    words = _("“%(node)s” was switched on.") if row.enabled else _("“%(node)s” was switched off.")
    return words % {"node": row}


def _save_card(nodes_admin: Any, request: HttpRequest, form: CardForm) -> None:
    row = form.save(commit=False)
    nodes_admin.save_model(request, row, form, change=True)
    nodes_admin.log_change(request, row, nodes_admin.construct_change_message(request, form, [], False))


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
