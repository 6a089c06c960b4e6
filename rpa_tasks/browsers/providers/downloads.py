"""Set the download folder in the preferences of a profile, which no process uses at the moment."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

FOLDER = "Downloads"  #: Chromium's own choice
LARGEST = 5_000_000  #: bytes of preferences; a larger file is replaced


def set_download_folder(profile: Path, name: str) -> None:
    """Write the folder to the preferences, if it is not there. Follows no link. Raises `OSError`.

    The browser owns what is in the profile, so everything is opened relative to its directories.
    """
    wanted = str(profile / (name or FOLDER))
    if not name and not (profile / "Default").is_dir():
        return
    root = os.open(profile, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner = os.fstat(root)
        with suppress(FileExistsError):
            os.mkdir("Default", 0o700, dir_fd=root)
            os.chown("Default", owner.st_uid, owner.st_gid, dir_fd=root, follow_symlinks=False)
        folder = os.open("Default", os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
    finally:
        os.close(root)
    try:
        _write_preferences(folder, wanted, owner)
    finally:
        os.close(folder)


def _write_preferences(folder: int, wanted: str, owner: os.stat_result) -> None:
    preferences = _read_preferences(folder)
    download = preferences.get("download")
    if not isinstance(download, dict):
        download = {}
    if download.get("default_directory", str(Path(wanted).with_name(FOLDER))) == wanted:
        return
    preferences["download"] = download | {"default_directory": wanted, "prompt_for_download": False}
    preferences["savefile"] = {"default_directory": wanted}
    draft = "Preferences.aftertouch"
    with suppress(FileNotFoundError):
        os.unlink(draft, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(draft, flags, 0o600, dir_fd=folder), "w", encoding="utf-8") as file:
        os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
        json.dump(preferences, file)
    os.rename(draft, "Preferences", src_dir_fd=folder, dst_dir_fd=folder)


def _read_preferences(folder: int) -> dict[str, object]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open("Preferences", flags, dir_fd=folder), "rb") as file:
            found = json.loads(file.read(LARGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
