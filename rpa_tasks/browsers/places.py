"""Where the pool keeps what it knows: under `<state directory>/rpa`, readable by its own user only.

browsers/slot-<n>.lock   flocked by whoever has the slot; never deleted, or two could hold "it" at once
browsers/slot-<n>.json   which browser the slot holds; no file, no browser
profiles/<profile>/      a shop's browser profile, with the `.lock` of the one who uses or starts its browser, which is
                         never deleted either
logs/                    what browsers say on standard error
workers/<pid>-<n>.json   the queues of the execution worker that started at tick n
homes/<profile>/         HOME of a shop's commands
runs/<task>-<lease no>/  the working directory of a run, with `param.json` where it reads its parameter from a file;
                         deleted after it
uids.json                the uid of each profile's shop, where commands have uids of their own
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from urllib.parse import quote

from django.conf import settings

LONGEST_NAME = 200
LOCK = ".lock"  #: of a profile, in its directory


def root() -> Path:
    return Path(settings.AFTERTOUCH_STATE_DIR).absolute() / "rpa"


def browsers() -> Path:
    return _made(root() / "browsers")


def logs() -> Path:
    return _made(root() / "logs")


def homes() -> Path:
    return _made(root() / "homes")


def runs() -> Path:
    return _made(root() / "runs")


def workers() -> Path:
    return _made(root() / "workers")


def profiles() -> Path:
    return _made(root() / "profiles")


def profile(profile_id: str) -> Path:
    """The profile's directory. ValueError: no profile id."""
    return _made(profiles() / directory_name(profile_id))


def directory_name(profile_id: str) -> str:
    """A file name that no other profile id has, and that stays inside its folder."""
    if not profile_id:
        raise ValueError("A browser profile needs an id.")
    name = re.sub(r"^\.", "%2E", quote(profile_id, safe=""))
    if len(name) > LONGEST_NAME:
        name = f"{name[:120]}-{hashlib.sha256(profile_id.encode()).hexdigest()[:32]}"
    return name


def profile_lock(profile_id: str) -> Path:
    return profile(profile_id) / LOCK


def slot_lock(slot: int) -> Path:
    return browsers() / f"slot-{slot}.lock"


def slot_record(slot: int) -> Path:
    return browsers() / f"slot-{slot}.json"


def marker(slot: int) -> str:
    """What every process of the slot's browser has in its environment, as `AFTERTOUCH_BROWSER`: it finds them even
    when the record was lost. The path tells two stacks on one machine apart."""
    return str(browsers().resolve() / f"slot-{slot}")


def read_own(path: Path) -> bytes:
    """A file in a directory that a shop's programs may write to: a link in its place is not followed. Raises
    `OSError`."""
    with open(path, "rb", opener=_without_links) as file:
        return file.read(1_000_000)


def write_own(path: Path, text: str) -> None:
    """As `read_own`. Raises `OSError`."""
    with open(path, "w", encoding="utf-8", opener=_without_links) as file:
        file.write(text)


def _without_links(path: str, flags: int) -> int:
    # A named pipe in its place does not make us wait.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _made(directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory
