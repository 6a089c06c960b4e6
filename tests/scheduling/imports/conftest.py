"""Upload files for imports and run their batches."""

from __future__ import annotations

from typing import Any

import pytest

from scheduling.customers import imports
from scheduling.customers.imports import run_import_batch
from scheduling.error_text import ErrorText
from scheduling.models import Customer, CustomerImport


@pytest.fixture
def short_batches(monkeypatch) -> None:
    monkeypatch.setattr(imports, "BATCH", 10)


def upload(content: str | bytes, **options: Any) -> CustomerImport:
    """An upload in small parts, as the page makes it."""
    data = content.encode() if isinstance(content, str) else content
    row = imports.create_import("people.csv", len(data), actor="ann", **options)
    piece = max(len(data) // 5, 50)
    for start in range(0, len(data), piece):
        row = imports.store_part(row.pk, start, data[start : start + piece])
    return row


def finish(row: CustomerImport) -> CustomerImport:
    """All batches of the phase."""
    while run_import_batch(row.pk):
        pass
    row.refresh_from_db()
    return row


def check(content: str | bytes, **options: Any) -> CustomerImport:
    return finish(upload(content, **options))


def import_file(content: str | bytes, **options: Any) -> CustomerImport:
    row = check(content, **options)
    imports.start_import(row.pk, actor="ann")
    return finish(row)


def read_refused(row: CustomerImport) -> list[tuple[int, str, str]]:
    batches = row.refused.order_by("pk")
    return [(line, field, ErrorText.load(text)) for each in batches for line, field, text in each.entries]


def read_problems(row: CustomerImport) -> list[tuple[str, str]]:
    return [(field, ErrorText.load(text)) for field, text in row.problems]


def read_names() -> dict[str, str]:
    return dict(Customer.objects.order_by("user_id").values_list("user_id", "name"))


def make_lines(count: int, start: int = 0) -> str:
    rows = (
        f"user-{number},客户{number},{'vip' if number % 3 else 'normal'}\n" for number in range(start, start + count)
    )
    return "user_id,name,level\n" + "".join(rows)
