"""What the house burns while nothing happens: every program of the stack, over half a minute."""

from __future__ import annotations

import time

import psutil

from benchmarks.bench import Bench, family
from config.stack.running import running_stack

GOAL = 3.0
SETTLES_WITHIN = 15.0


def idle(bench: Bench) -> None:
    seconds = bench.size(30, 10)
    ours = {name: value for name, value in bench.environment.items() if name != "AFTERTOUCH_STATE_DIR"}
    with running_stack(ours, state_dir=bench.state_dir / "stack") as stack:
        time.sleep(SETTLES_WITHIN)
        for _ in range(bench.repeat):
            supervisor = psutil.Process(stack.pids["core"]).ppid()
            alone = {"supervisor": supervisor, "its owner": psutil.Process(supervisor).ppid()}
            pids = {**stack.pids, **alone}
            before = {name: _seconds(pid, with_children=name not in alone) for name, pid in pids.items()}
            servers = {name: _seconds(pid) for name, pid in _servers(bench).items()}
            time.sleep(seconds)
            total = 0.0
            for name, pid in pids.items():
                spent = _seconds(pid, with_children=name not in alone) - before[name]
                total += spent
                bench.figures.add("idle", name, spent / seconds * 100, "% of a core")
            bench.figures.add(
                "idle", "all our programs", total / seconds * 100, "% of a core", goal=GOAL, note=f"over {seconds} s"
            )
            for name, pid in _servers(bench).items():
                spent = _seconds(pid) - servers[name]
                bench.figures.add("idle", f"beside them: {name}", spent / seconds * 100, "% of a core")


def _servers(bench: Bench) -> dict[str, int]:
    from config.embedded import servers

    return {name: pid for name, pid in servers.status(bench.state_dir).items() if pid}


def _seconds(pid: int, *, with_children: bool = True) -> float:
    """Processor time so far, of children too; of those that have ended, where their parent has noticed."""
    process = psutil.Process(pid)
    own = process.cpu_times()
    spent = own.user + own.system
    if with_children:
        spent += own.children_user + own.children_system
        for child in family([process])[1:]:
            times = child.cpu_times()
            spent += times.user + times.system
    return spent
