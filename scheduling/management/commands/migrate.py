"""`manage.py migrate`, Django's, while programs work on."""

from __future__ import annotations

import time
from typing import Any

import structlog
from django.core.management.commands import migrate
from django.db import OperationalError, connections
from psycopg.errors import LockNotAvailable

log = structlog.get_logger(__name__)

# Whoever comes after a migration that waits for a table waits behind it, even to read.
LOCK_WITHIN = "1s"
PAUSE = 4.0
TRIES = 120


class Command(migrate.Command):
    """A table that a dump or a long count is still reading is asked for again and again, and kept from nobody for
    longer than a second. What is not atomic makes an index beside traffic, and may wait."""

    _begins = False

    def handle(self, *args: Any, **options: Any) -> Any:
        connection = connections[options["database"]]
        for tries_left in reversed(range(TRIES)):
            try:
                with connection.execute_wrapper(self._wait_briefly):
                    return super().handle(*args, **options)
            except OperationalError as error:
                if not tries_left or not isinstance(error.__cause__, LockNotAvailable):
                    raise
                log.warning("migration_waits", why=str(error).splitlines()[0], tries_left=tries_left)
            # Where the end of a migration fails, Django leaves its transaction open.
            connection.close()
            time.sleep(PAUSE)
            connection.connect()
        return None

    def migration_progress_callback(self, action: str, migration: Any = None, fake: bool = False) -> None:
        if action in ("apply_start", "unapply_start"):
            self._begins = migration.atomic
        super().migration_progress_callback(action, migration, fake)

    def _wait_briefly(self, execute: Any, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        """Once in the transaction of each migration, and for it alone: a pooler gives the connection to others."""
        connection = context["connection"]
        if self._begins and connection.in_atomic_block:
            self._begins = False
            with connection.cursor() as cursor:
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [LOCK_WITHIN])
        return execute(sql, params, many, context)
