"""Read the records of a CSV file from the offset of any record, in bounded memory.

In UTF-8 and in GB18030 no byte of a longer character equals a line end, a quote or a delimiter. Lines are therefore
split as bytes and decoded one by one: a broken line spoils no other.
"""

from __future__ import annotations

import codecs
import csv
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from scheduling.error_text import ErrorText as _

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
    for encoding in [chosen] if chosen else ENCODINGS:
        if chosen or _can_decode(sample, encoding):
            return encoding, 0
    raise UnreadableFile(_("is neither UTF-8 nor GB18030 text"))


def _can_decode(sample: bytes, encoding: str) -> bool:
    try:
        codecs.getincrementaldecoder(encoding)().decode(sample)  # the last character may be incomplete
    except UnicodeDecodeError:
        return False
    return True


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
