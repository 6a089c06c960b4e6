"""Parse addresses of Redis and RabbitMQ. Every client takes its options from here, so all treat an address alike.

Errors contain no values: an address has a password.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

LOGIN = ("username", "password")
FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
TLS = (*FILES, "ssl_cert_reqs", "ssl_check_hostname")
PORTS = {
    "redis": 6379, "rediss": 6379, "unix": 0, "sentinel": 26379, "redis+cluster": 6379, "rediss+cluster": 6379,
}  # fmt: skip
AMQP = ("amqp", "amqps", "pyamqp")
FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
WRONG = (
    "must be redis://host:6379/0, rediss:// with TLS, unix:///path, sentinel://host:26379/0;… or "
    "redis+cluster://host:6379,… (the broker: also amqp:// or amqps://), with special characters of passwords "
    "percent-encoded"
)
WRONG_CLUSTER = (
    "a cluster is redis+cluster://user:password@h1:6379,h2:6379, or rediss+cluster:// with TLS, without a database and "
    "with special characters of user and password percent-encoded"
)
_NODE = r"(?:[\w.%-]+|\[[\da-f:.]+\])(?::\d+)?"
_CLUSTER = re.compile(rf"(rediss?\+cluster://(?:[^/?#@]*@)?)({_NODE}(?:,{_NODE})*)/?(\?.*)?", re.ASCII | re.IGNORECASE)


class InvalidAddress(ValueError):
    """The text is not an address, or a client could not honour all of it."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    scheme: str
    hosts: tuple[tuple[str, int], ...]  #: names and ports: the server, or the Sentinels or nodes; none of a socket
    options: Mapping[str, Any]  #: login, database and TLS of the servers, as keyword arguments of redis-py
    socket: str = ""  #: path

    @property
    def server(self) -> dict[str, Any]:
        """Return the keyword arguments of redis-py for a server that is named directly."""
        if self.scheme == "unix":
            return {"unix_socket_path": self.socket, **self.options}
        return {"host": self.hosts[0][0], "port": self.hosts[0][1], **self.options}


@cache
def parse_redis(url: str) -> RedisAddress:
    """Parse `redis://user:password@host:6379/0`, `rediss://…`, `unix:///path`, a list `sentinel://…;sentinel://…`, or
    `redis+cluster://user:password@host:6379,host:6379` and `rediss+cluster://…`.

    Login, database and parameters may stand at any Sentinel of a list and are those of the servers. With TLS the
    certificate and its name are verified, unless a parameter switches it off.

    Raises:
        InvalidAddress: the address is wrong, or has an unknown parameter or two values of one.
    """
    parts = _split(url, PORTS)
    scheme = parts[0].scheme
    clustered = is_cluster(url)
    if parts[1:] and not clustered and scheme != "sentinel":
        raise InvalidAddress(WRONG)
    parameters = _merge((name, value) for part in parts for name, value in _read_part(part))
    if not parameters.get("db", "0").isdecimal():
        raise InvalidAddress("the database must be a number, as in redis://host:6379/0")
    names = (*LOGIN, *(() if clustered else ("db",)))
    options = _read_options(parameters, names, encrypted=None if scheme == "sentinel" else scheme.startswith("rediss"))
    if not clustered:
        options["db"] = int(options.get("db", 0))
    if scheme == "unix":
        return RedisAddress(scheme, (), options, unquote(parts[0].path))
    hosts = tuple((unquote(part.hostname or "127.0.0.1"), part.port or PORTS[scheme]) for part in parts)
    return RedisAddress(scheme, hosts, options)


def is_cluster(url: str) -> bool:
    """Return whether the address is meant for a Redis Cluster. It may still be wrong."""
    return url.partition("://")[0].lower().endswith("cluster")


def is_rabbitmq(broker_url: str) -> bool:
    """Return whether the address is meant for RabbitMQ. It may still be wrong."""
    return broker_url.partition("://")[0] in AMQP


def parse_amqp(url: str) -> tuple[str, dict[str, Any]]:
    """Return the address of RabbitMQ without parameters, and its TLS options as in `RedisAddress`, {} without TLS.

    Several hosts are `amqps://…;amqps://…`, each with its login. Raises `InvalidAddress`.
    """
    parts = _split(url, AMQP)
    parameters = _merge(pair for part in parts for pair in parse_qsl(part.query, keep_blank_values=True))
    options = _read_options(parameters, (), encrypted=parts[0].scheme == "amqps")
    return ";".join(part.partition("?")[0].strip() for part in url.split(";")), options


@cache
def parse_sentinel_options(query: str) -> Mapping[str, Any]:
    """Return login and TLS of the Sentinels themselves, as keyword arguments of redis-py. Raises `InvalidAddress`."""
    return _read_options(_merge(parse_qsl(query, keep_blank_values=True)), LOGIN, encrypted=None)


def parse_options(url: str) -> Mapping[str, Any]:
    """Return the options of an address of any kind. Raises `InvalidAddress`."""
    return parse_amqp(url)[1] if is_rabbitmq(url) else parse_redis(url).options


def is_verified(options: Mapping[str, Any]) -> bool:
    """Return whether certificate and name of the server are verified. True without TLS."""
    return not options.get("ssl") or (options["ssl_cert_reqs"] == "required" and options["ssl_check_hostname"])


def _split(url: str, schemes: Iterable[str]) -> list[SplitResult]:
    if is_cluster(url):
        cluster = _CLUSTER.fullmatch(url)
        if not cluster:
            raise InvalidAddress(WRONG_CLUSTER)
        start, nodes, query = cluster.groups(default="")
        addresses = [f"{start}{node}{query}" for node in nodes.split(",")]  # login and parameters for each node
    else:
        addresses = url.split(";")
    try:
        parts = [urlsplit(address) for address in addresses]
        ports = [part.port for part in parts]
    except ValueError:
        raise InvalidAddress(WRONG) from None
    cut_password = any(part.fragment or "@" in part.path or "@" in part.query for part in parts)
    has_list = any("," in (part.hostname or "") for part in parts)
    used = {part.scheme for part in parts}
    if cut_password or has_list or 0 in ports or len(used) > 1 or not used.issubset(schemes):
        raise InvalidAddress(WRONG)
    return parts


def _read_part(part: SplitResult) -> list[tuple[str, str]]:
    """Return login, database and parameters of one address."""
    own = {"username": unquote(part.username or ""), "password": unquote(part.password or "")}
    if part.scheme != "unix":
        own["db"] = part.path.strip("/")
    return [*((name, value) for name, value in own.items() if value), *parse_qsl(part.query, keep_blank_values=True)]


def _merge(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for name, value in pairs:
        if merged.setdefault(name, value) != value:
            raise InvalidAddress(f"“{name}” has two values")
    return merged


def _read_options(parameters: Mapping[str, str], names: Sequence[str], *, encrypted: bool | None) -> dict[str, Any]:
    """Return `parameters` as keyword arguments of redis-py. If `encrypted` is None, the parameter `ssl` decides."""
    names = (*names, *(("ssl",) if encrypted is None else ()), *TLS)
    if encrypted is None:
        encrypted = _read_flag("ssl", parameters.get("ssl", "false"))
    for name, value in parameters.items():
        if not encrypted and name.startswith("ssl") and (name != "ssl" or name not in names):
            raise InvalidAddress(
                f"“{name}” without TLS: it is rediss://, rediss+cluster://, amqps://, or ssl=true for Sentinels"
            )
        if name not in names:
            raise InvalidAddress(f"“{name}” is not a parameter here; known are {', '.join(names)}")
        if not value:
            raise InvalidAddress(f"“{name}” has no value")
    options: dict[str, Any] = {name: value for name, value in parameters.items() if name != "ssl" and name not in TLS}
    if not encrypted:
        return options
    tls = {name: parameters[name] for name in TLS if name in parameters}
    for name in FILES:
        if name in tls and not (os.path.isfile(tls[name]) and os.access(tls[name], os.R_OK)):
            raise InvalidAddress(f"“{name}” names no file that this user can read")
    if "ssl_keyfile" in tls and "ssl_certfile" not in tls:
        raise InvalidAddress("“ssl_keyfile” needs ssl_certfile")
    demand = tls.get("ssl_cert_reqs", "required").lower().removeprefix("cert_")
    if demand not in ("required", "none"):
        raise InvalidAddress("“ssl_cert_reqs” must be required or none")
    named = _read_flag("ssl_check_hostname", tls.get("ssl_check_hostname", "true"))
    return {
        **options, **tls, "ssl": True, "ssl_cert_reqs": demand, "ssl_check_hostname": named and demand == "required",
    }  # fmt: skip


def _read_flag(name: str, text: str) -> bool:
    if text.lower() not in FLAGS:
        raise InvalidAddress(f"“{name}” must be true or false")
    return FLAGS[text.lower()]
