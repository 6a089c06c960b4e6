"""Isolate a flow's command, and the browser that it controls, from the application and from other shops.

Both run in a sandbox of bubblewrap, because the command also reads files through the browser. The module also owns the
directories of shops. See `docs/decisions/0026-confine-commands-and-browsers.md`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import structlog
from django.conf import settings

from rpa_tasks.browsers import registry

log = structlog.get_logger(__name__)

BUBBLEWRAP, NONE = "bubblewrap", "none"
#: Uid and gid of the programs of shops where the worker is root: as root they could read the secrets of the machine.
#: No account has this number, also not on a system that assigns numbers dynamically.
ACCOUNT = 65_533
TRIAL_TIMEOUT = 20.0  #: seconds
DELETE_TIMEOUT = 20.0  #: seconds of one deletion; much less than the lease of a run
#: Sockets of local services are in /run: some accept a client by uid alone.
PRIVATE_DIRECTORIES = ("/tmp", "/var/tmp", "/run", "/dev/shm")  # noqa: S108  (covered, not used)
HIDE, READ, WRITE = "--tmpfs", "--ro-bind", "--bind"  #: options of bwrap


class CannotIsolate(RuntimeError):
    """The required isolation does not work here."""


# --- whether ------------------------------------------------------------------------------------------------------


def is_isolated() -> bool:
    """Return whether commands and browsers run in a sandbox here. Outside production they need none.

    Raises:
        CannotIsolate: bubblewrap does not work here, and no setting disables it.
    """
    if (problem := find_problem()) and settings.AFTERTOUCH_RPA_ISOLATION_REQUIRED:
        raise CannotIsolate(problem)
    return settings.AFTERTOUCH_RPA_ISOLATION != NONE and not problem


def find_problem() -> str:
    """Return why commands would run here without isolation although no setting disables it, or ""."""
    if settings.AFTERTOUCH_RPA_ISOLATION == NONE or (os.geteuid(), os.environ.get("PATH")) in _proofs:
        return ""
    if problem := _try_sandbox():
        return f"AFTERTOUCH_RPA_ISOLATION={BUBBLEWRAP} does not work here: {problem}"
    _proofs.add((os.geteuid(), os.environ.get("PATH")))
    return ""


#: Uid and PATH of trials that succeeded. Failures are not kept: a trial may time out on a busy machine.
_proofs: set[tuple[int, str | None]] = set()


def _try_sandbox() -> str:
    """Run a program in an empty sandbox and return why that failed, or ""."""
    for program, package in (("bwrap", "bubblewrap"), ("setpriv", "util-linux")):
        if (program == "bwrap" or os.geteuid() == 0) and not shutil.which(program):
            return f"the program {program} is not installed (Debian: {package})"
    folder = tempfile.mkdtemp(prefix="isolation-")
    try:
        if os.geteuid() == 0:
            os.chown(folder, ACCOUNT, ACCOUNT)
        tried = subprocess.run(  # noqa: S603  (our own script)
            [*_build_sandbox({folder: WRITE}, cwd=folder), sys.executable, "-ISc", "open('tried', 'w').close()"],
            env={"PATH": os.environ.get("PATH", "")}, timeout=TRIAL_TIMEOUT,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = [*tried.stderr.strip().splitlines(), f"the trial ended with {tried.returncode}"]
        return "" if tried.returncode == 0 else lines[0][:300]
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- sandboxes ----------------------------------------------------------------------------------------------------


def isolate_run(profile_id: str, reads: Iterable[str], cwd: str) -> tuple[str, ...]:
    """Return the words before a shop's command: run directories and home are writable, the profile is readable.

    `reads` are additional readable directories. Authors of flows must not control their content.
    """
    if not is_isolated():
        return ()
    binds = dict.fromkeys(reads, READ)
    binds |= {
        str(registry.shop_runs_dir(profile_id)): WRITE,
        str(home_dir(profile_id)): WRITE,
        str(registry.profile_dir(profile_id)): READ,
    }
    return _build_sandbox(binds, cwd=cwd)


def isolate_browser(profile_id: str, extensions: Iterable[Path]) -> tuple[str, ...]:
    """Return the words before a shop's browser, which outlives the process that starts it. Its profile is writable.

    The folder of the shop's runs is writable too: each run names a folder in it for downloads later.
    """
    profile = registry.profile_dir(profile_id)
    if not is_isolated():
        return ()
    _change_owner(profile)
    binds = dict.fromkeys((str(profile), str(registry.shop_runs_dir(profile_id))), WRITE)
    return _build_sandbox(binds | dict.fromkeys(map(str, extensions), READ))


def _build_sandbox(binds: dict[str, str], *, cwd: str = "") -> tuple[str, ...]:
    """Return the words before a program. With `cwd` it starts there and ends with the process that starts it."""
    words = [shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-ipc"]
    words += ["--chdir", cwd, "--die-with-parent"] if cwd else []  # else a hidden folder is replaced
    words += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for path, option in _ordered_mounts(binds):
        # Where the worker is root, the directories that bwrap makes belong to root.
        if option == HIDE:
            words += ["--perms", "1777", HIDE, path]
        else:
            words += ["--dir", os.path.dirname(path), option, path, path]
    if os.geteuid() != 0:
        return (*words, "--unshare-user", "--")
    become = [shutil.which("setpriv") or "setpriv", f"--reuid={ACCOUNT}", f"--regid={ACCOUNT}", "--clear-groups"]
    return (*words, "--", *become, "--inh-caps=-all")


def _ordered_mounts(binds: dict[str, str]) -> list[tuple[str, str]]:
    """Return the mounts, outermost first.

    Only directories below a hidden one are bound. Of the state directory only directories of shops are bound.
    """
    hidden = _hidden_directories()
    state = os.path.realpath(registry.browser_root().parent)
    shops = {os.path.realpath(each) for each in (registry.runs_dir(), registry.homes_dir(), registry.profiles_dir())}
    wanted = dict.fromkeys(_needed_directories(), READ) | binds
    found = dict.fromkeys(hidden, HIDE)
    for given, option in wanted.items():
        path = os.path.realpath(given) if given else ""
        of_shops = os.path.dirname(path) in shops
        if (
            os.path.isdir(path)
            and path not in hidden
            and _is_below(path, hidden)
            and (of_shops or not _is_below(path, [state]))
        ):
            found[path] = option
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


# --- whose directories --------------------------------------------------------------------------------------------


def home_dir(profile_id: str) -> Path:
    """Return the shop's HOME, which its runs share, and keep it for `cleaning.KEPT_FOR`. Raises `OSError`.

    Flows without a browser run on any node, also on one that the profile has left.
    """
    name = registry.directory_name(profile_id)
    folder = registry.homes_dir() / name
    with registry.homes_lock():
        (registry.profiles_dir() / name / registry.UNNEEDED_MARK).unlink(missing_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _change_owner(folder)
    return folder


def delete_directory(folder: Path) -> bool:
    """Delete a directory that commands or a browser could write to, in about `DELETE_TIMEOUT` seconds. Idempotent.

    Returns whether it is gone; the next call deletes the rest. A command chose the names, modes and depth. `rm` follows
    no link and has no depth limit, unlike `shutil.rmtree`.
    """
    # The directory of a run that wrote nothing there needs no process, which would cost 3 ms.
    with suppress(OSError):
        if not folder.is_symlink():
            (folder / "tmp").rmdir()
            folder.rmdir()
            return True
    ends_at = time.monotonic() + DELETE_TIMEOUT
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


def owner() -> int:
    """Return the uid and gid to which directories of shops are given; -1 if their programs run as this user."""
    return ACCOUNT if os.geteuid() == 0 and is_isolated() else -1


def _change_owner(folder: Path) -> None:
    """Give a directory with its contents to the programs of shops. Follows no link."""
    uid = owner()
    if uid < 0 or folder.lstat().st_uid == uid:
        return
    for _, names, files, above in os.fwalk(folder, follow_symlinks=False):
        for name in (*names, *files):
            os.chown(name, uid, uid, dir_fd=above, follow_symlinks=False)
    os.chown(folder, uid, uid, follow_symlinks=False)  # last, so that an interrupted walk starts again
