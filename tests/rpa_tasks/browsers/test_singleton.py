"""What is deleted with Chromium's lock on a profile, whose links a flow can write."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from rpa_tasks.browsers.browser_processes import SINGLETON_FILES, release_singleton


@pytest.mark.parametrize(
    ("folder", "stays"),
    [
        ("tmp/org.chromium.x", False),
        ("tmp/com.google.Chrome.x", False),
        ("tmp/mine", True),
        ("home/org.chromium.x", True),
    ],
    ids=["of Chromium", "of Chrome", "another name", "elsewhere"],
)
def test_release_singleton_deletes_only_chromium_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, stays: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "file").touch()
    profile = tmp_path / "profile"
    profile.mkdir()
    (profile / "SingletonLock").symlink_to("a-container-that-is-gone-1")
    (profile / "SingletonSocket").symlink_to(tmp_path / folder / "SingletonSocket")

    release_singleton(profile)

    assert (tmp_path / folder / "file").exists() == stays
    assert not any((profile / name).is_symlink() for name in SINGLETON_FILES)


def test_release_singleton_leaves_what_is_no_file(tmp_path: Path) -> None:
    """Programs of the shop can write a directory there. The end of a browser must not fail at it."""
    (tmp_path / "SingletonLock").symlink_to("a-container-that-is-gone-1")
    (tmp_path / "SingletonSocket").mkdir()
    (tmp_path / "SingletonCookie").symlink_to("1")

    release_singleton(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["SingletonSocket"]
