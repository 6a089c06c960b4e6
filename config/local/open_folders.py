"""Run a program in a private mount namespace, where open folders cover closed ones. For root alone.

`python -I -S open_folders.py MOUNTS COMMAND…`: MOUNTS is a JSON list of [directory, what], outermost first. What is
COVER (an empty directory covers it) or BIND (it stays reachable below a covered one).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

COVER, BIND = "cover", "bind"
CLONE_NEWNS = 0x20000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000

_libc = ctypes.CDLL(None, use_errno=True)


def open_folders(mounts: Sequence[Sequence[str]]) -> None:
    """Mount for this process and its children. Raises `OSError`.

    The sources of binds are opened first, because they may lie below a covered directory.
    """
    _check_call(_libc.unshare(CLONE_NEWNS), "unshare")
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path, what in mounts if what == BIND}
    mask = os.umask(0o022)  # another account needs access through the directories created here
    for path, what in mounts:
        if what == BIND:
            os.makedirs(path, exist_ok=True)
            _mount(f"/proc/self/fd/{sources[path]}", path, None, MS_BIND | MS_REC)
        else:
            mode = "1777" if os.stat(path).st_mode & 0o1000 else "0755"
            _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, f"mode={mode}")
    os.umask(mask)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind, options)]
    _check_call(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def _check_call(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)} ({what})")


if __name__ == "__main__":
    open_folders(json.loads(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606  (no shell is meant)
