"""Import customers from CSV files, as the back office does: upload in parts, read the check, then start or discard."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from django.http import HttpRequest
from ninja import Query, Router, Schema

from scheduling.api.auth import ApiKeyAuth, build_api_key_actor
from scheduling.api.schemas import FieldErrorOut, Page, ProblemOut, Request, Text, build_page, limit_list_time
from scheduling.customers import imports
from scheduling.customers.imports import map_header
from scheduling.error_text import ErrorText
from scheduling.errors import NotFound
from scheduling.models import CustomerImport

router = Router(tags=["customers"], auth=ApiKeyAuth("customers"))
PROBLEMS = (400, 401, 403, 404, 408, 409, 413, 422, 429, 503)
PART_BODY = {
    "requestBody": {"required": True, "content": {"text/csv": {"schema": {"type": "string", "format": "binary"}}}}
}
ACTIONS: dict[str, Callable[..., object]] = {
    "start": imports.start_import, "stop": imports.stop_import
}  # fmt: skip


class ImportIn(Request):
    """`size`: bytes of the file. `encoding`: `utf-8` or `gb18030`; empty: detected."""

    file_name: Text
    size: int
    encoding: Text = ""
    empty_clears: bool = False


class ImportOut(Schema):
    """`stored`: bytes that arrived. `counts`: by phase `checking`, `running`. `problems`: why the file cannot be
    read."""

    id: UUID
    file_name: str
    state: str
    size: int
    stored: int
    unknown_columns: list[str]
    counts: dict[str, dict[str, int]]
    problems: list[FieldErrorOut]
    created_at: datetime
    ended_at: datetime | None

    @staticmethod
    def resolve_unknown_columns(row: CustomerImport) -> list[str]:
        return map_header(row.header).unknown if row.header else []

    @staticmethod
    def resolve_problems(row: CustomerImport) -> list[dict[str, str]]:
        return [{"field": field, "message": ErrorText.load(text)} for field, text in row.problems]


class RefusedLineOut(Schema):
    line: int
    field: str
    message: str


class RefusedLinesOut(Schema):
    items: list[RefusedLineOut]
    next: str | None


@router.post("/customer-imports", response={201: ImportOut, PROBLEMS: ProblemOut})
def post_import(request: HttpRequest, wish: ImportIn) -> tuple[int, CustomerImport]:
    """Announce a CSV file of up to 256 MB. Its parts follow."""
    return 201, imports.create_import(**wish.model_dump(), actor=build_api_key_actor(request).name)


@router.put(
    "/customer-imports/{import_id}/parts/{start}",
    response={200: ImportOut, PROBLEMS: ProblemOut}, openapi_extra=PART_BODY,
)  # fmt: skip
def put_import_part(request: HttpRequest, import_id: UUID, start: int) -> CustomerImport:
    """Store the bytes of the file from offset `start`, up to 1 MB. A repeated part changes nothing. The last part
    starts the check."""
    return imports.store_part(import_id, start, request.body)


@router.get("/customer-imports/{import_id}", response={200: ImportOut, PROBLEMS: ProblemOut})
def get_import(request: HttpRequest, import_id: UUID) -> CustomerImport:
    """Return the state and the counts of an import. `ready` waits for `start` or `stop`."""
    return _find_import(import_id)


@router.get("/customer-imports/{import_id}/refused", response={200: RefusedLinesOut, PROBLEMS: ProblemOut})
def list_refused_lines(request: HttpRequest, import_id: UUID, page: Query[Page]) -> dict[str, Any]:
    """Return the refused lines of the check, or of the import after its start. `limit` counts batches of 500 lines."""
    row, after = _find_import(import_id), page.before()
    phase = next((each for each in ("running", "checking") if each in row.counts), "checking")
    found = row.refused.filter(phase=phase, pk__gt=min(after.int, 2**63 - 1) if after else 0)
    with limit_list_time():
        batches = list(found.order_by("pk")[: page.limit + 1])
    shown = build_page(batches, [UUID(int=each.pk) for each in batches], page.limit)
    entries = (entry for each in shown["items"] for entry in each.entries)
    return shown | {
        "items": [{"line": line, "field": field, "message": ErrorText.load(text)} for line, field, text in entries]
    }


@router.post("/customer-imports/{import_id}/{action}", response={200: ImportOut, PROBLEMS: ProblemOut})
def decide_import(request: HttpRequest, import_id: UUID, action: Literal["start", "stop"]) -> CustomerImport:
    """Start a checked import, discard or stop one. 409 in a state that does not allow it."""
    ACTIONS[action](import_id, actor=build_api_key_actor(request).name)
    return _find_import(import_id)


def _find_import(import_id: UUID) -> CustomerImport:
    row = CustomerImport.objects.filter(pk=import_id).first()
    if row is None:
        raise NotFound(f"There is no import {import_id}.")
    return row
