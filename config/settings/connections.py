"""Build the settings of PostgreSQL and the broker from their addresses, with their time limits."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict

from scheduling.server_addresses import is_rabbitmq, parse_amqp, parse_redis


def build_database(
    url: str, *, prepare_statements: bool, connect_timeout: int = 5, writes: bool = True
) -> dict[str, Any]:
    """Return the settings of one database. `connect_timeout` is in seconds.

    The address may have several hosts and every parameter of libpq. They replace the defaults here; `options` is added.
    Of several hosts the one that accepts writes is used, unless the address demands another state or nothing `writes`.
    """
    given: dict[str, Any] = conninfo_to_dict(url)
    if writes and "," in given.get("host", ""):
        # On a standby a second beat would get the lock.
        given.setdefault("target_session_attrs", "read-write")
    options = "-c idle_in_transaction_session_timeout=60s" if prepare_statements else ""
    options = f"{options} {given.pop('options', '')}".strip()
    return {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": given.pop("host", ""),
        "PORT": given.pop("port", ""),
        "NAME": given.pop("dbname", ""),
        "USER": given.pop("user", ""),
        "PASSWORD": given.pop("password", ""),
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
        # A cursor outlives its statement. Behind a pooler the next statement may use another connection.
        "DISABLE_SERVER_SIDE_CURSORS": not prepare_statements,
        "OPTIONS": {
            "connect_timeout": connect_timeout,
            "application_name": "aftertouch",
            # Planning a small batch costs more than its execution. None behind a pooler without prepared statements.
            "prepare_threshold": 3 if prepare_statements else None,
            # A node that loses power or network does not disconnect. Without these its transactions keep their locks
            # for two hours, and its processes wait 15 minutes for an answer.
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 20_000,  # milliseconds
            **({"options": options} if options else {}),
            **given,
        },
    }


#: Options of kombu's transport for RabbitMQ by name of our parameter.
AMQP_NAMES = {"ssl_ca_certs": "ca_certs", "ssl_certfile": "certfile", "ssl_keyfile": "keyfile"}


def build_broker(url: str) -> tuple[str, dict[str, Any] | bool]:
    """Return the address without parameters, as kombu and Flower read it, and its TLS options, False without TLS.

    Every address of a list gets login and database: kombu uses them one at a time.
    """
    if is_rabbitmq(url):
        address, options = parse_amqp(url)
        if not options:
            return address, False
        return address, {
            "cert_reqs": ssl.CERT_REQUIRED if options["ssl_cert_reqs"] == "required" else ssl.CERT_NONE,
            # None: py-amqp demands the name of the address in the certificate.
            **({"server_hostname": None} if options["ssl_check_hostname"] else {}),
            **{theirs: options[ours] for ours, theirs in AMQP_NAMES.items() if ours in options},
        }
    redis = parse_redis(url)
    words = [quote(redis.options.get(name, ""), safe="") for name in ("username", "password")]
    login, database = f"{':'.join(words)}@" if any(words) else "", redis.options["db"]
    if redis.scheme == "unix":
        return f"redis+socket://{login}{quote(redis.socket)}?virtual_host={database}", False
    tls = {name: value for name, value in redis.options.items() if name.startswith("ssl_")}
    hosts = [f"{redis.scheme}://{login}{quote(host, safe='')}:{port}/{database}" for host, port in redis.hosts]
    return ";".join(hosts), tls or False


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits in seconds. Code reads `settings.TIMEOUTS` at each use, so that tests can replace it."""

    redis: float = 1.0  #: connecting, and each response
    redis_quota: float = 1.0  #: a channel's quota
    redis_rates: float = 0.2  #: the budget of an API key; a request waits for it
    session_notify: float = 2.0  #: one publication to the connections of a session
    probe: float = 1.0  #: each of Redis and the broker, in a health probe
    broker_producer: float = 1.0  #: a free connection for publishing
    broker_stats: float = 1.0  #: connecting, and each response about queues
    broker_age: float = 2.0  #: connecting, to read the age of the oldest message

    event_lock: float = 1.0  #: one lock while events are stored
    list_page: float = 5.0  #: one statement of an API list
    count: float = 2.0  #: one count for an admin page
    search: float = 1.0  #: all statements of the search of every page together
    overview: float = 4.0  #: all counts of the overview together, so that it loads under overload
    dashboard: float = 1.0  #: one count of another dashboard card; all counts of a chart together
    export: float = 20.0  #: finding the rows of a CSV export
    complaint_rates: float = 15.0  #: longer than `overview`: the user requested these numbers
    conversion: float = 20.0  #: longer than `overview`: the user requested these numbers
    receivers: float = 2.0  #: each statement of the page of receivers
    rollout: float = 20.0  #: each statement that counts the results of a roll-out
    bulk_selection: float = 5.0  #: finding the rows of a bulk action
    bulk_batch: float = 20.0  #: each statement of a batch; beyond it the try has failed
    bulk_cancel: float = 3.0  #: a user's wait for the current batch of a bulk action or import
    metrics_statement: float = 2.0  #: one statement for metrics
    #: all statements for metrics together: Prometheus waits for 10 s, and the broker and Redis have their own limits
    metrics: float = 4.0
