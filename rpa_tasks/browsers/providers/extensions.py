"""Find the unpacked extensions that a browser loads, in the folder that the node allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from django.conf import settings

from rpa_tasks.browsers.browser_errors import BROWSER_FAILED, NoBrowser

SETTING = "AFTERTOUCH_RPA_EXTENSIONS_DIR"


def find_extensions(names: Iterable[str]) -> list[Path]:
    """Return the folders of these extensions, whose names are valid. Raises `NoBrowser` if the node lacks one."""
    return [_find_extension(name) for name in names]


def _find_extension(name: str) -> Path:
    allowed = settings.AFTERTOUCH_RPA_EXTENSIONS_DIR
    if not allowed:
        raise _refuse(name, f"{SETTING} is not set on this node")
    if not Path(allowed).is_absolute() or "," in allowed:
        raise _refuse(name, f"{SETTING} must be an absolute folder without a comma")
    folder = Path(allowed) / name
    if folder.is_symlink() or not folder.is_dir():
        raise _refuse(name, f"{allowed} of this node has no folder with this name")
    if not (folder / "manifest.json").is_file():
        raise _refuse(name, f"{folder} of this node has no manifest.json")
    return folder


def _refuse(name: str, problem: str) -> NoBrowser:
    return NoBrowser(BROWSER_FAILED, f"The extension “{name}” cannot be loaded: {problem}.")


def make_extension_flags(folders: Sequence[Path]) -> list[str]:
    """Return the flags with which Chromium loads these extensions and no others."""
    if not folders:
        return []
    words = ",".join(map(str, folders))
    return [f"--load-extension={words}", f"--disable-extensions-except={words}"]
