"""Maintain the browsers and runs of a node: `python -m rpa_tasks.maintainer.main`.

Each execution worker of the node starts one; the holder of the lock works and the others wait. It stops when its
standard input closes or its parent ends, not at SIGTERM, and then ends unused browsers. The main thread maintains the
browsers. One thread reports the node, one cleans it, one ends runs without a supervisor process, others host the
take-overs. So none of them delays another.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import django
import structlog
from django.db import DatabaseError, InterfaceError, connection

from rpa_tasks.browsers import registry, upkeep
from rpa_tasks.browsers.registry import Lock
from rpa_tasks.supervisor.runs import end_unsupervised

log = structlog.get_logger(__name__)

PASS_INTERVAL = 5.0  #: seconds between passes
CLEAN_INTERVAL = 60.0  #: seconds between passes that clean
POLL_INTERVAL = 1.0  #: seconds between checks of the worker
EXIT_TIME_LIMIT = 120.0  #: seconds to wait for runs that outlive their worker; the next maintainer ends the rest


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m rpa_tasks.maintainer.main")
    parser.add_argument("--queues", default="", help="queues of the worker, separated by commas")
    parser.add_argument("--parent", type=int, default=0, help="process id of the worker")
    order = parser.parse_args(words)
    queues = [name for name in order.queues.split(",") if name]
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.production")
    django.setup()
    # A SIGTERM to all processes of a stack must not stop it before runs and browsers have ended. Not SIG_IGN: browsers
    # would inherit that.
    signal.signal(signal.SIGTERM, lambda *_: None)
    parent = order.parent or os.getppid()
    lock = Lock(registry.browsers_dir() / "maintainer.lock")
    while not lock.try_acquire():
        if is_gone(parent, within=POLL_INTERVAL):
            return
    log.info("maintainer_started", queues=queues)
    run_passes(parent, queues)
    end_unused_at_exit(lock)


def is_gone(parent: int, *, within: float) -> bool:
    """Wait at most `within` seconds for the end of the worker. Returns whether it has ended.

    Its pipe closes then. The pid is checked as well: a child of it may have inherited the other end of the pipe.
    """
    ends_at = time.monotonic() + within
    while os.getppid() == parent:
        left = max(0.0, min(POLL_INTERVAL, ends_at - time.monotonic()))
        if select.select([sys.stdin], [], [], left)[0] and not os.read(sys.stdin.fileno(), 1024):
            return True
        if time.monotonic() >= ends_at:
            return False
    return True


def run_passes(parent: int, queues: list[str]) -> None:
    """Run a pass every few seconds until the worker has ended."""
    from rpa_tasks.maintainer import cleaning  # its models need `django.setup`
    from rpa_tasks.maintainer.housekeeping import Housekeeping
    from rpa_tasks.takeover.host import TakeOverHost

    prewarmer = upkeep.Prewarmer()
    threads = (
        (PASS_INTERVAL, [end_unsupervised], False),
        (PASS_INTERVAL, Housekeeping(queues, prewarmer).steps, True),
        (CLEAN_INTERVAL, cleaning.STEPS, True),
    )
    for interval, steps, needs_database in threads:
        threading.Thread(target=_repeat, args=(interval, steps, needs_database), daemon=True).start()
    take_overs = TakeOverHost()
    take_overs.start()
    # Steps that free slots precede those that use them.
    upkeep_steps = [
        upkeep.end_unfit,
        upkeep.check_idle,
        upkeep.end_surplus,
        prewarmer.prewarm,
    ]
    while not is_gone(parent, within=PASS_INTERVAL):
        run_steps(upkeep_steps)
    take_overs.stop()


def _repeat(interval: float, steps: Sequence[Callable[[], object]], needs_database: bool) -> None:
    while True:
        if not needs_database or is_database_available():
            run_steps(steps)
            connection.close()  # the next pass may be far away
        time.sleep(interval)


def is_database_available() -> bool:
    """Return whether PostgreSQL is available to this thread."""
    try:
        connection.ensure_connection()
    except (DatabaseError, InterfaceError) as error:
        log.warning("database_unavailable", error=str(error))
        return False
    return True


def run_steps(steps: Sequence[Callable[[], object]]) -> None:
    """Run all steps. An error in one step does not prevent the next."""
    for step in steps:
        try:
            step()
        except Exception as error:
            log.exception("maintenance_step_failed", step=getattr(step, "__qualname__", repr(step)), error=str(error))


def end_unused_at_exit(lock: Lock) -> None:
    """End unused browsers and unsupervised runs. Runs may outlive their worker for a moment.

    Stops after 120 s, or as soon as another maintainer takes the lock.
    """
    ends_at = time.monotonic() + EXIT_TIME_LIMIT
    while upkeep.end_unused() + end_unsupervised() and time.monotonic() < ends_at:
        lock.release()
        time.sleep(POLL_INTERVAL)
        if not lock.try_acquire():
            return
    log.info("maintainer_ended")


if __name__ == "__main__":
    main(sys.argv[1:])
