"""Pages of customer imports: what each role sees, and what the refused lines' file holds."""

from __future__ import annotations

import csv
import io

import pytest
from django.test import Client

from scheduling.error_text import ErrorText
from scheduling.models import CustomerImport, RefusedLines
from tests.scheduling.admin.conftest import Url
from tests.scheduling.imports.conftest import check
from tests.support.tables import each_row
from tests.support.undrawn import read_context, read_refusal

pytestmark = pytest.mark.django_db
CONTENT = "user_id,name,=cmd,timezone\nann,张三,x,Mars\nbob,李四,x,Asia/Tokyo\n"


@each_row("start", ["x", "-1", "5", "99999999999999999999"])
def test_part_at_a_wrong_place_is_refused_with_a_reason(editor: Client, admin_url: Url, start: str) -> None:
    editor.post(admin_url("customerimport_add"), {"file_name": "人员.csv", "size": "12"})
    row = CustomerImport.objects.get()
    url = f"{admin_url('customerimport_part', row.pk)}?start={start}"
    answer = editor.post(url, b"x", content_type="application/octet-stream")
    assert (answer.status_code, bool(answer.content)) == (409, True)


def test_wrong_size_is_named(editor: Client, admin_url: Url) -> None:
    data = {"file_name": "a.csv", "size": str(10**12)}
    errors = read_refusal(editor, admin_url("customerimport_add"), data)["form"].errors
    assert "must be from 1 to 268435456 bytes" in str(errors)
    assert not CustomerImport.objects.exists()


def test_page_shows_columns_and_lines_to_editors_only(editor: Client, viewer: Client, admin_url: Url) -> None:
    url = admin_url("customerimport_change", check(CONTENT).pk)
    page = editor.get(url).content.decode()
    for text in (
        "张三", "Unknown columns, not imported:", "=cmd", "must be a name of the IANA time zone database",
        "Start the import",
    ):  # fmt: skip
        assert text in page, text
    page = viewer.get(url).content.decode()
    assert ("张三" in page, "Start the import" in page) == (False, False)


def test_file_of_refused_lines_escapes_formulas(editor: Client, admin_url: Url) -> None:
    row = check("user_id,attributes.x:number,=2+3\nann,z,1\nbob,1,1,1\n")
    CustomerImport.objects.filter(pk=row.pk).update(state="ready")
    answer = editor.get(admin_url("customerimport_refused", row.pk))
    text = b"".join(answer.streaming_content).decode()
    assert list(csv.reader(io.StringIO(text.removeprefix("\ufeff")))) == [
        ["line", "column", "reason"], ["2", "attributes.x:number", "must be a number"],
        ["3", "–", "has 4 cells; the header has 3"],
    ]  # fmt: skip
    row.refused.update(entries=[[2, "=HYPERLINK(1)", ErrorText.dump("must be a number")]])
    text = b"".join(editor.get(admin_url("customerimport_refused", row.pk)).streaming_content).decode()
    assert "'=HYPERLINK(1)" in text


def test_page_shows_the_first_refusals_of_many(editor: Client, admin_url: Url) -> None:
    row = check(CONTENT)
    row.refused.all().delete()
    entries = [[line, "name", ErrorText.dump("is missing")] for line in range(15)]
    RefusedLines.objects.bulk_create(RefusedLines(upload=row, entries=entries) for _ in range(4))
    assert len(read_context(editor, admin_url("customerimport_change", row.pk))["refused"]) == 20


def test_wrong_header_is_shown_by_column(editor: Client, admin_url: Url) -> None:
    row = check("name,attributes.x:colour\n")
    page = read_context(editor, admin_url("customerimport_change", row.pk))
    assert page["problems"] == [
        ("attributes.x:colour", "must be one of text, number, bool, instant"), ("user_id", "is missing"),
    ]  # fmt: skip
