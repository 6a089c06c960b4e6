"""Start the maintainer from a worker, restart it after a crash, and stop it with the worker.

The maintainer runs as long as the pipe to its standard input is open. So it also ends when the worker is killed.

The worker adopts and reaps orphans, because PID 1 of a container may reap nothing: browsers, which outlive the process
that started them, their helpers, and what killed processes leave.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import structlog
from django.conf import settings

from rpa_tasks.supervisor.processes import adopt_orphans, reap_orphans
from rpa_tasks.worker import node

log = structlog.get_logger(__name__)

INTERVAL = 5.0  #: seconds between looks at the maintainer and at orphans
STOP_WITHIN = 30.0  #: seconds to end the browsers
STOP_MARGIN = 5.0  #: seconds beyond, after which a stop goes on without the thread

_supervision: Supervision | None = None


def start_maintainer(queues: Sequence[str] = (), processes: int = 0) -> None:
    """Keep a maintainer running. Idempotent."""
    global _supervision
    if _supervision is None:
        _supervision = Supervision(queues, processes)


def stop_maintainer() -> None:
    """Stop the maintainer, which ends unused browsers, and wait for it."""
    global _supervision
    supervision, _supervision = _supervision, None
    if supervision is not None:
        supervision.stop()


class Supervision:
    """Thread that keeps one maintainer running, and reaps orphans."""

    def __init__(self, queues: Sequence[str], processes: int = 0) -> None:
        self._queues = list(queues)
        self._processes = processes
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._supervise, name="maintainer", daemon=True)
        adopt_orphans()
        self._thread.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def stop(self) -> None:
        """Stop the maintainer and wait for it, up to a limit. Idempotent."""
        self._stopping.set()
        self._thread.join(STOP_WITHIN + STOP_MARGIN)
        if self._thread.is_alive():  # the disk of its program or of the node's files does not answer
            log.warning("maintainer_not_stopped", pid=self.pid)
            if self._process:
                self._process.kill()
        adopt_orphans(False)

    def _supervise(self) -> None:
        while not self._stopping.is_set():
            if self._process is None or self._process.poll() is not None:
                if self._process and self._process.stdin:
                    log.warning("maintainer_died", exit_code=self._process.returncode)
                    self._process.stdin.close()
                try:
                    self._process = self.launch()
                except OSError as error:  # no memory, process or descriptor is left for a moment
                    log.warning("maintainer_not_started", error=str(error))
            reap_orphans([self.pid] if self.pid else [])
            self._stopping.wait(INTERVAL)
        if self._process:
            with self._process as process:
                assert process.stdin
                process.stdin.close()
                try:
                    process.wait(STOP_WITHIN)
                except subprocess.TimeoutExpired:
                    log.warning("maintainer_killed", pid=process.pid)
                    process.kill()
        reap_orphans([])

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the maintainer."""
        try:
            node.record_worker(self._queues, self._processes)
        except OSError as error:  # the disk is full, and the maintainer is what frees space
            log.warning("node_queues_not_recorded", error=str(error))
        words = ["--queues", ",".join(self._queues), "--parent", str(os.getpid())]
        return subprocess.Popen(  # noqa: S603  (our own module; the words are ours)
            [sys.executable, "-m", "rpa_tasks.maintainer.main", *words],
            stdin=subprocess.PIPE,
            cwd=settings.BASE_DIR,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": settings.SETTINGS_MODULE},
            start_new_session=True,  # the worker handles Ctrl-C; the maintainer ends with the pipe
        )
