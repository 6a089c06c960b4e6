"""Import customers from CSV files: upload, start, stop and undo. `import_batches` does the work.

The page sends a file in parts, because a request must not exceed 1 MB. The parts are rows, which every process reads.
They are deleted when the import ends, or a day after an upload that was not started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import islice
from uuid import UUID

import structlog
from django.contrib.auth.models import User
from django.db import OperationalError, transaction
from django.utils.timezone import now

from scheduling import sql
from scheduling.customers.csv_records import (
    ENCODINGS,
    CsvReader,
    CsvRecord,
    UnreadableFile,
    detect_encoding,
    find_delimiter,
    split_lines,
)
from scheduling.customers.import_columns import map_header
from scheduling.error_text import ErrorText
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, FieldError, InvalidInput, NotFound
from scheduling.models import CustomerImport, CustomerImportPart, RefusedLines

log = structlog.get_logger(__name__)

MOST_BYTES = 256 * 1024 * 1024  #: of a file
MOST_OPEN = 20  #: imports whose files are stored
SAMPLE = 1024 * 1024  #: bytes that decide the encoding
KEPT_UNSTARTED = timedelta(days=1)
LOCK_WAIT = 3.0  #: seconds for the current batch
NOT_ALLOWED = _("The state of the import does not allow this.")
State = CustomerImport.State
WORKING = (State.CHECKING, State.RUNNING, State.UNDOING)
UNDOABLE = (State.DONE, State.STOPPED, State.FAILED)
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
        sample = _read_sample(row)
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


def _read_sample(row: CustomerImport) -> bytes:
    return b"".join(bytes(each.content) for each in row.parts.filter(start__lt=SAMPLE).order_by("start"))


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


def undo_import(import_id: UUID, *, actor: str) -> None:
    """Let workers restore the values from before an import.

    Raises:
        NotFound, Conflict: there is no such import, or nothing of it can be undone.
    """
    with _lock_in_state(import_id, *UNDOABLE) as row:
        if not changed_customers(row):
            raise Conflict(_("The import changed no customer."))
        row.state, row.tries, row.next_at = State.UNDOING, 0, sql.now()
        row.ended_at, row.ended_by = None, actor[:150]
        row.save()
    log.info("import_undo_started", id=str(import_id), actor=actor)


def changed_customers(row: CustomerImport) -> int:
    """Return the number of customers that the import created or changed."""
    counts = row.counts.get(State.RUNNING, {})
    return int(counts.get("created", 0) + counts.get("changed", 0))


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
