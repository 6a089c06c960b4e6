"""Read customers from CSV files: bytes become records, the cells of a record become input as the API has it.

Records are read from the offset of any record, in bounded memory. In UTF-8 and in GB18030 no byte of a longer character
equals a line end, a quote or a delimiter. Lines are therefore split as bytes and decoded one by one: a broken line
spoils no other.

Messages name no value of the file, because they outlive it (see `erasure`).
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, NamedTuple

from django.utils.timezone import get_default_timezone

from scheduling.customers.changes import CustomerInput
from scheduling.customers.inputs import ADDRESS_KIND, KIND_RULE, CustomerFields, UserId
from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput
from scheduling.policy.profile import UNSTORABLE, InvalidValue, check_attribute_name, normalize_tags, store_value

MAX_LINE = 65_536  #: bytes; a longer line is skipped without being kept
MAX_RECORD_LINES = 100  #: lines of a quoted cell; beyond that its quote was not closed
ENCODINGS = {"utf-8": "UTF-8", "gb18030": "GB18030"}
DELIMITERS = ",;\t"
#: Marks at the start of other files, and what the operator can do.
FOREIGN = {
    b"PK\x03\x04": _("is an Excel workbook; save it as CSV UTF-8"),
    b"\xd0\xcf\x11\xe0": _("is an Excel workbook; save it as CSV UTF-8"),
    codecs.BOM_UTF16_LE: _("is UTF-16 text; save it as CSV UTF-8"),
    codecs.BOM_UTF16_BE: _("is UTF-16 text; save it as CSV UTF-8"),
}
BAD_QUOTES = _("is no CSV: a quote is not closed or not doubled")


class _BadRecord(ValueError):
    """The record cannot be read. The message states why."""


class CsvRecord(NamedTuple):
    line: int  #: its first one
    end: int  #: offset after it
    next_line: int
    cells: Sequence[str] = ()
    problem: str = ""

    @property
    def is_blank(self) -> bool:
        return not self.problem and not any(cell.strip() for cell in self.cells)


def detect_encoding(sample: bytes, chosen: str = "") -> str:
    """Return the encoding of a text that starts with `sample`.

    Raises:
        InvalidInput: it is no text in this encoding.
    """
    for mark, problem in FOREIGN.items():
        if sample.startswith(mark):
            raise InvalidInput.of("", problem)
    if b"\0" in sample:
        raise InvalidInput.of("", _("is no text file"))
    if sample.startswith(codecs.BOM_UTF8):
        return "utf-8"
    if chosen:
        return chosen
    for encoding in ENCODINGS:
        try:
            codecs.getincrementaldecoder(encoding)().decode(sample)  # the last character may be incomplete
        except UnicodeDecodeError:
            continue
        return encoding
    raise InvalidInput.of("", _("is neither UTF-8 nor GB18030 text"))


def find_delimiter(sample: bytes) -> str:
    """Return the delimiter that occurs most in the first line."""
    first_line = sample.partition(b"\n")[0]
    return max(DELIMITERS, key=lambda each: first_line.count(each.encode()))


def read_records(file: BinaryIO, encoding: str, delimiter: str, line: int = 1) -> Iterator[CsvRecord]:
    """Yield the records from the position of the file. After a record with a problem the next line starts a new one."""
    while True:
        ends: list[int] = []  # offsets after its lines
        problem: str
        try:
            cells = next(csv.reader(_read_lines(file, encoding, ends), delimiter=delimiter, strict=True))
        except StopIteration:
            return
        except UnicodeDecodeError:
            problem = _("is no %(encoding)s text", encoding=ENCODINGS[encoding])
        except csv.Error:
            problem = BAD_QUOTES
        except _BadRecord as error:
            problem = str(error)
        else:
            yield CsvRecord(line, ends[-1], line + len(ends), cells)
            line += len(ends)
            continue
        file.seek(ends[0])
        yield CsvRecord(line, ends[0], line + 1, (), problem)
        line += 1


def _read_lines(file: BinaryIO, encoding: str, ends: list[int]) -> Iterator[str]:
    """Yield the lines of one record. The parser asks for the next one only within a quoted cell."""
    size = 0
    while content := file.readline(MAX_LINE + 1):
        size += len(content)
        rest = content
        while len(content) > MAX_LINE and rest and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE)
        ends.append(file.tell())
        if len(content) > MAX_LINE and len(ends) == 1:
            raise _BadRecord(_("is longer than %(most)s bytes", most=MAX_LINE))
        if len(ends) > MAX_RECORD_LINES or size > MAX_LINE:
            raise _BadRecord(BAD_QUOTES)
        yield content.decode(encoding)


# --- columns ----------------------------------------------------------------------------------------------------------


MOST_COLUMNS = 200
MAX_TITLE = 200  #: characters
#: Titles in the language of most files.
ALIASES = {
    "用户id": "user_id", "客户id": "user_id", "姓名": "name", "名称": "name", "等级": "level", "语言": "locale",
    "时区": "timezone", "退订": "opted_out", "标签": "tags", "邮箱": "addresses.email", "手机": "addresses.phone",
    "手机号": "addresses.phone",
}  # fmt: skip
TRUTH = {
    **dict.fromkeys(("true", "yes", "y", "1", "是"), True), **dict.fromkeys(("false", "no", "n", "0", "否"), False)
}  # fmt: skip
_NUMBER = re.compile(r"[+-]?\d{1,100}(\.\d{1,100})?([eE][+-]?\d{1,3})?", re.ASCII)
#: `13800138000` as a spreadsheet shows it: 1.38E+10.
_SHORTENED = re.compile(r"\d([.,]\d+)?E\+\d+", re.ASCII)
_DATE = re.compile(
    r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})(?:[Tt ]+(\d{1,2})(:\d\d(?::\d\d(?:\.\d+)?)?)\s*(\S*))?", re.ASCII
)
_TAG_ENDS = re.compile(r"[,，;；|\n]")


def _refuse_shortened(text: str) -> str:
    if _SHORTENED.fullmatch(text):
        raise InvalidValue(_("was shortened by a spreadsheet; format the column as text"))
    return text


def _parse_truth(text: str) -> bool:
    if text.lower() not in TRUTH:
        raise InvalidValue(_("must be yes or no"))
    return TRUTH[text.lower()]


def _parse_tags(text: str) -> list[str]:
    return normalize_tags([tag for each in _TAG_ENDS.split(text) if (tag := each.strip())])


def _parse_number(text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise InvalidValue(_("must be a number"))
    return float(text) if set(text) & set(".eE") else int(text)


def _parse_instant(text: str) -> Any:
    """Return an instant. A date is its midnight; without an offset it is in the zone of the settings."""
    found = _DATE.fullmatch(text)
    try:
        if not found:
            raise ValueError
        year, month, day, hour, rest, offset = found.groups(default="")
        at = datetime.fromisoformat(f"{year}-{month:0>2}-{day:0>2}T{hour or '0':0>2}{rest or ':00'}{offset.upper()}")
        return store_value(at if at.tzinfo else at.replace(tzinfo=get_default_timezone()))
    except (ValueError, OverflowError):
        raise InvalidValue(_("must be a date like 2026-03-03 or an instant like 2026-03-03T12:00:00+08:00")) from None


#: Make what the API takes of the text of a cell, or raise `InvalidValue`. The model checks the value.
PARSERS: Mapping[str, Callable[[str], Any]] = {
    "user_id": _refuse_shortened, "name": str, "level": str, "locale": str, "timezone": str, "opted_out": _parse_truth,
    "tags": _parse_tags,
}  # fmt: skip
ATTRIBUTE_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "text": str, "number": _parse_number, "bool": _parse_truth, "instant": _parse_instant
}  # fmt: skip


class ImportedCustomer(CustomerFields):
    user_id: UserId


class ImportColumn(NamedTuple):
    """A column of the file. `path` is the field of the API that its values belong to; empty for an unknown one."""

    title: str
    path: tuple[str, ...] = ()
    parse: Callable[[str], Any] = str

    @property
    def target(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class ColumnMap:
    columns: Sequence[ImportColumn]

    @property
    def unknown(self) -> list[str]:
        return [each.title for each in self.columns if not each.path and each.title]

    def read_cells(self, cells: Sequence[str], *, empty_clears: bool) -> CustomerInput:
        """Return what a record changes. Empty cells change nothing, or clear the value.

        Raises:
            InvalidInput: with each wrong column.
        """
        if len(cells) != len(self.columns) and (len(cells) < len(self.columns) or any(cells[len(self.columns) :])):
            raise InvalidInput.of(
                "", _("has %(count)s cells; the header has %(most)s", count=len(cells), most=len(self.columns))
            )
        problems: dict[str, str] = {}  #: by target
        values: dict[str, Any] = {"user_id": ""}
        for column, cell in zip(self.columns, cells, strict=False):
            text, path = cell.strip(), column.path
            if not path or not (text or empty_clears) or (not text and path == ("opted_out",)):
                continue
            try:
                if len(path) == 2:
                    values.setdefault(path[0], {})[path[1]] = column.parse(text) if text else None
                else:
                    values[path[0]] = column.parse(text)
            except InvalidValue as error:
                problems[column.target] = str(error)
        try:
            given = ImportedCustomer.read(values)
            if not problems:
                return CustomerInput(given.user_id, given.list_given())
        except InvalidInput as error:
            for each in error.errors:
                problems.setdefault(each.field, each.message)
        titles = {each.target: each.title for each in self.columns if each.path}
        ordered = [
            *(target for target in titles if target in problems),
            *(each for each in problems if each not in titles),
        ]
        raise InvalidInput(*(FieldError(titles.get(target, target), problems[target]) for target in ordered))


def map_header(cells: Sequence[str]) -> ColumnMap:
    """Return the columns of a header. Unknown titles are kept: their cells are ignored.

    Raises:
        InvalidInput: with each wrong title; the user id is missing, or a column occurs twice.
    """
    errors: list[FieldError] = []
    if len(cells) > MOST_COLUMNS:
        raise InvalidInput.of("", _("must not have more than %(most)s columns", most=MOST_COLUMNS))
    columns: list[ImportColumn] = []
    seen: set[tuple[str, ...]] = set()
    for cell in cells:
        title = cell.strip()[:MAX_TITLE]
        try:
            column = _read_title(title)
        except InvalidValue as error:
            errors.append(FieldError(title, str(error)))
            continue
        if column.path in seen:
            errors.append(FieldError(title, _("is given twice")))
        seen |= {column.path} - {()}
        columns.append(column)
    if ("user_id",) not in seen:
        errors.append(FieldError("user_id", _("is missing")))
    if errors:
        raise InvalidInput(*errors)
    return ColumnMap(columns)


def _read_title(title: str) -> ImportColumn:
    if UNSTORABLE.search(title):
        raise InvalidValue(_("the database cannot hold this character"))
    field, dot, key = ALIASES.get(title.lower(), title).partition(".")
    field = field.strip().lower()
    if field == "addresses" and dot:
        key = key.strip().lower()
        if not re.match(ADDRESS_KIND, key):
            raise InvalidValue(KIND_RULE)
        return ImportColumn(title, (field, key), _refuse_shortened)
    if field == "attributes" and dot:
        key, colon, kind = (part.strip() for part in key.partition(":"))
        check_attribute_name(key)
        if colon and kind.lower() not in ATTRIBUTE_PARSERS:
            raise InvalidValue(_("must be one of %(known)s", known=", ".join(ATTRIBUTE_PARSERS)))
        return ImportColumn(title, (field, key), ATTRIBUTE_PARSERS[kind.lower() or "text"])
    if not dot and field in PARSERS:
        return ImportColumn(title, (field,), PARSERS[field])
    return ImportColumn(title)
