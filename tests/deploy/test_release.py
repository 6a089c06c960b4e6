"""`make release` refuses a version that its changelog, images or tag contradict."""

import re
import shutil
import subprocess
import tomllib

import pytest

from config.environment import ROOT

GIT = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]


@pytest.fixture
def release(tmp_path):
    """A repository whose version 1.2.3 is ready for release."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.2.3] - 2026-11-22\n")
    (tmp_path / "deploy/kubernetes").mkdir(parents=True)
    (tmp_path / "deploy/kubernetes/all.yaml").write_text("image: registry.example.com/aftertouch:1.2.3\n")
    subprocess.run([*GIT, "init", "-q"], cwd=tmp_path, check=True)
    commit_all(tmp_path)
    return tmp_path


def commit_all(repository):
    subprocess.run([*GIT, "add", "-A"], cwd=repository, check=True)
    subprocess.run([*GIT, "commit", "-qm", "change"], cwd=repository, check=True)


def check(repository):
    return subprocess.run(
        [ROOT / ".ci/check-release"], cwd=repository, capture_output=True, text=True, check=False, timeout=180
    )


def replace(file, old, new):
    def change(repository):
        path = repository / file
        path.write_text(path.read_text().replace(old, new))
        commit_all(repository)

    return change


def tag_and_commit(repository):
    subprocess.run([*GIT, "tag", "v1.2.3"], cwd=repository, check=True)
    (repository / "later").touch()
    commit_all(repository)


def test_release_of_consistent_version_passes(release):
    before = check(release)
    assert (before.returncode, "git tag -a v1.2.3" in before.stdout) == (0, True), before.stderr
    subprocess.run([*GIT, "tag", "v1.2.3"], cwd=release, check=True)
    assert check(release).returncode == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (replace("CHANGELOG.md", "[1.2.3]", "[1.2.2]"), "CHANGELOG.md"),
        (replace("CHANGELOG.md", " - 2026-11-22", ""), "CHANGELOG.md"),
        (replace("deploy/kubernetes/all.yaml", "1.2.3", "1.2.2"), "deploy/kubernetes"),
        (replace("pyproject.toml", "1.2.3", "1.2.4"), "CHANGELOG.md"),
        (tag_and_commit, "tag v1.2.3"),
        (lambda repository: (repository / "new").touch(), "uncommitted"),
    ],
)
def test_release_with_contradiction_names_it(release, change, named):
    change(release)
    refused = check(release)
    assert refused.returncode == 1
    assert named in refused.stderr


def test_version_changelog_and_images_of_this_repository_agree(tmp_path):
    """In a copy: neither tags nor uncommitted changes of the working tree count."""
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "deploy/kubernetes", tmp_path / "deploy/kubernetes")
    subprocess.run([*GIT, "init", "-q"], cwd=tmp_path, check=True)
    commit_all(tmp_path)

    checked = check(tmp_path)

    assert checked.returncode == 0, checked.stderr
    sections = re.findall(r"^## .*$", (tmp_path / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert sections[0] == "## [Unreleased]"
    assert sections[1].startswith(f"## [{project_version()}] - ")


def project_version():
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
