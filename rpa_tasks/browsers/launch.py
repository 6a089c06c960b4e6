"""Errors, program and settings of a browser. Trials of flows use it too: it needs only the standard library."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

BROWSER_WAIT = "browser_wait"  #: every slot was busy during the whole wait
BROWSER_FAILED = "browser_failed"  #: Chromium is missing, or did not start
PROXY_FAILED = "proxy_failed"  #: the proxy cannot be used, or is not used
DISK_FULL = "disk_full"
PROFILE_BUSY = "profile_busy"  #: the shop's profile is used by another run, a person, or a process that does not end


class NoBrowser(Exception):
    """No browser is available. The run did not start."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


def is_disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: Flags of each browser, also of a trial.
COMMON_FLAGS = (
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-search-engine-choice-screen",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-breakpad",
    "--password-store=basic",
    "--window-size=1366,900",
)
SNAPS = "/snap/"  #: where the programs of snaps are mounted
LONGEST_SCRIPT = 10_000  #: bytes read of a program that may be a script


class NoProgram(NoBrowser):
    """No usable browser is installed. The detail has the remedy."""

    def __init__(self, detail: str) -> None:
        super().__init__(BROWSER_FAILED, detail)


class OnlySnap(NoProgram):
    """The browser is a snap. AppArmor hides the folders of profiles and runs from it."""


def find_program(wanted: str) -> str:
    """Return the path of the wanted browser, or of the first Chromium or Chrome on the `PATH`. Snaps do not count.

    Raises: `NoProgram`.
    """
    found = [path for name in ([wanted] if wanted else NAMES) if (path := shutil.which(name))]
    if usable := next((path for path in found if not _is_snap(path)), None):
        return usable
    if found:
        raise OnlySnap(
            f"{'RPA_CHROMIUM_PATH: ' if wanted else ''}{found[0]} is a snap, which cannot read the profiles of shops. "
            "Install Google Chrome or a package of Chromium outside snap, such as Debian's, and set RPA_CHROMIUM_PATH "
            "to its path."
        )
    raise NoProgram(f"Chromium was not found ({wanted or ', '.join(NAMES)}). Set RPA_CHROMIUM_PATH to its path.")


def _is_snap(path: str) -> bool:
    """Return whether the program is a snap, a link to the program `snap`, or Ubuntu's script that starts one."""
    real = os.path.realpath(path)
    if real.startswith(SNAPS) or os.path.basename(real) == "snap":
        return True
    try:
        with Path(real).open("rb") as file:
            head = file.read(LONGEST_SCRIPT)
    except OSError:
        return False
    return head.startswith(b"#!") and f"{SNAPS}bin/".encode() in head


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Valid settings of one shop. An empty value leaves the choice to Chromium or to the server."""

    language: str = ""  #: BCP 47, such as zh-CN
    timezone: str = ""  #: IANA name
    window: str = ""  #: WIDTHxHEIGHT in CSS pixels
    downloads: str = ""  #: folder in the profile
    flags: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()  #: folders below the node's folder of extensions
    proxy_url: str = ""  #: http:// or socks5://, with a port
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    cdp_url: str = ""  #: http:// with a port, of a browser that runs elsewhere; the others have no effect then

    @property
    def fingerprint(self) -> str:
        """Return a text that differs for other settings. A browser with another one is replaced."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]

    @property
    def proxy_kind(self) -> str:
        return urlsplit(self.proxy_url).scheme

    @property
    def command_line(self) -> list[str]:
        """Return the flags for Chromium, without those of the proxy."""
        flags = list(self.flags)
        if self.language:
            general = self.language.partition("-")[0]
            flags += [f"--lang={self.language}", f"--accept-lang={','.join(dict.fromkeys([self.language, general]))}"]
        if self.window:
            flags.append(f"--window-size={self.window.replace('x', ',')}")
        return flags

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of the browser's environment. Chromium on Linux reads its language there."""
        found = {"TZ": self.timezone, "LANGUAGE": self.language.replace("-", "_")}
        return {name: value for name, value in found.items() if value}
