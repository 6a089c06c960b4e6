"""Chromium's own lock on a profile, and what is left of it by a Chromium that was killed."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from rpa_tasks.browsers.browser_processes import command_line, names_profile

SINGLETON_FILES = ("SingletonLock", "SingletonSocket", "SingletonCookie")


def release_singleton(profile: Path) -> bool:
    """Remove the lock if its owner is proven dead. Chromium would take care of its own host's dead, but not of those
    of a container that had another name. False: the owner lives."""
    try:
        host, _, pid = os.readlink(profile / "SingletonLock").rpartition("-")
    except OSError:
        return True
    if host == socket.gethostname():
        lives = pid.isdigit() and names_profile(command_line(int(pid)), str(profile))
    else:
        lives = _somebody_listens(profile / "SingletonSocket")
    if not lives:
        _remove(profile)
    return not lives


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
        client.settimeout(1)
        client.connect(str(path.resolve()))
        return True
    return False


def _remove(profile: Path) -> None:
    """With the folder of its socket, which a killed Chromium leaves in the temporary directory. The link is the
    browser's to write, so nothing elsewhere is deleted."""
    with suppress(OSError):
        folder = Path(os.readlink(profile / "SingletonSocket")).parent
        chromium_made_it = "org.chromium." in folder.name or "com.google.Chrome" in folder.name
        if chromium_made_it and folder.parent == Path(tempfile.gettempdir()) and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
    for name in SINGLETON_FILES:
        (profile / name).unlink(missing_ok=True)
