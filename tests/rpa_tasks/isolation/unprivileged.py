"""Become an ordinary user and run a command: `python unprivileged.py UID COMMAND…`. For root alone.

The interpreter may lie in a home that is closed to others. An open folder covers that home in a mount namespace of this
process, and the interpreter is bound there. No mode on the machine changes.
"""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWNS = 0x20000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
HOME = "/root"

_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind, options)]
    _check_call(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def _check_call(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)} ({what})")


if __name__ == "__main__":
    uid, *command = sys.argv[1:]
    _check_call(_libc.unshare(CLONE_NEWNS), "unshare")
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    python = os.path.realpath(sys.base_prefix)
    source = os.open(python, os.O_PATH | os.O_CLOEXEC)  # before it is covered
    _mount("tmpfs", HOME, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    if python.startswith(f"{HOME}/"):
        os.umask(0o022)
        os.makedirs(python)
        _mount(f"/proc/self/fd/{source}", python, None, MS_BIND | MS_REC)
    os.setgroups([])
    os.setresgid(int(uid), int(uid), int(uid))
    os.setresuid(int(uid), int(uid), int(uid))
    os.execvp(command[0], command)
