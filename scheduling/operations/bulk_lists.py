"""Name the lists whose rows bulk actions change. Other apps add theirs (`Integration.bulk_lists`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import QuerySet
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from scheduling.app_integrations import integrations
from scheduling.models import Scope
from scheduling.operations.filters import FAILED_TASK_ROWS, TOUCH_ROWS, FilteredList
from scheduling.operations.row_actions import FAILED_TASKS, ROW_ACTIONS, TOUCHES, RowAction


@dataclass(frozen=True, slots=True)
class BulkList:
    """A list whose rows bulk actions change."""

    rows: FilteredList
    label: str | Promise
    changelist: str  #: name of the list's page
    scope: str = ""  #: of an API key that may read and stop its bulk actions; empty: no key may
    #: Actions of a leaf app by name. A name starts with that of the list: `job.cancel`.
    actions: Mapping[str, RowAction] = field(default_factory=dict)
    #: Parameters of the page by their names in the filter, where the two differ.
    page_names: Mapping[str, str] = field(default_factory=dict)


LISTS = {
    FAILED_TASKS: BulkList(
        FAILED_TASK_ROWS, _("Failed tasks"), "admin:scheduling_failedtask_changelist", Scope.FAILED_TASKS.value
    ),
    TOUCHES: BulkList(TOUCH_ROWS, _("Touches"), "admin:scheduling_touch_changelist"),
}


def get_list(over: str) -> BulkList:
    return LISTS.get(over) or _load_leaf_lists()[over]


def find_row_action(name: str) -> RowAction | None:
    """Return the action of this name; None if there is none, for example after an upgrade."""
    known = _load_leaf_lists().get(name.partition(".")[0])
    return ROW_ACTIONS.get(name) or (known.actions.get(name) if known else None)


def matching_rows(row_action: RowAction, chosen: Mapping[str, str], as_of: datetime) -> QuerySet[Any]:
    """Return the rows that existed at `as_of`, match the filter and allow the action.

    Raises:
        InvalidInput: parameters have no meaning; the error names each.
    """
    return row_action.allowed_rows(get_list(row_action.over).rows.matching_rows(chosen, as_of))


def _load_leaf_lists() -> dict[str, BulkList]:
    return {over: listed for app in integrations() for over, listed in app.bulk_lists.items()}
