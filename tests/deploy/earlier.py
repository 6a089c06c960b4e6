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
class Earlier:
    commit: str
    today: str
    tree: Path  #: a checkout of the former, at first
    drops_unknown_ticks: bool  #: which it does from 21 November 2026 on; before, its workers buried them

    def switch(self, commit: str) -> None:
        subprocess.run(["git", "-C", str(self.tree), "checkout", "--quiet", commit], check=True)


def check_out(tree: Path) -> Earlier:
    commit = before_the_newest_migration() if shutil.which("git") else ""
    if not commit:
        pytest.skip("missing service: the history of this repository")
    if _git("show", f"{commit}:{PACKAGES}") != (ROOT / PACKAGES).read_text("utf-8").strip():
        pytest.skip(f"missing service: the packages of {commit}")
    drops = "tick_unknown" in _git("show", f"{commit}:config/celery_guards.py")
    made = Earlier(commit, _git("rev-parse", "HEAD"), tree, drops)
    subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(tree)], check=True)
    made.switch(commit)
    return made


def before_the_newest_migration() -> str:
    """The last commit whose migrations are fewer than today's and none but today's: two that stood beside each other
    for an hour were never anybody's version. Nothing where the history does not reach so far."""
    today = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/migrations/[0-9]*.py")}
    folders = sorted({f"{Path(path).parent}/" for path in today})
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
