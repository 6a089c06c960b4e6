"""The stack in the foreground: what it starts, keeps alive, refuses and stops."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest

from config.environment import ROOT, Environment
from config.local import servers
from config.local import stack as local_stack
from config.local.endpoints import adopt_stack_settings, read_or_create_secret, stack_settings, write_private
from config.local.isolated import RunningStack, running_stack
from config.local.processes import is_alive, processes_with_variable, wait_until
from config.local.stack import Foreground, Program, StackError, refuse_older_tables
from tests.support.stack import copy_migrated_tables
from tests.support.waiting import WAIT_LIMIT


@pytest.fixture(scope="module")
def stack(state_folder: Callable[[str], Path]) -> Iterator[RunningStack]:
    folder = state_folder("stack")
    copy_migrated_tables(folder)
    with running_stack(programs=["web", "beat", "flower"], state_dir=folder) as running:
        yield running


def status_of(url: str, login: str = "") -> int:
    connection = HTTPConnection(urlsplit(url).netloc, timeout=WAIT_LIMIT)
    try:
        token = base64.b64encode(login.encode()).decode()
        connection.request("GET", urlsplit(url).path, headers={"Authorization": f"Basic {token}"} if login else {})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def test_web_ignores_forwarded_address_of_direct_client(stack: RunningStack) -> None:
    token = "t" * 32
    form = f"csrfmiddlewaretoken={token}&username=ann&password=wrong"
    headers = {"Cookie": f"csrftoken={token}", "Content-Type": "application/x-www-form-urlencoded"}
    for number in range(3):
        connection = HTTPConnection(urlsplit(stack.base_url).netloc, timeout=WAIT_LIMIT)
        connection.request("POST", "/admin/login/", form, {**headers, "X-Forwarded-For": f"192.0.2.{number}"})
        assert connection.getresponse().status == 200
        connection.close()
    with psycopg.connect(stack.endpoints.database_url) as database:
        rows = database.execute("SELECT address, tries FROM scheduling_failedlogin WHERE address <> '*'").fetchall()
    assert rows == [("127.0.0.1", 3)]


def test_killed_servers_return_at_their_addresses(stack: RunningStack) -> None:
    before, killed = stack.endpoints, {stack.kill(server) for server in ("PostgreSQL", "Valkey")}
    stack.wait_until(lambda: len({*stack.server_pids.values()} - killed) == 2, WAIT_LIMIT)
    assert servers.start_servers(stack.state_dir) == before  # proves that both answer


def test_flower_without_login_serves_nothing(stack: RunningStack) -> None:
    login = f"aftertouch:{read_or_create_secret(stack.state_dir, 'flower')}"
    stack.wait_until(lambda: status_of(stack.flower_url + "/workers", login) == 200, WAIT_LIMIT)
    for path in ("/workers", "/metrics", "/healthcheck", "/api/workers"):
        assert status_of(stack.flower_url + path) == 401, path
    assert status_of(stack.flower_url + "/metrics", login) == 200
    assert status_of(stack.flower_url + "/healthcheck", login) == 200
    assert status_of(stack.flower_url + "/workers", "aftertouch:guess") == 401
    for pid in stack.pids.values():
        assert login not in " ".join(psutil.Process(pid).cmdline())


def test_manage_in_second_shell_uses_settings_and_servers_of_the_stack(stack: RunningStack) -> None:
    kept = stack.state_dir / "settings.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("AFTERTOUCH_", "DJANGO_"))}
    done = subprocess.run(
        [sys.executable, "manage.py", "shell", "--no-imports", "-c",
         "from django.conf import settings; from scheduling.models import Configuration;"
         "print(settings.AFTERTOUCH_BASE_URL, settings.FLOWER_URL, Configuration.objects.count())"],
        cwd=ROOT, env={**ours, "AFTERTOUCH_STATE_DIR": str(stack.state_dir)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [stack.base_url, f"{stack.flower_url}/", "1"]


def test_adopted_settings_never_replace_given_ones(tmp_path: Path) -> None:
    ours = {"AFTERTOUCH_TIME_SCALE": "60", "DJANGO_SETTINGS_MODULE": "config.settings.local"}
    write_private(stack_settings(tmp_path), json.dumps(ours))
    environ = {"AFTERTOUCH_TIME_SCALE": "1"}
    adopt_stack_settings(tmp_path, environ)
    assert environ == {"AFTERTOUCH_TIME_SCALE": "1", "DJANGO_SETTINGS_MODULE": "config.settings.local"}
    for name in ("DATABASE_URL", "DJANGO_SETTINGS_MODULE"):
        other = {name: "of another stack"}
        adopt_stack_settings(tmp_path, other)
        assert other == {name: "of another stack"}
    stack_settings(tmp_path).unlink()
    nothing: dict[str, str] = {}
    adopt_stack_settings(tmp_path, nothing)
    assert nothing == {}


def test_second_stack_in_folder_is_refused(stack: RunningStack) -> None:
    refused = run("run", stack.state_dir)
    assert refused.returncode == 1
    assert "already runs" in refused.stderr
    assert status_of(stack.base_url + "/health/live") == 200


def run(action: str, state_dir: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "config.local", action],
        cwd=ROOT, env={**os.environ, "AFTERTOUCH_STATE_DIR": str(state_dir), **env},
        text=True, capture_output=True, timeout=WAIT_LIMIT, check=False,
    )  # fmt: skip


def test_taken_ports_name_their_settings_and_nothing_is_started(tmp_path: Path) -> None:
    variables = ("AFTERTOUCH_PORT", "AFTERTOUCH_FLOWER_PORT")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(taken.getsockname()[1]) for taken in (one, other)]
        refused = run("run", tmp_path / "state", **dict(zip(variables, ports, strict=True)))
    assert refused.returncode == 1
    for port, variable in zip(ports, variables, strict=True):
        assert f"port {port} on 127.0.0.1 is taken; set {variable} " in refused.stderr
    assert not (tmp_path / "state" / "postgres").exists()


def test_program_that_cannot_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program("broken", "-c exit(3)")
    settings = Environment(aftertouch_state_dir=tmp_path)
    monkeypatch.setattr(local_stack, "LIVE_WITHIN", 600.0)
    monkeypatch.setattr(local_stack, "MOST_ENDS", 2)  # each has a longer pause before it
    stack = Foreground(settings, tmp_path, [program])
    try:
        with pytest.raises(StackError, match="broken cannot be started"):
            stack.await_live()
    finally:
        stack.stop()


WAITS_FOR_THE_OTHER = """
import pathlib, signal, sys, time
folder, name, other = pathlib.Path(sys.argv[1]), *sys.argv[2:]

def end(*_):
    (folder / f"{name}.asked").touch()
    while not (folder / f"{other}.asked").exists():
        time.sleep(0.02)
    (folder / f"{name}.ended").touch()
    sys.exit()

signal.signal(signal.SIGTERM, end)
(folder / f"{name}.runs").touch()
while True:
    time.sleep(1)
"""


def test_stop_signals_all_programs_at_once(tmp_path: Path) -> None:
    """One after another, their times would add up to more than the stop has, and the last would get none."""
    (tmp_path / "program.py").write_text(WAITS_FOR_THE_OTHER)
    names = ("one", "two")
    programs = [
        Program(name, f"{tmp_path}/program.py {tmp_path} {name} {other}", stop_within=60)
        for name, other in zip(names, reversed(names), strict=True)
    ]
    settings = Environment(aftertouch_state_dir=tmp_path)
    stack = Foreground(settings, tmp_path, programs)
    stack.check_programs()
    try:
        assert wait_until(lambda: all((tmp_path / f"{name}.runs").exists() for name in names), WAIT_LIMIT)
    finally:
        stack.stop()

    assert [name for name in names if not (tmp_path / f"{name}.ended").exists()] == []


def test_stop_during_start_reaches_every_program(tmp_path: Path) -> None:
    programs = [Program(f"p{number}", "-c 'import time; time.sleep(3600)'", stop_within=3600) for number in range(10)]
    stack = Foreground(Environment(aftertouch_state_dir=tmp_path), tmp_path, programs)
    stack.check_programs()
    assert wait_until(stack.have_stopped, WAIT_LIMIT)


def test_deaf_program_is_killed_with_its_children(tmp_path: Path) -> None:
    deaf = "import signal, subprocess, sys; signal.signal(15, signal.SIG_IGN); subprocess.run(['sleep', sys.argv[1]])"
    program = Program("deaf", f'-c "{deaf}" 3600', stop_within=1)
    stack = Foreground(Environment(aftertouch_state_dir=tmp_path), tmp_path, [program])
    stack.check_programs()
    try:
        assert wait_until(
            lambda: len(processes_with_variable(local_stack.STACK_MARKER, str(tmp_path))) == 2, WAIT_LIMIT
        )
        assert wait_until(stack.have_stopped, WAIT_LIMIT)
        assert processes_with_variable(local_stack.STACK_MARKER, str(tmp_path)) == []
    finally:
        stack.stop()


def test_long_log_keeps_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_stack, "LOG_LIMIT", 10)
    stack = Foreground(Environment(aftertouch_state_dir=tmp_path), tmp_path, [])
    log = tmp_path / "logs" / "web.log"
    with log.open("ab") as writer:
        writer.write(b"more than ten\n")
        writer.flush()
        stack.trim_logs()
        writer.write(b"new\n")
    assert (log.read_text(), log.with_suffix(".log.1").read_text()) == ("new\n", "more than ten\n")


def test_tables_of_an_older_version_are_refused_with_the_remedy(tmp_path: Path) -> None:
    refuse_older_tables(tmp_path)
    (tmp_path / "postgres").mkdir()
    refuse_older_tables(tmp_path)  # those of this version
    (tmp_path / "initial-migrations").write_text("another digest")
    with pytest.raises(StackError, match="make clean"):
        refuse_older_tables(tmp_path)


# --- the end of the stack that the tests above share ------------------------------------------------------------------


def test_stack_with_killed_owner_leaves_no_process(stack: RunningStack) -> None:
    programs = [psutil.Process(pid) for pid in stack.pids.values()]
    owner = local_stack.owner_pid(stack.state_dir)
    assert owner is not None
    os.kill(owner, signal.SIGKILL)
    assert wait_until(lambda: not any(is_alive(program) for program in programs), WAIT_LIMIT)
    local_stack.stop_stack(stack.state_dir)
    assert_nothing_runs(stack.state_dir)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_stack_without_error(stack: RunningStack, number: signal.Signals) -> None:
    """It starts again in the folder of the one before."""
    local_stack.stop_stack(stack.state_dir)
    with running_stack(programs=["beat"], state_dir=stack.state_dir):
        owner = local_stack.owner_pid(stack.state_dir)
        assert owner is not None
        os.kill(owner, number)
        assert wait_until(lambda: local_stack.owner_pid(stack.state_dir) is None, WAIT_LIMIT)
        assert_nothing_runs(stack.state_dir)
        assert "has stopped" in (stack.state_dir / "logs" / "stack.log").read_text()


def assert_nothing_runs(state_dir: Path) -> None:
    assert servers.server_pids(state_dir) == {"PostgreSQL": None, "Valkey": None}
    assert processes_with_variable(local_stack.STACK_MARKER, str(state_dir)) == []
