"""Confine the program that this process will exec: another uid, a private mount namespace, few TCP ports.

It runs between fork and exec and needs only the standard library. `confine_process` takes a plan, a JSON object with
optional keys:

    uid         become this uid and gid, without groups or capabilities; root only
    mounts      [directory, what] pairs, outermost first, in a private mount namespace; root only. What is HIDE (an
                empty directory covers it), READ or WRITE (it is bound if a directory above it is hidden)
    ruleset     descriptor of a Landlock ruleset (`create_ruleset`), which limits TCP connections
    seal        refuse the system calls that reach a TCP port around Landlock
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)

HIDE, READ, WRITE = "hide", "read", "write"
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 38, 22
PR_SET_DUMPABLE = 4
CLONE_NEWNS = 0x20000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 0x1, 0x2, 0x4, 0x8, 0x20
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
CONNECT_TCP, RULE_NET_PORT = 2, 2
#: First kernel whose procfs has options per mount.
OWN_PROC_SINCE = (5, 8)


class _NetPort(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("port", ctypes.c_uint64)]


def confine_process(plan: dict[str, Any]) -> None:
    """Restrict this process permanently. Raises `OSError`; the caller must not exec in that case."""
    if "mounts" in plan:
        _mount_all(plan["mounts"])
    if "uid" in plan:
        os.setgroups([])
        os.setresgid(plan["uid"], plan["uid"], plan["uid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    if plan:
        _check_call(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if plan.get("ruleset", -1) >= 0:
        _check_call(_libc.syscall(RESTRICT_SELF, plan["ruleset"], 0), "landlock")
        os.close(plan["ruleset"])
    if plan.get("seal"):
        _block_bypass_calls()


# --- files --------------------------------------------------------------------------------------------------------


def _mount_all(mounts: Sequence[Sequence[str]]) -> None:
    """Mount the plan. The sources of binds are opened first, because they may lie below a hidden directory."""
    _check_call(_libc.unshare(CLONE_NEWNS), "unshare")
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path, what in mounts if what != HIDE}
    mask = os.umask(0o022)  # the other uid needs access through the directories created here
    for path, what in mounts:
        if what != HIDE:
            os.makedirs(path, exist_ok=True)
            _mount(f"/proc/self/fd/{sources[path]}", path, None, MS_BIND | MS_REC)
            if what == READ:
                _mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY)
        elif os.path.isdir(path):
            mode = "1777" if os.stat(path).st_mode & 0o1000 else "0755"
            _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, f"mode={mode}")
    os.umask(mask)
    if _kernel_version() >= OWN_PROC_SINCE:  # an earlier kernel would hide processes from the whole machine
        _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind, options)]
    _check_call(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def _kernel_version() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()) or 0)


# --- TCP ports ----------------------------------------------------------------------------------------------------


def create_ruleset(ports: Iterable[int]) -> int:
    """Create a Landlock ruleset that allows TCP connections to these ports only.

    Returns its descriptor, which the caller closes; -1 if the kernel has no such rule (before 6.7).
    """
    if _libc.syscall(CREATE_RULESET, None, 0, 1) < 4:
        return -1
    handled = (ctypes.c_uint64 * 2)(0, CONNECT_TCP)
    descriptor: int = _check_call(_libc.syscall(CREATE_RULESET, handled, ctypes.sizeof(handled), 0), "landlock")
    rule = _NetPort(CONNECT_TCP, 0)
    address, syscall = ctypes.byref(rule), _libc.syscall
    for port in ports:
        rule.port = port
        _check_call(syscall(ADD_RULE, descriptor, RULE_NET_PORT, address, 0), "landlock")
    return descriptor


def _block_bypass_calls() -> None:
    """Refuse the system calls that bypass Landlock's check of connect(2) on TCP sockets.

    MPTCP and SMC fall back to TCP. Fast Open connects in a send. io_uring makes system calls that no filter sees. An
    upper-layer protocol of a socket (TCP_ULP, such as SMC) has calls of its own. Calls of another architecture have
    other numbers. A kernel for an architecture without numbers here gets no filter.
    """
    numbers = {
        "x86_64": (0xC000003E, 41, 44, 46, 307, 54),
        "aarch64": (0xC00000B7, 198, 206, 211, 269, 208),
    }.get(os.uname().machine)  # fmt: skip
    if numbers is None:
        return
    arch, socket, sendto, sendmsg, sendmmsg, setsockopt = numbers
    load, equal, at_least, some_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse = (give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050000 | errno.EPERM)
    absent = (give, 0, 0, 0x00050000 | errno.ENOSYS)
    number, flags_of = 0, {sendto: 16 + 8 * 3, sendmsg: 16 + 8 * 2, sendmmsg: 16 + 8 * 3}
    first, second, third = 16, 16 + 8, 16 + 8 * 2  # arguments; the kernel takes the lower half of these
    fast_open, mptcp, af_smc, smc, io_uring_setup, x32 = 0x20000000, 262, 43, 256, 425, 0x40000000
    tcp, ulp = 6, 31
    program = [
        (load, 0, 0, 4), (equal, 1, 0, arch), absent,
        (load, 0, 0, number), (at_least, 0, 1, x32), absent, (equal, 0, 1, io_uring_setup), absent,
        (equal, 0, 7, socket), (load, 0, 0, first), (equal, 0, 1, af_smc), refuse,
        (load, 0, 0, third), (equal, 1, 0, mptcp), (equal, 0, 1, smc), refuse, (load, 0, 0, number),
        (equal, 0, 6, setsockopt), (load, 0, 0, second), (equal, 0, 3, tcp),
        (load, 0, 0, third), (equal, 0, 1, ulp), refuse, (load, 0, 0, number),
    ]  # fmt: skip
    for call, at in flags_of.items():
        program += [(equal, 0, 4, call), (load, 0, 0, at), (some_bit, 0, 1, fast_open), refuse, (load, 0, 0, number)]
    program.append(allow)
    code = b"".join(struct.pack("=HBBI", operation, yes, no, value) for operation, yes, no, value in program)
    kept = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("=H6xQ", len(program), ctypes.addressof(kept))
    _check_call(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(header), 0, 0), "seccomp")


def block_inspection() -> None:
    """Prevent processes of the same uid from reading this one's environment or memory and from tracing it.

    Forked children inherit this, exec resets it. The process leaves no core dump.
    """
    _check_call(_libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


def _check_call(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)} ({what})")
    return result


def main(plan: str, command: list[str]) -> None:
    """Confine and exec a command: `python -I -S confine.py PLAN COMMAND…`."""
    import json

    confine_process(json.loads(plan))
    os.execvp(command[0], command)  # noqa: S606  (no shell is meant)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
