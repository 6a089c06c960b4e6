"""Looks after a node's browsers: `python -m rpa_tasks.maintainer.main`, started by every execution worker of the node.

One of them works, the others wait for its lock. It ends when its standard input closes or its parent is gone, and ends
the browsers that nobody uses any more: with no worker on the node nobody would. Browsers are kept in the main thread,
what needs PostgreSQL in another, so that a database that does not answer leaves the browsers in good hands; and runs
that lost their guard in a third, as neither may hold that up.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import threading
import time
from collections.abc import Callable

import django
import structlog

from rpa_tasks.browsers import health, recycling, registry, warmth
from rpa_tasks.browsers.registry import Lock
from rpa_tasks.supervisor.orphans import end_unguarded

log = structlog.get_logger(__name__)

PASS = 5.0  #: seconds between passes
LOOK = 1.0  #: seconds between looks whether the worker is still there
FAREWELL = 120.0  #: seconds for runs that outlive their worker to end, before the rest is left to the next one


def main(words: list[str]) -> None:
    order = _parser().parse_args(words)
    queues = [name for name in order.queues.split(",") if name]
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.local")
    django.setup()
    worker = Worker(order.parent)
    lock = Lock(registry.browsers() / "maintainer.lock")
    while not lock.take():
        if worker.is_gone(within=LOOK):
            return
    log.info("maintainer_started", queues=queues)
    maintain(worker, queues)
    say_farewell(lock)


class Worker:
    """The process that started this one, told by the pipe to it. The parent's pid says the same where a child of the
    worker has inherited the other end of the pipe."""

    def __init__(self, parent: int) -> None:
        self._parent = parent or os.getppid()
        self._gone = False

    def is_gone(self, *, within: float) -> bool:
        """Waits until it is, at most so many seconds."""
        ends_at = time.monotonic() + within
        while not self._gone:
            left = max(0.0, min(LOOK, ends_at - time.monotonic()))
            if select.select([sys.stdin], [], [], left)[0]:
                self._gone = not os.read(sys.stdin.fileno(), 1024)
            if os.getppid() != self._parent:
                self._gone = True
            if time.monotonic() >= ends_at:
                break
        return self._gone


def maintain(worker: Worker, queues: list[str]) -> None:
    """A pass every few seconds until the worker is gone."""
    threading.Thread(target=_do_chores, args=(queues,), daemon=True).start()
    threading.Thread(target=_watch_over_runs, daemon=True).start()
    steps = browser_steps()
    while not worker.is_gone(within=PASS):
        take_steps(steps)


def browser_steps() -> list[Callable[[], object]]:
    """One pass, in this order: what frees slots comes before what fills them."""
    return [
        recycling.end_abandoned,
        recycling.end_unrecorded,
        recycling.free_quarantined,
        recycling.end_worn,
        health.check_idle,
        recycling.end_surplus,
        warmth.Warmth().keep,
    ]


def take_steps(steps: list[Callable[[], object]]) -> None:
    """One that fails does not keep the others from being taken."""
    for step in steps:
        try:
            step()
        except Exception as error:
            log.exception("step_failed", step=getattr(step, "__qualname__", repr(step)), error=str(error))


def say_farewell(lock: Lock) -> None:
    """End what nobody uses, and what nobody guards. Runs may go on without their worker for moments; but as soon as
    another maintainer takes over, the rest is its."""
    ends_at = time.monotonic() + FAREWELL
    while recycling.end_unused() + end_unguarded() and time.monotonic() < ends_at:
        lock.release()
        time.sleep(LOOK)
        if not lock.take():
            return
    log.info("maintainer_ended")


def _watch_over_runs() -> None:
    while True:
        take_steps([end_unguarded])
        time.sleep(PASS)


def _do_chores(queues: list[str]) -> None:
    from rpa_tasks.maintainer.housekeeping import Chores  # its models want Django to be set up

    chores = Chores(queues)
    while True:
        if chores.can_be_done():
            take_steps(chores.steps)
        time.sleep(PASS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rpa_tasks.maintainer.main")
    parser.add_argument("--queues", default="", help="what the worker consumes, separated by commas")
    parser.add_argument("--parent", type=int, default=0, help="the pid of the worker")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
