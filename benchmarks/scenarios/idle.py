"""Measure the processor time of an idle deployment: every program of the stack, over 30 s."""

from __future__ import annotations

import time

import psutil

from benchmarks.environment import Bench, processor_seconds
from config.local.isolated import running_stack

GOAL = 3.0
SETTLES_WITHIN = 15.0
OWNER = "owner of the programs"


def idle(bench: Bench) -> None:
    seconds = bench.size(30, 10)
    ours = {name: value for name, value in bench.environment.items() if name != "AFTERTOUCH_STATE_DIR"}
    with running_stack(ours, state_dir=bench.state_dir / "stack") as stack:
        time.sleep(SETTLES_WITHIN)
        for _ in range(bench.repeat):
            pids = {**stack.pids, OWNER: psutil.Process(stack.pids["core"]).ppid()}
            before = {name: _seconds(name, pid) for name, pid in pids.items()}
            servers = {name: processor_seconds([process]) for name, process in bench.servers.items()}
            time.sleep(seconds)
            total = 0.0
            for name, pid in pids.items():
                burnt = _seconds(name, pid) - before[name]
                total += burnt
                bench.figures.add("idle", name, burnt / seconds * 100, "% of a core")
            bench.figures.add(
                "idle", "all our programs", total / seconds * 100, "% of a core", goal=GOAL, note=f"over {seconds} s"
            )
            for name, process in bench.servers.items():
                burnt = processor_seconds([process]) - servers[name]
                bench.figures.add("idle", f"beside them: {name}", burnt / seconds * 100, "% of a core")


def _seconds(name: str, pid: int) -> float:
    """Return processor seconds; those of the owner without its children."""
    process = psutil.Process(pid)
    return sum(process.cpu_times()[:2]) if name == OWNER else processor_seconds([process])
