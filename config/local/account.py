"""The account that runs the embedded servers.

PostgreSQL refuses to run as root, and initdb refuses a uid without a name. Root therefore runs both servers as an
account without rights. Root may keep folders above their programs and data closed (mode 0700). Only there the servers
keep one capability: to traverse closed folders.
"""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from config.local.endpoints import EmbeddedServerError

UNPRIVILEGED_ACCOUNT = "nobody"
# The narrower right first: many containers have only the wider one.
TRAVERSAL_CAPABILITIES = (("dac_read_search", 2), ("dac_override", 1))
REMEDY = "run as an ordinary user, or set DATABASE_URL and REDIS_URL"


@dataclass(frozen=True)
class Account:
    uid: int
    gid: int

    @property
    def is_lent(self) -> bool:
        """Return whether this process is root and lends the servers to the account."""
        return os.geteuid() == 0

    def own(self, path: Path) -> None:
        if self.is_lent:
            os.chown(path, self.uid, self.gid)

    def restrict(self, folder: Path) -> None:
        """Close a folder of this process to all accounts but this one, which may only traverse it."""
        if self.is_lent:
            os.chown(folder, -1, self.gid)
        folder.chmod(0o710 if self.is_lent else 0o700)

    def becoming(self, *paths: Path) -> tuple[str, ...]:
        """Return the words that start a program as this account, able to reach these existing paths.

        Raises: `EmbeddedServerError` if root lacks setpriv or the right to traverse closed folders.
        """
        if not self.is_lent:
            return ()
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise EmbeddedServerError(f"root needs the command setpriv (Debian: util-linux); install it, {REMEDY}")
        words = [setpriv, f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups", "--no-new-privs"]
        kept = "-all"
        if closed := next((above for above in _folders_above(paths) if not self._may_traverse(above)), None):
            right = next((name for name, bit in TRAVERSAL_CAPABILITIES if _holds(bit)), None)
            if right is None:
                raise EmbeddedServerError(
                    f"the account {UNPRIVILEGED_ACCOUNT!r} cannot enter {closed}; open it (chmod o+x), {REMEDY}"
                )
            kept += f",+{right}"
            words.append("--securebits=+no_setuid_fixup")  # otherwise access(2), which PostgreSQL calls, ignores it
        return (*words, f"--inh-caps={kept}", f"--ambient-caps={kept}", f"--bounding-set={kept}")

    def _may_traverse(self, folder: Path) -> bool:
        found = folder.stat()
        bit = 0o100 if found.st_uid == self.uid else 0o010 if found.st_gid == self.gid else 0o001
        return bool(found.st_mode & bit)


def server_account() -> Account:
    """Return the current account, or for root the account that it lends the servers to."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid())
    try:
        lent = pwd.getpwnam(UNPRIVILEGED_ACCOUNT)
    except KeyError:
        raise EmbeddedServerError(
            f"the embedded servers cannot run as root, and there is no account {UNPRIVILEGED_ACCOUNT!r}; {REMEDY}"
        ) from None
    return Account(lent.pw_uid, lent.pw_gid)


def _folders_above(paths: Iterable[Path]) -> list[Path]:
    """Return the folders on the way to these paths, with and without links."""
    return [above for path in paths for above in (*path.absolute().parents, *path.resolve().parents)]


def _holds(bit: int) -> bool:
    """Return whether this process has the capability and can pass it on."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapPrm:"))
    return bool(int(line.split()[1], 16) >> bit & 1)
