"""Run any number of beat processes, of which one leads and publishes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import psycopg
import structlog
from celery.beat import ScheduleEntry, SchedulingError
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, connections
from django.db import connection as database
from django_celery_beat.models import PeriodicTask
from django_celery_beat.schedulers import DatabaseScheduler
from kombu.common import ignore_errors
from psycopg.pq import Conninfo

from config.celery.guards import TICK_HEADER
from config.celery.schedule import SCHEDULE
from scheduling import metrics, sql
from scheduling.app_integrations import ScheduledRound, scheduled_rounds
from scheduling.errors import InvalidInput
from scheduling.ledger.failures import record_unreadable_message
from scheduling.monitoring import alerts
from scheduling.operations.periodic_rows import RowEntry, UnusableRow
from scheduling.queue_names import TICK_QUEUES

log = structlog.get_logger(__name__)


class TickBacklog:
    """Detect a backlog of passes in one queue, in which another pass would add nothing.

    The queue length is read seldom, so that an idle beat costs almost nothing. Only this process's clock is used.
    """

    MOST = 30  #: messages: half a minute of passes or more, because passes do not expire
    ASK_EVERY = 5.0  #: seconds

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._asked_at = float("-inf")
        self._is_full = False

    def is_full(self, producer: Any) -> bool:
        """Return whether so many passes wait that no further one is published."""
        if time.monotonic() - self._asked_at > self.ASK_EVERY:
            self._note(producer.channel)
            self._asked_at = time.monotonic()
        return self._is_full

    def _note(self, channel: Any) -> None:
        try:
            client = getattr(channel, "client", None)
            if client is not None:
                waiting = int(client.llen(self._queue))
            else:
                # A separate channel: RabbitMQ closes a channel that asks for a missing queue.
                with channel.connection.channel() as asking:
                    waiting = int(asking.queue_declare(self._queue, passive=True).message_count)
        except Exception as error:
            # Without permission to ask, beat still publishes. The publish fails if the broker is unavailable.
            log.warning("tick_backlog_unknown", queue=self._queue, error=str(error))
            waiting = 0
        was_full, self._is_full = self._is_full, waiting > self.MOST
        if self._is_full and not was_full:
            log.warning("ticks_suspended", waiting=waiting, problem=f"the workers of {self._queue} are busy or gone")
        elif was_full and not self._is_full:
            log.info("ticks_resumed", queue=self._queue, waiting=waiting)


LEADER_LOCK = 0x4146_5445_5254  # "AFTERT"

# A leader that loses power or network does not disconnect. PostgreSQL would keep its lock for two hours.
KEEPALIVE_SETTINGS = """
SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; SET tcp_user_timeout = 20000
"""


class LeaderScheduler(DatabaseScheduler):
    """django-celery-beat without duplicate ticks: only the holder of a PostgreSQL advisory lock publishes.

    Passes come from `SCHEDULE`, operators' schedules from rows. A row that cannot be used is skipped and reported once.

    The lock has its own connection, because Django's is closed at each tick. It ends with its process. A standby
    takes over within seconds after a kill, and within half a minute after the loss of a machine.
    """

    STANDBY_SECONDS = 5.0
    ASK_EVERY = 2.0  #: seconds between checks for edited schedules; a tick would check several times
    ALERTS_EVERY = 30.0  #: seconds
    SURE_FOR = 0.5  #: seconds for which a lock check is valid, so that entries due together need only one
    LOCK_WAIT = 2.0  #: seconds in which a round must get its locks; beat does nothing else meanwhile
    LONG_ROUND = 0.5  #: seconds, after which the passes that are due go before the next round
    RETRY_SECONDS = 5.0  #: until a round that failed is tried again
    TRIES = 12  #: of a round that fails although PostgreSQL answers; then it becomes a failed task
    #: SQLSTATEs of time limits: the work itself may cause them, so PostgreSQL counts as available.
    TIME_LIMITS = frozenset({"57014", "25P03", "55P03"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock_connection: psycopg.Connection[Any] | None = None
        self._leads = False
        self._asked_at = self._held_at = float("-inf")
        self._alerts: threading.Thread | None = None
        self._alerts_at = float("-inf")
        self._backlogs = {queue: TickBacklog(queue) for queue in TICK_QUEUES}
        self._failures: Counter[str] = Counter()  #: of rounds, by name of their row
        self._reread_at = float("inf")  #: when the rows are read again, because a round failed
        self._problems: dict[str, str] = {}  #: of rows that are skipped, by name
        self._passes: dict[str, ScheduleEntry] = {}
        super().__init__(*args, **kwargs)

    def setup_schedule(self) -> None:
        for name, each in SCHEDULE.items():
            options = {**each["options"], "headers": {TICK_HEADER: name}}
            self._passes[name] = ScheduleEntry(
                name, each["task"], schedule=each["schedule"], options=options, app=self.app
            )

    def all_as_schedule(self) -> dict[str, ScheduleEntry]:
        found: dict[str, ScheduleEntry] = dict(self._passes)
        problems = {}
        try:
            rows = list(PeriodicTask.objects.enabled())
        except sql.UNAVAILABLE_ERRORS as error:
            if self._schedule is None:
                raise
            log.warning("schedules_not_read", error=str(error))
            database.close()
            self._reread_at = time.monotonic() + self.RETRY_SECONDS
            return dict(self._schedule)
        for row in rows:
            try:
                if row.name in SCHEDULE:
                    raise UnusableRow("its name is that of a pass")
                found[row.name] = RowEntry(row, self.app)
            except UnusableRow as error:
                problems[row.name] = str(error)
        for name, problem in problems.items() - self._problems.items():
            log.error("schedule_skipped", schedule=name, problem=problem)
        self._problems = problems
        return found

    def reserve(self, entry: Any) -> Any:
        """Store the next entry in the schedule too, from which a heap is made. The library keeps the last one there."""
        if entry.name in self._passes:
            following = self._passes[entry.name] = next(entry)
        else:
            following = super().reserve(entry)
        self._schedule[entry.name] = following
        return following

    def tick(self, *args: Any, **kwargs: Any) -> float:
        led, self._leads = self._leads, self._holds_lock()
        if not self._leads:
            return self.STANDBY_SECONDS
        if not led:
            log.info("beat_leads")
        if not led or time.monotonic() >= self._reread_at:
            # The schedules read as a standby may be minutes old. A round that failed is due in its row still.
            self._initial_read, self._heap, self._heap_invalidated = True, None, False
            self._reread_at = float("inf")
        # The alerts report missing workers and a blocked broker, so they need neither: a thread evaluates them.
        is_due = time.monotonic() - self._alerts_at >= self.ALERTS_EVERY
        if is_due and (self._alerts is None or not self._alerts.is_alive()):
            self._alerts_at = time.monotonic()
            self._alerts = threading.Thread(target=_run_alert_pass, name="alerts", daemon=True)
            self._alerts.start()
        pause = float(super().tick(*args, **kwargs))
        metrics.set_gauge(metrics.beat_ticked_at, settings.AFTERTOUCH_NODE, value=time.time())
        return pause

    def adjust(self, n: Any, drift: float = 0.0) -> Any:
        """Disable the 10 ms early wake-up of Celery. Its polling until the due time cost more than the rest of beat."""
        return super().adjust(n, drift)

    def schedule_changed(self) -> bool:
        if time.monotonic() - self._asked_at < self.ASK_EVERY:
            return False
        self._asked_at = time.monotonic()
        return bool(super().schedule_changed())

    def should_sync(self) -> bool:
        """Save operators' schedules at once: a restarted beat would publish them again. Passes are not saved."""
        return bool(self._dirty) and bool(super().should_sync())

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Publish an entry. Ticks are skipped during a backlog; operators' schedules never, because no later pass
        replaces them.
        """
        if entry.name in SCHEDULE and self._backlogs[entry.options["queue"]].is_full(producer):
            return
        if rounds := scheduled_rounds().get(entry.task):
            self._publish_round(entry, rounds)
        else:
            super().apply_entry(entry, producer=producer)

    def _publish_round(self, entry: Any, rounds: ScheduledRound) -> None:
        """Publish the jobs of a round in PostgreSQL, without a message that could be lost.

        If beat dies before it has saved `last_run_at`, the next leader finds the same due time and publishes none of
        them twice. A round that failed keeps its `last_run_at`, so it stays due. No error ends beat.
        """
        due_at = entry.due_instant()
        self._dirty.discard(entry.name)  # else the end of beat would save the round as published
        started = time.monotonic()
        try:
            close_old_connections()
            sql.execute("SELECT set_config('lock_timeout', %(wait)s, false)", {"wait": f"{self.LOCK_WAIT:g}s"})
            try:
                rounds.publish(entry.model.pk, due_at, entry.args, entry.kwargs)
            except Exception as error:
                if not self._gives_up(entry.name, error):
                    raise
                body = {"task": entry.task, "schedule": entry.name, "due_at": due_at.isoformat()}
                body |= {"args": entry.args, "kwargs": entry.kwargs}
                log.error("round_abandoned", schedule=entry.name, error=repr(error))
                record_unreadable_message("task_error", body, detail=f"{type(error).__name__}: {error}", queue="beat")
        except Exception as error:
            log.warning("round_not_published", schedule=entry.name, due_at=due_at.isoformat(), error=repr(error))
            database.close()
            entry.model.enabled = False  # of this copy: it is not due again before the row is read again
            self._reread_at = min(self._reread_at, time.monotonic() + self.RETRY_SECONDS)
            return
        finally:
            if time.monotonic() - started > self.LONG_ROUND:
                self._heap = None  # made again, it has the passes first
        del self._failures[entry.name]
        self._dirty.add(entry.name)
        self._tasks_since_sync += 1
        if self.should_sync():
            self._do_sync()

    def _gives_up(self, name: str, error: Exception) -> bool:
        """Return whether the round becomes a failed task. An unavailable PostgreSQL does not count as a try."""
        sqlstate = getattr(error.__cause__, "sqlstate", None)
        if not isinstance(error, sql.UNAVAILABLE_ERRORS) or sqlstate in self.TIME_LIMITS:
            self._failures[name] += 1
        return isinstance(error, InvalidInput) or self._failures[name] >= self.TRIES

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        """Reconnect after a failed publish. Publishes are not retried here, so no other code detects a dead AMQP
        connection.
        """
        try:
            return super().apply_async(*args, **kwargs)
        except SchedulingError:
            self.__dict__.pop("producer", None)
            connection = self.__dict__.pop("connection", None)
            if connection is not None:
                ignore_errors(connection, connection.release)
            raise

    def _holds_lock(self) -> bool:
        """Return whether this process holds the lock; False if the database does not answer."""
        try:
            if self._lock_connection is None or self._lock_connection.closed:
                self._lock_connection = _open_lock_connection()
            elif self._leads:
                if time.monotonic() - self._held_at > self.SURE_FOR:
                    self._lock_connection.execute("SELECT 1")
                    self._held_at = time.monotonic()
                return True
            row = self._lock_connection.execute("SELECT pg_try_advisory_lock(%s)", [LEADER_LOCK]).fetchone()
            return bool(row and row[0])
        except psycopg.Error as error:
            log.warning("beat_cannot_lead", error=str(error))
            if self._lock_connection is not None:
                self._lock_connection.close()
            self._lock_connection = None
            return False

    def close(self) -> None:
        super().close()
        if self._lock_connection is not None:
            self._lock_connection.close()


def _run_alert_pass() -> None:
    try:
        alerts.evaluate_alerts(sql.now())
    except Exception:
        log.exception("alerts_not_evaluated")
    finally:
        connections.close_all()


def _open_lock_connection() -> psycopg.Connection[Any]:
    """Open the lock's connection.

    Raises:
        ImproperlyConfigured: the connection leads to a pooler. It could keep the lock of an ended beat, and no beat
        would lead.
    """
    known = {each.keyword.decode() for each in Conninfo.get_defaults()}  # Django adds parameters of psycopg
    options = {key: value for key, value in database.get_connection_params().items() if key in known}
    made = psycopg.connect(**{**options, "connect_timeout": 3}, autocommit=True)
    ((pid,),) = made.execute("SELECT pg_backend_pid()").fetchall()
    may_be_shared = database.settings_dict["OPTIONS"].get("prepare_threshold") is None
    if may_be_shared and pid != made.info.backend_pid:
        made.close()
        raise ImproperlyConfigured("DATABASE_URL leads to a pooler; beat needs PostgreSQL's own address")
    made.execute(KEEPALIVE_SETTINGS)
    return made
