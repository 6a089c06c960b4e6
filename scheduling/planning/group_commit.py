"""Events of many requests in one transaction: a commit costs the same for one event as for five hundred.

While one group commits, the next gathers; nobody waits for a clock. A request's answer comes after its own commit.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Iterable, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Protocol

import structlog
from django.db import connection, reset_queries

from scheduling import metrics, sql
from scheduling.dispatch.dispatcher import doorbell
from scheduling.errors import AftertouchError, InvalidInput
from scheduling.ledger.transitions import Hint
from scheduling.planning import ingest
from scheduling.planning.ingest import NewEvent, Receipt, locked_customers, record_events

log = structlog.get_logger(__name__)

GROUP_LIMIT = 500  #: events in a transaction, unless one request alone has more
WAITING_LIMIT = 10_000  #: events that may wait; more than a few seconds' worth would only be answered too late
#: The longest wait for a customer who was locked a moment ago, so that one lock holds up no group twice.
SHORT_LOCK_WAIT = timedelta(milliseconds=50)
SEPARATE_WITHIN = 1.0  #: seconds; the locked customers of a group are told from the others within that time
REMEMBER_LOCKED = 2.0  #: seconds for which a locked customer's events are stored apart from those of others

Outcome = list[Receipt] | Exception


class Record(Protocol):
    def __call__(self, events: Sequence[NewEvent], lock_wait: timedelta) -> list[Receipt]:
        """Store `events` in one transaction that waits for one lock no longer than `lock_wait`."""


class DatabaseUnavailable(AftertouchError):
    """The database cannot be reached. Nothing is lost by sending it again."""


class CustomerLocked(DatabaseUnavailable):
    """Another transaction holds this customer's row. Nothing is stored; send it again in a moment."""


class Overloaded(AftertouchError):
    """Too many events wait to be stored. Send it again in a moment."""


@dataclass(frozen=True, slots=True)
class _Submission:
    events: Sequence[NewEvent]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Receipt]]

    @property
    def users(self) -> set[str]:
        return {event.user_id for event in self.events}


def record_and_ring(events: Sequence[NewEvent], lock_wait: timedelta) -> list[Receipt]:
    """Store the events; what falls due soon is published by the doorbell's own thread, after the commit."""
    return record_events(events, announce=_ring, lock_wait=lock_wait)


def _ring(hints: list[Hint]) -> None:
    """It is committed: whatever goes wrong here must not look like a failed commit."""
    try:
        doorbell.ring(hints)
    except Exception:
        log.exception("hints_lost", count=len(hints))


class GroupCommit:
    """One writer thread a process. `submit` on any event loop; the answer comes back on that loop."""

    def __init__(self, record: Record = record_and_ring, *, waiting_limit: int = WAITING_LIMIT) -> None:
        self._record = record
        self._waiting: deque[_Submission] = deque()
        self._waiting_events = 0
        self._waiting_limit = waiting_limit
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._locked: dict[str, float] = {}  #: by user id, until when its events are stored apart

    def submit(self, events: Sequence[NewEvent]) -> Awaitable[list[Receipt]]:
        """Hand in events that belong together; await the receipts, which exist once they are committed.

        Awaiting raises `InvalidInput`, `DatabaseUnavailable` (`CustomerLocked` where only this customer's row is held
        by another transaction), or whatever else storing them raised. Raises `Overloaded` at once where too much
        waits. Cancelling the wait does not take the events back.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Receipt]] = loop.create_future()
        with self._changed:
            if self._waiting and self._waiting_events + len(events) > self._waiting_limit:
                raise Overloaded
            self._waiting.append(_Submission(events, loop, future))
            self._waiting_events += len(events)
            self._start()
            self._changed.notify()
        return future

    def close(self, timeout: float = 30) -> None:
        """Commit what waits, then end the writer and its connection."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread:
            thread.join(timeout)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._closing = False
            self._thread = threading.Thread(target=self._run, name="group-commit", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while group := self._gather():
            reset_queries()
            try:
                self._store_group(group)
            except Exception as error:
                log.exception("group_lost", submissions=len(group))
                _answer(group, [error] * len(group))
        connection.close()

    def _gather(self) -> list[_Submission]:
        """Everything that waits, up to the limit; empty when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            group: list[_Submission] = []
            count = 0
            while self._waiting and (not group or count + len(self._waiting[0].events) <= GROUP_LIMIT):
                submission = self._waiting.popleft()
                group.append(submission)
                count += len(submission.events)
            self._waiting_events -= count
            return group

    def _store_group(self, group: list[_Submission]) -> None:
        """Store and answer `group`; the customers who were locked a moment ago last, with a short wait."""
        if self._locked:
            now = monotonic()
            self._locked = {user_id: until for user_id, until in self._locked.items() if until > now}
        rest, apart = _apart(group, self._locked.keys()) if self._locked else (group, [])
        if rest:
            self._store(rest, ingest.LOCK_WAIT)
        if apart:
            self._store(apart, SHORT_LOCK_WAIT)

    def _store(self, group: list[_Submission], lock_wait: timedelta, ends_at: float | None = None) -> None:
        """Store `group` in one transaction and answer it. Where its content makes it fail, halve until what is to blame
        fails alone. `ends_at`: when locked customers are no longer waited for."""
        try:
            _answer(group, self._commit(group, lock_wait))
        except sql.AWAY as error:
            if sql.is_lock_timeout(error):
                self._store_unlocked(group, ends_at or monotonic() + SEPARATE_WITHIN)
                return
            log.warning("database_unavailable", submissions=len(group), error=str(error))
            unavailable = DatabaseUnavailable()
            _answer(group, [unavailable] * len(group))
            self._refuse_waiting(unavailable)
        except Exception as error:
            if len(group) == 1:
                if not isinstance(error, InvalidInput):
                    log.exception("events_not_stored", events=len(group[0].events))
                _answer(group, [error])
                return
            for half in _halves(group):
                self._store(half, lock_wait, ends_at)

    def _store_unlocked(self, group: list[_Submission], ends_at: float) -> None:
        """Store what another transaction does not hold up; refuse the rest."""
        locked = locked_customers(user_id for each in group for user_id in each.users)
        self._locked |= dict.fromkeys(locked, monotonic() + REMEMBER_LOCKED)
        if len(group) == 1 or monotonic() >= ends_at:
            log.warning("customers_locked", submissions=len(group))
            _answer(group, [CustomerLocked()] * len(group))
            return
        free, held_up = _apart(group, locked)
        # A customer whom another transaction inserts at this moment has no row yet that could be found locked.
        for part in (free, held_up) if free and held_up else _halves(group):
            self._store(part, SHORT_LOCK_WAIT, ends_at)

    def _commit(self, group: list[_Submission], lock_wait: timedelta) -> Sequence[Outcome]:
        """Once more after a lost connection or a deadlock: events are stored once however often they are handed in."""
        events = [event for submission in group for event in submission.events]
        try:
            receipts = self._record(events, lock_wait)
        except sql.AWAY as error:
            if sql.is_lock_timeout(error):
                raise
            connection.close()
            receipts = self._record(events, lock_wait)
        metrics.count_commit(len(events))
        outcomes, start = [], 0
        for submission in group:
            outcomes.append(receipts[start : start + len(submission.events)])
            start += len(submission.events)
        return outcomes

    def _refuse_waiting(self, error: Exception) -> None:
        """Who waits behind a database that is away would wait as long again, and then be refused as well."""
        with self._changed:
            refused = list(self._waiting)
            self._waiting.clear()
            self._waiting_events = 0
        _answer(refused, [error] * len(refused))


def _answer(group: Sequence[_Submission], outcomes: Sequence[Outcome]) -> None:
    """Wake each loop once, however many wait on it."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[list[Receipt]], Outcome]]] = defaultdict(list)
    for submission, outcome in zip(group, outcomes, strict=True):
        by_loop[submission.loop].append((submission.future, outcome))
    for loop, answers in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, answers)
        except RuntimeError:
            log.info("nobody_waits", submissions=len(answers))  # its loop is closed


def _apart(group: list[_Submission], locked: Set[str]) -> tuple[list[_Submission], list[_Submission]]:
    """Return the submissions without a customer of `locked`, and those with one."""
    free: list[_Submission] = []
    held_up: list[_Submission] = []
    for each in group:
        (held_up if each.users & locked else free).append(each)
    return free, held_up


def _halves(group: list[_Submission]) -> Iterable[list[_Submission]]:
    half = len(group) // 2
    return group[:half], group[half:]


def _resolve(answers: Sequence[tuple[asyncio.Future[list[Receipt]], Outcome]]) -> None:
    for future, outcome in answers:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


group_commit = GroupCommit()
submit = group_commit.submit
