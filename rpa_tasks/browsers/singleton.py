"""Remove Chromium's own lock on a profile after a crash."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from rpa_tasks.browsers.browser_processes import names_profile, read_command_line

SINGLETON_FILES = ("SingletonLock", "SingletonSocket", "SingletonCookie")


def release_singleton(profile: Path) -> bool:
    """Remove the lock if its owner is proven dead. Returns False if the owner runs.

    Chromium itself does this only for owners on the same host name, which a former container does not have.
    """
    try:
        host, _, pid = os.readlink(profile / "SingletonLock").rpartition("-")
    except OSError:
        return True
    if host == socket.gethostname():
        lives = pid.isdigit() and names_profile(read_command_line(int(pid)), str(profile))
    else:
        lives = _has_listener(profile / "SingletonSocket")
    if not lives:
        _remove_lock_files(profile)
    return not lives


def _has_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
        client.settimeout(1)
        client.connect(str(path.resolve()))
        return True
    return False


def _remove_lock_files(profile: Path) -> None:
    """Remove the lock files and the socket's folder, which a killed Chromium leaves in the temporary directory.

    The browser can write the link, so no folder elsewhere is deleted.
    """
    with suppress(OSError):
        folder = Path(os.readlink(profile / "SingletonSocket")).parent
        chromium_made_it = "org.chromium." in folder.name or "com.google.Chrome" in folder.name
        if chromium_made_it and folder.parent == Path(tempfile.gettempdir()) and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
    for name in SINGLETON_FILES:
        (profile / name).unlink(missing_ok=True)
