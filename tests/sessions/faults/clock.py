"""A clock for some processes only, which jumps while they run. Like on a node whose clock is set, the monotonic clock
goes on."""

from __future__ import annotations

from pathlib import Path

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))


def missing_for_clocks() -> str:
    return "" if LIBRARIES else "libfaketime (Debian: faketime)"


class Clock:
    def __init__(self, file: Path) -> None:
        self._file = file
        self.jump(0)

    def jump(self, seconds: int) -> None:
        """To so many seconds ahead of everybody else."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.replace(self._file)

    @property
    def env(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(LIBRARIES[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }
