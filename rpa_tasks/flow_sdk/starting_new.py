"""The file that a new flow begins with."""

from __future__ import annotations

import os
from pathlib import Path

from rpa_tasks.flow_sdk.discovery import NAME, VARIABLE, directories
from rpa_tasks.flow_sdk.errors import Misused

STARTER = Path(__file__).with_name("starter.txt")


def write_starter(name: str, folder: Path | None = None) -> Path:
    """In `folder`, else in the first directory of AFTERTOUCH_RPA_FLOWS, else among ours. Misused: no such name, or
    there is one already; nothing is ever written over."""
    if not NAME.fullmatch(name):
        raise Misused(f"{name!r} is no name for a flow: letters, digits, “_”, “-” and “.”, at most 140.")
    folder = folder or directories()[0]
    path = folder / f"{name}.py"
    text = STARTER.read_text(encoding="utf-8").replace("NAME", name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise Misused(f"{path} is there already.") from None
    except OSError as error:
        raise Misused(f"{path} cannot be written: {error.strerror}") from None
    return path


def is_found(path: Path) -> bool:
    """Whether `run` will look there."""
    return any(path.parent.resolve() == folder.resolve() for folder in directories())


def hint(path: Path) -> str:
    """What to do so that it is found."""
    return f"export {VARIABLE}={os.path.abspath(path.parent)}"
