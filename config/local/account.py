"""Select the account of the embedded servers, and start programs as this account.

PostgreSQL refuses to run as root, and initdb refuses a uid without a name. Root therefore runs both servers as
another account, without any capability.

That account must reach its programs and data below folders that root may keep closed (mode 0700). If the modes allow
no access, the program gets a mount namespace in which open folders cover the closed ones. A container may forbid
mounts. Only there the program keeps one capability: to traverse closed folders.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from config.local import open_folders
from config.local.endpoints import EmbeddedServerError
from config.local.open_folders import BIND, COVER
from config.local.processes import PLAIN_ENVIRONMENT

UNPRIVILEGED_ACCOUNT = "nobody"
# The narrower right first: many containers can grant only the wider one.
TRAVERSAL_CAPABILITIES = (("dac_read_search", 2), ("dac_override", 1))
SETPCAP = 8
#: PostgreSQL checks its files in the same way, with access(2).
TRIAL = 'for each; do test -x "$each" || { echo "$each is closed"; exit 1; }; done'
TRIAL_TIMEOUT = 20.0  #: seconds


@dataclass(frozen=True)
class Account:
    uid: int
    gid: int

    @property
    def is_lent(self) -> bool:
        """Return whether this process is root and lends the servers to the account."""
        return os.geteuid() == 0

    def own(self, file: Path | int) -> None:
        """Make the account the owner of a path or descriptor."""
        if self.is_lent:
            os.chown(file, self.uid, self.gid)

    def restrict(self, folder: Path) -> None:
        """Close a folder of this process to all accounts but this one, which may only traverse it."""
        if not self.is_lent:
            folder.chmod(0o700)
        elif (folder.stat().st_gid, stat.S_IMODE(folder.stat().st_mode)) != (self.gid, 0o710):
            folder.chmod(0o700)
            try:
                os.chown(folder, -1, self.gid)
            except OSError as error:
                raise EmbeddedServerError(f"the group of {folder} cannot be set for the servers: {error}") from None
            folder.chmod(0o710)

    def becoming(self, *folders: Path) -> tuple[str, ...]:
        """Return the words that start a program as this account. The program reaches these folders, which exist.

        Raises: `EmbeddedServerError` if the account cannot reach them in any way.
        """
        if not self.is_lent:
            return ()
        problem = ""
        for words in self._ways(folders):
            if not (problem := _try(words, folders)):
                return words
        raise EmbeddedServerError(
            f"the account {UNPRIVILEGED_ACCOUNT!r} cannot run the embedded servers ({problem}); "
            "run as an ordinary user, or set DATABASE_URL and REDIS_URL"
        )

    def _ways(self, folders: Sequence[Path]) -> Iterator[tuple[str, ...]]:
        yield _setpriv(self.uid, self.gid)
        yield (
            sys.executable, "-I", "-S", open_folders.__file__, json.dumps(_mounts(folders)),
            *_setpriv(self.uid, self.gid),
        )  # fmt: skip
        if right := next((name for name, bit in TRAVERSAL_CAPABILITIES if _holds(bit)), None):
            yield _setpriv(self.uid, self.gid, right)


def server_account() -> Account:
    """Return the current account, or for root the account that it lends the servers to."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid())
    try:
        lent = pwd.getpwnam(UNPRIVILEGED_ACCOUNT)
    except KeyError:
        raise EmbeddedServerError(
            f"the embedded servers cannot run as root and there is no account {UNPRIVILEGED_ACCOUNT!r} to lend them to"
            "; run as an ordinary user, or set DATABASE_URL and REDIS_URL"
        ) from None
    return Account(lent.pw_uid, lent.pw_gid)


def _setpriv(uid: int, gid: int, right: str = "") -> tuple[str, ...]:
    """Return the words that become the account, without capabilities except `right`."""
    setpriv = shutil.which("setpriv", path="/usr/bin:/bin:/usr/local/bin")
    if setpriv is None:
        raise EmbeddedServerError(
            "root needs the command setpriv (Debian: util-linux) to run the embedded servers as another account; "
            "install it, run as an ordinary user, or set DATABASE_URL and REDIS_URL"
        )
    kept = f"-all,+{right}" if right else "-all"
    words = [setpriv, f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs"]
    words += [f"--inh-caps={kept}", f"--ambient-caps={kept}"]
    if _holds(SETPCAP):  # otherwise only `--no-new-privs` keeps the rest of the bounding set out of reach
        words.append(f"--bounding-set={kept}")
    if right:  # without this bit access(2) ignores capabilities of an account other than root
        words.append("--securebits=+no_setuid_fixup")
    return tuple(words)


def _mounts(folders: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the mounts for `open_folders`: open folders cover the closed ones, and these folders are bound there."""
    closed = {str(folder): _outermost_closed(folder) for folder in folders}
    covered = {str(above): COVER for above in closed.values() if above}
    return sorted((covered | {path: BIND for path, above in closed.items() if above}).items())


def _outermost_closed(path: Path) -> Path | None:
    """Return the outermost folder above the path that other accounts cannot traverse."""
    return next((above for above in reversed(path.parents) if not above.stat().st_mode & 0o001), None)


def _try(words: Sequence[str], folders: Sequence[Path]) -> str:
    """Return why a program that starts with these words cannot reach the folders, or ""."""
    try:
        tried = subprocess.run(
            [*words, "/bin/sh", "-c", TRIAL, "sh", *map(str, folders)],
            cwd="/", stdin=subprocess.DEVNULL, env=PLAIN_ENVIRONMENT, capture_output=True, text=True,
            timeout=TRIAL_TIMEOUT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise EmbeddedServerError(f"the trial of the server account did not end: {error}") from None
    except OSError as error:
        return str(error)
    if not tried.returncode:
        return ""
    lines = (tried.stdout + tried.stderr).strip().splitlines()
    return lines[-1][:300] if lines else f"exit code {tried.returncode}"


def _holds(bit: int) -> bool:
    """Return whether this process has the capability and can pass it on."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapPrm:"):
            return bool(int(line.split()[1], 16) >> bit & 1)
    return False
