"""Lists as CSV: what the filter shows and nothing else, harmless in a spreadsheet, and noted."""

from __future__ import annotations

import csv
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import AsyncClient, Client
from pytest_django import DjangoAssertNumQueries

from scheduling.admin import csv_export
from scheduling.delivery.pipeline import deliver_touches
from scheduling.models import Customer, FailedTask, Touch
from tests.support.matrix import MatrixBuilder

pytestmark = pytest.mark.django_db

Url = Callable[..., str]
RecordEvent = Callable[..., Any]
HOUR = timedelta(hours=1)


def read_csv_rows(answer: Any) -> list[dict[str, str]]:
    text = b"".join(answer.streaming_content).decode()
    assert text.startswith("\ufeff")
    return list(csv.DictReader(StringIO(text.removeprefix("\ufeff"))))


def test_export_contains_filtered_rows(
    matrix: MatrixBuilder, operator: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    matrix.node()
    Customer.objects.create(user_id="ann", name="王小安")
    (wanted,) = record_event(user="ann", chat_id="c1", event_id="e1").task_ids
    deliver_touches([wanted])
    record_event(user="bob")
    page = operator.get(admin_url("touch_changelist"), {"q": "ann"})
    link = page.context["export_link"]
    assert link in page.content.decode()
    answer = operator.get(link)
    assert answer["content-type"] == "text/csv; charset=utf-8"
    assert answer["content-disposition"].startswith('attachment; filename="touch-')
    (row,) = read_csv_rows(answer)
    assert (row["task id"], row["state"], row["customer"], row["event id"], row["chat id"]) == (
        str(wanted), "Delivered", "王小安", "e1", "c1",
    )  # fmt: skip


def test_export_escapes_formulas(
    matrix: MatrixBuilder, operator: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    matrix.node()
    record_event(user='=HYPERLINK("http://evil.example")', chat_id="@SUM(1)", event_id="-2+3")
    (row,) = read_csv_rows(operator.get(admin_url("touch_export")))
    assert (row["user id"], row["chat id"], row["event id"]) == (
        "'=HYPERLINK(\"http://evil.example\")", "'@SUM(1)", "'-2+3",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1", "'=1"), ("+86 138", "'+86 138"), ("-1", "'-1"), ("@a", "'@a"), ("\t=1", "'\t'=1"), ("\r=1", "'\r'=1"),
        ("\n=1", "'\n'=1"), ("\tx", "'\tx"), (" =1", "' =1"), ("＝1", "'＝1"), ("a=1", "a=1"), ("", ""), (None, ""),
        (-3, -3), (False, "False"),
        (datetime(2026, 3, 1, 4, tzinfo=UTC), "2026-03-01 12:00:00"),
    ],
)  # fmt: skip
def test_format_cell_escapes_formula_starts(value: Any, cell: Any) -> None:
    assert csv_export.format_cell(value) == cell


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("text", [
    "x;=1+1;y", "x\t+1", "x|-1", "x;@SUM(1)", "x;＝1", "x; =1", 'x;"=1', 'x;"";"=1', "x\n=1", "x\r\n=1", ";;=1",
    "=1;=1", "x,=1", "x;\n=1", 'x\n"=1', "x;=1;=2|=3",
])  # fmt: skip
def test_export_escapes_formulas_after_any_separator(separator: str, text: str) -> None:
    """Excel takes the separator from the reader's country, and a quote only at the start of a cell."""
    file = csv_export.format_csv_rows([["id", csv_export.format_cell(text), "end"]])
    cells = [cell for row in csv.reader(StringIO(file, newline=""), delimiter=separator) for cell in row]
    assert not [cell for cell in cells if cell.lstrip().startswith(tuple("=+-@＝＋－＠"))]


@pytest.mark.parametrize(
    "text", ["a;b", "a; b=1", "x | y", "10:00-11:00;12:00", '"quoted"; "text"', "ann@shop.example; bob@x", "a - b"]
)
def test_format_cell_keeps_harmless_text(text: str) -> None:
    assert csv_export.format_cell(text) == text


def test_export_uses_the_reader_language(
    matrix: MatrixBuilder, operator: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    matrix.node(delay=HOUR)
    record_event()
    operator.cookies["django_language"] = "zh-hans"
    (row,) = read_csv_rows(operator.get(admin_url("touch_export")))
    assert row["状态"] == "已排期"


def test_export_is_recorded_in_the_log(
    matrix: MatrixBuilder, operator: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    matrix.node(delay=HOUR)
    for user in ("ann", "bob"):
        record_event(user=user)
    operator.get(admin_url("touch_export"), {"state__exact": "scheduled"})
    entry = LogEntry.objects.get()
    assert entry.user.username == "operator"
    assert entry.content_type.model == "touch"
    assert entry.change_message == "Exported 2 rows. state__exact=scheduled"


@pytest.mark.parametrize("name", ["scheduling_touch", "scheduling_failedtask", "rpa_tasks_job"])
def test_export_needs_operator_permission(as_member: Callable[[str], Client], name: str) -> None:
    from django.urls import reverse

    viewer = as_member("viewer")
    assert viewer.get(reverse(f"admin:{name}_changelist")).context["export_link"] == ""
    assert viewer.get(reverse(f"admin:{name}_export")).status_code == 403
    assert LogEntry.objects.count() == 0
    assert as_member("operator").get(reverse(f"admin:{name}_export")).status_code == 200


def test_export_is_cut_at_the_row_limit(
    matrix: MatrixBuilder, operator: Client, admin_url: Url, record_event: RecordEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_export, "MOST", 5)
    monkeypatch.setattr(csv_export, "BATCH", 2)
    matrix.node()
    for number in range(6):
        record_event(user=f"u{number}")
    rows = read_csv_rows(operator.get(admin_url("touch_export")))
    newest = Touch.objects.order_by("-pk").values_list("customer__user_id", flat=True)[:5]
    assert [row["user id"] for row in rows[:-1]] == list(newest)
    assert rows[-1]["task id"] == "There are more than 5 rows; these are the first."


def test_export_batch_takes_one_query(
    matrix: MatrixBuilder,
    operator: Client,
    admin_url: Url,
    record_event: RecordEvent,
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    matrix.node()
    for number in range(10):
        record_event(user=f"u{number}")
    answer = operator.get(admin_url("touch_export"))
    with django_assert_num_queries(1):
        assert len(read_csv_rows(answer)) == 10


def test_failed_task_export_contains_the_action(failed: Callable[..., Any], operator: Client, admin_url: Url) -> None:
    row = failed("ann")
    failed("bob")
    FailedTask.objects.filter(pk=row.pk).update(state="ignored", actor_name="eve", action_reason="known")
    (only,) = read_csv_rows(operator.get(admin_url("failedtask_export"), {"state": "ignored"}))
    assert (only["task id"], only["user id"], only["actor"], only["reason of the action"], only["reason"]) == (
        str(row.task_id), "ann", "eve", "known", "Data for the text is missing",
    )  # fmt: skip


@pytest.mark.django_db(transaction=True)
def test_export_streams_over_asgi(
    matrix: MatrixBuilder, operator: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    from asgiref.sync import async_to_sync

    matrix.node()
    record_event()
    client = AsyncClient(headers={"accept-language": "en"})
    client.cookies = operator.cookies

    async def read() -> str:
        answer = await client.get(admin_url("touch_export"))
        return b"".join([part async for part in answer]).decode()

    assert len(async_to_sync(read)().splitlines()) == 2
