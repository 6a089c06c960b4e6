"""Isolate a flow's command, and the browser that it controls, from the application and from other shops.

Both run under the same plan, because the command reads files and connects to ports through the browser. The module also
owns the directories of shops; `shop_uids` owns their uids. See `docs/decisions/0026-confine-commands-and-browsers.md`.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from django.conf import settings

from rpa_tasks import shop_uids
from rpa_tasks.browsers import registry
from rpa_tasks.supervisor import confine

log = structlog.get_logger(__name__)

AUTO, UID, BUBBLEWRAP, NONE = "auto", "uid", "bubblewrap", "none"
TRIAL_TIMEOUT = 20.0  #: seconds
DELETE_TIMEOUT = 20.0  #: seconds; much less than the lease of a run
DELETE_FOR = 5.0  #: seconds of one deletion step of the housekeeping; the node reports between its passes
#: Sockets of local services are in /run: some accept a client by uid alone.
PRIVATE_DIRECTORIES = ("/tmp", "/var/tmp", "/run", "/dev/shm")  # noqa: S108  (covered, not used)


class CannotIsolate(RuntimeError):
    """The requested isolation does not work here."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one program is confined. An empty plan changes nothing."""

    #: Words before the command.
    prefix: tuple[str, ...] = ()
    #: See `rpa_tasks.supervisor.confine`.
    confine: dict[str, Any] = field(default_factory=dict)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that the process which starts the program must inherit."""
        ruleset = self.confine.get("ruleset", -1)
        return (ruleset,) if ruleset >= 0 else ()


# --- which one ----------------------------------------------------------------------------------------------------


def mode() -> str:
    """Return `UID`, `BUBBLEWRAP` or `NONE`. `auto` selects the first that works, otherwise `NONE`.

    Raises:
        CannotIsolate: the selected mode does not work, or `auto` finds none although isolation is required.
    """
    wanted: str = settings.AFTERTOUCH_RPA_ISOLATION
    if wanted == AUTO:
        found = next((each for each in (UID, BUBBLEWRAP) if not _mode_problem(each)), NONE)
        if found == NONE and settings.AFTERTOUCH_RPA_ISOLATION_REQUIRED:
            raise CannotIsolate(_no_mode_reason())
        return found
    if wanted != NONE and (problem := _mode_problem(wanted)):
        raise CannotIsolate(f"AFTERTOUCH_RPA_ISOLATION={wanted} does not work here: {problem}")
    return wanted


def missing_isolation_reason() -> str:
    """Return why commands would run here without isolation although no setting requests that, or ""."""
    try:
        if mode() != NONE or settings.AFTERTOUCH_RPA_ISOLATION == NONE:
            return ""
    except CannotIsolate as error:
        return str(error)
    return _no_mode_reason()


def _no_mode_reason() -> str:
    reasons = "; ".join(f"{kind}: {problem}" for kind, problem in mode_problems().items())
    return f"AFTERTOUCH_RPA_ISOLATION=auto finds nothing that works here ({reasons})"


def may_worker_start() -> bool:
    """Return whether an execution worker may start in spite of a complaint."""
    return settings.AFTERTOUCH_RPA_ISOLATION == AUTO and not settings.AFTERTOUCH_RPA_ISOLATION_REQUIRED


def mode_problems() -> dict[str, str]:
    """Return why `UID` and `BUBBLEWRAP` do not work here; empty for a mode that works."""
    return {each: _mode_problem(each) for each in (UID, BUBBLEWRAP)}


def _mode_problem(kind: str) -> str:
    uids: tuple[int, int] = settings.AFTERTOUCH_RPA_UIDS
    return prove_isolation(kind, os.geteuid(), uids, os.environ.get("PATH", ""))


#: Modes that worked once in this process. Failures are not cached: a trial may time out on a busy machine.
_proved_modes: set[tuple[str, int, tuple[int, int], str]] = set()


def prove_isolation(kind: str, uid: int, uids: tuple[int, int], path: str) -> str:
    """Try the mode once in a process. Return the problem, or "" if it works."""
    if (kind, uid, uids, path) in _proved_modes:
        return ""
    if not (problem := _try_sandbox(kind, uid, uids, path)):
        _proved_modes.add((kind, uid, uids, path))
    return problem


def _try_sandbox(kind: str, uid: int, uids: tuple[int, int], path: str) -> str:
    """Run a program in an empty sandbox and return why that failed, or "".

    Its uid is the last of the range, which no shop has: a sweep of a shop's processes must not end it.
    """
    if kind == UID and uid != 0:
        return "only root can give commands a uid of their own"
    if kind == UID and (taken := shop_uids.accounts_in_range(*uids)):
        return f"AFTERTOUCH_RPA_UIDS={uids[0]}-{uids[1]} has uids or gids of {', '.join(taken[:5])}"
    if kind == BUBBLEWRAP and not shutil.which("bwrap"):
        return "the program bwrap is not installed (Debian: bubblewrap)"
    if kind == BUBBLEWRAP and uid == 0:
        return "root would be root inside as well; use uid"
    folder = Path(tempfile.mkdtemp(prefix="isolation-"))
    try:
        owner = uids[1] if kind == UID else uid
        os.chown(folder, owner, -1)
        plan = _build_plan(kind, owner, {str(folder): confine.WRITE}, ruleset=-1)
        tried = subprocess.run(  # noqa: S603  (our own script)
            [*_start_command(plan), sys.executable, "-I", "-S", "-c", "open('tried', 'w').close()"],
            cwd=folder, env={"PATH": path}, capture_output=True, text=True, timeout=TRIAL_TIMEOUT, check=False,
        )  # fmt: skip
        return (
            tried.stderr.strip().splitlines()[-1][:300]
            if tried.returncode and tried.stderr.strip()
            else (f"the trial ended with {tried.returncode}" if tried.returncode else "")
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start_command(plan: Plan) -> list[str]:
    return [sys.executable, "-I", "-S", confine.__file__, json.dumps(plan.confine), *plan.prefix]


def limits_ports() -> bool:
    """Return whether this kernel can block a flow's access to the debug ports of other shops."""
    descriptor = confine.create_ruleset(())
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


# --- plans --------------------------------------------------------------------------------------------------------


@contextmanager
def plan_for_run(profile_id: str, reads: Iterable[str], port: int | None, cwd: str) -> Iterator[Plan]:
    """Return the plan of a shop's command: run directories and home are writable, the browser's profile is readable.

    `reads` are additional readable directories. Authors of flows must not control their content. The shop's browser
    listens on `port`. The descriptors of the plan are closed at the end.
    """
    kind = mode()
    binds = dict.fromkeys(reads, confine.READ)
    binds |= {
        str(registry.shop_runs_dir(profile_id)): confine.WRITE,
        str(home_dir(profile_id)): confine.WRITE,
        str(registry.profile_dir(profile_id)): confine.READ,
    }
    with _ruleset(kind, port) as ruleset:
        yield _build_plan(kind, owner_uid(profile_id, kind), binds, ruleset, cwd=cwd)


@contextmanager
def plan_for_browser(profile_id: str, proxy_port: int | None, extensions: Iterable[Path]) -> Iterator[Plan]:
    """Return the plan of a shop's browser: its profile is writable. It reaches no debug port, not even its own.

    The folder of the shop's runs is writable too: each run names a folder in it for downloads later. With a
    proxy it reaches only the port of its forwarder.
    """
    kind = mode()
    profile, owner = registry.profile_dir(profile_id), owner_uid(profile_id, kind)
    if kind == UID:
        _change_owner(profile, owner)
    with _ruleset(kind, proxy_port, alone=proxy_port is not None) as ruleset:
        binds = dict.fromkeys((str(profile), str(registry.shop_runs_dir(profile_id))), confine.WRITE)
        binds |= dict.fromkeys(map(str, extensions), confine.READ)
        yield _build_plan(kind, owner, binds, ruleset, lasting=True)


def _build_plan(
    kind: str, owner: int, binds: dict[str, str], ruleset: int, *, lasting: bool = False, cwd: str = ""
) -> Plan:
    """Build the plan. `lasting`: the program outlives the process that starts it."""
    if kind == NONE:
        return Plan()
    limits = {"ruleset": ruleset, "seal": ruleset >= 0}
    mounts = _ordered_mounts(binds)
    if kind == UID:
        return Plan(confine={"uid": owner, "mounts": mounts, **limits})
    words = [shutil.which("bwrap") or "bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc"]
    words += ["--chdir", cwd] * bool(cwd) + ["--die-with-parent"] * (not lasting)  # else a hidden folder is replaced
    words += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for path, what in mounts:
        words += {
            confine.HIDE: ["--tmpfs", path],
            confine.READ: ["--ro-bind", path, path],
            confine.WRITE: ["--bind", path, path],
        }[what]
    return Plan(prefix=(*words, "--"), confine=limits)


def _ordered_mounts(binds: dict[str, str]) -> list[tuple[str, str]]:
    """Return the mounts, outermost first.

    Only directories below a hidden one are bound. Of the state directory only directories of shops are bound.
    """
    hidden = _hidden_directories()
    state = os.path.realpath(registry.browser_root().parent)
    shops = {os.path.realpath(each) for each in (registry.runs_dir(), registry.homes_dir(), registry.profiles_dir())}
    wanted = dict.fromkeys(_needed_directories(), confine.READ) | binds
    found = dict.fromkeys(hidden, confine.HIDE)
    for given, what in wanted.items():
        path = os.path.realpath(given) if given else ""
        of_shops = os.path.dirname(path) in shops
        if (
            os.path.isdir(path)
            and path not in hidden
            and _is_below(path, hidden)
            and (of_shops or not _is_below(path, [state]))
        ):
            found[path] = what
    return sorted(found.items())


def _hidden_directories() -> set[str]:
    """Return the directories to hide, which contain data of other users or of the application."""
    own = [os.path.expanduser("~")]
    with suppress(KeyError):
        own.append(pwd.getpwuid(os.geteuid()).pw_dir)
    wanted = (
        *PRIVATE_DIRECTORIES,
        "/root",
        *own,
        str(registry.browser_root().parent),
        str(settings.BASE_DIR / ".state"),
    )
    needed = set(map(os.path.realpath, _needed_directories()))  # a home directory may be the checkout itself
    return {os.path.realpath(path) for path in wanted if path and os.path.isdir(path)} - needed - {"/"}


def _needed_directories() -> list[str]:
    """Return the directories that programs of this project need, even below hidden ones."""
    resolver = os.path.dirname(os.path.realpath("/etc/resolv.conf"))
    return [sys.prefix, sys.base_prefix, str(settings.BASE_DIR), resolver, *settings.AFTERTOUCH_RPA_PATHS]


def _is_below(path: str, above: Iterable[str]) -> bool:
    return any(path == each or path.startswith(each.rstrip("/") + "/") for each in above)


# --- TCP ports ----------------------------------------------------------------------------------------------------

_rulesets: dict[tuple[int | None, bool, tuple[tuple[int, int], ...]], int] = {}
MOST_RULESETS = 2  #: kept by a process: one ruleset has a rule for each port


@contextmanager
def _ruleset(kind: str, port: int | None, *, alone: bool = False) -> Iterator[int]:
    """Return a duplicate of the ruleset for this port, beside those of the setting or alone, closed at the end."""
    if kind == NONE:
        yield -1
        return
    key = port, alone, tuple(settings.AFTERTOUCH_RPA_PORTS)
    if key not in _rulesets:
        while len(_rulesets) >= MOST_RULESETS:
            os.close(_rulesets.pop(next(iter(_rulesets))))
        made = confine.create_ruleset({*(() if alone else _browser_ports()), *([port] if port else [])})
        if made >= 0:
            _rulesets[key] = made
    if key not in _rulesets:
        yield -1
        return
    duplicate = os.dup(_rulesets[key])
    try:
        yield duplicate
    finally:
        os.close(duplicate)


def reachable_browser_ports() -> str:
    """Return the kernel's range of local ports if AFTERTOUCH_RPA_PORTS overlaps it, or "".

    Browsers get their debug ports from that range.
    """
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return ""
    return (
        f"{first}-{last}" if any(low <= last and high >= first for low, high in settings.AFTERTOUCH_RPA_PORTS) else ""
    )


def _browser_ports() -> set[int]:
    return {port for first, last in settings.AFTERTOUCH_RPA_PORTS for port in range(first, last + 1)}


# --- whose directories --------------------------------------------------------------------------------------------


def home_dir(profile_id: str) -> Path:
    """Return the shop's HOME, which its runs share. Raises `OSError`."""
    with registry.claim_home(profile_id) as folder:
        return _create_owned(folder, profile_id)


def delete_directory(folder: Path, within: float = DELETE_TIMEOUT) -> bool:
    """Delete a directory that commands or a browser could write to, in about `within` seconds. Idempotent.

    Returns whether it is gone; the next call deletes the rest. A command chose the names, modes and depth. `rm` follows
    no link and has no depth limit, unlike `shutil.rmtree`.
    """
    if _delete_untouched(folder):
        return True
    ends_at = time.monotonic() + within
    steps = [["rm", "-rf", "--one-file-system"], ["chmod", "-R", "u+rwx"], ["rm", "-rf", "--one-file-system"]]
    for words in steps[:1] if folder.is_symlink() else steps:  # chmod would follow the link
        if not os.path.lexists(folder):
            return True
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(  # noqa: S603  (the path is ours)
                [*words, "--", str(folder)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
                timeout=max(0.1, ends_at - time.monotonic()),
            )  # fmt: skip
    if os.path.lexists(folder):
        log.warning("directory_left", folder=str(folder))
        return False
    return True


def _delete_untouched(folder: Path) -> bool:
    """Delete the directory of a run that wrote nothing there. It needs no process, which would cost 3 ms."""
    with suppress(OSError):
        if not folder.is_symlink():
            (folder / "tmp").rmdir()
            folder.rmdir()
            return True
    return False


def _create_owned(folder: Path, profile_id: str) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() == 0:
        _change_owner(folder, owner_uid(profile_id, mode()))
    return folder


def owner_uid(profile_id: str, kind: str) -> int:
    """Return the uid of the shop's programs in this mode."""
    return shop_uids.uid_of(profile_id) if kind == UID else os.geteuid()


def _change_owner(folder: Path, owner: int) -> None:
    """Change the owner of a directory with its contents. Follows no link."""
    if folder.lstat().st_uid == owner:
        return
    for _, names, files, above in os.fwalk(folder, follow_symlinks=False):
        for name in (*names, *files):
            os.chown(name, owner, owner, dir_fd=above, follow_symlinks=False)
    os.chown(folder, owner, owner, follow_symlinks=False)  # last, so that an interrupted walk starts again
