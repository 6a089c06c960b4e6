"""Start a command, and read and signal processes through /proc: descent, environment, uid, end.

The kernel reuses pids. So a process is identified by its pid and start time. A signal goes through a pidfd that was
compared with both.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Container, Iterator
    from typing import Any, NoReturn
else:
    import _signal as signal  # `signal` imports enum: 4 ms

#: After SIGKILL the kernel needs moments. A longer wait means that a process hangs in the kernel or is not ours.
PROOF_SECONDS = 5.0
PAUSE_SECONDS = 0.02
EXEC_READS, EXEC_PAUSE = 200, 0.001  #: an execve takes microseconds, unless the kernel suspends it


class Process:
    """Snapshot of one process."""

    __slots__ = ("gone", "group", "parent", "pid", "session", "started")

    def __init__(self, pid: int, stat: bytes) -> None:
        fields = stat[stat.rindex(b")") + 2 :].split()
        self.pid = pid
        self.parent, self.group, self.session = (int(field) for field in fields[1:4])
        self.started = int(fields[19])
        # A zombie is harmless, unless only its first thread has ended.
        self.gone = fields[0] in (b"Z", b"X") and int(fields[17]) <= 1

    def send(self, number: int) -> None:
        """Signal this process; no other process with the same pid."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return
        try:
            now = read_process(self.pid)
            if now is not None and now.started == self.started:
                signal.pidfd_send_signal(descriptor, number)
        except OSError:
            pass  # it has just ended, or belongs to another user
        finally:
            os.close(descriptor)


def read_process(pid: int) -> Process | None:
    stat = read_file(f"/proc/{pid}/stat")
    return Process(pid, stat) if stat else None


def is_alive(pid: int, ticks: int) -> bool:
    """Return whether the process with this start time is still running."""
    process = read_process(pid)
    return process is not None and not process.gone and process.started == ticks


def all_processes() -> Iterator[Process]:
    """Yield all running processes except this one."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            process = read_process(int(name))
            if process is not None and not process.gone:
                yield process


def read_environment(pid: int, having: str = "") -> dict[str, str]:
    """Return the initial environment of a process; empty without permission or without `having` in it.

    The check of `having` costs a tenth of parsing.
    """
    path = f"/proc/{pid}/environ"
    found = read_file(path) or _read_after_exec(pid, path)
    if having.encode() not in found:
        return {}
    return dict(os.fsdecode(word).split("=", 1) for word in found.split(b"\0") if b"=" in word)


def _read_after_exec(pid: int, path: str) -> bytes:
    """Read an environment that was empty. In the middle of an execve a process shows no arguments either."""
    arguments = f"/proc/{pid}/cmdline"
    for _ in range(EXEC_READS):
        try:
            os.readlink(f"/proc/{pid}/exe")
        except OSError:
            break  # it has ended, or there is no permission
        before, found = read_file(arguments), read_file(path)
        if found or (before and read_file(arguments)):
            return found
        time.sleep(EXEC_PAUSE)
    return b""


def real_uid(pid: int) -> int:
    """Return the real uid, or -1 after the end of the process. A process can make root the owner of its /proc
    directory.
    """
    uids = _status(pid, b"Uid:")
    return int(uids[0]) if uids else -1


def is_nested(pid: int) -> bool:
    """Return whether the process is in a pid namespace below the one of our /proc, as in a sandbox."""
    return len(_status(pid, b"NSpid:")) > 1


def terminate(processes: list[Process]) -> None:
    for process in processes:
        process.send(signal.SIGTERM)
        process.send(signal.SIGCONT)  # a stopped process would not react


def kill(processes: list[Process]) -> None:
    for process in processes:
        process.send(signal.SIGKILL)


def end_processes(find: Callable[[], list[Process]], grace: float) -> list[Process]:
    """End all processes that `find` finds, including new ones: SIGTERM, `grace` seconds, SIGKILL.

    Returns the processes whose end is not proven.
    """
    known: dict[tuple[int, int], Process] = {}

    def find_left() -> list[Process]:
        """Return what `find` finds, and what it found before and still runs. An end removes the marks first."""
        known.update({(each.pid, each.started): each for each in find()})
        for pid, started in list(known):
            if not is_alive(pid, started):
                del known[pid, started]
        return list(known.values())

    left = find_left()
    terminate(left)
    left = _wait_for_end(find_left, grace) if left else []
    return _wait_for_end(find_left, PROOF_SECONDS, kill) if left else []


def _wait_for_end(
    find: Callable[[], list[Process]], seconds: float, strike: Callable[[list[Process]], None] | None = None
) -> list[Process]:
    until = time.monotonic() + seconds
    while True:
        left = find()
        if strike:
            strike(left)
        if not left or time.monotonic() >= until:
            return left
        time.sleep(PAUSE_SECONDS)


def reap_orphans(spared: Container[int]) -> None:
    """Reap the ended orphans that this process has adopted: its children in other sessions, except `spared`.

    All children that a worker starts are in its session, except those that it names.
    """
    me = os.getpid()
    session = os.getsid(0)
    tasks = f"/proc/{me}/task"
    children = [int(pid) for task in os.listdir(tasks) for pid in read_file(f"{tasks}/{task}/children").split()]
    for pid in children:
        child = read_process(pid)
        if child and child.gone and child.session != session and pid not in spared:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue  # another thread has reaped it


def list_descendants(ancestor: int) -> list[Process]:
    """Return the running descendants of a process, by a snapshot of all processes."""
    children: dict[int, list[Process]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process)
    found, left = [], [ancestor]
    while left:
        below = children.pop(left.pop(), [])
        found += below
        left += [each.pid for each in below]
    return found


def _status(pid: int, name: bytes) -> list[bytes]:
    """Return the words of a line of /proc/PID/status, which all users can read; empty after the end of the process."""
    _, _, rest = read_file(f"/proc/{pid}/status").partition(b"\n" + name)
    return rest.partition(b"\n")[0].split()


def read_file(path: str) -> bytes:
    """Return the content of a file in /proc; empty without permission or after the end of the process."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        content = b""
        while piece := os.read(descriptor, 65536):
            content += piece
        return content
    except OSError:
        return b""  # it ended during the read
    finally:
        os.close(descriptor)


# Start the command in a new session, with exactly the ordered environment, bound to the supervisor's life.


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
        # Check program and directory in advance: the prefix's program would report a missing one only as an exit code.
        program = argv[0]
        if not os.path.isdir(cwd):
            raise NotStarted(*_describe_start_error(b"chdir", errno.ENOENT, program, cwd))
        folders = [cwd] if os.path.dirname(program) else env.get("PATH", os.defpath).split(os.pathsep)
        found = [path for folder in folders if os.path.lexists(path := os.path.join(folder, program))]
        if not any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
            raise NotStarted(*_describe_start_error(b"exec", errno.EACCES if found else errno.ENOENT, program, cwd))
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
        # Reset all signal handlers. Ignored signals stay ignored across exec, and SIGTERM must have its effect.
        signal.set_wakeup_fd(-1)
        for number in range(1, signal.NSIG):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                continue  # SIGKILL, SIGSTOP and signals reserved by the C library
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        step = b"chdir"
        os.chdir(cwd)
        step = b"exec"
        os.execvpe(argv[0], argv, env)  # noqa: S606  (a shell is what we avoid)
    except OSError as error:
        os.write(error_end, b"%s %d" % (step, error.errno or 0))
    finally:
        os._exit(127)
