"""Make the working directory of a run."""

from __future__ import annotations

import os
from pathlib import Path

from rpa_tasks import isolation
from rpa_tasks.browsers import registry

PARAM_FILE = "param.json"


def make_run_directory(profile_id: str, lease_no: int, *, downloads: str = "", param: str | None = None) -> Path:
    """Create the working directory of one run, with `tmp`, the folder for downloads and the file of the parameter.

    Only the shop's programs can read it. Its browser can write beside it, so no link is followed. Raises `OSError`.
    """
    registry.shop_runs_dir(profile_id)
    folder = registry.run_path(profile_id, lease_no)
    isolation.delete_directory(folder)  # the browser may have made one
    owner = isolation.owner()
    folder.mkdir(mode=0o700)
    made = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in ("tmp", *([downloads] if downloads else ())):
            os.mkdir(name, 0o700, dir_fd=made)
            os.chown(name, owner, owner, dir_fd=made, follow_symlinks=False)
        if param is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(PARAM_FILE, flags, 0o600, dir_fd=made), "w", encoding="utf-8") as file:
                os.fchown(file.fileno(), owner, owner)
                file.write(param)
        os.fchown(made, owner, owner)  # last: until then no program of the shop changes it
    finally:
        os.close(made)
    return folder
