"""Retire rows instead of deleting them, so that their history stays readable.

Count long lists only up to `MOST` rows.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, cast

from django.contrib import admin
from django.core.paginator import Paginator
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.admin.base import Confirmation, OpsAdmin, row_action
from scheduling.admin.count_time_limits import count_within
from scheduling.models.versioned import lock_for_write


class RetiredFilter(admin.SimpleListFilter):
    """Hide retired rows unless the user selects them."""

    title = gettext_lazy("retired")
    parameter_name = "retired"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("yes", gettext_lazy("Retired")), ("all", gettext_lazy("All"))]

    def choices(self, changelist: Any) -> Any:
        default, *others = super().choices(changelist)
        return [{**default, "display": _("In use")}, *others]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() == "all":
            return queryset
        return queryset.filter(retired_at__isnull=self.value() != "yes")


class Retirable(OpsAdmin):
    """Offer retirement. Only a row that was never used can be deleted."""

    actions_detail: ClassVar[tuple[str, ...]] = ("retire", "bring_back")

    def in_use(self, row: Any) -> bool:
        """Return whether history refers to the row, so that it cannot be deleted."""
        raise NotImplementedError

    def explain_retirement_block(self, row: Any) -> str:
        """Return why the row cannot be retired now, or ""."""
        return ""

    def explain_restoration_block(self, row: Any) -> str:
        """Return why the row cannot be restored now, or ""."""
        return ""

    def describe_retirement_effects(self, row: Any) -> list[str]:
        """Return what the retirement changes for waiting work, for the confirmation page."""
        return []

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_delete_permission(request, obj) and (obj is None or not self.in_use(obj))

    def get_actions(self, request: HttpRequest) -> Any:
        return {name: each for name, each in super().get_actions(request).items() if name != "delete_selected"}

    @row_action(gettext_lazy("Retire"), icon="archive", permission="change", allowed=lambda row: row.retired_at is None)
    def retire(self, request: HttpRequest, row: Any) -> Confirmation:
        return Confirmation(
            title=_("Retire “%(what)s”?") % {"what": row}, button=_("Retire"),
            text=_("Removes the object from the lists and stops its use. The history stays readable. "
                   "You can restore the object later."),
            facts=self.describe_retirement_effects(row), problem=self.explain_retirement_block(row),
            act=lambda: self._write(row, now()), logged=_("Retired."), done=_("“%(what)s” is retired.") % {"what": row},
        )  # fmt: skip

    @row_action(gettext_lazy("Restore"), icon="unarchive", permission="change", allowed=lambda row: row.retired_at)
    def bring_back(self, request: HttpRequest, row: Any) -> Confirmation:
        return Confirmation(
            title=_("Restore “%(what)s”?") % {"what": row}, button=_("Restore"),
            text=_("The object is used again at once."), problem=self.explain_restoration_block(row),
            act=lambda: self._write(row, None), logged=_("Restored."),
        )  # fmt: skip

    def _write(self, row: Any, retired_at: datetime | None) -> None:
        """Write to the current row, so that concurrent changes of other fields stay."""
        with transaction.atomic():
            stored = lock_for_write(self.model._default_manager.all()).get(pk=row.pk)
            stored.retired_at = retired_at
            stored.save()


MOST = 10_000  #: rows that are counted; beyond, only that there are more


class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """Count at most `MOST` rows; later pages do not exist. A narrower filter finds the rest."""

    @cached_property
    def count(self) -> int:
        rows = cast("QuerySet[Any]", self.object_list)
        found = count_within(lambda: rows.order_by()[: MOST + 1].count())
        return MOST + 1 if found is None else found
