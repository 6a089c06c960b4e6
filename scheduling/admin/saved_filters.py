"""Save filters of a list by user. A user with the right to share may show a filter to all users of the list."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, QueryDict
from django.shortcuts import redirect
from django.urls import URLPattern, path
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.models import SavedFilter

MOST = 50  #: saved filters per user and list
#: Parameters of the position within a list; they are not part of a filter.
POSITION_PARAMETERS = ("p", "all", "e", "_facets")


class SavedFilterForm(forms.Form):
    name = forms.CharField(label=gettext_lazy("name"), max_length=60)
    query = forms.CharField(max_length=2000, strip=False)
    shared = forms.BooleanField(required=False)


class SavedFiltersMixin:
    """Show saved filters as links above a list."""

    list_before_template = "ops/saved_filters.html"

    def may_share(self, request: HttpRequest) -> bool:
        raise NotImplementedError

    def get_urls(self: Any) -> list[URLPattern]:
        view, name = self.admin_site.admin_view, f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path("filters/save/", view(self.save_filter_view), name=f"{name}_save_filter"),
            path("filters/<int:filter_id>/delete/", view(self.delete_filter_view), name=f"{name}_delete_filter"),
            *super().get_urls(),  # type: ignore[misc]
        ]

    def changelist_view(self: Any, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        here = _strip_position(request.GET)
        context = {
            "saved_filters": [
                {
                    "row": row, "here": row.query == here, "mine": row.owner_id == request.user.pk,
                    "delete_link": self.url("delete_filter", row.pk),
                }
                for row in _list_visible_filters(request, self.opts.model_name)
            ],
            "filter_here": here, "save_filter_link": self.url("save_filter"),
            "may_share_filter": self.may_share(request), **(extra_context or {}),
        }  # fmt: skip
        return super().changelist_view(request, context)  # type: ignore[misc,no-any-return]

    def save_filter_view(self: Any, request: HttpRequest) -> HttpResponse:
        """Save a filter. Overwrites the user's filter of the same name."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not self.has_view_permission(request):
            raise PermissionDenied
        form = SavedFilterForm(request.POST)
        query = _strip_position(QueryDict(request.POST.get("query", "")[:2000]))
        back = redirect(f"{self.url('changelist')}?{query}")
        mine = SavedFilter.objects.filter(owner_id=request.user.pk, listed=self.opts.model_name)
        if not form.is_valid() or not query:
            messages.error(request, _("A name and a filter are needed."))
            return back
        name, shared = form.cleaned_data["name"], form.cleaned_data["shared"]
        if shared and not self.may_share(request):
            raise PermissionDenied
        if mine.exclude(name=name).count() >= MOST:
            messages.error(request, _("You already have %(most)s saved filters. Delete one first.") % {"most": MOST})
            return back
        SavedFilter.objects.update_or_create(
            owner_id=request.user.pk,
            listed=self.opts.model_name,
            name=name,
            defaults={"query": query, "shared": shared},
        )
        messages.success(request, _("The filter “%(name)s” was saved.") % {"name": name})
        return back

    def delete_filter_view(self: Any, request: HttpRequest, filter_id: int) -> HttpResponse:
        """Delete a filter. Only the owner may delete it."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not self.has_view_permission(request):
            raise PermissionDenied
        mine = SavedFilter.objects.filter(pk=filter_id, owner_id=request.user.pk, listed=self.opts.model_name)
        if not mine.delete()[0]:
            raise Http404
        messages.success(request, _("The filter was deleted."))
        return redirect(self.url("changelist"))


def _strip_position(address: QueryDict) -> str:
    kept = address.copy()
    for name in POSITION_PARAMETERS:
        kept.pop(name, None)
    return kept.urlencode()[:2000]


def _list_visible_filters(request: HttpRequest, listed: str) -> list[SavedFilter]:
    mine_or_shared = Q(owner_id=request.user.pk) | Q(shared=True)
    return list(SavedFilter.objects.filter(mine_or_shared, listed=listed).select_related("owner")[: 2 * MOST])
