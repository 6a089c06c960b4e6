"""Run a program with a clock that is ahead by the seconds in a file, and jumps when the file changes:

    python -m tests.sessions.faults.shifted_clock FILE manage.py watch_sessions

As on a node whose clock is set, the monotonic clock goes on, and sleepers do not notice. libfaketime would do the same
to programs that are not Python, but lets `time.sleep` fail now and then.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from pathlib import Path

import time_machine

LOOK_EVERY = 0.1  #: seconds


class ShiftedClock:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._clock = time_machine.travel(0, tick=True).start()
        self._ahead = self._told()
        self._jump()
        self.follow()
        os.register_at_fork(after_in_child=self.follow)  # no thread comes along

    def follow(self) -> None:
        threading.Thread(target=self._follow, name="odd-clock", daemon=True).start()

    def _follow(self) -> None:
        while True:
            if (told := self._told()) != self._ahead:
                self._ahead = told
                self._jump()
            time.sleep(LOOK_EVERY)

    def _told(self) -> float:
        return float(self._file.read_text())

    def _jump(self) -> None:
        self._clock.move_to(time_machine.escape_hatch.time.time() + self._ahead)


def set_clock(file: Path, seconds: float) -> None:
    """To so many seconds ahead."""
    new = file.with_suffix(".new")
    new.write_text(f"{seconds}")
    new.replace(file)


def main() -> None:
    ShiftedClock(Path(sys.argv[1]))
    del sys.argv[:2]
    sys.path.insert(0, os.getcwd())
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
