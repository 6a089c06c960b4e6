"""Columns of an import: titles become fields, and each wrong cell is named."""

import pytest

from scheduling.customers.csv_files import map_header
from scheduling.errors import InvalidInput
from tests.support.tables import each_row


def read(title, cell, *, empty_clears=False):
    return map_header(["user_id", title]).read_cells(["ann", cell], empty_clears=empty_clears).fields


def errors_of(cells, header):
    with pytest.raises(InvalidInput) as refused:
        map_header(header).read_cells(cells, empty_clears=False)
    return [(each.field, each.message) for each in refused.value.errors]


@each_row(
    "title, cell, fields",
    [
        ("Name", " 张三\u3000", {"name": "张三"}),
        ("姓名", "张三", {"name": "张三"}),
        ("level", "vip", {"level": "vip"}),
        ("timezone", "Asia/Tokyo", {"timezone": "Asia/Tokyo"}),
        ("opted_out", "是", {"opted_out": True}),
        ("opted_out", "No", {"opted_out": False}),
        ("tags", "vip；新客, vip", {"tags": ["vip", "新客"]}),
        ("addresses.email", "ann@example.com", {"addresses": {"email": "ann@example.com"}}),
        ("手机号", "13800138000", {"addresses": {"phone": "13800138000"}}),
        ("attributes.city", "上海", {"attributes": {"city": "上海"}}),
        ("attributes.城市:text", "12", {"attributes": {"城市": "12"}}),
        ("attributes.paid:number", "12", {"attributes": {"paid": 12}}),
        ("attributes.paid:number", "-1.5e3", {"attributes": {"paid": -1500.0}}),
        ("attributes.member:bool", "yes", {"attributes": {"member": True}}),
        ("attributes.since:instant", "2026-03-03T12:00:00Z", {"attributes": {"since": "2026-03-03T12:00:00Z"}}),
        ("attributes.since:instant", "2026/3/3", {"attributes": {"since": "2026-03-02T16:00:00Z"}}),
        ("attributes.since:instant", "2026/3/3 9:30", {"attributes": {"since": "2026-03-03T01:30:00Z"}}),
        ("name", "", {}),
        ("unheard", "x", {}),
    ],
)
def test_cell_becomes_a_value(title, cell, fields):
    assert read(title, cell) == fields


@each_row(
    "title, fields",
    [
        ("name", {"name": ""}),
        ("tags", {"tags": []}),
        ("attributes.paid:number", {"attributes": {"paid": None}}),
        ("addresses.email", {"addresses": {"email": None}}),
        ("opted_out", {}),
    ],
)
def test_empty_cell_clears_the_value_on_request(title, fields):
    assert read(title, " ", empty_clears=True) == fields


def test_each_wrong_cell_is_named_without_its_value():
    header = ["user_id", "timezone", "opted_out", "addresses.email", "attributes.paid:number", "attributes.day:instant"]
    found = errors_of(["", "Mars", "perhaps", "ann@", "1,5", "2026-02-30"], header)
    assert [field for field, _ in found] == header
    text = str(found)
    assert not any(value in text for value in ("Mars", "perhaps", "ann@", "1,5", "2026-02-30"))


def test_number_that_a_spreadsheet_shortened_is_refused():
    message = "was shortened by a spreadsheet; format the column as text"
    assert errors_of(["1.38E+10", "1.38E+10"], ["user_id", "addresses.phone"]) == [
        ("user_id", message), ("addresses.phone", message),
    ]  # fmt: skip


def test_empty_cells_after_the_last_column_are_ignored():
    assert map_header(["user_id"]).read_cells(["ann", "", ""], empty_clears=False).user_id == "ann"


@each_row(
    "header, wrong",
    [
        (["name"], ["user_id"]),
        (["user_id", "name", "姓名"], ["姓名"]),
        (["user_id", "attributes.a b", "attributes.x:colour", "addresses.电话"],
         ["attributes.a b", "attributes.x:colour", "addresses.电话"]),
    ],
)  # fmt: skip
def test_wrong_title_is_named(header, wrong):
    with pytest.raises(InvalidInput) as refused:
        map_header(header)
    assert [each.field for each in refused.value.errors] == wrong


def test_unknown_titles_are_listed():
    assert map_header(["user_id", "note", "", "phone"]).unknown == ["note", "phone"]
