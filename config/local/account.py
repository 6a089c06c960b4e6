"""Select the account of the embedded servers.

PostgreSQL refuses to run as root, and initdb refuses a uid without a name. Root therefore runs both servers as
another account. Root may own the parent folders with mode 0700. The account keeps the right to traverse them and no
other right. PostgreSQL checks with access(2), which drops such rights for other accounts unless `no_setuid_fixup` is
set.
"""

from __future__ import annotations

import os
import pwd
import shutil
from dataclasses import dataclass
from pathlib import Path

from config.local.endpoints import EmbeddedServerError

UNPRIVILEGED_ACCOUNT = "nobody"
# The narrower right first: many containers can grant only the wider one.
TRAVERSAL_CAPABILITIES = (("dac_read_search", 2), ("dac_override", 1))


@dataclass(frozen=True)
class Account:
    uid: int
    gid: int
    becoming: tuple[str, ...]

    def own(self, path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, self.uid, self.gid)


def server_account() -> Account:
    """Return the current account, or for root the other account and the command that switches to it."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid(), ())
    try:
        lent = pwd.getpwnam(UNPRIVILEGED_ACCOUNT)
    except KeyError:
        raise EmbeddedServerError(
            f"the embedded servers cannot run as root and there is no account {UNPRIVILEGED_ACCOUNT!r} to lend them to"
            "; run as an ordinary user, or set DATABASE_URL and REDIS_URL"
        ) from None
    return Account(lent.pw_uid, lent.pw_gid, switch_command(lent.pw_uid, lent.pw_gid))


def switch_command(uid: int, gid: int) -> tuple[str, ...]:
    setpriv = shutil.which("setpriv", path="/usr/bin:/bin:/usr/local/bin")
    if setpriv is None:
        raise EmbeddedServerError(
            "root needs the command setpriv (Debian: util-linux) to run the embedded servers as another account; "
            "install it, run as an ordinary user, or set DATABASE_URL and REDIS_URL"
        )
    identity = (f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs")
    right = held_capability()
    if right is None:
        return (setpriv, *identity)
    kept = f"-all,+{right}"
    return (setpriv, *identity, "--securebits=+no_setuid_fixup", f"--inh-caps={kept}", f"--ambient-caps={kept}")


def held_capability() -> str | None:
    """Return the capability to traverse closed folders that this process can pass on."""
    held = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapPrm:"):
            held = int(line.split()[1], 16)
    return next((name for name, bit in TRAVERSAL_CAPABILITIES if held >> bit & 1), None)
