"""Start the command in a new session, with exactly the ordered environment, bound to the supervisor's life."""

from __future__ import annotations

import ctypes
import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, NoReturn
else:
    import _signal as signal  # `signal` imports enum: 4 ms

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
REASONS = {
    errno.ENOENT: "command_missing",
    errno.ENOTDIR: "command_missing",
    errno.EACCES: "command_not_executable",
    errno.EPERM: "command_not_executable",
    errno.ENOEXEC: "command_not_executable",
    errno.E2BIG: "arguments_too_long",
}

_libc = ctypes.CDLL(None)


class NotStarted(Exception):
    """The command did not start. The arguments are a reason code and a sentence."""


def adopt_orphans(adopt: bool = True) -> bool:
    """Make this process, instead of init, the parent of orphaned descendants such as daemons.

    Returns whether it was that before.
    """
    before = ctypes.c_int()
    _libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
    return bool(before.value)


def start_command(order: dict[str, Any], outputs: tuple[int, int]) -> int:
    """Start the command and return its pid, after a successful exec. With a `prefix` it is the pid of the prefix's
    program.

    Raises: `NotStarted`.
    """
    argv, env, cwd = order["argv"], order["env"], order["cwd"]
    if order["prefix"]:
        _check_program(argv[0], env, cwd)
    guard = os.getpid()
    report_end, error_end = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        raise NotStarted("fork_failed", error.strerror) from None
    if pid == 0:
        _exec_command([*order["prefix"], *argv], env, cwd, outputs, guard, error_end)
    os.close(error_end)
    failure = os.read(report_end, 32)
    os.close(report_end)
    if failure:
        os.waitpid(pid, 0)
        step, code = failure.split()
        raise NotStarted(*_describe_start_error(step, int(code), argv[0], cwd))
    return pid


def _check_program(program: str, env: dict[str, str], cwd: str) -> None:
    """Check program and directory in advance: the prefix's program would report a missing one only as an exit code."""
    if not os.path.isdir(cwd):
        raise NotStarted(*_describe_start_error(b"chdir", errno.ENOENT, program, cwd))
    folders = [cwd] if os.path.dirname(program) else env.get("PATH", os.defpath).split(os.pathsep)
    found = [path for folder in folders if os.path.lexists(path := os.path.join(folder, program))]
    if not any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
        raise NotStarted(*_describe_start_error(b"exec", errno.EACCES if found else errno.ENOENT, program, cwd))


def _describe_start_error(step: bytes, code: int, program: str, cwd: str) -> tuple[str, str]:
    if step == b"chdir":
        return "directory_missing", f"{os.strerror(code)}: {cwd}"
    return REASONS.get(code, "exec_failed"), f"{os.strerror(code)}: {program}"


def _exec_command(
    argv: list[str], env: dict[str, str], cwd: str, outputs: tuple[int, int], guard: int, error_end: int
) -> NoReturn:
    step = b"setup"
    try:
        os.setsid()
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(127)  # the supervisor died before the kernel had this setting
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(outputs[0], 1)
        os.dup2(outputs[1], 2)  # exec closes all others
        _reset_signals()
        step = b"chdir"
        os.chdir(cwd)
        step = b"exec"
        os.execvpe(argv[0], argv, env)  # noqa: S606  (a shell is what we avoid)
    except OSError as error:
        os.write(error_end, b"%s %d" % (step, error.errno or 0))
    finally:
        os._exit(127)


def _reset_signals() -> None:
    """Reset all signal handlers. Ignored signals stay ignored across exec, and SIGTERM must have its effect."""
    signal.set_wakeup_fd(-1)
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue  # SIGKILL, SIGSTOP and signals reserved by the C library
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
