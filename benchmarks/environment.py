"""Start servers and programs with production settings on free ports."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil
from cryptography.fernet import Fernet

from benchmarks.results import Figures
from config.environment import ROOT
from config.local import servers
from config.local.endpoints import Endpoints
from config.local.processes import MARK, select_port

QUEUES = "touch.high,touch.normal,touch.low"
WORKER = (
    "celery", "-A", "config", "worker", "-Q", QUEUES, "-c", "2",
    "-n", "core@%h", "--without-gossip", "--without-mingle",
)  # fmt: skip
TICKS = (
    "celery", "-A", "config", "worker", "-Q", "ticks,long", "-c", "2", "-n", "ticks@%h", "--without-gossip",
    "--without-mingle",
)  # fmt: skip
BEAT = ("celery", "-A", "config", "beat")
STOP_WITHIN = 40.0


@dataclass
class Bench:
    """Addresses, sizes, figures and a way to start programs, for one scenario."""

    state_dir: Path
    endpoints: Endpoints
    environment: dict[str, str]
    figures: Figures
    random: Random
    repeat: int
    quick: bool
    ended: int = 2_000_000  #: ended touches of `volume`
    _logs: int = field(default=0)

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def redis_url(self, database: int) -> str:
        """Return the URL of another database on the same server, for a peer."""
        return self.endpoints.redis_url.rsplit("/", 1)[0] + f"/{database}"

    @property
    def servers(self) -> dict[str, psutil.Process]:
        return {name: psutil.Process(pid) for name, pid in servers.server_pids(self.state_dir).items() if pid}

    def start(self, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Run `python -m words…` in the bench's environment."""
        self._logs += 1
        with (self.state_dir / "logs" / f"{self._logs:02}-{words[0].replace('.', '-')}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=ROOT, env={**self.environment, **(env or {})}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @contextmanager
    def running(self, *words: str, env: dict[str, str] | None = None) -> Iterator[psutil.Process]:
        program = self.start(*words, env=env)
        try:
            yield psutil.Process(program.pid)
        finally:
            stop_program(program)

    @contextmanager
    def core(self) -> Iterator[tuple[psutil.Process, psutil.Process]]:
        """Run a core worker, a ticks worker and a beat. Yields both workers once they accept work."""
        with ExitStack() as programs:
            lanes = [programs.enter_context(self.running(*words)) for words in self._core_workers()]
            ticks = programs.enter_context(self.running(*TICKS))
            programs.enter_context(self.running(*BEAT))
            wait_until(lambda: all(len(each.children()) >= 2 for each in (*lanes, ticks)), 60, "the workers")
            yield lanes[0], ticks

    @contextmanager
    def core_nodes(self, number: int) -> Iterator[tuple[list[psutil.Process], psutil.Process]]:
        """Run core workers as on `number` machines, each with its own state folder, a ticks worker and a beat.

        Yields the core workers and the ticks worker once they accept work.
        """
        with ExitStack() as programs:
            nodes = []
            for name in (f"node-{nth}" for nth in range(number)):
                own = {"AFTERTOUCH_STATE_DIR": str(self.state_dir / name), "AFTERTOUCH_NODE": name}
                nodes.append(programs.enter_context(self.running(*WORKER, "-n", f"{name}@%h", env=own)))
            ticks = programs.enter_context(self.running(*TICKS))
            programs.enter_context(self.running(*BEAT))
            wait_until(lambda: all(len(each.children()) >= 2 for each in (*nodes, ticks)), 60, "the workers")
            yield nodes, ticks

    def _core_workers(self) -> list[tuple[str, ...]]:
        """Return the words of one worker, or of one for each priority: RabbitMQ has no order between queues."""
        if not self.environment["CELERY_BROKER_URL"].startswith("amqp"):
            return [WORKER]
        return [
            tuple(word.replace(QUEUES, queue).replace("core@", f"{queue}@") for word in WORKER)
            for queue in QUEUES.split(",")
        ]


Scenario = Callable[[Bench], None]


def stop_program(program: subprocess.Popen[bytes]) -> None:
    program.terminate()
    try:
        program.wait(STOP_WITHIN)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def wait_until(happened: Callable[[], bool], seconds: float, what: str, pause: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} took longer than {seconds:g} s")
        time.sleep(pause)


@contextmanager
def open_bench(
    *,
    seed: int,
    repeat: int,
    quick: bool,
    state_dir: Path | None = None,
    keep: bool = False,
    broker: str = "",
    ended: int = 0,
) -> Iterator[Bench]:
    """Start and migrate the servers, and set Django up in this process. Stops everything at the end.

    `broker` is the URL of a running broker, instead of Valkey.
    """
    folder = (state_dir or Path(tempfile.mkdtemp(prefix="aftertouch-bench-"))).resolve()
    endpoints = servers.start_servers(folder)
    try:
        # Inserting millions of rows skips the foreign key checks; the insert is not measured.
        servers.run_as_administrator(
            folder, "GRANT SET ON PARAMETER session_replication_role TO aftertouch", "GRANT pg_checkpoint TO aftertouch"
        )
        (folder / "logs").mkdir(exist_ok=True)
        environment = _environment(folder, endpoints) | ({"CELERY_BROKER_URL": broker} if broker else {})
        os.environ.update(environment)
        _migrate(environment)
        bench = Bench(folder, endpoints, environment, Figures(), Random(seed), repeat, quick)
        bench.ended = ended or bench.size(bench.ended, 20_000)
        yield bench
    finally:
        servers.stop_servers(folder)
        if state_dir is None and not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _environment(folder: Path, endpoints: Endpoints) -> dict[str, str]:
    """Return production settings. Django in debug mode keeps every query in memory."""
    port = select_port()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AFTERTOUCH_", "DJANGO_"))}
    return {
        **inherited,
        **({MARK: os.environ[MARK]} if MARK in os.environ else {}),
        "DJANGO_SETTINGS_MODULE": "config.settings.production",
        "DJANGO_SECRET_KEY": secrets.token_urlsafe(48),
        "DJANGO_ALLOWED_HOSTS": "127.0.0.1",
        "DATABASE_URL": endpoints.database_url,
        "REDIS_URL": endpoints.redis_url,
        "CELERY_BROKER_URL": endpoints.redis_url,
        "AFTERTOUCH_STATE_DIR": str(folder),
        "AFTERTOUCH_PORT": str(port),
        "AFTERTOUCH_BASE_URL": f"http://127.0.0.1:{port}",
        "AFTERTOUCH_SECRETS_KEYS": Fernet.generate_key().decode(),
        "AFTERTOUCH_ALLOWED_PRIVATE_HOSTS": "127.0.0.1",
        "AFTERTOUCH_API_RATE_PER_MINUTE": "100000000",
    }


def _migrate(environment: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "migrate", "--verbosity", "0"],
        cwd=ROOT, env=environment, check=True,
    )  # fmt: skip
    import django

    django.setup()


def with_descendants(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes and all their descendants."""
    found = {each.pid: each for process in processes for each in (process, *process.children(recursive=True))}
    return list(found.values())


def processor_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the processor seconds so far, with children. Ended children count after their parent waited for them."""
    total = 0.0
    for process in processes:
        own = process.cpu_times()
        total += own.user + own.system + own.children_user + own.children_system
        total += sum(sum(child.cpu_times()[:2]) for child in with_descendants([process])[1:])
    return total


def resident_mb(processes: Sequence[psutil.Process]) -> float:
    """Return the resident memory in MB. Pages shared after a fork count in both processes."""
    return sum(each.memory_info().rss for each in with_descendants(processes)) / 1e6
