"""The version before the newest migration, from the history of this repository."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from config.environment import ROOT

PACKAGES = "requirements/base.txt"


@dataclass(frozen=True)
class EarlierVersion:
    commit: str
    today: str
    tree: Path  #: a checkout of the former, at first

    def switch(self, commit: str) -> None:
        subprocess.run(["git", "-C", str(self.tree), "checkout", "--quiet", commit], check=True)


def check_out(tree: Path) -> EarlierVersion:
    commit = find_previous_version() if shutil.which("git") else ""
    if not commit:
        pytest.skip("missing service: the history of this repository")
    if _git("show", f"{commit}:{PACKAGES}") != (ROOT / PACKAGES).read_text("utf-8").strip():
        pytest.skip(f"missing service: the packages of {commit}")
    made = EarlierVersion(commit, _git("rev-parse", "HEAD"), tree)
    subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(tree)], check=True)
    made.switch(commit)
    return made


def find_previous_version() -> str:
    """Return the last commit that has a part of today's migrations and no others: two that existed side by side for an
    hour were never a version. HEAD if each app has its initial migration only; "" if the history is too short."""
    today = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/migrations/[0-9]*.py")}
    folders = sorted({f"{Path(path).parent}/" for path in today})
    if len(today) == len(folders):
        return _git("rev-parse", "--short", "HEAD")
    touched = _git("log", "--format=%H", "--", *folders).split()
    for commit in ["HEAD", *(f"{each}~" for each in touched)]:
        files = _git("ls-tree", "-r", "--name-only", commit, "--", *folders).splitlines()
        then = {path for path in files if Path(path).name[:1].isdigit()}
        if then and then < today:
            return _git("rev-parse", "--short", commit)
    return ""


def _git(*words: str) -> str:
    """What it printed; nothing where it failed, as where there is no repository."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
