"""The guide to deploying, followed line by line: in a fresh folder, by a user who may write nowhere else, with nothing
in the environment. Folders and ports are other ones; packages are there already; each unit's own command runs in
systemd's place."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest

from config.environment import ROOT
from config.local.postgres import binaries
from config.local.processes import select_port, wait_until
from config.local.valkey import server_binary
from tests.docs.pages import blocks

GUIDE = (ROOT / "docs" / "how-to" / "deploy.md").read_text("utf-8")
NOBODY = 65534
UNITS = ("web", "core", "ticks", "long", "execution", "beat", "watcher", "flower")
HOUSE = ("/opt/aftertouch", "/etc/aftertouch", "/etc/redis", "/var/lib/aftertouch")


def postgres_binaries() -> Path:
    """PostgreSQL as Debian packages it, else the one that comes with the tests."""
    packaged = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return packaged[-1] if packaged else binaries()


class Machine:
    """A folder that plays `/`, and a user who owns it and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {"5432": select_port(), "6379": select_port(), "8000": select_port(), "5555": select_port()}
        self.user = (NOBODY, NOBODY) if os.geteuid() == 0 else (None, None)
        self.groups: list[int] | None = [] if self.user[0] else None
        self.env = {
            "PATH": f"{postgres_binaries()}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(folder / "home"), "LANG": "C.UTF-8",
            "TMPDIR": str(folder / "tmp"), "REPOSITORY": str(folder / "repository"), "GIT_CONFIG_NOSYSTEM": "1",
            "PGHOST": str(folder / "run"), "PGPORT": str(self.ports["5432"]),
            **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
        }  # fmt: skip
        self.api_key = ""
        for name in ("home", "run", "opt", "etc", "tmp", "var/lib/aftertouch"):
            (folder / name).mkdir(parents=True)
        subprocess.run(["git", "clone", "--quiet", "--bare", str(ROOT), self.env["REPOSITORY"]], check=True)
        if self.user[0] is not None:
            subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(folder)], check=True)

    def here(self, text: str) -> str:
        """With the folders and ports of this machine."""
        for path in HOUSE:
            text = re.sub(rf"(?<![\w.]){path}", f"{self.folder}{path}", text)
        for usual, ours in self.ports.items():
            text = re.sub(rf"(127\.0\.0\.1:|_PORT=){usual}\b", rf"\g<1>{ours}", text)
        return text

    @property
    def elsewhere(self) -> str:
        """Adapt a command to the folders and ports of the example environment."""
        ports = "; ".join(f"s|_PORT=[{usual[0]}]{usual[1:]}|_PORT={ours}|" for usual, ours in self.ports.items())
        return f"sed -E -i 's#=/(var/lib|run)/#={self.folder}/\\1/#; {ports}' /etc/aftertouch/environment"

    def start(self, words: Sequence[str], env: dict[str, str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{log}.log").open("wb") as stream:
            return subprocess.Popen(
                words, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                user=self.user[0], group=self.user[1], extra_groups=self.groups, start_new_session=True,
            )  # fmt: skip

    def run(self, script: str) -> str:
        """What a shell printed that stops at the first thing that goes wrong."""
        said = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.here(script)], cwd=self.folder / "home", env=self.env,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, user=self.user[0], group=self.user[1],
            extra_groups=self.groups,
        )  # fmt: skip
        assert said.returncode == 0, f"{script}\n{said.stdout[-3000:]}\n{said.stderr[-3000:]}"
        return said.stdout

    @contextmanager
    def running(self, words: Sequence[str], log: str, env: dict[str, str] | None = None) -> Iterator[None]:
        process = self.start(words, env or self.env, log)
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT if log == "postgres" else signal.SIGTERM)
            try:
                process.wait(45)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def unit(self, name: str) -> tuple[list[str], dict[str, str]]:
        """The words of a unit's command and the environment that it names, as systemd would read them."""
        folder = self.folder / "opt/aftertouch/deploy/systemd"
        text = (folder / f"aftertouch-{name}.service").read_text()
        env = self.env | dict(word.split("=", 1) for word in re.findall(r"^Environment=(\S+)$", text, re.MULTILINE))
        for file in re.findall(r"^EnvironmentFile=-?(\S+)$", text, re.MULTILINE):
            path = Path(self.here(file.replace("%p", f"aftertouch-{name}")))
            lines = path.read_text().splitlines() if path.exists() else []
            env.update(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        command = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)[0].replace("%%", "%")
        words = re.sub(r"\$\{(\w+)\}", lambda match: env[match[1]], self.here(command))
        return ["env", "-C", str(self.folder / "opt/aftertouch"), *shlex.split(words)], env

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]


@pytest.fixture
def machine() -> Iterator[Machine]:
    if shutil.which("openssl") is None:
        pytest.skip("missing service: openssl")
    folder = Path(tempfile.mkdtemp(prefix="machine-"))
    folder.chmod(0o755)
    try:
        yield Machine(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def postgres(machine: Machine) -> Iterator[None]:
    data = machine.folder / "postgres"
    machine.run(f"initdb -D {data} -U postgres --auth-local=trust --auth-host=scram-sha-256 -E UTF8 --locale=C.UTF-8")
    words = [
        str(postgres_binaries() / "postgres"),
        "-D",
        str(data),
        "-p",
        machine.env["PGPORT"],
        "-k",
        machine.env["PGHOST"],
    ]
    with machine.running([*words, "-c", "listen_addresses=127.0.0.1"], "postgres"):
        assert wait_until(lambda: _succeeds(machine, "pg_isready"), 60, 0.2), machine.log("postgres")
        yield


def _succeeds(machine: Machine, word: str) -> bool:
    return subprocess.run([word], env=machine.env, capture_output=True).returncode == 0


@pytest.mark.campaign
def test_deploy_guide_sets_up_machine_and_restores_dump(machine: Machine) -> None:
    todo = [block.replace(EXAMPLE, f"{EXAMPLE}\n{machine.elsewhere}") for block in blocks(GUIDE, "console")]
    checks = next(number for number, block in enumerate(todo) if "/health/ready" in block)
    with ExitStack() as programs:
        programs.enter_context(postgres(machine))
        said = machine.run("\n".join(todo[:checks]))
        machine.api_key = said.split()[-1]
        server = shutil.which("redis-server") or str(server_binary())
        words = [server, machine.here("/etc/redis/aftertouch.conf"), "--port", str(machine.ports["6379"])]
        programs.enter_context(machine.running([*words, "--dir", str(machine.folder / "home")], "redis"))
        with ExitStack() as units:
            for name in UNITS:
                command, env = machine.unit(name)
                units.enter_context(machine.running(command, name, env))
            live = f"http://127.0.0.1:{machine.ports['8000']}/health/live"
            assert wait_until(lambda: _answers(live), 120, 0.3), machine.log("web")
            assert '"status": "ok"' in machine.run(todo[checks])
            _send_an_event(machine)
            machine.run(f"{NEW_SHELL}\n{todo[checks + 1]}")  # the dump
        machine.run(f"{NEW_SHELL}\n" + "\n".join(todo[checks + 2 :]))
        assert _count(machine, "restored", "scheduling_event") == 1
        assert _count(machine, "restored", "scheduling_touch") == _count(machine, "aftertouch", "scheduling_touch") == 1
        assert _count(machine, "aftertouch", "scheduling_pause") == 1


EXAMPLE = "environment.example /etc/aftertouch/environment"
NEW_SHELL = (
    "set -a && . /etc/aftertouch/environment && . /etc/aftertouch/keys.environment && set +a && cd /opt/aftertouch"
)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=3) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _send_an_event(machine: Machine) -> None:
    event = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "material.downloaded", "subject": "ann"}
    headers = {
        "Authorization": f"Bearer {machine.api_key}", "Content-Type": "application/json",
        "Host": "aftertouch.example.com", "X-Forwarded-Proto": "https",
    }  # fmt: skip
    url = f"http://127.0.0.1:{machine.ports['8000']}/api/v1/events"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(event).encode(), headers), timeout=30) as answer:
        assert (answer.status, len(json.load(answer)["touches"])) == (202, 1)


def _count(machine: Machine, database: str, table: str) -> int:
    with psycopg.connect(
        host=machine.env["PGHOST"], port=int(machine.env["PGPORT"]), user="postgres", dbname=database
    ) as connection:
        row = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
        assert row
        return int(row[0])


def test_deploy_guide_marks_untested_commands() -> None:
    """Every block of commands is run by the test above or marked as not run."""
    for match in re.finditer(r"([^\n]*\n[^\n]*\n[^\n]*)\n\n```sh\n", GUIDE):
        assert "not tried" in match[1].lower(), match[1]
