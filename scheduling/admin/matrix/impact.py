"""What an edit of a node means for the touches that wait at it, told before it is saved."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import structlog
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import Error, transaction
from django.http import HttpRequest, JsonResponse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from scheduling.admin.labels import spoken
from scheduling.admin.patience import patiently
from scheduling.configuration import snapshot
from scheduling.models import WAITING, Node, Touch
from scheduling.planning.impact import DELAY
from scheduling.planning.rescheduling import MOST_LEFT, SPREAD, WATCHED, Moved, foresee, move_waiting
from scheduling.policy.specs import NodeSpec

log = structlog.get_logger(__name__)

TYPING = timedelta(seconds=2)  #: for a look at them meanwhile
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
    count = patiently(lambda: Touch.objects.filter(node_id=row.pk, state__in=WAITING)[: MOST + 1].count())
    lines = [_count_line(count)]
    if count == 0:
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


def _count_line(count: int | None) -> tuple[str, str]:
    if count is None:
        return ("wait", _("How many touches wait at this node is too much to count now."))
    words = ngettext("%(count)s touch waits at this node.", "%(count)s touches wait at this node.", count)
    return ("", words % {"count": f"{MOST}+" if count > MOST else count})


def _delay_lines(row: Node, count: int | None) -> list[tuple[str, str]]:
    moved = None if count is None or count > MOST else _foreseen(row)
    if moved is None:
        return [("wait", _("They keep their time unless you move them; how many would move is told when it is done."))]
    if not moved.touches:
        return [("", _("None of them would move."))]
    return [("wait", _move_words(moved)), ("", _("They keep their time unless you choose to move them."))]


def _foreseen(row: Node) -> Moved | None:
    """None where it takes too long while somebody types."""
    node = spec_of(row)
    try:
        found = patiently(lambda: foresee([node], snapshot.current().delay_rules, TYPING))
    except TimeoutError:
        return None
    return found[node.id] if found else None


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
    config = snapshot.current()
    return snapshot.node_spec(row, config.templates, config.channels)


def move_after_commit(request: HttpRequest, row: Node) -> None:
    """Once the edit is stored, a batch a transaction: others go on meanwhile."""

    def move() -> None:
        try:
            moved = move_waiting([spec_of(row)], snapshot.current().delay_rules, WATCHED)
        except Error:  # the edit is stored all the same
            log.exception("waiting_not_moved", node=row.pk)
            moved = Moved(broken=True)
        tell_moved(request, moved)

    transaction.on_commit(move)


def tell_moved(request: HttpRequest, moved: Moved) -> None:
    if moved.broken:
        text = _("The edit is stored, but not all touches moved. Save their node with “move waiting touches” on.")
        messages.error(request, text)
        return
    words = ngettext("%(count)s waiting touch was moved.", "%(count)s waiting touches were moved.", moved.touches)
    messages.info(request, words % {"count": moved.touches})
    if moved.left:
        left = f"{moved.left}+" if moved.left >= MOST_LEFT else moved.left
        text = _("%(count)s more were not looked at in time. To go on, save their node with “move waiting touches” on.")
        messages.warning(request, text % {"count": left})
