"""Pages of customer imports: what each role sees, and what the refused lines' file holds."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

import pytest
from django.test import Client

from scheduling.customers.changes import change_customer
from scheduling.customers.import_batches import run_import_batch
from scheduling.error_text import ErrorText
from scheduling.models import CustomerChange, CustomerImport
from tests.scheduling.imports.conftest import check, import_file, undo
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db
Url = Callable[..., str]
CONTENT = "user_id,name,=cmd,timezone\nann,张三,x,Mars\nbob,李四,x,Asia/Tokyo\n"


def create(editor: Client, admin_url: Url, **changes: str) -> CustomerImport:
    answer = editor.post(admin_url("customerimport_add"), {"file_name": "人员.csv", "size": "12", **changes})
    row = CustomerImport.objects.get()
    assert answer.headers["location"] == admin_url("customerimport_change", row.pk)
    return row


def send(client: Client, url: str, content: bytes, start: object = 0) -> tuple[int, str]:
    answer = client.post(f"{url}?start={start}", content, content_type="application/octet-stream")
    return answer.status_code, answer.content.decode()


def test_editor_uploads_checks_and_imports(editor: Client, admin_url: Url) -> None:
    row = create(editor, admin_url, encoding="gb18030", empty_clears="on")
    url = admin_url("customerimport_part", row.pk)
    assert send(editor, url, b"user_id\n")[0] == 200
    assert send(editor, url, b"ann\n", 8)[0] == 200
    assert not run_import_batch(row.pk)
    page = editor.get(admin_url("customerimport_change", row.pk))
    assert page.context["figures"][1] == ("new customers", 1)
    editor.post(admin_url("customerimport_start", row.pk))
    assert not run_import_batch(row.pk)
    row.refresh_from_db()
    assert (row.state, row.encoding, row.empty_clears) == ("done", "gb18030", True)
    assert CustomerChange.objects.get().actor.startswith("editor (CSV …")


@each_row("start", ["", "x", "-1", "5", "99999999999999999999"])
def test_part_at_a_wrong_place_is_refused_with_a_reason(editor: Client, admin_url: Url, start: str) -> None:
    row = create(editor, admin_url)
    status, text = send(editor, admin_url("customerimport_part", row.pk), b"x", start)
    assert (status, bool(text)) == (409, True)


def test_wrong_size_is_named(editor: Client, admin_url: Url) -> None:
    answer = editor.post(admin_url("customerimport_add"), {"file_name": "a.csv", "size": str(10**12)})
    assert "must be from 1 to 268435456 bytes" in answer.content.decode()
    assert not CustomerImport.objects.exists()


def test_page_shows_columns_first_lines_and_refused_lines(editor: Client, admin_url: Url) -> None:
    row = check(CONTENT)
    page = editor.get(admin_url("customerimport_change", row.pk)).content.decode()
    for text in (
        "张三",
        "Unknown columns, not imported:",
        "=cmd",
        "must be a name of the IANA time zone database",
        "Start the import",
    ):
        assert text in page, text


def test_viewer_sees_no_line_of_the_file(viewer: Client, admin_url: Url) -> None:
    row = check(CONTENT)
    page = viewer.get(admin_url("customerimport_change", row.pk)).content.decode()
    assert "张三" not in page
    assert "Start the import" not in page
    assert viewer.get(admin_url("customerimport_refused", row.pk)).status_code == 403


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


def test_undone_import_lists_values_that_stay(editor: Client, admin_url: Url) -> None:
    change_customer("bob", {"name": "Bob"}, actor="x")
    row = import_file(CONTENT)
    change_customer("bob", {"name": "Robert"}, actor="eve")
    undo(row)
    page = editor.get(admin_url("customerimport_change", row.pk))
    assert page.context["refused"] == [("bob", "name", "was changed later by eve")]
    text = b"".join(editor.get(admin_url("customerimport_refused", row.pk)).streaming_content).decode()
    assert "bob,name,was changed later by eve" in text


def test_wrong_header_is_shown_by_column(editor: Client, admin_url: Url) -> None:
    row = check("name,attributes.x:colour\n")
    page = editor.get(admin_url("customerimport_change", row.pk)).context
    assert page["problems"] == [
        ("attributes.x:colour", "must be one of text, number, bool, instant"), ("user_id", "is missing"),
    ]  # fmt: skip
