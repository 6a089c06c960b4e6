"""Choose a read replica for the heavy reads of the back office, or the primary if the replica is too old or gone.

Only `read_from_replica` uses the replica, and only around reads on which no write depends. All other statements use
the primary.

Positions are bytes of the write-ahead log. Each process judges the replica for itself, at most once a second.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock
from typing import Any, TypeVar

import structlog
from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connection, connections
from psycopg.errors import QueryCanceled

from scheduling import metrics, sql
from scheduling.db_timeouts import Deadline
from scheduling.sql import reads_from

log = structlog.get_logger(__name__)

T = TypeVar("T")

ALIAS = "replica"
SHOWN_AGE = 5.0  #: seconds; pages show the age of older data
PROBE_EVERY = 1.0  #: seconds
PROBE_TIMEOUT = 3.0  #: seconds, with the connection
REST = 10.0  #: seconds without the replica after a failure
WAIT_PAUSE = 0.1  #: seconds between two looks at a replica that is waited for
OWN_APPS = frozenset(("scheduling", "rpa_tasks", "chat_sessions"))  #: never users, rights and browser sessions


class ReadRouter:
    """Send reads of our own tables to the replica within `read_from_replica`, and everything else to the primary."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return sql.choose_read_alias() if model._meta.app_label in OWN_APPS else DEFAULT_DB_ALIAS

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return DEFAULT_DB_ALIAS

    def allow_relation(self, one: Any, other: Any, **hints: Any) -> bool:
        return True

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return db == DEFAULT_DB_ALIAS


@dataclass(frozen=True, slots=True)
class ReplicaState:
    problem: str  #: "" if usable, else unreachable, promoted, lagging or failed
    position: int = 0
    age: float = 0.0  #: seconds by which its data is older than the primary's
    read_at: float = 0.0  #: monotonic seconds


def is_configured() -> bool:
    return ALIAS in connections.settings


def read_primary_position() -> int:
    """Return a position that includes all commits of the primary so far, also those not yet written to disk."""
    return int(sql.rows("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::int8", {})[0][0])


def read_from_replica(
    build: Callable[[float], T], *, after: int = 0, max_age: float | None = None, wait: float = 0.0
) -> T:
    """Return `build(age)`, with reads on the replica if it is usable, else on the primary. `age` is in seconds.

    The replica must have replayed the position `after`; `wait` seconds are spent on waiting for it. Older data than
    `max_age` (default: `AFTERTOUCH_REPLICA_LAG_LIMIT`) is not read. If the replica fails, `build` runs a second time,
    on the primary: it only reads, or is idempotent.
    """
    if not is_configured() or connection.in_atomic_block or reads_from.get() == ALIAS:
        return build(0.0)
    state = replica_watch.judge(after, wait)
    problem = state.problem
    if not problem and state.position < after:
        problem = "own_write"
    elif not problem and max_age is not None and state.age > max_age:
        problem = "lagging"
    if problem:
        metrics.count(metrics.replica_reads, "primary", problem)
        return build(0.0)
    token = reads_from.set(ALIAS)
    try:
        found = build(state.age)
    except sql.UNAVAILABLE_ERRORS as error:
        if not is_replica_failure(error):
            raise
        replica_watch.leave(ReplicaState("failed"), error)
    else:
        metrics.count(metrics.replica_reads, ALIAS, "")
        return found
    finally:
        reads_from.reset(token)
    metrics.count(metrics.replica_reads, "primary", "failed")
    return build(0.0)


def is_replica_failure(error: BaseException) -> bool:
    """Return whether the replica failed, as opposed to a statement that exceeded its time limit."""
    unavailable = isinstance(error, sql.UNAVAILABLE_ERRORS)
    return sql.choose_read_alias() == ALIAS and unavailable and not isinstance(error.__cause__, QueryCanceled)


class ReplicaWatch:
    """Judge the replica: at most one probe at a time and one per `PROBE_EVERY`, none during a rest."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._state = ReplicaState("unreachable", read_at=-REST)
        self.resting_until = 0.0
        self._healthy = True
        #: positions of the primary with their times, to date the data of a replica that replays no commit
        self._positions: deque[tuple[int, float]] = deque(maxlen=120)

    def judge(self, after: int, wait: float) -> ReplicaState:
        ends_at = time.monotonic() + wait
        while True:
            state = self._judge(after)
            if state.problem or state.position >= after or time.monotonic() > ends_at:
                return state
            time.sleep(WAIT_PAUSE)

    def _judge(self, after: int) -> ReplicaState:
        state, at = self._state, time.monotonic()
        fresh = at - state.read_at < PROBE_EVERY and (state.problem or state.position >= after)
        if fresh or at < self.resting_until or not self._lock.acquire(blocking=False):
            return state
        try:
            return self._probe()
        finally:
            self._lock.release()

    def _probe(self) -> ReplicaState:
        ((primary, at),) = sql.rows(_PRIMARY, {})
        self._positions.append((primary, at))
        token = reads_from.set(ALIAS)
        try:
            with Deadline(PROBE_TIMEOUT, ALIAS).limit_queries(PROBE_TIMEOUT):
                ((in_recovery, replayed, commit_at),) = sql.rows(_REPLICA, {})
        except sql.UNAVAILABLE_ERRORS as error:
            return self.leave(ReplicaState("unreachable"), error)
        finally:
            reads_from.reset(token)
        if not in_recovery:
            return self.leave(ReplicaState("promoted"))
        known_at = [commit_at or 0.0, *(seen_at for position, seen_at in self._positions if position <= replayed)]
        age = 0.0 if replayed >= primary else max(at - max(known_at), 0.0)
        metrics.set_gauge(metrics.replica_lag, ALIAS, value=age)
        if age > settings.AFTERTOUCH_REPLICA_LAG_LIMIT / timedelta(seconds=1):
            return self.leave(ReplicaState("lagging", replayed, age))
        self._state = ReplicaState("", replayed, age, time.monotonic())
        if not self._healthy:
            self._healthy = True
            log.info("replica_used_again", age=round(age, 3))
        return self._state

    def leave(self, state: ReplicaState, error: Exception | None = None) -> ReplicaState:
        """Read from the primary for `REST` seconds."""
        connections[ALIAS].close()
        if self._healthy or state.problem != self._state.problem:
            log.warning("replica_left", problem=state.problem, age=round(state.age, 3), error=str(error or "").strip())
        self._state, self._healthy, self.resting_until = state, False, time.monotonic() + REST
        return state


replica_watch = ReplicaWatch()

_PRIMARY = """
SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::int8, extract(epoch FROM clock_timestamp())::float8
"""

_REPLICA = """
SELECT pg_is_in_recovery(), pg_wal_lsn_diff(pg_last_wal_replay_lsn(), '0/0')::int8,
       extract(epoch FROM pg_last_xact_replay_timestamp())::float8
"""
