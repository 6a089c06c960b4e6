"""The scheduler that lets any number of beats stand by."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import structlog
from celery.beat import SchedulingError
from celery.schedules import crontab
from celery.schedules import schedule as interval
from celery.utils.time import maybe_make_aware
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, InternalError, OperationalError, close_old_connections
from django.db import connection as database
from django.utils.module_loading import import_string
from django_celery_beat.clockedschedule import clocked
from django_celery_beat.schedulers import DatabaseScheduler
from kombu.common import ignore_errors

from config.celery.schedule import SCHEDULE
from scheduling import metrics
from scheduling.monitoring.alerting.notifier import Watchman

log = structlog.get_logger(__name__)


QUEUE = "ticks"


class Pile:
    """One more pass does nothing that those which wait will not do. What waits is asked seldom: at rest, beat costs
    next to nothing. No clock but this process's is compared."""

    MOST = 30  #: messages: half a minute of passes, as none of them expires
    ASK_EVERY = 5.0  #: seconds

    def __init__(self) -> None:
        self._asked_at = float("-inf")
        self._stands = False

    def stands(self, producer: Any) -> bool:
        """Return whether so many passes wait that no other is published."""
        if time.monotonic() - self._asked_at > self.ASK_EVERY:
            self._note(producer.channel)
            self._asked_at = time.monotonic()
        return self._stands

    def _note(self, channel: Any) -> None:
        try:
            client = getattr(channel, "client", None)
            if client is not None:
                waiting = int(client.llen(QUEUE))
            else:
                # A channel of its own: RabbitMQ closes one that asks about a queue that is not there.
                with channel.connection.channel() as asking:
                    waiting = int(asking.queue_declare(QUEUE, passive=True).message_count)
        except Exception as error:  # whoever may not ask still publishes, and hears there if the broker is away
            log.warning("pile_unknown", error=str(error))
            waiting = 0
        stood, self._stands = self._stands, waiting > self.MOST
        if self._stands and not stood:
            log.warning("passes_held_back", waiting=waiting, problem=f"nobody takes what waits in {QUEUE}")
        elif stood and not self._stands:
            log.info("passes_published_again", waiting=waiting)


TICK = "periodic_task_name"  #: the header of a message that comes again by itself
DATABASE_ERRORS = (OperationalError, InterfaceError, InternalError)
LEADER_LOCK = 0x4146_5445_5254  # "AFTERT"

# A leader that lost its power or its network takes leave of nobody, and PostgreSQL would keep its lock for two hours.
LET_GO = """
SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; SET tcp_user_timeout = 20000
"""


@dataclass(frozen=True, slots=True)
class DueRound:
    """One instant at which a schedule of ops fell due."""

    task: str
    schedule_id: int
    schedule: str
    at: datetime
    args: Any
    kwargs: Any


def due_instant(entry: Any) -> datetime:
    """Return when `entry` fell due: the same instant on every beat that has read the same row.

    A fixed time keeps its instant when ops enable it again. Beat disables the row after its round, which dates it; a
    row that was changed after its time is therefore due at that change."""
    schedule, last = entry.schedule, maybe_make_aware(entry.last_run_at)
    at: datetime
    if isinstance(schedule, clocked):
        at = max(maybe_make_aware(schedule.clocked_time), entry.model.date_changed)
    elif isinstance(schedule, crontab):
        begins_at, delta, _ = schedule.remaining_delta(last)
        at = begins_at + delta
    elif isinstance(schedule, interval):
        at = last + schedule.run_every
    else:  # sunrise and the like are computed from now on, with a jitter of microseconds
        at = datetime.now(UTC) + schedule.remaining_estimate(last) + timedelta(seconds=30)
        at = at.replace(second=0, microsecond=0)
    return at


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
        self._owed: list[DueRound] = []  #: that fell due while PostgreSQL was away
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
        self._store_owed()
        pause = float(super().tick(*args, **kwargs))
        metrics.beat_ticked(settings.AFTERTOUCH_NODE)
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
        if entry.task in settings.SCHEDULED_ROUNDS:
            self._apply_round(entry, producer)
        else:
            super().apply_entry(entry, producer=producer)

    def _apply_round(self, entry: Any, producer: Any) -> None:
        """Store the round, then publish a wake-up. A beat that dies in between has saved no `last_run_at`: the next
        leader finds the same instant due, and the unique index keeps it from being stored twice."""
        due = DueRound(entry.task, entry.model.pk, entry.name, due_instant(entry), entry.args, entry.kwargs)
        if self._store(due):
            self._wake(due, producer)
            self._tasks_since_sync += 1
            if self.should_sync():
                self._do_sync()
        else:
            self._dirty.discard(entry.name)
            self._owed.append(due)

    def _store_owed(self) -> None:
        owed, self._owed = self._owed, []
        for due in owed:
            if self._store(due):
                self._dirty.add(due.schedule)
                self._wake(due, None)
            else:
                self._owed.append(due)

    def _store(self, due: DueRound) -> bool:
        """Return False where PostgreSQL is away."""
        store, _ = settings.SCHEDULED_ROUNDS[due.task]
        try:
            close_old_connections()
            is_new = import_string(store)(due.schedule_id, due.schedule, due.at, due.args, due.kwargs)
        except DATABASE_ERRORS as error:
            log.warning("round_not_stored", schedule=due.schedule, error=str(error))
            database.close()
            return False
        log.info("round_stored", schedule=due.schedule, due_at=due.at.isoformat(), is_new=is_new)
        return True

    def _wake(self, due: DueRound, producer: Any) -> None:
        """Where the broker is away, a pass finds the row."""
        _, task = settings.SCHEDULED_ROUNDS[due.task]
        try:
            self.app.send_task(task, queue="ticks", producer=producer, headers={TICK: due.schedule})
        except Exception as error:  # whatever the broker's client raises
            log.warning("wake_up_lost", schedule=due.schedule, error=str(error))

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
