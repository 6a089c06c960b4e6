"""Show under a form what its edit changes for waiting touches, before it is stored."""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, JsonResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext
from django.views.decorators.http import require_POST

#: Waiting touches that a preview reads.
MOST = 20_000
Lines = list[tuple[str, str]]  #: tone and text


class ImpactMixin:
    """A page whose edits have an effect on waiting touches. Also for a row that is added."""

    change_form_outer_after_template = "ops/impact.html"

    class Media:
        css: ClassVar[Any] = {"all": ("scheduling/impact.css",)}
        js = ("scheduling/impact.js",)

    def list_impact_lines(self, form: Any, row: Any) -> Lines:
        """Return the effects of a valid form as sentences with tones. `row` has its values and may be new."""
        raise NotImplementedError

    def get_urls(self: Any) -> list[URLPattern]:
        view = require_POST(self.admin_site.admin_view(self._respond_with_impact))
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path("impact/", view, name=f"{name}_impact_of_new"),
            path("<path:object_id>/impact/", view, name=f"{name}_impact"),
            *super().get_urls(),  # type: ignore[misc]
        ]

    def _respond_with_impact(self: Any, request: HttpRequest, object_id: str | None = None) -> JsonResponse:
        """Return no lines while the form is invalid or unchanged."""
        row = None if object_id is None else self.get_row_or_404(request, object_id)
        may = self.has_add_permission(request) if row is None else self.has_change_permission(request, row)
        if not may:
            raise PermissionDenied
        form = self.get_form(request, row, change=row is not None)(request.POST, instance=row)
        lines = self.list_impact_lines(form, form.instance) if form.is_valid() and form.changed_data else []
        return JsonResponse({"lines": [{"tone": tone, "text": text} for tone, text in lines]})


def describe_uncounted() -> Lines:
    return [("wait", gettext("Too many touches wait to count them now."))]


def format_most(count: int) -> str | int:
    return f"{MOST}+" if count > MOST else count
