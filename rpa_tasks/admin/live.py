"""Live cells of lists (see scheduling/live.js)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from rpa_tasks.models import Job

MOST_IDS = 200


def render_live_cell(address: str, row: Any, name: str, content: Any, *, again: bool) -> SafeString:
    """Render the cell `name` of this row, for the page and for the response of `address`."""
    return format_html(
        '<span id="{0}-{1}" data-live="{2}" data-row="{0}"{3}>{4}</span>',
        row, name, address, SafeString(" data-live-again") if again else "", content,
    )  # fmt: skip


def requested_rows(request: HttpRequest) -> list[str]:
    """Return the rows whose cells a page requests, at most `MOST_IDS`."""
    return request.GET.get("ids", "").split(",")[:MOST_IDS]


def cells_response(cells: Iterable[SafeString]) -> HttpResponse:
    response = HttpResponse(format_html_join("", "{}", ((each,) for each in cells)))
    response["Cache-Control"] = "no-store"
    return response


def render_tag(text: Any, tone: str) -> SafeString:
    return format_html('<span class="at-tag {}">{}</span>', tone, text)


def render_progress(job: Job) -> SafeString:
    """Render the progress that a running job reports."""
    if job.progress is None:
        return format_html('<span class="at-quiet">{}</span>', job.progress_message or _("no progress reported yet"))
    percent = round(100 * min(max(job.progress, 0), 1))
    return format_html(
        '<span class="at-progress" title="{1}"><progress max="100" value="{0}">{0} %</progress><b>{0} %</b>'
        '<span class="at-quiet">{1}</span></span>',
        percent, job.progress_message,
    )  # fmt: skip
