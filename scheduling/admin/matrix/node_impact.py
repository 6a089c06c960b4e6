"""Show what an edit of a node changes for waiting touches, and move them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import structlog
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import Error, transaction
from django.http import HttpRequest, JsonResponse
from django.utils.translation import gettext, ngettext

from scheduling.admin.count_time_limits import count_within
from scheduling.configuration import snapshot
from scheduling.models import WAITING, Node, Touch
from scheduling.monitoring.duration_text import describe_duration
from scheduling.planning.rescheduling import (
    DELAY_COLUMNS,
    MOST_LEFT,
    PAGE_TIME_LIMIT,
    SPREAD,
    MoveCounts,
    move_waiting,
    preview_moves,
)
from scheduling.policy.specs import NodeSpec

log = structlog.get_logger(__name__)


PREVIEW_TIMEOUT = timedelta(seconds=2)  #: limit of a preview while the user types
MOST = 20_000  #: waiting touches that a preview reads
CONTENT = ("template", "canary_template", "canary_percent", "canary_communities", "channel")


def impact_view(nodes_admin: Any, request: HttpRequest, object_id: str) -> JsonResponse:
    """Return the effects of the submitted form as sentences with tones.

    Empty while the form is invalid or unchanged.
    """
    row = nodes_admin.get_row_or_404(request, object_id)
    if not nodes_admin.has_change_permission(request, row):
        raise PermissionDenied
    form = nodes_admin.get_form(request, row, change=True)(request.POST, instance=row)
    lines = _list_impact_lines(form, row) if form.is_valid() else []
    return JsonResponse({"lines": [{"tone": tone, "text": text} for tone, text in lines]})


def _list_impact_lines(form: Any, row: Node) -> list[tuple[str, str]]:
    changed = set(form.changed_data)
    delayed, content, switched = changed & set(DELAY_COLUMNS), changed & set(CONTENT), "enabled" in changed
    if not (delayed or content or switched):
        return []
    count = count_within(lambda: Touch.objects.filter(node_id=row.pk, state__in=WAITING)[: MOST + 1].count())
    lines = [_count_line(count)]
    if count == 0:
        return lines
    if delayed:
        lines += _delay_lines(row, count)
    if content:
        lines.append(("wait", gettext("They are sent with the new content. A touch is rendered when it falls due.")))
    if switched and row.enabled:
        lines.append(("", gettext("They are sent at their planned time again.")))
    elif switched:
        lines.append(
            ("bad", gettext("They are suppressed when they fall due, unless the node is enabled again by then."))
        )
    return lines


def _count_line(count: int | None) -> tuple[str, str]:
    if count is None:
        return ("wait", gettext("Too many touches wait at this node to count them now."))
    words = ngettext("%(count)s touch waits at this node.", "%(count)s touches wait at this node.", count)
    return ("", words % {"count": f"{MOST}+" if count > MOST else count})


def _delay_lines(row: Node, count: int | None) -> list[tuple[str, str]]:
    moved = None if count is None or count > MOST else _preview_moves(row)
    if moved is None:
        return [
            (
                "wait",
                gettext("They keep their time unless you move them. The number of moved touches is shown afterwards."),
            )
        ]
    if not moved.touches:
        return [("", gettext("None of them would move."))]
    return [("wait", _describe_moves(moved)), ("", gettext("They keep their time unless you choose to move them."))]


def _preview_moves(row: Node) -> MoveCounts | None:
    """Preview how many waiting touches would move; None if that takes longer than `PREVIEW_TIMEOUT`."""
    node = build_node_spec(row)
    try:
        found = count_within(lambda: preview_moves([node], snapshot.current().delay_rules, PREVIEW_TIMEOUT))
    except TimeoutError:
        return None
    return found[node.id] if found else None


def _describe_moves(moved: MoveCounts) -> str:
    words = ngettext(
        "The new delay places %(count)s of them elsewhere.", "The new delay places %(count)s of them elsewhere.",
        moved.touches,
    ) % {"count": moved.touches}  # fmt: skip
    if moved.overdue:
        words += " " + gettext("%(count)s would be overdue; they go out over %(span)s instead of at once.") % {
            "count": moved.overdue,
            "span": describe_duration(SPREAD),
        }
    return words


def build_node_spec(row: Node) -> NodeSpec:
    """Return the node's specification from its row, saved or not."""
    config = snapshot.current()
    return snapshot.node_spec(row, config.templates, config.channels)


def move_after_commit(request: HttpRequest, row: Node) -> None:
    """Move waiting touches after the edit is committed, one transaction per batch, so that other writers continue."""

    def move() -> None:
        try:
            moved = move_waiting([build_node_spec(row)], snapshot.current().delay_rules, PAGE_TIME_LIMIT)
        except Error:  # the edit is stored anyway
            log.exception("reschedule_failed", node=row.pk)
            moved = MoveCounts(broken=True)
        report_moved_touches(request, moved)

    transaction.on_commit(move)


def report_moved_touches(request: HttpRequest, moved: MoveCounts) -> None:
    """Show the result of moving waiting touches as messages."""
    if moved.broken:
        text = gettext("The edit is stored, but not all touches moved. Save their node with “move waiting touches” on.")
        messages.error(request, text)
        return
    words = ngettext("%(count)s waiting touch was moved.", "%(count)s waiting touches were moved.", moved.touches)
    messages.info(request, words % {"count": moved.touches})
    if moved.left:
        left = f"{moved.left}+" if moved.left >= MOST_LEFT else moved.left
        text = gettext(
            "%(count)s more were not processed within the time limit. To continue, save their node "
            "with “move waiting touches” on."
        )
        messages.warning(request, text % {"count": left})
