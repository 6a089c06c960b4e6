"""Find the program of the browser. Trials of flows use it too: it needs only the standard library."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SNAPS = "/snap/"  #: where the programs of snaps are mounted
LONGEST_SCRIPT = 10_000  #: bytes read of a program that may be a script


class NoProgram(Exception):
    """There is no usable browser. The message has the remedy."""


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
