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

from config.local.processes import MARK, ROOT, environment_of, is_alive, kill_leftovers, send_signal, wait_until

TERMINATE_SECONDS = 20.0  #: seconds from SIGTERM to SIGKILL; enough for a test stack unless the machine is overloaded
END_WITHIN = 90.0  #: seconds that a run waits for its reaper
POLL_INTERVAL = 0.5  #: seconds between checks of the run


def start_reaper(state_dir: Path | None = None) -> subprocess.Popen[bytes]:
    """Mark this process and all processes that it starts from now on. Returns the second process for `end_run`.

    Args:
        state_dir: its embedded servers are stopped too, also those of an earlier run.
    """
    environment = dict(os.environ)
    outer = environment.pop(MARK, "")
    os.environ[MARK] = f"{outer}/{os.getpid()}-{time.time_ns()}".removeprefix("/")
    return subprocess.Popen(
        [
            sys.executable, "-m", "config.local.reaper", str(os.getpid()), os.environ[MARK],
            *([str(state_dir.resolve())] if state_dir else []),
        ],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def end_run(reaper: subprocess.Popen[bytes]) -> None:
    """End the processes of this run and wait. A second call does nothing.

    Raises:
        TimeoutError: after 90 s. The reaper continues.
    """
    if reaper.stdin is not None and not reaper.stdin.closed:
        with suppress(BrokenPipeError):
            reaper.stdin.write(b"end\n")
            reaper.stdin.close()
    try:
        reaper.wait(END_WITHIN)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"processes of this run have not ended within {END_WITHIN:.0f} s") from None


@contextmanager
def bounded_run() -> Iterator[None]:
    """End all processes at the end of the run. SIGTERM and SIGHUP act like Ctrl-C, so that its clean-up runs first."""
    reaper = start_reaper()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    try:
        yield
    finally:
        end_run(reaper)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def processes_of_run(mark: str) -> list[psutil.Process]:
    """Return the processes of this run and of nested runs, with their descendants.

    Only root can read the environment of a process that is not dumpable; its parent's is usually readable.
    """
    marked = [each for each in psutil.process_iter() if f"{environment_of(each).get(MARK)}/".startswith(f"{mark}/")]
    found = {process.pid: process for process in marked}
    for process in marked:
        with suppress(psutil.NoSuchProcess):
            found.update({child.pid: child for child in process.children(recursive=True)})
    return [process for process in found.values() if process.pid != os.getpid() and is_alive(process)]


def wait_for_owner(pid: int) -> None:
    """Wait until the owner has ended or requests the end."""
    with suppress(psutil.NoSuchProcess):
        owner = psutil.Process(pid)
        while is_alive(owner):
            readable, _, _ = select.select([sys.stdin], [], [], POLL_INTERVAL)
            if readable:
                if not os.read(sys.stdin.fileno(), 100):  # end of the pipe: the owner has ended or is ending
                    wait_until(lambda: not is_alive(owner), POLL_INTERVAL)
                return


def main(pid: str, mark: str, state_dir: str = "") -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wait_for_owner(int(pid))
    for process in processes_of_run(mark):
        send_signal(process, signal.SIGTERM)
    if state_dir:
        from config.local import endpoints, servers  # imports clients that the watching process does not need

        try:
            servers.stop_servers(Path(state_dir))
        except endpoints.EmbeddedServerError as error:
            sys.stderr.write(f"Aftertouch: {error}\n")
    left = kill_leftovers(lambda: processes_of_run(mark), TERMINATE_SECONDS)
    for process in left:
        sys.stderr.write(f"Aftertouch: process {process.pid} of this run does not end\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
