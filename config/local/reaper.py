"""End every process that a run of tests, benchmarks or the demo started, however that run ends.

A second process watches the run. It acts when the run asks for it or has ended, also by SIGKILL. It finds the
processes by an inherited variable. Runs may be nested: a test worker in a test run, a demo in a test. The value of the
variable then holds the names of the outer runs too.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil  # type: ignore[import-untyped,unused-ignore]

from config.local.processes import (
    MARK,
    ROOT,
    command_line_of,
    is_alive,
    kill_leftovers,
    send_signal,
    variable_of,
    wait_until,
)

TERMINATE_SECONDS = 20.0  #: seconds from SIGTERM to SIGKILL; enough for a test stack unless the machine is overloaded
END_WITHIN = 90.0  #: seconds that a run waits for its reaper
POLL_INTERVAL = 0.5  #: seconds between checks of the run


class Reaper:
    """Handle of the second process."""

    def __init__(self, process: subprocess.Popen[bytes], outer: str | None) -> None:
        self._process = process
        self._outer = outer

    @classmethod
    def start(cls, state_dir: Path | None = None) -> Reaper:
        """Mark this process and all processes that it starts from now on.

        Args:
            state_dir: its embedded servers are stopped too, also those of an earlier run.
        """
        outer, name = os.environ.get(MARK), f"{os.getpid()}-{time.time_ns()}"
        mark = f"{outer}/{name}" if outer else name
        environment = {key: value for key, value in os.environ.items() if key != MARK}
        folder = [str(state_dir.resolve())] if state_dir else []
        process = subprocess.Popen(
            [sys.executable, "-m", "config.local.reaper", str(os.getpid()), mark, *folder],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        os.environ[MARK] = mark
        return cls(process, outer)

    def end(self) -> None:
        """End the processes of this run and wait. A second call does nothing.

        Raises:
            TimeoutError: after 90 s. The reaper continues.
        """
        if self._outer is None:
            os.environ.pop(MARK, None)
        else:
            os.environ[MARK] = self._outer
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.write(b"end\n")
                self._process.stdin.close()
        try:
            self._process.wait(END_WITHIN)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"processes of this run have not ended within {END_WITHIN:.0f} s") from None


@contextmanager
def bounded_run(state_dir: Path | None = None) -> Iterator[None]:
    """End all processes at the end of the run. SIGTERM and SIGHUP act like Ctrl-C, so that its clean-up runs first."""
    reaper = Reaper.start(state_dir)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _raise_keyboard_interrupt)
    try:
        yield
    finally:
        reaper.end()


def _raise_keyboard_interrupt(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def processes_of_run(mark: str) -> list[psutil.Process]:
    """Return the processes of this run and of nested runs, with their descendants.

    Only root can read the environment of a process that is not dumpable; its parent's is usually readable.
    """
    marked = [each for each in psutil.process_iter() if f"{variable_of(each, MARK)}/".startswith(f"{mark}/")]
    found = {process.pid: process for process in marked}
    for process in marked:
        with suppress(psutil.NoSuchProcess):
            found.update({child.pid: child for child in process.children(recursive=True)})
    return [process for process in found.values() if process.pid != os.getpid() and is_alive(process)]


def wait_for_owner(owner: psutil.Process | None) -> None:
    """Wait until the owner has ended or requests the end."""
    while owner is not None and is_alive(owner):
        readable, _, _ = select.select([sys.stdin], [], [], POLL_INTERVAL)
        if readable and os.read(sys.stdin.fileno(), 100):
            return
        if readable:  # end of the pipe: the owner has ended or is ending
            wait_until(lambda: not is_alive(owner), POLL_INTERVAL)
            return


def end_processes_of_run(mark: str, state_dir: Path | None) -> list[psutil.Process]:
    """End all processes of the run. Returns those that did not end."""
    for process in processes_of_run(mark):
        # PostgreSQL waits for its clients after SIGTERM, and ends them after SIGINT.
        is_postgres = any(os.path.basename(word) == "postgres" for word in command_line_of(process)[:1])
        send_signal(process, signal.SIGINT if is_postgres else signal.SIGTERM)
    if state_dir is not None:
        _stop_servers(state_dir)
    return kill_leftovers(lambda: processes_of_run(mark), TERMINATE_SECONDS)


def _stop_servers(state_dir: Path) -> None:
    from config.local import servers  # imports clients that the watching process does not need
    from config.local.endpoints import EmbeddedServerError

    try:
        servers.stop_servers(state_dir)
    except EmbeddedServerError as error:
        sys.stderr.write(f"Aftertouch: {error}\n")


def main(pid: str, mark: str, state_dir: str = "") -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        owner = psutil.Process(int(pid))
    except psutil.NoSuchProcess:
        owner = None
    wait_for_owner(owner)
    left = end_processes_of_run(mark, Path(state_dir) if state_dir else None)
    for process in left:
        sys.stderr.write(f"Aftertouch: process {process.pid} of this run does not end\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
