"""Import customers from CSV files: upload, check, decision, import. `csv_files` reads the files.

The page sends a file in parts, because a request must not exceed 1 MB. The parts are rows, which every process reads.
They are deleted when the import ends, or a day after an upload that was not started.

A periodic pass checks and imports the file in batches (`BatchJob`). The customers are written by the function that the
API calls.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any
from uuid import UUID

import structlog
from django.db import transaction
from django.utils.timezone import now

from scheduling import sql
from scheduling.customers import csv_files
from scheduling.customers.changes import (
    BATCH,
    CustomerInput,
    CustomersRefused,
    StoredCustomer,
    change_customers,
    predict_changes,
)
from scheduling.customers.csv_files import ENCODINGS, CsvRecord, detect_encoding, find_delimiter, map_header
from scheduling.error_text import ErrorText
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, FieldError, InvalidInput, NotFound
from scheduling.models import CustomerErasure, CustomerImport, CustomerImportPart, RefusedLines
from scheduling.models.batch_job import MAX_TRIES, lock_job, run_counted_batch, run_in_turn
from scheduling.models.customer import digest_user_id

log = structlog.get_logger(__name__)

MOST_BYTES = 256 * 1024 * 1024  #: of a file
MOST_OPEN = 20  #: imports whose files are stored
SAMPLE = 1024 * 1024  #: bytes that decide the encoding
KEPT_UNSTARTED = timedelta(days=1)
BATCH_BYTES = 1_000_000  #: of the file; long records make a batch shorter
NOT_ALLOWED = _("The state of the import does not allow this.")
OPT_OUT_STAYS = _("the customer opted out in person; only a consent by the API or an operator lifts it")
State = CustomerImport.State
WORKING = (State.CHECKING, State.RUNNING)
WITH_FILE = (State.UPLOADING, State.CHECKING, State.READY, State.RUNNING)
#: Line, column and message.
Refusal = tuple[int, str, str]


# --- upload -----------------------------------------------------------------------------------------------------------


def create_import(
    file_name: str, size: int, *, actor: str, encoding: str = "", empty_clears: bool = False
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
        file_name=file_name[:200], size=size, encoding=encoding, empty_clears=empty_clears, actor_name=actor[:150],
        created_at=sql.now(),
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
            try:
                _read_header(row)
            except InvalidInput as error:
                _fail(row, error.errors)
        row.save()
        return row


def _read_header(row: CustomerImport) -> None:
    """Detect encoding and delimiter, read the header, and let the check start.

    Raises:
        InvalidInput: the file cannot be read.
    """
    sample = _open_file(row).read(SAMPLE)
    row.encoding = detect_encoding(sample, row.encoding)
    row.delimiter = find_delimiter(sample)
    header = next(_read_filled_records(row), None)
    if header is None:
        raise InvalidInput.of("", _("is empty"))
    if header.problem:
        raise InvalidInput.of("", _("line %(line)s: %(what)s", line=header.line, what=header.problem))
    map_header(header.cells)
    row.header, row.state = list(header.cells), State.CHECKING
    row.position, row.line = header.end, header.next_line


def _fail(row: CustomerImport, errors: Sequence[FieldError]) -> None:
    row.problems = [[each.field, ErrorText.dump(each.message)] for each in errors]
    row.state, row.ended_at = State.FAILED, now()
    row.parts.all().delete()


class _StoredFile(io.RawIOBase):
    """The parts of an upload as one file."""

    def __init__(self, row: CustomerImport) -> None:
        self._row = row
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._row.stored}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = self._row.parts.filter(start__lte=self._position).order_by("-start").first()
        if part is None:
            return 0
        content = bytes(part.content)[self._position - part.start :][: len(buffer)]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def _open_file(row: CustomerImport) -> io.BufferedReader:
    return io.BufferedReader(_StoredFile(row), SAMPLE)


def _read_filled_records(row: CustomerImport) -> Iterator[CsvRecord]:
    """Yield the records of the file without blank ones. The first is the header."""
    file = _open_file(row)
    file.seek(len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0)
    return (each for each in csv_files.read_records(file, row.encoding, row.delimiter) if not each.is_blank)


def read_first_records(row: CustomerImport, most: int) -> list[CsvRecord]:
    """Return the first records of a stored file after its header."""
    return list(islice(_read_filled_records(row), 1, most + 1))


# --- decisions --------------------------------------------------------------------------------------------------------


def start_import(import_id: UUID, *, actor: str) -> None:
    """Let workers import a file that was checked.

    Raises:
        NotFound, Conflict: there is no such import, or it does not wait for a decision.
    """
    with _lock_in_state(import_id, State.READY) as row:
        header = next(_read_filled_records(row))
        row.state, row.counts = State.RUNNING, {}
        row.position, row.line = header.end, header.next_line
        row.refused.all().delete()
        row.save()
    log.info("import_started", id=str(import_id), actor=actor)


def stop_import(import_id: UUID, *, actor: str) -> None:
    """Discard an import that has not started, or stop it before its next batch. Changes made before stay.

    Raises:
        NotFound, Conflict: there is no such import, it has ended, or its current batch takes longer than
            `TIMEOUTS.bulk_cancel`.
    """
    with _lock_in_state(import_id, *WITH_FILE) as row:
        row.state = State.STOPPED if row.state == State.RUNNING else State.DISCARDED
        row.ended_at, row.ended_by = now(), actor[:150]
        row.save()
        row.parts.all().delete()
    log.info("import_stopped", id=str(import_id), actor=actor)


@contextmanager
def _lock_in_state(import_id: UUID, *states: str) -> Iterator[CustomerImport]:
    """Open a transaction that holds the lock of an import in one of the states."""
    with lock_job(CustomerImport.objects.filter(pk=import_id)) as row:
        if row is None:
            raise NotFound(_("There is no import %(import_id)s.", import_id=import_id))
        if row.state not in states:
            raise Conflict(NOT_ALLOWED)
        yield row


# --- batches ----------------------------------------------------------------------------------------------------------


def continue_imports() -> None:
    working = CustomerImport.objects.filter(state__in=WORKING)
    run_in_turn(working.order_by("retry_at", "pk"), run_import_batch)  # a batch moves `retry_at` on


def run_import_batch(import_id: UUID) -> bool:
    """Run one batch. Return whether another one follows; false also if another worker has it."""
    working = CustomerImport.objects.filter(pk=import_id, state__in=WORKING)
    row = run_counted_batch(working, run_import_lines, _abandon)
    if row is not None and row.state not in WORKING:
        log.info("import_phase_done", id=str(row.pk), state=row.state, counts=row.counts)
    return row is not None and row.state in WORKING


def _abandon(row: CustomerImport) -> None:
    text = _("The batch at line %(place)s could not be finished %(count)s times.", place=row.line, count=MAX_TRIES)
    _fail(row, [FieldError("", text)])


def run_import_lines(row: CustomerImport) -> None:
    """Check or import the next lines, and note the progress. The caller saves the row."""
    records: list[CsvRecord] = []
    file = _open_file(row)
    file.seek(row.position)
    for record in csv_files.read_records(file, row.encoding, row.delimiter, row.line):
        records.append(record)
        if len(records) >= BATCH or record.end - row.position >= BATCH_BYTES:
            break
    filled = [each for each in records if not each.is_blank]
    inputs, lines, refused = _read_inputs(row, filled)
    stored, wrong = _apply_inputs(row, inputs)
    refused += [(line, field, message) for user_id, field, message in wrong for line in lines[user_id]]
    kept = [(lines[each.user_id][-1], field, OPT_OUT_STAYS) for each in stored for field in each.ignored]
    counts = {
        "lines": len(filled),
        "created": sum(each.created for each in stored),
        "changed": sum(bool(each.after) and not each.created for each in stored),
        "unchanged": sum(not each.after and not each.created for each in stored),
        "refused": len({line for line, _column, _message in refused}),
    }
    if kept:
        counts["kept"] = len(kept)
    row.counts = {**row.counts, **{name: row.counts.get(name, 0) + count for name, count in counts.items()}}
    if refused or kept:
        entries = [(line, field, ErrorText.dump(message)) for line, field, message in sorted([*refused, *kept])]
        RefusedLines.objects.create(upload=row, entries=entries)
    if records:
        row.position, row.line = records[-1].end, records[-1].next_line
    if not records or row.position >= row.size:
        if row.state == State.CHECKING:
            row.state = State.READY
        else:
            row.state, row.ended_at = State.DONE, now()
            row.parts.all().delete()


def _read_inputs(
    row: CustomerImport, records: Iterable[CsvRecord]
) -> tuple[dict[str, CustomerInput], dict[str, list[int]], list[Refusal]]:
    """Return inputs and lines by user id, and the lines that cannot be read. A later line of a customer wins."""
    columns = map_header(row.header)
    inputs: dict[str, CustomerInput] = {}
    lines: dict[str, list[int]] = {}
    refused: list[Refusal] = []
    for record in records:
        try:
            if record.problem:
                raise InvalidInput.of("", record.problem)
            given = columns.read_cells(record.cells, empty_clears=row.empty_clears)
        except InvalidInput as error:
            refused += [(record.line, each.field, each.message) for each in error.errors]
            continue
        earlier = inputs[given.user_id].fields if given.user_id in inputs else {}
        fields: dict[str, Any] = {**earlier, **given.fields}
        for name in earlier.keys() & given.fields.keys() & {"addresses", "attributes"}:
            fields[name] = {**earlier[name], **given.fields[name]}
        inputs[given.user_id] = CustomerInput(given.user_id, fields)
        lines.setdefault(given.user_id, []).append(record.line)
    return inputs, lines, refused


def _apply_inputs(
    row: CustomerImport, inputs: Mapping[str, CustomerInput]
) -> tuple[list[StoredCustomer], list[tuple[str, str, str]]]:
    """Apply the inputs without those that are refused. Return the customers, and user id, field and message of each."""
    act: Callable[[Sequence[CustomerInput]], list[StoredCustomer]] = predict_changes
    if row.state != State.CHECKING:
        act = partial(change_customers, actor=f"{row.actor_name} (CSV …{str(row.pk)[-8:]})")
    rest = list(inputs.values())
    wrong: list[tuple[str, str, str]] = []
    while rest:
        try:
            with transaction.atomic():
                stored = act(rest)
                _refuse_erased(row, rest)  # no erasure of these customers commits after their locks
                return stored, wrong
        except CustomersRefused as error:
            refused = error.by_position
            wrong += [(rest[place].user_id, each.field, each.message) for place, each in refused.items()]
            rest = [each for place, each in enumerate(rest) if place not in refused]
    return [], wrong


def _refuse_erased(row: CustomerImport, inputs: Sequence[CustomerInput]) -> None:
    """Refuse customers that were erased after the upload: the file must not bring them back.

    Raises:
        CustomersRefused: there are some.
    """
    erasures = CustomerErasure.objects.filter(requested_at__gte=row.created_at)
    erased = set(erasures.values_list("digest", flat=True))
    errors = {
        position: FieldError("", _("the customer was erased"))
        for position, each in enumerate(inputs)
        if erased and digest_user_id(each.user_id) in erased
    }
    if errors:
        raise CustomersRefused(errors)


# --- end --------------------------------------------------------------------------------------------------------------


@transaction.atomic
def discard_stale_imports() -> int:
    """Discard imports that wait for a file or for a decision too long. Return their number."""
    stale = CustomerImport.objects.filter(
        state__in=(State.UPLOADING, State.READY), created_at__lt=sql.now() - KEPT_UNSTARTED
    )
    # One that receives a part or a decision at this moment is left to the next pass.
    ids = list(stale.select_for_update(skip_locked=True).values_list("pk", flat=True))
    CustomerImportPart.objects.filter(upload__in=ids).delete()
    return CustomerImport.objects.filter(pk__in=ids).update(state=State.DISCARDED, ended_at=now())


def is_in_stored_file(user_id: str, before: datetime) -> bool:
    """Return whether a file that was uploaded before an instant may still name a user id."""
    needles = {user_id.encode(encoding) for encoding in ENCODINGS}
    parameters = {"states": list(WITH_FILE), "before": before}
    return any(
        sql.rows(_NAMED, parameters | {"needle": needle, "overlap": len(needle) - 1})[0][0] for needle in needles
    )


# The id may lie on the border of two parts.
_NAMED = """
SELECT EXISTS (
    SELECT FROM scheduling_customerimport AS i JOIN scheduling_customerimportpart AS p ON p.upload_id = i.id
    LEFT JOIN scheduling_customerimportpart AS n ON n.upload_id = i.id AND n.start = p.start + length(p.content)
    WHERE i.state = ANY(%(states)s) AND i.created_at < %(before)s
      AND position(%(needle)s::bytea IN p.content || COALESCE(substr(n.content, 1, %(overlap)s), '')) > 0
)
"""
