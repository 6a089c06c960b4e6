"""Build Celery's broker settings from the address of a Redis or RabbitMQ."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import quote

from scheduling.server_addresses import is_rabbitmq, parse_amqp, parse_redis

#: Options of kombu's transport for RabbitMQ by name of our parameter.
AMQP_NAMES = {"ssl_ca_certs": "ca_certs", "ssl_certfile": "certfile", "ssl_keyfile": "keyfile"}


def build_broker(url: str) -> tuple[str, dict[str, Any] | bool]:
    """Return the address without parameters, as kombu and Flower read it, and its TLS options, False without TLS.

    Every address of a list gets login and database: kombu uses them one at a time.
    """
    if is_rabbitmq(url):
        address, options = parse_amqp(url)
        return address, _amqp_tls(options) if options else False
    redis = parse_redis(url)
    words = [quote(redis.options.get(name, ""), safe="") for name in ("username", "password")]
    login, database = f"{':'.join(words)}@" if any(words) else "", redis.options["db"]
    if redis.scheme == "unix":
        return f"redis+socket://{login}{quote(redis.socket)}?virtual_host={database}", False
    tls = {name: value for name, value in redis.options.items() if name.startswith("ssl_")}
    hosts = [f"{redis.scheme}://{login}{quote(host, safe='')}:{port}/{database}" for host, port in redis.hosts]
    return ";".join(hosts), tls or False


def _amqp_tls(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of py-amqp. `server_hostname: None` demands the name of the address in the certificate."""
    return {
        "cert_reqs": ssl.CERT_REQUIRED if options["ssl_cert_reqs"] == "required" else ssl.CERT_NONE,
        **({"server_hostname": None} if options["ssl_check_hostname"] else {}),
        **{theirs: options[ours] for ours, theirs in AMQP_NAMES.items() if ours in options},
    }
