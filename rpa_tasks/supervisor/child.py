"""Start the command: in a session of its own, with exactly the environment of the order, bound to the guard's life."""

from __future__ import annotations

import ctypes
import errno
import os
import signal

from rpa_tasks.supervisor import confine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
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
    """The command did not begin: the first argument says why in one word, the second in a sentence."""


def adopt_orphans(adopt: bool = True) -> None:
    """A daemon that left its parent comes back to us instead of to init."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def start(order: dict[str, Any], outputs: tuple[int, int]) -> int:
    """Returns the pid, once the program has really been entered. Raises `NotStarted`. With a `prefix` that is the
    prefix's program, which starts the command as a process of its own."""
    argv, env, cwd = order["argv"], order["env"], order["cwd"]
    if order["prefix"]:
        _look_for(argv[0], env, cwd)
    guard = os.getpid()
    told, tells = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        raise NotStarted("fork_failed", error.strerror) from None
    if pid == 0:
        _become([*order["prefix"], *argv], env, cwd, order["confine"], outputs, guard, tells)
    os.close(tells)
    failure = os.read(told, 32)
    os.close(told)
    if failure:
        os.waitpid(pid, 0)
        step, code = failure.split()
        raise NotStarted(*_explain(step, int(code), argv[0], cwd))
    return pid


def _look_for(program: str, env: dict[str, str], cwd: str) -> None:
    """The prefix's program would report what is missing only as an exit code."""
    if not os.path.isdir(cwd):
        raise NotStarted(*_explain(b"chdir", errno.ENOENT, program, cwd))
    folders = [cwd] if os.path.dirname(program) else env.get("PATH", os.defpath).split(os.pathsep)
    found = [path for folder in folders if os.path.lexists(path := os.path.join(folder, program))]
    if not any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
        raise NotStarted(*_explain(b"exec", errno.EACCES if found else errno.ENOENT, program, cwd))


def _explain(step: bytes, code: int, program: str, cwd: str) -> tuple[str, str]:
    if step == b"chdir":
        return "directory_missing", f"{os.strerror(code)}: {cwd}"
    if step == b"confine":
        return "not_isolated", f"{os.strerror(code)}: {program} was not started, it cannot be isolated"
    return REASONS.get(code, "exec_failed"), f"{os.strerror(code)}: {program}"


def _become(
    argv: list[str],
    env: dict[str, str],
    cwd: str,
    plan: dict[str, Any],
    outputs: tuple[int, int],
    guard: int,
    tells: int,
) -> NoReturn:
    step = b"setup"
    try:
        os.setsid()
        step = b"confine"
        confine.enter(plan)
        step = b"setup"
        # Another uid would clear it.
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(127)  # the guard died before the kernel was told
        _plug(outputs)
        _forget_signals()
        step = b"chdir"
        os.chdir(cwd)
        step = b"exec"
        os.execvpe(argv[0], argv, env)  # noqa: S606  (a shell is what we avoid)
    except OSError as error:
        os.write(tells, b"%s %d" % (step, error.errno or 0))
    finally:
        os._exit(127)


def _plug(outputs: tuple[int, int]) -> None:
    """Every other descriptor closes itself when the program is entered."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(outputs[0], 1)
    os.dup2(outputs[1], 2)


def _forget_signals() -> None:
    """A worker ignores some, Python others: what is ignored stays so across exec, and SIGTERM must count."""
    signal.set_wakeup_fd(-1)
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue  # SIGKILL, SIGSTOP and those of the C library
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
