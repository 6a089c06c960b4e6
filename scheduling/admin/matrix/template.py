from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.admin import StackedInline
from unfold.contrib.filters.admin import ChoicesDropdownFilter
from unfold.decorators import action, display

from scheduling.admin.base import CheckedForm, WithHistory
from scheduling.admin.labels import complaint
from scheduling.admin.matrix import try_out
from scheduling.admin.merging import MergingForm
from scheduling.admin.retirement import Retirable, RetiredFilter
from scheduling.configuration.validation import check_template, check_template_text
from scheduling.errors import InvalidInput
from scheduling.models import Node, Template, TemplateText


class TemplateForm(CheckedForm):
    check = staticmethod(check_template)

    class Meta:
        model = Template
        exclude = ("version",)


class TextForm(MergingForm):
    """A text is refused while it cannot be rendered, with the line or the variable that is wrong."""

    class Meta:
        model = TemplateText
        fields = ("locale", "subject", "body")
        help_texts: ClassVar[Any] = {
            "locale": _("Like zh-hans or en. Customers get their own language, else the first text."),
            "subject": _("For mail only."),
            "body": _(
                "Variables: {{ user.name }}, {{ user.level }}, {{ chat.id }}, {{ event.type }}, {{ event.data.x }}"
            ),
        }

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        try:
            check_template_text(cleaned)
        except InvalidInput as error:
            for each in error.errors:
                if each.field in self.fields and each.field not in self.errors:
                    self.add_error(each.field, complaint(each.message))
        return cleaned


class TextInline(StackedInline):  # type: ignore[misc]
    model = TemplateText
    form = TextForm
    extra = 0
    min_num = 1
    hide_title = True
    fields = (("locale", "subject"), "body")


@admin.register(Template)
class TemplateAdmin(WithHistory, Retirable):
    form = TemplateForm
    inlines = (TextInline,)
    list_display = ("key", "content_type", "category", "locales", "beginning", "version")
    list_filter = (("category", ChoicesDropdownFilter), RetiredFilter)
    search_fields = ("key", "content_type", "texts__body")
    fields = (("key", "content_type"), ("category", "version"), "change_reason")
    readonly_fields = ("version",)
    write_only = frozenset({"change_reason"})
    actions_detail = ("send_test", "retire", "bring_back")
    change_form_outer_after_template = "ops/template_preview.html"

    class Media:
        js = ("scheduling/preview.js",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Template]:
        return super().get_queryset(request).prefetch_related("texts")  # type: ignore[no-any-return]

    def get_urls(self) -> list[URLPattern]:
        preview = self.admin_site.admin_view(self.preview_view)
        return [path("preview/", preview, name="scheduling_template_preview"), *super().get_urls()]

    def get_readonly_fields(self, request: HttpRequest, obj: Template | None = None) -> Any:
        fields = super().get_readonly_fields(request, obj)
        return [*fields, "key"] if obj else fields

    def in_use(self, row: Template) -> bool:
        return row.touches.exists() or Node.objects.filter(Q(template=row) | Q(canary_template=row)).exists()

    def keeps_from_retiring(self, row: Template) -> str:
        alive = Node.objects.filter(Q(template=row) | Q(canary_template=row), retired_at=None)
        keys = ", ".join(alive.values_list("key", flat=True)[:5])
        return gettext("Nodes still say it: %(nodes)s.") % {"nodes": keys} if keys else ""

    @display(description=_("languages"))  # type: ignore[untyped-decorator]
    def locales(self, row: Template) -> str:
        return ", ".join(text.locale for text in row.texts.all())

    @display(description=_("text"))  # type: ignore[untyped-decorator]
    def beginning(self, row: Template) -> str:
        first = next(iter(row.texts.all()), None)
        body = first.body if first else ""
        return body[:40] + ("…" if len(body) > 40 else "")

    def preview_view(self, request: HttpRequest) -> HttpResponse:
        """What a text would say to a customer: a stored one, or as it stands in the form for who may change it."""
        if not self.has_view_or_change_permission(request):
            raise PermissionDenied
        if "text" in request.POST:
            row = get_object_or_404(TemplateText, pk=_id(request.POST["text"]))
            return try_out.preview(request, row.subject, row.body)
        if not self.has_change_permission(request):
            raise PermissionDenied
        return try_out.preview(request, request.POST.get("subject", ""), request.POST.get("body", ""))

    @action(description=_("Send a test"), icon="send", url_path="send-test", permissions=["change"])  # type: ignore[untyped-decorator]
    def send_test(self, request: HttpRequest, object_id: str) -> HttpResponse:
        return try_out.test_page(self, request, self.found(request, object_id))


def _id(text: str) -> int:
    """0, which no row has, for what is none."""
    return int(text) if text.isdecimal() and len(text) < 19 else 0
