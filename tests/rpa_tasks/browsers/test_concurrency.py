"""Many processes, many times."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pytest_django import Settings

from rpa_tasks.browsers import upkeep
from rpa_tasks.browsers.browser_processes import memory_by_session, read_command_line
from rpa_tasks.browsers.pool import AcquiredBrowser
from tests.rpa_tasks.browsers.browser_processes import AcquiringProcess, list_pool_processes
from tests.support.waiting import WAIT_LIMIT

Acquire = Callable[..., AcquiredBrowser]


def test_concurrent_runs_share_slots_exclusively(
    start_acquiring_process: Callable[..., AcquiringProcess], pool: Path
) -> None:
    """Never more browsers than slots, never a slot or a profile in two hands. Six shops, so that they evict."""
    notes = pool / "notes"
    shops = ",".join(f"s{number}" for number in range(6))
    racers = [
        start_acquiring_process(shops, "600", "--rounds", "3", "--log", str(notes), AFTERTOUCH_RPA_BROWSERS="3")
        for _ in range(6)
    ]
    most = 0
    ends_at = time.monotonic() + 3 * WAIT_LIMIT
    while any(racer.process.poll() is None for racer in racers):
        assert time.monotonic() < ends_at, "they do not come to an end"
        most = max(most, len(_browsers(pool)))
        time.sleep(0.2)  # a look reads all processes of the machine, which takes the processor from the racers

    in_hand: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for sign, profile, slot, _ in (line.split(maxsplit=3) for line in notes.read_text().splitlines()):
        ends[sign] += 1
        for thing in (f"profile {profile}", f"slot {slot}"):
            in_hand[thing] += {"+": 1, "-": -1, "!": 0}[sign]
            assert in_hand[thing] <= 1, f"{thing} is in two hands"
    assert ends == {"+": 18, "-": 18}
    assert most <= 3
    assert len(upkeep.records_in("idle", "busy", "quarantined")) <= 3


def _browsers(state: Path) -> set[str]:
    """Profiles that have a browser's main process."""
    lines = (read_command_line(pid) for pid in list_pool_processes(state))
    return {
        match[1]
        for line in lines
        if "--type=" not in line
        and "/bin/sh" not in line
        and (match := re.search(rf"--user-data-dir={re.escape(str(state))}/rpa/profiles/(\S+)", line))
    }


def test_repeated_acquisitions_use_flat_memory(acquire: Acquire, pool: Path, settings: Settings) -> None:
    """Memory stays flat, recycling included, and nothing piles up."""
    settings.AFTERTOUCH_RPA_BROWSER_USES = 20
    fresh, memory, processes = [], [], []
    for number in range(60):
        with acquire("s1") as borrowed:
            if not borrowed.warm:
                fresh.append(number)
        if number % 10 == 9:
            processes.append(len(list_pool_processes(pool)))
            memory.append(sum(memory_by_session().get(record.pid, 0) for record in upkeep.records_in("idle")) / 2**20)

    assert fresh == [0, 20, 40]
    assert max(memory) < 1.5 * max(memory[:2]), memory
    assert max(processes) < 20, processes
