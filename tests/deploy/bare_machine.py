"""A machine to follow the guides on: a folder, a user who may write nowhere else, and nothing in the environment."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from config.local.processes import select_port, wait_until
from config.local.servers import binaries, server_binary

NOBODY = 65534
HOUSE = (
    "/opt/aftertouch", "/etc/aftertouch", "/etc/redis", "/var/lib/aftertouch", "/var/lib/postgresql", "/var/lib/redis",
    "/var/backups",
)  # fmt: skip
DATA = "/var/lib/postgresql/15/main"


def postgres_binaries() -> Path:
    """PostgreSQL as Debian packages it, else the one that comes with the tests."""
    packaged = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return packaged[-1] if packaged else binaries()


class BareMachine:
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
        folders = ("home", "run", "opt", "etc", "tmp", "var/lib/aftertouch", "var/lib/redis", "var/lib/postgresql/15")
        for name in (*folders, "var/backups/postgresql", "var/backups/redis"):
            (folder / name).mkdir(parents=True)
        self.own(folder)

    def own(self, path: Path) -> None:
        """Give a path to the user."""
        if self.user[0] is not None:
            subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(path)], check=True)

    def here(self, text: str) -> str:
        """With the folders and ports of this machine."""
        for path in HOUSE:
            text = re.sub(rf"(?<![\w.]){path}", f"{self.folder}{path}", text)
        for usual, ours in self.ports.items():
            text = re.sub(rf"(127\.0\.0\.1:|_PORT=|-p ){usual}\b", rf"\g<1>{ours}", text)
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
    def running(
        self, words: Sequence[str], log: str, env: dict[str, str] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        process = self.start(words, env or self.env, log)
        try:
            yield process
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

    def ask(self, database: str, statement: str) -> list[tuple[Any, ...]]:
        where = {"host": self.env["PGHOST"], "port": int(self.env["PGPORT"]), "user": "postgres", "dbname": database}
        with psycopg.connect(**where) as connection:
            return connection.execute(statement.encode()).fetchall()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]


@contextmanager
def bare_machine() -> Iterator[BareMachine]:
    folder = Path(tempfile.mkdtemp(prefix="machine-"))
    folder.chmod(0o755)
    try:
        yield BareMachine(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def create_cluster(machine: BareMachine) -> None:
    data = machine.here(DATA)
    machine.run(f"initdb -D {data} -U postgres --auth-local=trust --auth-host=scram-sha-256 -E UTF8 --locale=C.UTF-8")


@contextmanager
def postgres(machine: BareMachine) -> Iterator[subprocess.Popen[bytes]]:
    words = [
        str(postgres_binaries() / "postgres"), "-D", machine.here(DATA), "-p", machine.env["PGPORT"],
        "-k", machine.env["PGHOST"], "-c", "listen_addresses=127.0.0.1",
    ]  # fmt: skip
    with machine.running(words, "postgres") as process:
        assert wait_until(lambda: _succeeds(machine, "pg_isready"), 60, 0.2), machine.log("postgres")
        yield process


@contextmanager
def redis_server(machine: BareMachine) -> Iterator[subprocess.Popen[bytes]]:
    """Run with the file that the guide writes."""
    words = [
        shutil.which("redis-server") or str(server_binary()), machine.here("/etc/redis/aftertouch.conf"),
        "--port", str(machine.ports["6379"]), "--dir", machine.here("/var/lib/redis"),
    ]  # fmt: skip
    with machine.running(words, "redis") as process:
        yield process


def _succeeds(machine: BareMachine, word: str) -> bool:
    return subprocess.run([word], env=machine.env, capture_output=True).returncode == 0
