from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.decorators import display

from scheduling.admin.retirement import Retirable, RetiredFilter
from scheduling.models import Stage


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

    @display(description=gettext_lazy("name"), ordering="position")  # type: ignore[untyped-decorator]
    def name_or_key(self, row: Stage) -> str:
        return str(row)

    @display(description=gettext_lazy("nodes"))  # type: ignore[untyped-decorator]
    def node_count(self, row: Any) -> int:
        return int(row.node_count)

    def in_use(self, row: Stage) -> bool:
        return row.nodes.exists()

    def keeps_from_retiring(self, row: Stage) -> str:
        return _("Nodes are still on it: retire or move them first.") if row.nodes.filter(retired_at=None) else ""

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> forms.Field | None:
        field: forms.Field | None = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field and db_field.name == "position":
            field.help_text = gettext_lazy("Small numbers come first in the matrix.")
        return field
