"""Servers on loopback that take TLS only, with certificates of an authority of our own for the name 127.0.0.1."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from config.local.processes import select_port
from tests.faults.brokers import MASTER, Server, rabbitmq

NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]


@dataclass(frozen=True)
class Authority:
    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Authority:
        if shutil.which("openssl") is None:
            pytest.skip("missing service: openssl")
        folder.mkdir(parents=True)
        made = cls(folder)
        made._request("ca", "/CN=authority")
        made._request("cert", "/CN=server", "-CA", made.path("ca.pem"), "-CAkey", made.path("ca.key"),
                      "-addext", "subjectAltName=IP:127.0.0.1")  # fmt: skip
        return made

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def _request(self, name: str, subject: str, *words: str) -> None:
        files = ["-keyout", self.path(f"{name}.key"), "-out", self.path(f"{name}.pem")]
        subprocess.run(
            ["openssl", "req", "-x509", *NEW_KEY, *files, "-subj", subject, *words], check=True, capture_output=True
        )

    @property
    def client(self) -> dict[str, str]:
        """Parameters of a client that trusts this authority and has a certificate of it."""
        return {
            "ssl_ca_certs": self.path("ca.pem"), "ssl_certfile": self.path("cert.pem"),
            "ssl_keyfile": self.path("cert.key"),
        }  # fmt: skip

    @property
    def query(self) -> str:
        return "&".join(f"{name}={value}" for name, value in self.client.items())


@contextmanager
def tls_redis(
    folder: Path, authority: Authority, *lines: str, words: tuple[str, ...] = (), **login: str
) -> Iterator[int]:
    """Start a Redis without a plain port, which demands certificates of clients. Yield its port.

    `lines` belong to its configuration. `login` is the one by which the test sees that it runs.
    """
    program = shutil.which("redis-server")  # Valkey of the package has no TLS
    if program is None:
        pytest.skip("missing service: redis-server")
    port = select_port()
    home = folder / f"redis-{port}"
    home.mkdir(parents=True)
    (home / "conf").write_text("\n".join([
        "port 0", f"tls-port {port}", "bind 127.0.0.1 127.0.0.2", f"dir {home}", "tls-auth-clients yes",
        "tls-replication yes",
        f"tls-cert-file {authority.path('cert.pem')}", f"tls-key-file {authority.path('cert.key')}",
        f"tls-ca-cert-file {authority.path('ca.pem')}", *lines, "",
    ]))  # fmt: skip
    options: dict[str, Any] = {**authority.client, **login}

    def answers() -> bool:
        try:
            with redis.Redis(port=port, host="127.0.0.1", ssl=True, socket_timeout=1, **options) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    with Server([program, str(home / "conf"), *words], home / "log").standing(answers):
        yield port


@contextmanager
def tls_sentinel(folder: Path, authority: Authority, primary: int, *, user: str, password: str) -> Iterator[int]:
    """Start a Sentinel with a login of its own that watches the primary on this port. Yield its port."""
    lines = [
        f"sentinel monitor {MASTER} 127.0.0.1 {primary} 1", f"sentinel auth-user {MASTER} web",
        f"sentinel auth-pass {MASTER} {password}", "user default off", f"user {user} on >{password} ~* &* +@all",
    ]  # fmt: skip
    with tls_redis(folder, authority, *lines, words=("--sentinel",), username=user, password=password) as port:
        yield port


@contextmanager
def tls_rabbitmq(folder: Path, authority: Authority) -> Iterator[int]:
    """Start a RabbitMQ that demands certificates of clients. Yield its port for TLS; the user is guest."""
    port = select_port()
    with rabbitmq(
        folder, f"listeners.ssl.1 = 127.0.0.1:{port}", f"ssl_options.cacertfile = {authority.path('ca.pem')}",
        f"ssl_options.certfile = {authority.path('cert.pem')}", f"ssl_options.keyfile = {authority.path('cert.key')}",
        "ssl_options.verify = verify_peer", "ssl_options.fail_if_no_peer_cert = true",
    ):  # fmt: skip
        yield port
