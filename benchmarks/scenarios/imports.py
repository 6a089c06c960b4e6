"""Measure the check and the import of a CSV file of customers, of which one line in a thousand is wrong."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

from benchmarks import workload
from benchmarks.environment import Bench, processor_seconds

PART = 524_288  #: bytes, as the page sends them
WRONG_EVERY = 1_000  #: lines
GOAL_GROWTH = 64.0  #: MB


def imports(bench: Bench) -> None:
    from scheduling.customers import imports as uploads

    lines = bench.size(1_000_000, 5_000)
    for _ in range(bench.repeat):
        workload.delete_all()
        before = _peak_mb()
        row = uploads.create_import("people.csv", sum(map(len, _generate_lines(lines))), actor="bench")
        start = 0
        for part in _generate_parts(lines):
            uploads.store_part(row.pk, start, part)
            start += len(part)
        _measure_phase(bench, row.pk, "checking", lines)
        uploads.start_import(row.pk, actor="bench")
        _measure_phase(bench, row.pk, "running", lines)
        bench.figures.add("imports", "growth of the process", _peak_mb() - before, "MB", goal=GOAL_GROWTH)


def _measure_phase(bench: Bench, import_id: object, phase: str, lines: int) -> None:
    """Run the batches of a phase in this process, as a worker does."""
    from scheduling.customers.imports import run_import_batch
    from scheduling.models import CustomerImport

    server = [bench.servers["PostgreSQL"]]
    begun_at, own, database, longest, more = time.monotonic(), time.process_time(), processor_seconds(server), 0.0, True
    while more:
        batch_at = time.monotonic()
        more = run_import_batch(import_id)  # type: ignore[arg-type]
        longest = max(longest, time.monotonic() - batch_at)
    own, database = time.process_time() - own, processor_seconds(server) - database
    counts = CustomerImport.objects.get(pk=import_id).counts
    add = bench.figures.add
    add("imports", f"{phase}: lines", lines / (time.monotonic() - begun_at), "/s", note=f"{lines:,} lines, one worker")
    add("imports", f"{phase}: processor time of the worker for each line", own / lines * 1e6, "µs")
    add("imports", f"{phase}: processor time of PostgreSQL for each line", database / lines * 1e6, "µs")
    add("imports", f"{phase}: longest batch", longest, "s")
    wrong = counts["refused"] - lines // WRONG_EVERY
    add("imports", f"{phase}: refused beyond the wrong lines", wrong, "lines", goal=0)


def _generate_lines(count: int) -> Iterator[bytes]:
    yield b"user_id,name,level,addresses.phone,attributes.city,attributes.paid:number,tags,note\n"
    for number in range(count):
        paid = "oops" if number % WRONG_EVERY == 7 else f"{number}.5"
        yield f"user-{number},客户{number},vip,138{number:08},上海,{paid},老客;vip,x\n".encode()


def _generate_parts(count: int) -> Iterator[bytes]:
    held = bytearray()
    for line in _generate_lines(count):
        held += line
        if len(held) >= PART:
            yield bytes(held[:PART])
            del held[:PART]
    if held:
        yield bytes(held)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
