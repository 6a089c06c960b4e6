"""Import customers from CSV files: upload, start and stop. `import_batches` does the work.

The page sends a file in parts, because a request must not exceed 1 MB. The parts are rows, which every process reads.
They are deleted when the import ends, or a day after an upload that was not started.

Records are read from the offset of any record, in bounded memory. In UTF-8 and in GB18030 no byte of a longer character
equals a line end, a quote or a delimiter. Lines are therefore split as bytes and decoded one by one: a broken line
spoils no other.

The header is mapped to fields of customers, and the cells are checked. Messages name no value of the file, because they
outlive it (see `erasure`).
"""

from __future__ import annotations

import codecs
import csv
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple
from uuid import UUID

import structlog
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import OperationalError, transaction
from django.utils.timezone import get_default_timezone, now

from scheduling import sql
from scheduling.customers.changes import CustomerInput
from scheduling.error_text import ErrorText
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, FieldError, InvalidInput, NotFound
from scheduling.ids import find_user_id_problem
from scheduling.models import Customer, CustomerImport, CustomerImportPart, RefusedLines
from scheduling.policy.profile import UNSTORABLE, InvalidValue, check_attribute_name, normalize_tags, store_value
from scheduling.policy.send_times import is_time_zone

log = structlog.get_logger(__name__)

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


class UnreadableFile(ValueError):
    """The file is no CSV text. The message states why."""


class _BadRecord(ValueError):
    """The record cannot be read. The message states why."""


class FileLine(NamedTuple):
    number: int
    end: int  #: offset after its line end
    content: bytes | None  #: without the line end; None if it is longer than `MAX_LINE`


class CsvRecord(NamedTuple):
    line: int  #: its first one
    end: int  #: offset after it
    next_line: int
    cells: Sequence[str] = ()
    problem: str = ""

    @property
    def is_blank(self) -> bool:
        return not self.problem and not any(cell.strip() for cell in self.cells)


def detect_encoding(sample: bytes, chosen: str = "") -> tuple[str, int]:
    """Return the encoding of a text that starts with `sample`, and the length of its byte order mark.

    Raises:
        UnreadableFile: it is no text in this encoding.
    """
    for mark, problem in FOREIGN.items():
        if sample.startswith(mark):
            raise UnreadableFile(problem)
    if b"\0" in sample:
        raise UnreadableFile(_("is no text file"))
    if sample.startswith(codecs.BOM_UTF8):
        return "utf-8", len(codecs.BOM_UTF8)
    if chosen:
        return chosen, 0
    for encoding in ENCODINGS:
        try:
            codecs.getincrementaldecoder(encoding)().decode(sample)  # the last character may be incomplete
        except UnicodeDecodeError:
            continue
        return encoding, 0
    raise UnreadableFile(_("is neither UTF-8 nor GB18030 text"))


def find_delimiter(first_line: bytes) -> str:
    """Return the delimiter that occurs most in the header."""
    return max(DELIMITERS, key=lambda each: first_line.count(each.encode()))


def split_lines(pieces: Iterable[bytes], offset: int, number: int) -> Iterator[FileLine]:
    """Yield the lines of a text in pieces. `offset` and `number` are those of its first line."""
    rest, length = b"", 0  # of the unfinished line; a long one is not kept
    for piece in pieces:
        *ended, tail = piece.split(b"\n")
        for part in ended:
            length += len(part) + 1
            offset += length
            yield FileLine(number, offset, rest + part if length <= MAX_LINE else None)
            rest, length, number = b"", 0, number + 1
        length += len(tail)
        rest = rest + tail if length <= MAX_LINE else b""
    if length:
        yield FileLine(number, offset + length, rest if length <= MAX_LINE else None)


class CsvReader:
    """Yield the records of lines. After a record with a problem the next line starts a new one."""

    def __init__(self, lines: Iterator[FileLine], encoding: str, delimiter: str) -> None:
        self._lines = lines
        self._encoding = encoding
        self._delimiter = delimiter
        self._returned: deque[FileLine] = deque()

    def __iter__(self) -> Iterator[CsvRecord]:
        return self

    def __next__(self) -> CsvRecord:
        taken: list[FileLine] = []
        problem: str
        try:
            cells = next(csv.reader(self._take_texts(taken), delimiter=self._delimiter, strict=True))
        except UnicodeDecodeError:
            problem = _("is no %(encoding)s text", encoding=ENCODINGS[self._encoding])
        except csv.Error:
            problem = BAD_QUOTES
        except _BadRecord as error:
            problem = str(error)
        else:
            return CsvRecord(taken[0].number, taken[-1].end, taken[-1].number + 1, cells)
        first, *others = taken
        self._returned.extendleft(reversed(others))
        return CsvRecord(first.number, first.end, first.number + 1, (), problem)

    def _take_texts(self, taken: list[FileLine]) -> Iterator[str]:
        """Yield the lines of one record. The parser asks for the next one only within a quoted cell."""
        size = 0
        while (line := self._returned.popleft() if self._returned else next(self._lines, None)) is not None:
            taken.append(line)
            if line.content is None:
                raise _BadRecord(_("is longer than %(most)s bytes", most=MAX_LINE) if len(taken) == 1 else BAD_QUOTES)
            size += len(line.content)
            if len(taken) > MAX_RECORD_LINES or size > MAX_LINE:
                raise _BadRecord(BAD_QUOTES)
            yield f"{line.content.decode(self._encoding)}\n"


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


def _parse_time_zone(text: str) -> str:
    if not is_time_zone(check_cell_text(text, 60)):
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


MOST_BYTES = 256 * 1024 * 1024  #: of a file
MOST_OPEN = 20  #: imports whose files are stored
SAMPLE = 1024 * 1024  #: bytes that decide the encoding
KEPT_UNSTARTED = timedelta(days=1)
LOCK_WAIT = 3.0  #: seconds for the current batch
NOT_ALLOWED = _("The state of the import does not allow this.")
State = CustomerImport.State
WORKING = (State.CHECKING, State.RUNNING)
WITH_FILE = (State.UPLOADING, State.CHECKING, State.READY, State.RUNNING)


# --- upload -----------------------------------------------------------------------------------------------------------


def create_import(
    file_name: str, size: int, *, actor: str, user: User | None = None, encoding: str = "", empty_clears: bool = False
) -> CustomerImport:
    """Create an import whose file of `size` bytes follows in parts. An empty `encoding` is detected.

    Raises:
        InvalidInput: the size or the encoding is not accepted.
        Conflict: `MOST_OPEN` files are stored.
    """
    if not 0 < size <= MOST_BYTES:
        raise InvalidInput.of("size", _("must be from 1 to %(most)s bytes", most=MOST_BYTES))
    if encoding and encoding not in ENCODINGS:
        raise InvalidInput.of("encoding", _("must be one of %(known)s", known=", ".join(ENCODINGS)))
    if CustomerImport.objects.filter(state__in=WITH_FILE).count() >= MOST_OPEN:
        raise Conflict(_("Too many imports wait or run. Discard one first."))
    return CustomerImport.objects.create(
        file_name=file_name[:200], size=size, encoding=encoding, empty_clears=empty_clears, actor=user,
        actor_name=actor[:150], created_at=sql.now(),
    )  # fmt: skip


def store_part(import_id: UUID, start: int, content: bytes) -> CustomerImport:
    """Store the bytes from offset `start`. The last part starts the check of the file.

    A part that arrived before changes nothing: the page repeats a part whose answer was lost.

    Raises:
        Conflict: the upload has ended, or an earlier part is missing.
        InvalidInput: the part is empty or exceeds the announced size.
    """
    with _lock_in_state(import_id, *State) as row:
        if 0 <= start < row.stored:
            return row
        if row.state != State.UPLOADING:
            raise Conflict(NOT_ALLOWED)
        if start != row.stored:
            raise Conflict(_("The next part starts at byte %(place)s.", place=row.stored))
        if not content or start + len(content) > row.size:
            raise InvalidInput.of("part", _("must be from 1 to %(most)s bytes", most=row.size - start))
        CustomerImportPart.objects.create(upload=row, start=start, content=content)
        row.stored += len(content)
        if row.stored == row.size:
            _read_header(row)
        row.save()
        return row


def _read_header(row: CustomerImport) -> None:
    """Detect encoding and delimiter, map the header, and request the check; or note why the file cannot be read."""
    try:
        sample = b"".join(bytes(each.content) for each in row.parts.filter(start__lt=SAMPLE).order_by("start"))
        row.encoding, offset = detect_encoding(sample, row.encoding)
        row.delimiter = find_delimiter(sample[offset:].partition(b"\n")[0])
        row.first_position, row.first_line = offset, 1
        reader = iter(CsvReader(split_lines([sample[offset:]], offset, 1), row.encoding, row.delimiter))
        header = next((record for record in reader if not record.is_blank), None)
        if header is None:
            raise UnreadableFile(_("is empty"))
        if header.problem:
            raise UnreadableFile(_("line %(line)s: %(what)s", line=header.line, what=header.problem))
        map_header(header.cells)
    except UnreadableFile as error:
        _refuse_file(row, [FieldError("", str(error))])
    except InvalidInput as error:
        _refuse_file(row, error.errors)
    else:
        row.header, row.first_position, row.first_line = list(header.cells), header.end, header.next_line
        row.state = State.CHECKING
        rewind_file(row)


def _refuse_file(row: CustomerImport, errors: Sequence[FieldError]) -> None:
    row.problems = [[each.field, ErrorText.dump(each.message)] for each in errors]
    row.state, row.ended_at = State.FAILED, now()
    delete_file(row)


def rewind_file(row: CustomerImport) -> None:
    """Let the next batch start at the first record. The caller saves the row."""
    row.position, row.line, row.tries, row.next_at = row.first_position, row.first_line, 0, sql.now()


def delete_file(row: CustomerImport) -> None:
    row.parts.all().delete()


def read_records(row: CustomerImport) -> Iterator[CsvRecord]:
    """Yield the records of the stored file from the row's position."""
    lines = split_lines(_read_pieces(row), row.position, row.line)
    return CsvReader(lines, row.encoding, row.delimiter)


def _read_pieces(row: CustomerImport) -> Iterator[bytes]:
    at = row.position
    while at < row.size:
        part = row.parts.filter(start__lte=at).order_by("-start").first()
        assert part is not None
        content = bytes(part.content)
        yield content[at - part.start :]
        at = part.start + len(content)


def read_first_records(row: CustomerImport, most: int) -> list[CsvRecord]:
    """Return the first records of a stored file, without blank ones."""
    rewound = CustomerImport(pk=row.pk, size=row.size, encoding=row.encoding, delimiter=row.delimiter)
    rewound.position, rewound.line = row.first_position, row.first_line
    return list(islice((each for each in read_records(rewound) if not each.is_blank), most))


# --- decisions --------------------------------------------------------------------------------------------------------


def start_import(import_id: UUID, *, actor: str) -> None:
    """Let workers import a file that was checked.

    Raises:
        NotFound, Conflict: there is no such import, or it does not wait for a decision.
    """
    with _lock_in_state(import_id, State.READY) as row:
        row.state = State.RUNNING
        rewind_file(row)
        row.save()
    log.info("import_started", id=str(import_id), actor=actor)


def stop_import(import_id: UUID, *, actor: str) -> CustomerImport:
    """Discard an import that has not started, or stop it before its next batch. Changes made before stay.

    Raises:
        NotFound, Conflict: there is no such import, it has ended, or its current batch takes longer than `LOCK_WAIT`.
    """
    with _lock_in_state(import_id, *WITH_FILE) as row:
        row.state = State.STOPPED if row.state == State.RUNNING else State.DISCARDED
        row.ended_at, row.ended_by = now(), actor[:150]
        row.save()
        delete_file(row)
    log.info("import_stopped", id=str(import_id), actor=actor)
    return row


@contextmanager
def _lock_in_state(import_id: UUID, *states: str) -> Iterator[CustomerImport]:
    """Open a transaction that holds the lock of an import in one of the states."""
    try:
        with sql.brief_lock_waits(LOCK_WAIT):
            row = CustomerImport.objects.select_for_update(of=("self",)).filter(pk=import_id).first()
            if row is None:
                raise NotFound(_("There is no import %(import_id)s.", import_id=import_id))
            if row.state not in states:
                raise Conflict(NOT_ALLOWED)
            yield row
    except OperationalError as error:
        if not sql.is_lock_timeout(error):
            raise
        raise Conflict(_("A batch of this import is running. Try again in a moment.")) from None


# --- end --------------------------------------------------------------------------------------------------------------


def discard_stale_imports() -> int:
    """Discard imports that wait for a file or for a decision too long. Return their number."""
    stale = CustomerImport.objects.filter(
        state__in=(State.UPLOADING, State.READY), created_at__lt=sql.now() - KEPT_UNSTARTED
    )
    found = 0
    for row in stale:
        with transaction.atomic():
            mine = CustomerImport.objects.filter(pk=row.pk, state=row.state)
            if mine.update(state=State.DISCARDED, ended_at=now()):
                delete_file(row)
                found += 1
    return found


def is_in_stored_file(user_id: str, before: datetime) -> bool:
    """Return whether a file that was uploaded before an instant may still name a user id."""
    needles = {user_id.encode(encoding) for encoding in ENCODINGS}
    parameters = {"states": list(WITH_FILE), "before": before}
    return any(
        sql.rows(_NAMED, parameters | {"needle": needle, "overlap": len(needle) - 1})[0][0] for needle in needles
    )


def delete_imports(import_ids: Sequence[UUID]) -> int:
    """Delete ended imports with all that belongs to them. The history of customers stays."""
    CustomerImportPart.objects.filter(upload__in=import_ids).delete()
    RefusedLines.objects.filter(upload__in=import_ids).delete()
    return CustomerImport.objects.filter(pk__in=import_ids).delete()[0]


# The id may lie on the border of two parts.
_NAMED = """
SELECT EXISTS (
    SELECT FROM scheduling_customerimport AS i JOIN scheduling_customerimportpart AS p ON p.upload_id = i.id
    LEFT JOIN scheduling_customerimportpart AS n ON n.upload_id = i.id AND n.start = p.start + length(p.content)
    WHERE i.state = ANY(%(states)s) AND i.created_at < %(before)s
      AND position(%(needle)s::bytea IN p.content || COALESCE(substr(n.content, 1, %(overlap)s), '')) > 0
)
"""
