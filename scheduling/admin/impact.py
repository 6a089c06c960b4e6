"""What an edit of a node means for the touches that wait at it, told before it is saved."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from scheduling import configuration
from scheduling.admin.wording import spoken
from scheduling.config_file.impact import DELAY
from scheduling.config_file.moving import SPREAD, Moved, foresee, move_waiting
from scheduling.models import WAITING, Node, Touch
from scheduling.specs import NodeSpec

MOST = 20_000  #: waiting touches that are looked at one by one while somebody types
CONTENT = ("template", "canary_template", "canary_percent", "canary_communities", "channel")


def impact_view(nodes_admin: Any, request: HttpRequest, object_id: str) -> JsonResponse:
    """For the form as it stands: sentences, each with a tone. Nothing while the form is wrong or as it was."""
    row = nodes_admin.found(request, object_id)
    if not nodes_admin.has_change_permission(request, row):
        raise PermissionDenied
    form = nodes_admin.get_form(request, row, change=True)(request.POST, instance=row)
    lines = _lines(form, row) if form.is_valid() else []
    return JsonResponse({"lines": [{"tone": tone, "text": text} for tone, text in lines]})


def _lines(form: Any, row: Node) -> list[tuple[str, str]]:
    changed = set(form.changed_data)
    delayed, said, switched = changed & set(DELAY), changed & set(CONTENT), "enabled" in changed
    if not (delayed or said or switched):
        return []
    count = Touch.objects.filter(node_id=row.pk, state__in=WAITING)[: MOST + 1].count()
    words = ngettext("%(count)s touch waits at this node.", "%(count)s touches wait at this node.", count)
    lines = [("", words % {"count": f"{MOST}+" if count > MOST else count})]
    if not count:
        return lines
    if delayed:
        lines += _delay_lines(row, count)
    if said:
        lines.append(("wait", _("They go out with the new content: what is said is decided when a touch falls due.")))
    if switched and row.enabled:
        lines.append(("", _("They go out at their time again.")))
    elif switched:
        lines.append(("bad", _("They are suppressed when they fall due, unless the node is enabled again by then.")))
    return lines


def _delay_lines(row: Node, count: int) -> list[tuple[str, str]]:
    if count > MOST:
        return [("wait", _("They keep their time unless you move them; how many would move is told when it is done."))]
    node = spec_of(row)
    moved = foresee([node], configuration.current().delay_rules)[node.id]
    if not moved.touches:
        return [("", _("None of them would move."))]
    return [("wait", _move_words(moved)), ("", _("They keep their time unless you choose to move them."))]


def _move_words(moved: Moved) -> str:
    words = ngettext(
        "The new delay places %(count)s of them elsewhere.", "The new delay places %(count)s of them elsewhere.",
        moved.touches,
    ) % {"count": moved.touches}  # fmt: skip
    if moved.overdue:
        words += " " + _("%(count)s would be overdue; they go out over %(span)s instead of at once.") % {
            "count": moved.overdue,
            "span": spoken(SPREAD),
        }
    return words


def spec_of(row: Node) -> NodeSpec:
    """The node as its row stands, saved or not."""
    config = configuration.current()
    return configuration.node_spec(row, config.templates, config.channels)


def move_after_commit(request: HttpRequest, row: Node) -> None:
    """Once the edit is stored, a batch a transaction: others go on meanwhile."""

    def move() -> None:
        moved = move_waiting([spec_of(row)], configuration.current().delay_rules)
        words = ngettext("%(count)s waiting touch was moved.", "%(count)s waiting touches were moved.", moved.touches)
        messages.info(request, words % {"count": moved.touches})

    transaction.on_commit(move)
