"""Forms of actions, the undo of retries, and the difference of an edit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

from django import forms
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminDecimalFieldWidget, UnfoldAdminTextInputWidget

from scheduling.admin.undo import create_undo_link
from scheduling.models import FailedTask
from scheduling.operations.bulk_actions import FASTEST, SLOWEST, RowAction
from scheduling.redaction import redact
from scheduling.strict_text import is_same_json


class ReasonForm(forms.Form):
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=500,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("Stored with your name for later review."),
    )


class PaceForm(ReasonForm):
    """Ask for a reason and a rate per second."""

    per_second = forms.FloatField(
        label=gettext_lazy("Retries per second"), min_value=SLOWEST, max_value=FASTEST,
        widget=UnfoldAdminDecimalFieldWidget, help_text=gettext_lazy("Choose a rate that the receiver can handle."),
    )  # fmt: skip

    @classmethod
    def for_action(cls, action: RowAction, given: Any) -> PaceForm:
        """Build the form with the action's default rate."""
        form = cls(given, initial={"per_second": action.per_second})
        if not action.publishes:
            form.fields["per_second"].help_text = ""
        return form


def offer_retry_undo(request: HttpRequest, action: RowAction, retried: Mapping[UUID, Any], label: str = "") -> str:
    """Return the address that takes these retries back; "" for other actions. `retried` holds the new task ids."""
    if not action.publishes:
        return ""
    ids = {str(failed_id): str(task_id) for failed_id, task_id in retried.items()}
    return create_undo_link(request, "failed_task.retry", list(ids), label=label, retried=ids, as_new=action.as_new)


MOST_SHOWN = 50  #: changed values


def list_changed_values(difference: Any) -> list[dict[str, Any]]:
    """Return the edited values of a stored difference, masked by name and content, at most `MOST_SHOWN`.

    Each has its path, and the texts before and after; an absent value is None.
    """
    sides = [(difference or {}).get(side) or {} for side in ("before", "after")]
    before, after = (dict(_iterate_values(side)) for side in sides)
    shown_before, shown_after = (
        {
            path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for path, value in _iterate_values(redact(side))
        }
        for side in sides
    )
    kept = {path for path in before.keys() & after.keys() if is_same_json(before[path], after[path])}
    paths = [path for path in {**before, **after} if path not in kept]
    return [
        {"path": path, "before": shown_before.get(path), "after": shown_after.get(path)} for path in paths[:MOST_SHOWN]
    ]


def render_difference(row: FailedTask | None) -> SafeString:
    """Return the HTML of the difference with its author; empty if the task was not edited."""
    values = list_changed_values(row.difference) if row else []
    return render_to_string("ops/difference.html", {"row": row, "values": values}) if values else SafeString("")


def _iterate_values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values below an object by path. A list counts as one value."""
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _iterate_values(below, f"{path}.{name}" if path else str(name))
    elif path:
        yield path, value
