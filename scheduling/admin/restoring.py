"""Restore an old version: the row's own form shows its values, and a save passes the same checks as any edit."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import forms
from django.contrib import messages
from django.forms.models import model_to_dict
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.translation import gettext as _

from scheduling.admin.shown_values import describe_instant

PARAMETER = "restore"  #: of the form's address: the id of a version


def find_version(request: HttpRequest, row: Any) -> Any:
    """Return the version that the form shows instead of the current values; None for most requests.

    Raises:
        Http404: the row has no such version.
    """
    chosen = request.GET.get(PARAMETER)
    if not chosen or request.method != "GET" or row is None:
        return None
    version = row.history.filter(history_id=chosen).first() if chosen.isdecimal() and len(chosen) < 19 else None
    if version is None:
        raise Http404
    return version


def show_values_at(form_class: type[forms.ModelForm[Any]], at: datetime, reason: str) -> type[forms.ModelForm[Any]]:
    """Return the form with the values that its row had at an instant. A save compares with the current values."""

    class RestoringForm(form_class):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            row = kwargs.get("instance")
            if row is not None and row.pk:
                past = row.history.as_of(at) if row.history.filter(history_date__lte=at).exists() else row
                values = {name: value for name, value in model_to_dict(past).items() if name in self.base_fields}
                kwargs["initial"] = {**values, "change_reason": reason, **(kwargs.get("initial") or {})}
            super().__init__(*args, **kwargs)

    return RestoringForm


class RestorableAdmin:
    """Let `?restore=<version>` fill the form of a row and of its inlines with an old version."""

    def get_form(self: Any, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        form_class = super().get_form(request, obj, change, **kwargs)  # type: ignore[misc]
        # Viewers get the stored row: they could take old values for those of now.
        version = find_version(request, obj) if change and self.has_change_permission(request, obj) else None
        return show_values_at(form_class, version.history_date, describe_version(version)) if version else form_class

    def get_formsets_with_inlines(self: Any, request: HttpRequest, obj: Any = None) -> Any:
        version = find_version(request, obj) if self.has_change_permission(request, obj) else None
        for formset, inline in super().get_formsets_with_inlines(request, obj):  # type: ignore[misc]
            if version and hasattr(formset.model, "history"):
                formset.form = show_values_at(formset.form, version.history_date, "")
            yield formset, inline

    def change_view(
        self: Any, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        if request.method == "GET" and PARAMETER in request.GET:
            version = find_version(request, self.get_object(request, object_id))
            if version is not None and self.has_change_permission(request):
                text = _("The form shows the %(version)s. Nothing has changed yet: check the values and save.")
                messages.info(request, text % {"version": describe_version(version)})
        answer: HttpResponse = super().change_view(request, object_id, form_url, extra_context)  # type: ignore[misc]
        return answer

    def response_change(self: Any, request: HttpRequest, obj: Any) -> HttpResponse:
        request.undo_link = self._build_undo_link(obj)  # type: ignore[attr-defined]
        answer: HttpResponse = super().response_change(request, obj)  # type: ignore[misc]
        return answer

    def message_user(
        self, request: HttpRequest, message: Any, level: Any = messages.INFO, extra_tags: str = "",
        fail_silently: bool = False,
    ) -> None:  # fmt: skip
        """Add to the message of an edit the address of the form with the values before it."""
        tags = extra_tags or getattr(request, "undo_link", "")
        super().message_user(request, message, level, tags, fail_silently)  # type: ignore[misc]

    def _build_undo_link(self: Any, row: Any) -> str:
        """Return "" for rows with texts: a version of the row does not date the edit of a text."""
        before = None if self.inlines else row.history.order_by("-history_id")[1:].values_list("pk", flat=True).first()
        return f"{self.url('change', row.pk)}?{PARAMETER}={before}" if before else ""

    def restore_link(self: Any, request: HttpRequest, version: Any) -> str:
        """Return the address that restores a version; "" for the current one and for users who may not change."""
        row = self.get_object(request, str(version.instance.pk))
        if row is None or not super().has_change_permission(request, row):  # type: ignore[misc]
            return ""
        if row.history.first().pk == version.pk:
            return ""
        names = f"{self.opts.app_label}_{self.opts.model_name}"
        return f"{reverse(f'admin:{names}_change', args=[row.pk])}?{PARAMETER}={version.pk}"


def describe_version(version: Any) -> str:
    return _("version of %(time)s") % {"time": describe_instant(version.history_date)}
