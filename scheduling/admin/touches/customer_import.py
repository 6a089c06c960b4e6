"""Pages of customer imports: upload a file, look at its check, start and stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.http.request import RawPostDataException
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldBooleanSwitchWidget

from scheduling.admin.base import ReadOnlyAdmin, RowPage, ops_display, row_action
from scheduling.admin.labels import translate_error
from scheduling.admin.lists import stream_table
from scheduling.customers import imports
from scheduling.customers.csv_files import ENCODINGS, map_header
from scheduling.customers.imports import State
from scheduling.error_text import ErrorText
from scheduling.errors import AftertouchError, Conflict, InvalidInput
from scheduling.models import CustomerImport, RefusedLines

MAY_IMPORT = "scheduling.add_customerimport"
SHOWN_RECORDS = 5
SHOWN_REFUSALS = 20
TONES = {
    "uploading": "warning", "checking": "warning", "ready": "info", "running": "warning", "done": "success",
    "stopped": "default", "discarded": "default", "failed": "danger",
}  # fmt: skip
#: Labels of counts: of the check, and of the import once it has started.
FIGURES = {
    "lines": gettext_lazy("lines"), "created": gettext_lazy("new customers"),
    "changed": gettext_lazy("changed customers"), "unchanged": gettext_lazy("unchanged"),
    "refused": gettext_lazy("refused lines"), "kept": gettext_lazy("opt-outs that stay"),
}  # fmt: skip


class ImportForm(forms.Form):
    """Choose a file. Its script sends the name and the size, and then the file in parts."""

    file_name = forms.CharField(max_length=200, widget=forms.HiddenInput)
    size = forms.IntegerField(min_value=1, widget=forms.HiddenInput)
    encoding = forms.ChoiceField(
        label=gettext_lazy("Encoding"), required=False, widget=UnfoldAdminSelectWidget,
        choices=[("", gettext_lazy("Detect")), *ENCODINGS.items()],
        help_text=gettext_lazy("Excel in Chinese saves “CSV” as GB18030 and “CSV UTF-8” as UTF-8."),
    )  # fmt: skip
    empty_clears = forms.BooleanField(
        label=gettext_lazy("Empty cells clear the value"), required=False, widget=UnfoldBooleanSwitchWidget,
        help_text=gettext_lazy("Otherwise an empty cell changes nothing."),
    )  # fmt: skip


@admin.register(CustomerImport)
class CustomerImportAdmin(RowPage, ReadOnlyAdmin):
    list_display = ("file_name", "shown_state", "created_at", "actor_name", "outcome")
    list_filter = ("state",)
    list_filter_submit = False
    ordering = ("-pk",)
    actions_detail = ("part", "start", "stop", "refused")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(MAY_IMPORT)

    @ops_display(description=gettext_lazy("state"), label=TONES)
    def shown_state(self, row: CustomerImport) -> tuple[str, str]:
        return row.state, row.get_state_display()

    @ops_display(description=gettext_lazy("result"))
    def outcome(self, row: CustomerImport) -> str:
        return " · ".join(f"{label} {value}" for label, value in _list_figures(row) if value)

    def add_view(self, request: HttpRequest, form_url: str = "", extra_context: Any = None) -> HttpResponse:
        if not self.has_add_permission(request):
            raise PermissionDenied
        form = ImportForm(request.POST or None)
        if request.method == "POST" and form.is_valid():
            try:
                row = imports.create_import(**form.cleaned_data, actor=request.user.get_username())
            except InvalidInput as error:
                for each in error.errors:
                    form.add_error(None, f"{_('File')}: {translate_error(each.message)}")
            except Conflict as error:
                form.add_error(None, translate_error(str(error)))
            else:
                return redirect(self.url("change", row.pk))
        return self.page(
            request, "ops/import_upload.html", _("Import customers"), form=form, back=self.url("changelist")
        )  # fmt: skip

    @row_action(permission=MAY_IMPORT, methods=["POST"])
    def part(self, request: HttpRequest, row: CustomerImport) -> HttpResponse:
        """Store a part of the file. Answers 409 with the reason if the upload cannot continue."""
        try:
            imports.store_part(row.pk, int(request.GET.get("start", "")), request.body)
        except (AftertouchError, ValueError, RawPostDataException) as error:
            return HttpResponse(translate_error(str(error)), status=409, content_type="text/plain; charset=utf-8")
        return HttpResponse(content_type="text/plain")

    def show_row(self, request: HttpRequest, row: CustomerImport) -> HttpResponse:
        columns = map_header(row.header) if row.header else None
        batches = row.refused.order_by("pk")[:SHOWN_REFUSALS]  # none is empty
        shows_file = self.has_add_permission(request) and columns and row.state in imports.WITH_FILE
        return self.page(
            request,
            "ops/import_run.html",
            row.file_name,
            original=row,
            row=row,
            tone=TONES[row.state],
            working=row.state in imports.WORKING,
            percent=_compute_progress(row),
            figures=_list_figures(row),
            problems=[(field, translate_error(ErrorText.load(message))) for field, message in row.problems],
            columns=[each for each in columns.columns if each.path] if columns else [],
            unknown=columns.unknown if columns else [],
            records=imports.read_first_records(row, SHOWN_RECORDS) if shows_file else [],
            refused=list(islice(chain.from_iterable(map(_describe_entries, batches)), SHOWN_REFUSALS)),
            links=self.action_links(request, row),
            back=self.url("changelist"),
        )

    @row_action(permission=MAY_IMPORT, allowed=lambda row: row.state == State.READY, methods=["POST"])
    def start(self, request: HttpRequest, row: CustomerImport) -> HttpResponse:
        return self._decide(request, row, imports.start_import)

    @row_action(permission=MAY_IMPORT, allowed=lambda row: row.state in imports.WITH_FILE, methods=["POST"])
    def stop(self, request: HttpRequest, row: CustomerImport) -> HttpResponse:
        return self._decide(request, row, imports.stop_import)

    def _decide(self, request: HttpRequest, row: CustomerImport, act: Callable[..., object]) -> HttpResponse:
        try:
            act(row.pk, actor=request.user.get_username())
        except AftertouchError as error:
            messages.error(request, translate_error(str(error)))
        return redirect(self.url("change", row.pk))

    @row_action(permission=MAY_IMPORT, methods=["GET", "HEAD"])
    def refused(self, request: HttpRequest, row: CustomerImport) -> HttpResponseBase:
        return stream_table(request, "refused", "csv", _generate_refusals(row))


def _list_figures(row: CustomerImport) -> list[tuple[str, int]]:
    return [(str(label), row.counts.get(name, 0)) for name, label in FIGURES.items()] if row.counts else []


def _compute_progress(row: CustomerImport) -> int:
    """Return the progress of the upload, the check or the import in percent."""
    if row.state == State.UPLOADING:
        return 100 * row.stored // row.size
    return 100 * row.position // row.size if row.state in imports.WORKING else 100


def _describe_entries(batch: RefusedLines) -> list[tuple[str, str, str]]:
    """Return the line, the column and the reason of each refusal."""
    return [
        (str(line), column or "–", translate_error(ErrorText.load(message))) for line, column, message in batch.entries
    ]


def _generate_refusals(row: CustomerImport) -> Iterator[list[list[str]]]:
    yield [[_("line"), _("column"), _("reason")]]
    for each in row.refused.order_by("pk").iterator(chunk_size=10):
        yield [list(entry) for entry in _describe_entries(each)]
