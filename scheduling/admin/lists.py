"""Filters that several lists share, and the export of filtered lists as CSV and XLSX."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from datetime import datetime
from io import StringIO
from operator import itemgetter
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, ClassVar

import structlog
from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib import messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.handlers.asgi import ASGIRequest
from django.db.models import Model, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.decorators import method_decorator
from django.utils.functional import Promise
from django.utils.http import urlencode
from django.utils.timezone import is_naive, localtime, make_aware, now
from django.utils.translation import get_language, gettext, ngettext, override
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe
from unfold.contrib.filters.admin import (
    ChoicesDropdownFilter,
    DropdownFilter,
    RangeDateTimeFilter,
    RelatedDropdownFilter,
)
from unfold.utils import parse_datetime_str
from xlsxwriter import Workbook

from scheduling import replica
from scheduling.admin.base import table_page
from scheduling.admin.labels import translate_reason
from scheduling.admin.page_reads import count_within
from scheduling.audit import record_action
from scheduling.web.middleware import read_own_position

log = structlog.get_logger(__name__)


LOOKED_AT = 10_000  #: latest rows whose reasons are offered; an address may name any other
MOST_OFFERED = 50


class AlwaysOffered:
    """Apply a filter by a field also if there is only one value to choose.

    Django ignores its parameter then, and an action on all matching rows would include those of other rows. So does
    Unfold with `isnull` of the field, which the list reads here.
    """

    lookup_kwarg: str

    def has_output(self) -> bool:
        return True

    def expected_parameters(self) -> list[str]:
        return [self.lookup_kwarg]


class ChoicesFilter(AlwaysOffered, ChoicesDropdownFilter):  # type: ignore[misc]
    pass


class RelatedFilter(AlwaysOffered, RelatedDropdownFilter):  # type: ignore[misc]
    pass


class ColumnFilter(DropdownFilter):  # type: ignore[misc]
    """Filter by one value of the column `parameter_name`, also if the filter has nothing to offer."""

    def has_output(self) -> bool:
        return bool(self.value() or super().has_output())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(**{self.parameter_name: self.value()}) if self.value() else queryset


class SpanFilter(RangeDateTimeFilter):  # type: ignore[misc]
    """Filter by a span of time in the server's time zone: from the start, before the end.

    Consecutive spans do not overlap. Either end may be open; a missing time means midnight. No row is in a span that
    cannot be read: an action on all matching rows must not ignore it.
    """

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        ends = self.read_ends()
        return queryset.none() if ends is None else queryset.filter(**self.filter_ends(ends))

    def filter_ends(self, ends: dict[str, datetime]) -> dict[str, Any]:
        return {f"{self.field_path}__{end}": at for end, at in ends.items()}

    def read_ends(self) -> dict[str, datetime] | None:
        """Return the given ends by lookup; None if one cannot be read."""
        ends = {}
        for lookup, end in (("gte", "from"), ("lt", "to")):
            day, time = (str(self.used_parameters.get(f"{self.field_path}_{end}_{part}") or "") for part in (0, 1))
            if day or time:  # a time alone cannot be read
                at = parse_datetime_str(f"{day} {time or '00:00'}")
                if at is None:
                    return None
                ends[lookup] = make_aware(at) if is_naive(at) else at
        return ends


def build_span_link(name: str, field: str, since: datetime | None, until: datetime, **filters: str) -> str:
    """Return the address of the list `name`, filtered by a span of `field` and by other parameters."""
    span = {
        f"{field}_{end}_{part}": f"{localtime(at):{form}}"
        for end, at in (("from", since), ("to", until))
        if at is not None
        for part, form in ((0, "%Y-%m-%d"), (1, "%H:%M:%S"))
    }
    return f"{reverse(f'admin:{name}_changelist')}?{urlencode({**filters, **span})}"


class ReasonFilter(ColumnFilter):
    """Offer the reasons of the latest rows of the list, and the one selected by a link."""

    title = _("reason")
    parameter_name = "reason"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        rows = self.list_latest_rows(model_admin.model).values_list("reason", flat=True)
        found = count_within(lambda: set(rows[:LOOKED_AT])) or set()
        offered = {*sorted(found - {""})[:MOST_OFFERED], request.GET.get("reason", "")} - {""}
        words = {code: translate_reason(code) for code in offered}
        shared = {label for label, count in Counter(words.values()).items() if count > 1}
        named = [(code, f"{label} ({code})" if label in shared else label) for code, label in words.items()]
        return sorted(named, key=itemgetter(1))

    def list_latest_rows(self, model: type[Model]) -> QuerySet[Any]:
        return model._default_manager.order_by("-pk")


MOST = 100_000  #: rows of a file
BATCH = 500  #: rows read by one statement
BOM = "\ufeff"  #: Excel reads Chinese as Latin without it
#: A spreadsheet runs a cell that starts with one of these characters, in full width too.
COMMANDS = "=+-@＝＋－＠"
#: A reader with another list separator ignores the quotes of this file. A cell may then start within one of its cells.
WITHIN = re.compile(rf'([;|\s"]+)([{re.escape(COMMANDS)}]?)')
SEPARATORS = frozenset(";|\t\r\n")
FIRST = re.compile(rf"[\t\r\n]|\s*[{re.escape(COMMANDS)}]")
#: A spreadsheet computes with 15 digits and writes zeros for the others.
EXACT_BELOW = 10**15
PART = 65_536  #: bytes of a workbook sent at once

Cell = str | int
Rows = list[list[Any]]
Column = tuple[str | Promise, Callable[[Any], Any]]  #: the heading, and a function from a row to its cell


class ListExportMixin:
    """Add an export to a list, for users who may act on its rows. Columns appear in the order of `export_columns`."""

    export_columns: ClassVar[Sequence[Column]] = ()
    export_related: ClassVar[tuple[str, ...]] = ()
    list_after_template = "ops/export.html"

    def has_export_permission(self, request: HttpRequest) -> bool:
        raise NotImplementedError

    def changelist_view(self: Any, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        links = {}
        if self.has_export_permission(request):
            links = {name.upper(): f"{self.url('export', name)}?{request.GET.urlencode()}" for name in FILE_FORMATS}
        context = {"export_links": links, "export_most": MOST, **(extra_context or {})}
        return super().changelist_view(request, context)  # type: ignore[misc,no-any-return]

    @table_page("export/<str:file_format>/", "view", "export")
    @method_decorator(require_safe)
    def export(self: Any, request: HttpRequest, file_format: str) -> HttpResponseBase:
        if file_format not in FILE_FORMATS:
            raise Http404

        def find_keys(age: float) -> list[Any] | None:
            shown = self.get_changelist_instance(request).queryset
            return count_within(lambda: list(shown.values_list("pk", flat=True)[: MOST + 1]), settings.TIMEOUTS.export)

        try:
            keys = replica.read_from_replica(find_keys, after=read_own_position(request), max_age=replica.SHOWN_AGE)
        except IncorrectLookupParameters:
            return redirect(self.url("changelist"))
        if keys is None:
            messages.error(request, gettext("Too many rows to search. Narrow the list first."))
            return redirect(f"{self.url('changelist')}?{request.GET.urlencode()}")
        self.log_export(request, file_format, min(len(keys), MOST))
        rows = self.annotate_export(self.get_queryset(request).select_related(*self.export_related))
        batches = _generate_rows(rows, keys, self.export_columns, after=read_own_position(request))
        return stream_table(request, self.opts.model_name, file_format, batches)

    def annotate_export(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows with what only the export shows."""
        return rows

    def log_export(self: Any, request: HttpRequest, file_format: str, count: int) -> None:
        """Record the user and the number of rows. The filter may name a customer: only the log has it."""
        words = ngettext("Exported %(count)s row.", "Exported %(count)s rows.", count) % {"count": count}
        user = request.user.get_username()
        record_action("exported", (self.opts.label_lower, ""), actor=user, reason=words)
        chosen = request.GET.urlencode()
        log.info("exported", model=self.opts.model_name, format=file_format, rows=count, chosen=chosen, user=user)


def _generate_rows(
    rows: QuerySet[Any], keys: Sequence[Any], columns: Sequence[Column], *, after: int
) -> Iterator[Rows]:
    """Yield the heading, then batches of `BATCH` rows, at least as new as the position `after`.

    Rows deleted since the list was read are left out.
    """
    yield [[head for head, _ in columns]]
    for start in range(0, min(len(keys), MOST), BATCH):
        batch = keys[start : min(start + BATCH, MOST)]
        found = replica.read_from_replica(
            lambda age, batch=batch: rows.in_bulk(batch),  # type: ignore[misc]
            after=after, max_age=replica.SHOWN_AGE,
        )  # fmt: skip
        yield [[read(found[key]) for _, read in columns] for key in batch if key in found]
    if len(keys) > MOST:
        yield [[gettext("There are more than %(most)s rows; these are the first.") % {"most": MOST}]]


def _format_cell(value: Any) -> Cell:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return f"{localtime(value):%Y-%m-%d %H:%M:%S}"
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return str(value)


def escape_formula(cell: Cell) -> Cell:
    """Escape a text of a CSV file that a spreadsheet would run."""
    if isinstance(cell, int):
        return cell
    text = WITHIN.sub(_escape_command, cell)
    return f"'{text}" if FIRST.match(text) else text


def _escape_command(found: re.Match[str]) -> str:
    between, command = found.groups()
    return f"{between}'{command}" if command and not SEPARATORS.isdisjoint(between) else found[0]


def generate_csv(batches: Iterator[Rows]) -> Iterator[bytes]:
    yield BOM.encode()
    for rows in batches:
        page = StringIO()
        csv.writer(page).writerows([escape_formula(_format_cell(value)) for value in row] for row in rows)
        yield page.getvalue().encode()


def generate_xlsx(batches: Iterator[Rows]) -> Iterator[bytes]:
    """Write a workbook to the disk, then yield its parts.

    Each text is a text cell, which no spreadsheet runs, and so is a number that would lose digits. XlsxWriter escapes
    characters that XML does not allow, and cuts a text at 32,767 characters, the limit of a cell.
    """
    with TemporaryDirectory() as folder, TemporaryFile(dir=folder) as file:
        workbook = Workbook(file, {"constant_memory": True, "tmpdir": folder})
        sheet = workbook.add_worksheet()
        sheet.freeze_panes(1, 0)
        number = -1
        for rows in batches:
            for row in rows:
                number += 1
                for column, value in enumerate(row):
                    cell = _format_cell(value)
                    if isinstance(cell, int) and abs(cell) < EXACT_BELOW:
                        sheet.write_number(number, column, cell)
                    elif text := str(cell):
                        # XlsxWriter takes a text that starts with this tag for markup of its own.
                        sheet.write_string(number, column, f" {text}" if text.startswith("<r>") else text)
            try:
                yield b""
            except GeneratorExit:  # the browser has left: the workbook is not put together
                sheet.row_data_fh.close()
                raise
        workbook.close()
        file.seek(0)
        while part := file.read(PART):
            yield part


#: By the end of the file's name: the content type, and the function from batches of rows to parts of the file.
FILE_FORMATS: dict[str, tuple[str, Callable[[Iterator[Rows]], Iterator[bytes]]]] = {
    "csv": ("text/csv; charset=utf-8", generate_csv),
    "xlsx": ("application/vnd.openxmlformats-officedocument.spreadsheetml.sheet", generate_xlsx),
}


def stream_table(request: HttpRequest, name: str, file_format: str, batches: Iterator[Rows]) -> StreamingHttpResponse:
    """Stream rows as a file of one of `FILE_FORMATS`, named by `name` and the local time."""
    content_type, generate = FILE_FORMATS[file_format]
    localized = _render_in_language(generate(batches), get_language())
    response = StreamingHttpResponse(
        _iterate_in_threads(localized) if isinstance(request, ASGIRequest) else localized, content_type=content_type
    )
    ending = f"{localtime(now()):%Y%m%d-%H%M%S}.{file_format}"
    response["Content-Disposition"] = f'attachment; filename="{name}-{ending}"'
    response["Cache-Control"] = "no-store"
    return response


def _render_in_language(parts: Iterator[bytes], language: str | None) -> Generator[bytes, None, None]:
    """Render parts in the language of the request. They are read after the request has ended."""
    while True:
        with override(language):
            part = next(parts, None)
        if part is None:
            return
        yield part


async def _iterate_in_threads(parts: Generator[bytes, None, None]) -> AsyncIterator[bytes]:
    try:
        while (part := await sync_to_async(next)(parts, None)) is not None:  # type: ignore[call-arg]
            yield part
    finally:
        await sync_to_async(parts.close)()  # it deletes files
