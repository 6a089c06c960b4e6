"""Export filtered lists as CSV: streamed, at most `MOST` rows, with formulas escaped for spreadsheets."""

from __future__ import annotations

import csv
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import datetime
from io import StringIO
from typing import Any, ClassVar

import structlog
from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.core.handlers.asgi import ASGIRequest
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path
from django.utils.decorators import method_decorator
from django.utils.functional import Promise
from django.utils.timezone import localtime, now
from django.utils.translation import get_language, gettext, ngettext, override
from django.views.decorators.http import require_safe

from scheduling import replica
from scheduling.admin.count_time_limits import count_within
from scheduling.audit.audit_log import record_action
from scheduling.web.own_writes import read_own_position

log = structlog.get_logger(__name__)

MOST = 100_000  #: rows of a file
BATCH = 500  #: rows read by one statement
BOM = "\ufeff"  #: Excel reads Chinese as Latin without it
#: A spreadsheet runs a cell that starts with one of these characters, in full width too.
COMMANDS = "=+-@＝＋－＠"
#: A reader with another list separator ignores the quotes of this file. A cell may then start within one of its cells.
WITHIN = re.compile(rf'([;|\s"]+)([{re.escape(COMMANDS)}]?)')
SEPARATORS = frozenset(";|\t\r\n")
FIRST = re.compile(rf"[\t\r\n]|\s*[{re.escape(COMMANDS)}]")

Column = tuple[str | Promise, Callable[[Any], Any]]  #: the heading, and a function from a row to its cell


class CsvExportMixin:
    """Add an export to a list, for users who may act on its rows. Columns appear in the order of `export_columns`."""

    export_columns: ClassVar[Sequence[Column]] = ()
    export_related: ClassVar[tuple[str, ...]] = ()
    list_after_template = "ops/export.html"

    def has_export_permission(self, request: HttpRequest) -> bool:
        raise NotImplementedError

    def get_urls(self: Any) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_export"
        return [path("export/", self.admin_site.admin_view(self.export_view), name=name), *super().get_urls()]  # type: ignore[misc]

    def changelist_view(self: Any, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        link = f"{self.url('export')}?{request.GET.urlencode()}" if self.has_export_permission(request) else ""
        context = {"export_link": link, "export_most": MOST, **(extra_context or {})}
        return super().changelist_view(request, context)  # type: ignore[misc,no-any-return]

    @method_decorator(require_safe)
    def export_view(self: Any, request: HttpRequest) -> HttpResponseBase:
        if not (self.has_view_permission(request) and self.has_export_permission(request)):
            raise PermissionDenied
        try:
            keys = replica.read_from_replica(
                lambda age: self.find_export_keys(request), after=read_own_position(request), max_age=replica.SHOWN_AGE
            )
        except IncorrectLookupParameters:
            return redirect(self.url("changelist"))
        if keys is None:
            messages.error(request, gettext("Too many rows to search. Narrow the list first."))
            return redirect(f"{self.url('changelist')}?{request.GET.urlencode()}")
        self.log_export(request, min(len(keys), MOST))
        rows = self.annotate_export(self.get_queryset(request).select_related(*self.export_related))
        lines = _generate_csv(rows, keys, self.export_columns, after=read_own_position(request))
        return stream_csv(request, self.opts.model_name, lines)

    def annotate_export(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows with what only the export shows."""
        return rows

    def find_export_keys(self: Any, request: HttpRequest) -> list[Any] | None:
        shown = self.get_changelist_instance(request).queryset
        return count_within(lambda: list(shown.values_list("pk", flat=True)[: MOST + 1]), settings.TIMEOUTS.export)

    def log_export(self: Any, request: HttpRequest, count: int) -> None:
        """Log the user, the filter and the number of exported rows."""
        words = ngettext("Exported %(count)s row.", "Exported %(count)s rows.", count) % {"count": count}
        chosen = request.GET.urlencode()
        LogEntry.objects.create(  # type: ignore[misc]
            user=request.user, content_type=ContentType.objects.get_for_model(self.model), object_repr="CSV",
            action_flag=CHANGE, change_message=f"{words} {chosen}".strip(),
        )  # fmt: skip
        record_action("exported", (self.opts.label_lower, ""), actor=request.user.get_username(), reason=words)
        log.info("exported", model=self.opts.model_name, rows=count, chosen=chosen, user=request.user.get_username())


def format_cell(value: Any) -> str | int:
    """Format a value for readers, and escape it if a spreadsheet would run it."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return f"{localtime(value):%Y-%m-%d %H:%M:%S}"
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = WITHIN.sub(_escape_command, str(value))
    return f"'{text}" if FIRST.match(text) else text


def _escape_command(found: re.Match[str]) -> str:
    between, command = found.groups()
    return f"{between}'{command}" if command and not SEPARATORS.isdisjoint(between) else found[0]


def _generate_csv(rows: QuerySet[Any], keys: Sequence[Any], columns: Sequence[Column], *, after: int) -> Iterator[str]:
    """Yield lines in batches of `BATCH` rows, at least as new as the position `after`.

    Rows deleted since the list was read are left out.
    """
    yield BOM + format_csv_rows([[str(head) for head, _ in columns]])
    for start in range(0, min(len(keys), MOST), BATCH):
        batch = keys[start : min(start + BATCH, MOST)]
        found = replica.read_from_replica(
            lambda age, batch=batch: rows.in_bulk(batch),  # type: ignore[misc]
            after=after, max_age=replica.SHOWN_AGE,
        )  # fmt: skip
        yield format_csv_rows([[format_cell(read(found[key])) for _, read in columns] for key in batch if key in found])
    if len(keys) > MOST:
        yield format_csv_rows([[gettext("There are more than %(most)s rows; these are the first.") % {"most": MOST}]])


def format_csv_rows(lines: list[list[Any]]) -> str:
    page = StringIO()
    csv.writer(page).writerows(lines)
    return page.getvalue()


def stream_csv(request: HttpRequest, name: str, lines: Iterator[str]) -> StreamingHttpResponse:
    """Stream lines as a CSV file, named by `name` and the local time."""
    localized = _render_in_language(lines, get_language())
    response = StreamingHttpResponse(
        _iterate_in_threads(localized) if isinstance(request, ASGIRequest) else localized,
        content_type="text/csv; charset=utf-8",
    )
    response["Content-Disposition"] = f'attachment; filename="{name}-{localtime(now()):%Y%m%d-%H%M%S}.csv"'
    response["Cache-Control"] = "no-store"
    return response


def _render_in_language(lines: Iterator[str], language: str | None) -> Iterator[str]:
    """Render lines in the language of the request. They are read after the request has ended."""
    while True:
        with override(language):
            line = next(lines, None)
        if line is None:
            return
        yield line


async def _iterate_in_threads(lines: Iterator[str]) -> AsyncIterator[str]:
    while (line := await sync_to_async(next)(lines, None)) is not None:  # type: ignore[call-arg]
        yield line
