"""Map the header of a CSV file to fields of customers, and check the cells of its records.

Messages name no value of the file, because they outlive it (see `erasure`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.utils.timezone import get_default_timezone

from scheduling.customers.changes import CustomerInput
from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput
from scheduling.ids import find_user_id_problem
from scheduling.models import Customer
from scheduling.policy.profile import UNSTORABLE, InvalidValue, check_attribute_name, normalize_tags, store_value
from scheduling.policy.window_forms import is_time_zone

MOST_COLUMNS = 200
MAX_TITLE = 200  #: characters
MAX_ADDRESS = 500  #: characters
KINDS = {"addresses": "address_kinds", "attributes": "attributes"}  #: fields with a key in the title
#: Titles in the language of most files.
ALIASES = {
    "用户id": "user_id", "客户id": "user_id", "姓名": "name", "名称": "name", "等级": "level", "语言": "locale",
    "时区": "timezone", "退订": "opted_out", "标签": "tags", "邮箱": "addresses.email", "手机": "addresses.phone",
    "手机号": "addresses.phone",
}  # fmt: skip
TRUTH = {
    **dict.fromkeys(("true", "yes", "y", "1", "是"), True), **dict.fromkeys(("false", "no", "n", "0", "否"), False)
}  # fmt: skip
_ADDRESS_KIND = re.compile(r"[a-z0-9_.-]{1,64}")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d{1,3})?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d{1,19}", re.ASCII)
#: `13800138000` as a spreadsheet shows it: 1.38E+10.
_SHORTENED = re.compile(r"\d([.,]\d+)?E\+\d+", re.ASCII)
_DATE = re.compile(
    r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})(?:[Tt ]+(\d{1,2})(:\d\d(?::\d\d(?:\.\d+)?)?)\s*(\S*))?", re.ASCII
)
_TAG_ENDS = re.compile(r"[,，;；|\n]")

Parser = Callable[[str], Any]  #: returns the value of a cell, or raises `InvalidValue`


class ImportColumn(NamedTuple):
    """A column of the file, and where its values belong. `parse` is None for an unknown one."""

    title: str
    field: str = ""
    key: str = ""
    parse: Parser | None = None

    @property
    def target(self) -> str:
        """Return the field as the API names it."""
        names = {stored: name for name, stored in KINDS.items()}
        return f"{names[self.field]}.{self.key}" if self.key else self.field


@dataclass(frozen=True, slots=True)
class ColumnMap:
    columns: Sequence[ImportColumn]

    @property
    def unknown(self) -> list[str]:
        return [each.title for each in self.columns if each.parse is None and each.title]

    def read_cells(self, cells: Sequence[str], *, empty_clears: bool) -> CustomerInput:
        """Return what a record changes. Empty cells change nothing, or clear the value.

        Raises:
            InvalidInput: with each wrong column.
        """
        if len(cells) != len(self.columns) and (len(cells) < len(self.columns) or any(cells[len(self.columns) :])):
            raise InvalidInput.of(
                "", _("has %(count)s cells; the header has %(most)s", count=len(cells), most=len(self.columns))
            )
        errors: list[FieldError] = []
        fields: dict[str, Any] = {}
        user_id = ""
        for column, cell in zip(self.columns, cells, strict=False):
            if column.parse is None:
                continue
            text = cell.strip()
            try:
                if column.field == "user_id":
                    user_id = column.parse(text)
                elif text or (empty_clears and column.field != "opted_out"):
                    value = column.parse(text) if text else _EMPTY[column.field]
                    if column.key:
                        fields.setdefault(column.field, {})[column.key] = value
                    else:
                        fields[column.field] = value
            except InvalidValue as error:
                errors.append(FieldError(column.title, str(error)))
        if errors:
            raise InvalidInput(*errors)
        return CustomerInput(user_id, fields)


_EMPTY: Mapping[str, Any] = {
    "name": "", "level": "", "locale": "", "timezone": "", "tags": [], "address_kinds": None, "attributes": None,
}  # fmt: skip


def map_header(cells: Sequence[str]) -> ColumnMap:
    """Return the columns of a header. Unknown titles are kept: their cells are ignored.

    Raises:
        InvalidInput: with each wrong title; the user id is missing, or a column occurs twice.
    """
    errors: list[FieldError] = []
    if len(cells) > MOST_COLUMNS:
        raise InvalidInput.of("", _("must not have more than %(most)s columns", most=MOST_COLUMNS))
    columns: list[ImportColumn] = []
    seen: set[tuple[str, str]] = set()
    for cell in cells:
        title = cell.strip()[:MAX_TITLE]
        try:
            column = _read_title(title)
        except InvalidValue as error:
            errors.append(FieldError(title, str(error)))
            continue
        if column.parse and (column.field, column.key) in seen:
            errors.append(FieldError(title, _("is given twice")))
        seen.add((column.field, column.key))
        columns.append(column)
    if ("user_id", "") not in seen:
        errors.append(FieldError("user_id", _("is missing")))
    if errors:
        raise InvalidInput(*errors)
    return ColumnMap(columns)


def _read_title(title: str) -> ImportColumn:
    if UNSTORABLE.search(title):
        raise InvalidValue(_("the database cannot hold this character"))
    name = ALIASES.get(title.lower(), title)
    field, dot, key = name.partition(".")
    field = field.strip().lower()
    if field == "addresses" and dot:
        key = key.strip().lower()
        if not _ADDRESS_KIND.fullmatch(key):
            raise InvalidValue(_("must be lower-case letters, digits, “-”, “_” and “.”, at most 64"))
        return ImportColumn(title, KINDS[field], key, _parse_email if key == "email" else _parse_target)
    if field == "attributes" and dot:
        key, colon, kind = (part.strip() for part in key.partition(":"))
        check_attribute_name(key)
        if colon and kind.lower() not in ATTRIBUTE_PARSERS:
            raise InvalidValue(_("must be one of %(known)s", known=", ".join(ATTRIBUTE_PARSERS)))
        return ImportColumn(title, KINDS[field], key, ATTRIBUTE_PARSERS[kind.lower() or "text"])
    if not dot and field in PARSERS:
        return ImportColumn(title, field, "", PARSERS[field])
    return ImportColumn(title)


def check_cell_text(text: str, most: int) -> str:
    if len(text) > most:
        raise InvalidValue(_("must not be longer than %(most)s characters", most=most))
    if found := UNSTORABLE.search(text):
        raise InvalidValue(_("contains %(character)s", character=f"U+{ord(found[0]):04X}"))
    return text


def _refuse_shortened(text: str) -> None:
    if _SHORTENED.fullmatch(text):
        raise InvalidValue(_("was shortened by a spreadsheet; format the column as text"))


def _parse_user_id(text: str) -> str:
    if not text:
        raise InvalidValue(_("is missing"))
    _refuse_shortened(text)
    if problem := find_user_id_problem(text):
        raise InvalidValue(problem)
    return check_cell_text(text, 200)


def _make_text_parser(field: str) -> Parser:
    most: int = getattr(Customer._meta.get_field(field), "max_length", 0)
    return lambda text: check_cell_text(text, most)


@lru_cache(1_000)
def _knows_time_zone(name: str) -> bool:
    return is_time_zone(name)


def _parse_time_zone(text: str) -> str:
    if not _knows_time_zone(check_cell_text(text, 60)):
        raise InvalidValue(_("must be a name of the IANA time zone database, such as Asia/Shanghai"))
    return text


def _parse_truth(text: str) -> bool:
    if text.lower() not in TRUTH:
        raise InvalidValue(_("must be yes or no"))
    return TRUTH[text.lower()]


def _parse_tags(text: str) -> list[str]:
    return normalize_tags([tag for each in _TAG_ENDS.split(text) if (tag := each.strip())])


def _parse_target(text: str) -> str:
    _refuse_shortened(text)
    return check_cell_text(text, MAX_ADDRESS)


def _parse_email(text: str) -> str:
    try:
        validate_email(check_cell_text(text, MAX_ADDRESS))
    except ValidationError:
        raise InvalidValue(_("is not an e-mail address")) from None
    return text


def _parse_number(text: str) -> Any:
    if _WHOLE.fullmatch(text):
        return store_value(int(text))
    if not _NUMBER.fullmatch(text) or not math.isfinite(number := float(text)):
        raise InvalidValue(_("must be a number"))
    return store_value(number)


def _parse_instant_cell(text: str) -> Any:
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


PARSERS: Mapping[str, Parser] = {
    "user_id": _parse_user_id, "name": _make_text_parser("name"), "level": _make_text_parser("level"),
    "locale": _make_text_parser("locale"), "timezone": _parse_time_zone, "opted_out": _parse_truth,
    "tags": _parse_tags,
}  # fmt: skip
ATTRIBUTE_PARSERS: Mapping[str, Parser] = {
    "text": store_value, "number": _parse_number, "bool": _parse_truth, "instant": _parse_instant_cell
}  # fmt: skip
