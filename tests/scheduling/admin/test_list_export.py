"""Lists as CSV and XLSX: what the filter shows and nothing else, harmless in a spreadsheet, and noted."""

from __future__ import annotations

import csv
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import AsyncClient, Client
from openpyxl import load_workbook
from openpyxl.utils.escape import unescape
from pytest_django import DjangoAssertNumQueries

from scheduling.admin import lists
from scheduling.models import AuditEntry, Customer, FailedTask, Touch
from tests.scheduling.admin.conftest import Url
from tests.scheduling.core.conftest import deliver
from tests.support.matrix import MatrixBuilder
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)

RecordEvent = Callable[..., Any]
HOUR = timedelta(hours=1)


def read_csv_rows(answer: Any) -> list[dict[str, str]]:
    text = b"".join(answer.streaming_content).decode()
    assert text.startswith("\ufeff")
    return list(csv.DictReader(StringIO(text.removeprefix("\ufeff"))))


def read_xlsx_cells(file: bytes) -> list[list[tuple[str, Any]]]:
    """Each cell as its type (`s` for text, `n` for a number) and its value."""
    sheet = load_workbook(BytesIO(file)).active
    return [[(cell.data_type, cell.value) for cell in row] for row in sheet.iter_rows()]


def write_xlsx(*rows: list[Any]) -> list[list[tuple[str, Any]]]:
    return read_xlsx_cells(b"".join(lists.generate_xlsx(iter([list(rows)]))))


def test_export_contains_filtered_rows(
    matrix: MatrixBuilder, operator: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    matrix.node()
    Customer.objects.create(user_id="ann", name="王小安")
    (wanted,) = record_event(user="ann", chat_id="c1", event_id="e1").task_ids
    deliver([wanted])
    record_event(user="bob")
    page = operator.get(admin_url("touch_changelist"), {"q": "ann"})
    links = page.context["export_links"]
    assert [link for link in links.values() if link not in page.content.decode()] == []
    answer = operator.get(links["CSV"])
    assert answer["content-type"] == "text/csv; charset=utf-8"
    assert answer["content-disposition"].startswith('attachment; filename="touch-')
    (row,) = read_csv_rows(answer)
    assert (row["task id"], row["state"], row["customer"], row["event id"], row["chat id"]) == (
        str(wanted), "Delivered", "王小安", "e1", "c1",
    )  # fmt: skip
    answer = operator.get(links["XLSX"])
    assert answer["content-disposition"].endswith('.xlsx"')
    head, cells = read_xlsx_cells(b"".join(answer.streaming_content))
    values = dict(zip((name for _, name in head), (value for _, value in cells), strict=True))
    attempts = values.pop("attempts")
    assert attempts == int(row.pop("attempts"))
    assert {name: "" if value is None else str(value) for name, value in values.items()} == row
    operator.cookies["django_language"] = "zh-hans"
    (row,) = read_csv_rows(operator.get(links["CSV"]))
    assert row["状态"] == "已送达"


FORMULAS = ["=1", "+86 138", "-1", "@a", "\t=1", "\r=1", "\n=1", "\tx", " =1", "＝1"]
HARMLESS = ["a=1", "", "False", "a; b=1", "x | y", "10:00-11:00;12:00", '"quoted"; "text"', "ann@shop.example; bob@x"]


def test_csv_escapes_formulas_and_keeps_other_cells() -> None:
    def write_csv(*values: Any) -> list[str]:
        file = b"".join(lists.generate_csv(iter([[list(values)]]))).decode()
        (row,) = csv.reader(StringIO(file.removeprefix(lists.BOM), newline=""))
        return row

    assert [cell for cell in write_csv(*FORMULAS) if not cell.startswith("'")] == []
    assert write_csv(*HARMLESS) == HARMLESS
    assert write_csv("\t=1", None, -3, datetime(2026, 3, 1, 4, tzinfo=UTC)) == [
        "'\t'=1", "", "-3", "2026-03-01 12:00:00",
    ]  # fmt: skip


@each_row("separator", [",", ";", "\t", "|"])
@each_row("text", [
    "x;=1+1;y", "x\t+1", "x|-1", "x;@SUM(1)", "x;＝1", "x; =1", 'x;"=1', 'x;"";"=1', "x\n=1", "x\r\n=1", ";;=1",
    "=1;=1", "x,=1", "x;\n=1", 'x\n"=1', "x;=1;=2|=3",
])  # fmt: skip
def test_export_escapes_formulas_after_any_separator(separator: str, text: str) -> None:
    """Excel takes the separator from the reader's country, and a quote only at the start of a cell."""
    file = b"".join(lists.generate_csv(iter([[["id", text, "end"]]]))).decode().removeprefix(lists.BOM)
    cells = [cell for row in csv.reader(StringIO(file, newline=""), delimiter=separator) for cell in row]
    assert not [cell for cell in cells if cell.lstrip().startswith(tuple("=+-@＝＋－＠"))]


def test_xlsx_keeps_ids_and_runs_nothing() -> None:
    texts = ["1234567890123456789", "0012345", " a ", "#N/A", "https://shop.example/a", "2026-03-01", *FORMULAS, "👩‍👧"]
    exact, long = [3, -3, 10**15 - 1], [10**15, -(10**15), 1234567890123456789]
    row, others = write_xlsx(texts, [*exact, *long, datetime(2026, 3, 1, 4, tzinfo=UTC), None])
    assert row == [("s", text.replace("\r", "_x000D_")) for text in texts]
    assert others[:8] == [
        *(("n", number) for number in exact), *(("s", str(number)) for number in long),
        ("s", "2026-03-01 12:00:00"), ("n", None),
    ]  # fmt: skip


def test_xlsx_escapes_what_xml_refuses() -> None:
    texts = ["a\x01b\x0b\x1f", "a\ufffeb\uffff", "id_x0041_", "<r>", "<r>&</r>", "a<b>&amp;\"'"]
    (row,) = write_xlsx(texts)
    assert [unescape(value) for _, value in row[:2]] == texts[:2]
    assert [value for _, value in row[2:]] == ["id_x005F_x0041_", " <r>", " <r>&</r>", texts[-1]]
    ((cut, same),) = write_xlsx(["x" * 40_000, "x" * 32_767])
    assert cut == same


def test_xlsx_of_a_browser_that_left_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    parts = lists.generate_xlsx(iter([[["a"]], [["b"]]]))
    next(parts)
    assert list(tmp_path.iterdir()) != []
    parts.close()  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []


def test_export_is_recorded_in_the_log(
    matrix: MatrixBuilder, operator: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    matrix.node(delay=HOUR)
    for user in ("ann", "bob"):
        record_event(user=user)
    for file_format in ("csv", "xlsx"):
        operator.get(admin_url("touch_export", file_format), {"state__exact": "scheduled"})
    found = AuditEntry.objects.filter(action="exported")
    assert [(each.actor, each.kind, each.reason) for each in found] == [
        ("operator", "scheduling.touch", "Exported 2 rows.")
    ] * 2
    assert not LogEntry.objects.exists(), "an erasure would not reach a filter that names the customer"


def test_export_reads_batches_of_one_query_up_to_the_row_limit(
    matrix: MatrixBuilder, operator: Client, admin_url: Url, record_event: RecordEvent, monkeypatch: pytest.MonkeyPatch,
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:  # fmt: skip
    monkeypatch.setattr(lists, "MOST", 5)
    monkeypatch.setattr(lists, "BATCH", 2)
    matrix.node()
    for number in range(6):
        record_event(user=f"u{number}")
    answer = operator.get(admin_url("touch_export", "csv"))
    with django_assert_num_queries(3):
        rows = read_csv_rows(answer)
    newest = Touch.objects.order_by("-pk").values_list("customer__user_id", flat=True)[:5]
    assert [row["user id"] for row in rows[:-1]] == list(newest)
    assert rows[-1]["task id"] == "There are more than 5 rows; these are the first."
    file = b"".join(operator.get(admin_url("touch_export", "xlsx")).streaming_content)
    assert [row[0][1] for row in read_xlsx_cells(file)] == ["task id", *(row["task id"] for row in rows)]


def test_failed_task_export_contains_the_action(failed: Callable[..., Any], operator: Client, admin_url: Url) -> None:
    row = failed("ann")
    failed("bob")
    FailedTask.objects.filter(pk=row.pk).update(state="ignored", actor_name="eve", action_reason="known")
    (only,) = read_csv_rows(operator.get(admin_url("failedtask_export", "csv"), {"state": "ignored"}))
    assert (only["task id"], only["user id"], only["actor"], only["reason of the action"], only["reason"]) == (
        str(row.task_id), "ann", "eve", "known", "Data for the text is missing",
    )  # fmt: skip


def test_export_streams_over_asgi(
    matrix: MatrixBuilder, operator: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    from asgiref.sync import async_to_sync

    matrix.node()
    record_event()
    client = AsyncClient(headers={"accept-language": "en"})
    client.cookies = operator.cookies

    async def read(file_format: str) -> bytes:
        answer = await client.get(admin_url("touch_export", file_format))
        return b"".join([part async for part in answer])

    assert len(async_to_sync(read)("csv").splitlines()) == 2
    assert len(read_xlsx_cells(async_to_sync(read)("xlsx"))) == 2
