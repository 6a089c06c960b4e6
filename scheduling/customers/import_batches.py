"""Run the batches of imports on workers: check and import.

A batch is one transaction that holds the lock of the import's row. Its effects and its progress commit together: a
batch whose worker dies has no effect, and another worker repeats it. No lock is held between two batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils.timezone import now

from scheduling import sql
from scheduling.customers.changes import (
    BATCH,
    CustomerInput,
    StoredCustomer,
    change_customers,
    predict_changes,
)
from scheduling.customers.imports import WORKING, CsvRecord, State, delete_file, map_header, read_records
from scheduling.error_text import ErrorText
from scheduling.error_text import ErrorText as _
from scheduling.errors import InvalidInput
from scheduling.models import CustomerErasure, CustomerImport, RefusedLines
from scheduling.models.customer import digest_user_id

log = structlog.get_logger(__name__)

BATCH_BYTES = 1_000_000  #: of the file; long records make a batch shorter
RESERVED_FOR = timedelta(seconds=10)  #: then a batch is repeated, unless its worker still holds the row's lock
MAX_TRIES = 5  #: of one batch before the import fails
#: Nodes note the time of an erasure and of an upload by clocks that may differ by so much.
CLOCK_SKEW = timedelta(minutes=1)

OPT_OUT_STAYS = _("the customer opted out in person; only a consent by the API or an operator lifts it")

#: Line, column and message.
Refusal = tuple[int, str, str]


class _CustomerErased(Exception):
    """A customer of this batch was erased while it ran. The batch is repeated without it."""


def list_due_imports() -> list[UUID]:
    """Return the imports whose next batch is due, or whose worker died."""
    return list(_due_imports().order_by("next_at").values_list("pk", flat=True))


def _due_imports() -> QuerySet[CustomerImport]:
    return CustomerImport.objects.filter(state__in=WORKING, next_at__lte=Now())


def run_import_batch(import_id: UUID) -> bool:
    """Run one batch. Return whether another one follows; false also if another worker has it."""
    held_until = reserve_import(import_id)
    if held_until is None:
        return False
    try:
        with sql.limit_statement_time(settings.TIMEOUTS.bulk_batch):
            row = _lock_import(CustomerImport.objects.filter(pk=import_id, state__in=WORKING, next_at=held_until))
            if row is None:
                return False  # stopped, or so late that another worker has repeated this batch
            _run_phase(row)
            row.save()
    except _CustomerErased:
        CustomerImport.objects.filter(pk=import_id, next_at=held_until).update(next_at=Now(), tries=0)
        return True
    if row.state not in WORKING:
        log.info("import_phase_done", id=str(row.pk), state=row.state, counts=row.counts)
    return row.state in WORKING


def reserve_import(import_id: UUID) -> datetime | None:
    """Reserve the next batch and count the try. Return the end of the reservation; None if there is nothing to do.

    A batch that kills its worker each time ends after `MAX_TRIES`. Of concurrent workers one gets the batch.
    """
    with transaction.atomic():
        row = _lock_import(_due_imports().filter(pk=import_id))
        if row is None:
            return None
        if row.tries < MAX_TRIES:
            row.tries += 1
            row.next_at = row.at + RESERVED_FOR  # type: ignore[attr-defined]
        else:
            given_up = _(
                "The batch at line %(place)s could not be finished %(count)s times.", place=row.line, count=MAX_TRIES
            )
            row.problems = [["", ErrorText.dump(given_up)]]
            row.state, row.ended_at = State.FAILED, now()
            delete_file(row)
            log.error("import_abandoned", id=str(row.pk), line=row.line)
        row.save()
        return row.next_at if row.state in WORKING else None


def _lock_import(rows: QuerySet[CustomerImport]) -> CustomerImport | None:
    """Return the row locked for this transaction, with PostgreSQL's time. None if another transaction has it."""
    return rows.select_for_update(skip_locked=True, of=("self",)).annotate(at=Now()).first()


def _run_phase(row: CustomerImport) -> None:
    """Run one batch. The caller saves the row in the same transaction."""
    phase = row.state
    counts, refused, ended = run_import_lines(row)
    known = row.counts.get(phase, {})
    row.counts = {**row.counts, phase: {name: known.get(name, 0) + count for name, count in counts.items()}}
    if refused:
        entries = [(key, field, ErrorText.dump(message)) for key, field, message in refused]
        RefusedLines.objects.create(upload=row, phase=phase, entries=entries)
    row.tries, row.next_at = 0, row.at  # type: ignore[attr-defined]
    if ended:
        row.state = State.READY if phase == State.CHECKING else State.DONE
        if phase != State.CHECKING:
            row.ended_at = now()
            delete_file(row)


# --- lines ------------------------------------------------------------------------------------------------------------


def run_import_lines(row: CustomerImport) -> tuple[Counter[str], list[Refusal], bool]:
    """Check or import the next lines. Return counts, refused lines, and whether the file has ended."""
    records: list[CsvRecord] = []
    given = 0
    for record in read_records(row):
        records.append(record)
        given += not record.is_blank
        if given >= BATCH or record.end - row.position >= BATCH_BYTES:
            break
    inputs, lines, refused = _read_inputs(row, records)
    erased = _read_erased(row)
    for user_id in [each for each in inputs if erased and digest_user_id(each) in erased]:
        refused += [(line, "", _("the customer was erased")) for line in lines.pop(user_id)]
        del inputs[user_id]
    act: Callable[[Sequence[CustomerInput]], list[StoredCustomer]] = predict_changes
    if row.state != State.CHECKING:
        act = partial(change_customers, actor=f"{row.actor_name} (CSV …{str(row.pk)[-8:]})")
    stored, wrong = _apply_rows(act, inputs)
    refused += [(line, field, message) for user_id, field, message in wrong for line in lines[user_id]]
    later = _read_erased(row) - erased  # no erasure of these customers commits after their locks
    if later and any(digest_user_id(user_id) in later for user_id in inputs):
        raise _CustomerErased
    counts = Counter(
        lines=sum(not record.is_blank for record in records),
        created=sum(each.created for each in stored),
        changed=sum(bool(each.after) and not each.created for each in stored),
        unchanged=sum(not each.after and not each.created for each in stored),
        refused=len({line for line, _column, _message in refused}),
    )
    kept = [(lines[each.user_id][-1], field, OPT_OUT_STAYS) for each in stored for field in each.ignored]
    if kept:
        counts["kept"] = len(kept)
    if records:
        row.position, row.line = records[-1].end, records[-1].next_line
    return counts, sorted([*refused, *kept]), not records or row.position >= row.size


def _read_inputs(
    row: CustomerImport, records: Iterable[CsvRecord]
) -> tuple[dict[str, CustomerInput], dict[str, list[int]], list[Refusal]]:
    """Return inputs and lines by user id, and the lines that cannot be read. A later line of a customer wins."""
    columns = map_header(row.header)
    inputs: dict[str, CustomerInput] = {}
    lines: dict[str, list[int]] = {}
    refused: list[Refusal] = []
    for record in records:
        if record.is_blank:
            continue
        try:
            if record.problem:
                raise InvalidInput.of("", record.problem)
            given = columns.read_cells(record.cells, empty_clears=row.empty_clears)
        except InvalidInput as error:
            refused += [(record.line, each.field, each.message) for each in error.errors]
            continue
        known = inputs.get(given.user_id)
        inputs[given.user_id] = _merge_inputs(known, given) if known else given
        lines.setdefault(given.user_id, []).append(record.line)
    return inputs, lines, refused


def _merge_inputs(first: CustomerInput, second: CustomerInput) -> CustomerInput:
    fields: dict[str, Any] = {**first.fields, **second.fields}
    for name in ("address_kinds", "attributes"):
        if name in first.fields and name in second.fields:
            fields[name] = {**first.fields[name], **second.fields[name]}
    return CustomerInput(first.user_id, fields)


def _apply_rows(
    act: Callable[[Sequence[CustomerInput]], list[StoredCustomer]], inputs: Mapping[str, CustomerInput]
) -> tuple[list[StoredCustomer], list[tuple[str, str, str]]]:
    """Apply the inputs without those that are refused. Return the customers, and user id, field and message of each."""
    rest = list(inputs.values())
    wrong: list[tuple[str, str, str]] = []
    while True:
        try:
            return act(rest) if rest else [], wrong
        except InvalidInput as error:
            refused = set()
            for each in error.errors:
                _customers, position, field = each.field.split(".", 2)
                refused.add(int(position))
                wrong.append((rest[int(position)].user_id, field, each.message))
            rest = [each for place, each in enumerate(rest) if place not in refused]


def _read_erased(row: CustomerImport) -> set[str]:
    """Return the digests of customers that were erased after the upload. The file must not bring them back."""
    since = row.created_at - CLOCK_SKEW
    return set(CustomerErasure.objects.filter(requested_at__gte=since).values_list("digest", flat=True))
