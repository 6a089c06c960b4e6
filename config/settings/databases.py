"""Build Django's database settings from the address of a PostgreSQL server."""

from __future__ import annotations

from typing import Any

from psycopg.conninfo import conninfo_to_dict


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
