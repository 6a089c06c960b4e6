"""The scheduler that lets any number of beats stand by."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import structlog
from celery.beat import SchedulingError
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connection as database
from django_celery_beat.schedulers import DatabaseScheduler
from kombu.common import ignore_errors

from config.beat import SCHEDULE
from config.pile import Pile
from scheduling import measures
from scheduling.alerts.watchman import Watchman

log = structlog.get_logger(__name__)

LEADER_LOCK = 0x4146_5445_5254  # "AFTERT"

# A leader that lost its power or its network takes leave of nobody, and PostgreSQL would keep its lock for two hours.
LET_GO = """
SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; SET tcp_user_timeout = 20000
"""


class LeaderScheduler(DatabaseScheduler):
    """django-celery-beat without double sends: whoever holds a PostgreSQL advisory lock ticks, the others wait.

    The lock lives on a connection of its own, because Django's is closed at each tick. It ends with its process, so a
    standby takes over within seconds of a kill, and within half a minute of the loss of its machine.
    """

    STANDBY_SECONDS = 5.0
    ASK_EVERY = 2.0  #: seconds between questions whether somebody edited a schedule; a tick would ask several times
    SURE_FOR = 0.5  #: seconds; what falls due together costs one question whether the lock is still ours

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock_connection: psycopg.Connection[Any] | None = None
        self._leads = False
        self._asked_at = self._held_at = float("-inf")
        self._watchman = Watchman()
        self._pile = Pile()
        super().__init__(*args, **kwargs)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        held = self._holds_lock()
        led, self._leads = self._leads, bool(held)
        if held is not None:
            self._watchman.stand(held)
        if not self._leads:
            return self.STANDBY_SECONDS
        if not led:
            log.info("beat_leads")
            # What this process read while it stood by may be minutes old.
            self._initial_read, self._heap, self._heap_invalidated = True, None, False
        pause = float(super().tick(*args, **kwargs))
        measures.beat_ticked(settings.AFTERTOUCH_NODE)
        return pause

    def adjust(self, n: Any, drift: float = 0.0) -> Any:
        """Celery wakes 10 ms early and asks without a pause until the time has come: more than all else of beat's."""
        return super().adjust(n, drift)

    def schedule_changed(self) -> bool:
        if time.monotonic() - self._asked_at < self.ASK_EVERY:
            return False
        self._asked_at = time.monotonic()
        return bool(super().schedule_changed())

    def should_sync(self) -> bool:
        """At once where ops have scheduled it: a beat that starts again would send it again. A tick may be; to note
        each took half of what beat costs at rest."""
        if not super().should_sync():
            return False
        return bool(self._dirty - SCHEDULE.keys()) or time.monotonic() - (self._last_sync or 0) > self.sync_every

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """What ops have scheduled is always published: nobody else would do it later."""
        if entry.name in SCHEDULE and self._pile.stands(producer):
            return
        super().apply_entry(entry, producer=producer)

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        """Publishes are not retried here, so nobody else finds out that an AMQP connection is dead: dial anew."""
        try:
            return super().apply_async(*args, **kwargs)
        except SchedulingError:
            self.__dict__.pop("producer", None)
            connection = self.__dict__.pop("connection", None)
            if connection is not None:
                ignore_errors(connection, connection.release)
            raise

    def _holds_lock(self) -> bool | None:
        """None where the database does not say."""
        try:
            if self._lock_connection is None or self._lock_connection.closed:
                self._lock_connection = _connect()
                row = self._lock_connection.execute("SELECT pg_try_advisory_lock(%s)", [LEADER_LOCK]).fetchone()
            elif self._leads:
                if time.monotonic() - self._held_at > self.SURE_FOR:
                    self._lock_connection.execute("SELECT 1")
                    self._held_at = time.monotonic()
                return True
            else:
                row = self._lock_connection.execute("SELECT pg_try_advisory_lock(%s)", [LEADER_LOCK]).fetchone()
            return bool(row and row[0])
        except psycopg.Error as error:
            log.warning("beat_cannot_lead", error=str(error))
            if self._lock_connection is not None:
                self._lock_connection.close()
            self._lock_connection = None
            return None

    def close(self) -> None:
        super().close()
        self._watchman.end()
        if self._lock_connection is not None:
            self._lock_connection.close()


def _connect() -> psycopg.Connection[Any]:
    """Raises `ImproperlyConfigured` where a pooler would keep the lock of a beat that is gone, and none would lead."""
    made = psycopg.connect(**_parameters(), autocommit=True, connect_timeout=3)
    ((pid,),) = made.execute("SELECT pg_backend_pid()").fetchall()
    may_be_shared = database.settings_dict["OPTIONS"].get("prepare_threshold") is None
    if may_be_shared and pid != made.info.backend_pid:
        made.close()
        raise ImproperlyConfigured("DATABASE_URL leads to a pooler; beat needs PostgreSQL's own address")
    made.execute(LET_GO)
    return made


def _parameters() -> dict[str, Any]:
    parameters = database.get_connection_params()
    wanted = {"host", "port", "dbname", "user", "password", "tcp_user_timeout"}
    return {key: value for key, value in parameters.items() if key in wanted or key.startswith(("ssl", "keepalives"))}
