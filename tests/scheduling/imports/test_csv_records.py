"""Records of CSV files: from any offset, in bounded memory, and with broken lines that spoil no other."""

import csv
import io
import tracemalloc
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from scheduling.customers.csv_files import (
    BAD_QUOTES,
    MAX_LINE,
    detect_encoding,
    find_delimiter,
    read_records,
)
from tests.support.tables import each_row


def read_from(data, offset=0, line=1, *, encoding="utf-8"):
    file = io.BytesIO(data)
    file.seek(offset)
    return list(read_records(file, encoding, ",", line))


def outline(records):
    return [(each.line, each.problem or list(each.cells)) for each in records]


CELL = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=8)


@given(st.lists(st.lists(CELL, min_size=1, max_size=4), max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_records_of_any_csv_are_those_of_the_csv_module(rows, ending):
    page = io.StringIO()
    csv.writer(page, lineterminator=ending).writerows(rows)
    data = page.getvalue().encode()

    found = read_from(data)

    assert [list(each.cells) for each in found] == list(csv.reader(io.StringIO(page.getvalue(), newline="")))
    for before, after in pairwise(found):  # any record is a place to continue
        assert read_from(data, before.end, before.next_line)[0] == after


@given(st.binary(max_size=400))
def test_records_of_random_bytes_cover_the_file_once(data):
    found = read_from(data)
    assert [each.end for each in found] == sorted({each.end for each in found})
    assert (found[-1].end if found else 0) == len(data)
    assert [each.line for each in found[1:]] == [each.next_line for each in found[:-1]]


@given(st.lists(st.text("客户张三é,;a1", min_size=1, max_size=6), min_size=1, max_size=5))
def test_records_in_gb18030_are_split_at_their_own_commas(cells):
    page = io.StringIO()
    csv.writer(page).writerow(cells)
    assert read_from(page.getvalue().encode("gb18030"), encoding="gb18030")[0].cells == cells


def test_unclosed_quote_spoils_one_line():
    data = b'a,1\n"b,2\nc,3\n"d\nd2",4\ne,"x"y\nf,6\n'
    assert outline(read_from(data)) == [
        (1, ["a", "1"]), (2, BAD_QUOTES), (3, ["c", "3"]), (4, ["d\nd2", "4"]), (6, BAD_QUOTES), (7, ["f", "6"]),
    ]  # fmt: skip
    found = read_from(b'"a,1\n' + b"b,2\n" * 50_000)  # and is not looked for to the end
    assert (len(found), found[0].problem) == (50_001, BAD_QUOTES)
    assert not any(each.problem for each in found[1:])


def test_line_of_ten_megabytes_is_refused_in_bounded_memory(tmp_path):
    path = tmp_path / "long.csv"
    path.write_bytes(b"a,1\nb," + b"x" * 10_000_000 + b"\nc,3\n")
    with path.open("rb") as file:
        tracemalloc.start()
        found = list(read_records(file, "utf-8", ","))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert outline(found) == [(1, ["a", "1"]), (2, f"is longer than {MAX_LINE} bytes"), (3, ["c", "3"])]
    assert peak < 1_000_000


@each_row(
    "sample, encoding",
    [
        ("user_id,姓名\n".encode(), "utf-8"),
        ("\ufeffuser_id,姓名\n".encode(), "utf-8"),
        ("user_id,姓名\n".encode("gb18030"), "gb18030"),
        ("user_id,姓名".encode()[:-1], "utf-8"),
        (b"user_id\n", "utf-8"),
    ],
)
def test_encoding_is_detected(sample, encoding):
    assert detect_encoding(sample) == encoding


def test_delimiter_is_found_in_the_header():
    assert [find_delimiter(each) for each in (b"a,b;c,d", b"a;b;c,d", b"a\tb", b"a")] == [",", ";", "\t", ","]
