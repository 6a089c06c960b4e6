"""Store the events of many requests in one transaction: a commit costs the same for one event as for five hundred.

While one group commits, the next group gathers; no timer delays a group. A request gets its response after its own
commit.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Sequence, Set
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

import structlog
from django.conf import settings
from django.db import connection, reset_queries

from scheduling import sql
from scheduling.batching import bisect, halve, set_result
from scheduling.dispatch.dispatcher import background_publisher
from scheduling.errors import AftertouchError, InvalidInput
from scheduling.ledger.locks import locked_users
from scheduling.ledger.transitions import WakeUp
from scheduling.planning import request_metrics
from scheduling.planning.ingest import NewEvent, Receipt, record_events

log = structlog.get_logger(__name__)

GROUP_LIMIT = 500  #: events in a transaction; a single larger request is stored alone
WAITING_LIMIT = 10_000  #: waiting events; more would exceed a few seconds of work and be answered too late
#: seconds; longest lock wait for a customer who was locked recently, so that one lock delays no group twice
SHORT_LOCK_WAIT = 0.05
SEPARATE_WITHIN = 1.0  #: seconds for separating the locked customers of a group from the others
REMEMBER_LOCKED = 2.0  #: seconds during which the events of a locked customer are stored separately

SubmissionResult = list[Receipt] | Exception


class RecordEvents(Protocol):
    def __call__(self, events: Sequence[NewEvent], lock_wait: float) -> list[Receipt]:
        """Store `events` in one transaction that waits at most `lock_wait` seconds for a lock."""


class DatabaseUnavailable(AftertouchError):
    """The database cannot be reached. Nothing is lost by sending it again."""


class CustomerLocked(DatabaseUnavailable):
    """Another transaction holds this customer's row. Nothing is stored; send it again in a moment."""


class IngestOverloaded(AftertouchError):
    """Too many events wait to be stored. Send it again in a moment."""


@dataclass(frozen=True, slots=True)
class _Submission:
    events: Sequence[NewEvent]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Receipt]]

    @property
    def users(self) -> set[str]:
        return {event.user_id for event in self.events}


def record_and_publish(events: Sequence[NewEvent], lock_wait: float) -> list[Receipt]:
    """Store the events. After the commit a background thread publishes the touches that fall due soon."""
    return record_events(events, publish_wakeups=_publish_wakeups, lock_wait=lock_wait)


def _publish_wakeups(wakeups: list[WakeUp]) -> None:
    """Submit wake-ups for publishing.

    Raises nothing: the commit is done, and an error here must not look like a failed commit.
    """
    try:
        background_publisher.submit(wakeups)
    except Exception:
        log.exception("wakeups_lost", count=len(wakeups))


class GroupCommit:
    """Collect submitted events and commit them in groups, in one writer thread per process.

    `submit` works on any event loop; the result is set on that loop.
    """

    def __init__(self, record: RecordEvents = record_and_publish, *, waiting_limit: int = WAITING_LIMIT) -> None:
        self._record = record
        self._waiting: deque[_Submission] = deque()
        self._waiting_events = 0
        self._waiting_limit = waiting_limit
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._locked: dict[str, float] = {}  #: by user id: end of the separate storing (monotonic seconds)

    def submit(self, events: Sequence[NewEvent]) -> Awaitable[list[Receipt]]:
        """Submit events that belong together. Awaiting the result gives their receipts after the commit.

        Cancelling the wait does not withdraw the events.

        Raises:
            IngestOverloaded: at once, when too many events wait.
            InvalidInput: on awaiting, for events that cannot be stored.
            CustomerLocked: on awaiting, when another transaction holds only this customer's row.
            DatabaseUnavailable: on awaiting, when PostgreSQL is unavailable.
            Exception: on awaiting, any other error of storing.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Receipt]] = loop.create_future()
        with self._changed:
            if self._waiting and self._waiting_events + len(events) > self._waiting_limit:
                raise IngestOverloaded
            self._waiting.append(_Submission(events, loop, future))
            self._waiting_events += len(events)
            self._start()
            self._changed.notify()
        return future

    def close(self, timeout: float = 30) -> None:
        """Commit the waiting events, then end the writer thread and its connection. `timeout` is in seconds."""
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
                log.exception("group_commit_failed", submissions=len(group))
                _resolve_group(group, [error] * len(group))
        connection.close()

    def _gather(self) -> list[_Submission]:
        """Wait for submissions and return a group up to `GROUP_LIMIT`. Return an empty group after closing."""
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
        """Store and answer `group`. Store recently locked customers last, with a short lock wait."""
        if self._locked:
            now = monotonic()
            self._locked = {user_id: until for user_id, until in self._locked.items() if until > now}
        rest, apart = _split_by_lock(group, self._locked.keys()) if self._locked else (group, [])
        if rest:
            self._store(rest, settings.TIMEOUTS.event_lock)
        if apart:
            self._store(apart, SHORT_LOCK_WAIT)

    def _store(self, group: Sequence[_Submission], lock_wait: float, ends_at: float | None = None) -> None:
        """Store `group` and answer it, in one transaction unless its content fails. After `ends_at` (monotonic seconds)
        the writer stops waiting for locked customers.
        """
        bisect(
            group,
            lambda part: self._store_together(part, lock_wait, ends_at),
            _refuse_submission,
            concerns_all=lambda error, _: isinstance(error, sql.UNAVAILABLE_ERRORS),
        )

    def _store_together(self, group: Sequence[_Submission], lock_wait: float, ends_at: float | None) -> None:
        """Store `group` in one transaction and answer it, or answer that the database is unavailable.

        Raises:
            Exception: the content of a submission cannot be stored.
        """
        try:
            _resolve_group(group, self._commit(group, lock_wait))
        except sql.UNAVAILABLE_ERRORS as error:
            if sql.is_lock_timeout(error):
                self._store_unlocked(group, ends_at or monotonic() + SEPARATE_WITHIN)
                return
            log.warning("database_unavailable", submissions=len(group), error=str(error))
            unavailable = DatabaseUnavailable()
            _resolve_group(group, [unavailable] * len(group))
            self._refuse_waiting(unavailable)

    def _store_unlocked(self, group: Sequence[_Submission], ends_at: float) -> None:
        """Store the submissions that no lock of another transaction delays. Refuse the others."""
        locked = locked_users(user_id for each in group for user_id in each.users)
        self._locked |= dict.fromkeys(locked, monotonic() + REMEMBER_LOCKED)
        if len(group) == 1 or monotonic() >= ends_at:
            log.warning("customers_locked", submissions=len(group))
            _resolve_group(group, [CustomerLocked()] * len(group))
            return
        free, held_up = _split_by_lock(group, locked)
        # A customer whom another transaction inserts right now has no visible row, so the lock check misses it.
        for part in (free, held_up) if free and held_up else halve(group):
            self._store(part, SHORT_LOCK_WAIT, ends_at)

    def _commit(self, group: Sequence[_Submission], lock_wait: float) -> Sequence[SubmissionResult]:
        """Store the group. Retry once after a lost connection or a deadlock; storing events is idempotent."""
        events = [event for submission in group for event in submission.events]
        try:
            receipts = self._record(events, lock_wait)
        except sql.UNAVAILABLE_ERRORS as error:
            if sql.is_lock_timeout(error):
                raise
            connection.close()
            receipts = self._record(events, lock_wait)
        request_metrics.count_commit(len(events))
        outcomes, start = [], 0
        for submission in group:
            outcomes.append(receipts[start : start + len(submission.events)])
            start += len(submission.events)
        return outcomes

    def _refuse_waiting(self, error: Exception) -> None:
        """Refuse all waiting submissions.

        With PostgreSQL unavailable they would wait as long again and then fail too.
        """
        with self._changed:
            refused = list(self._waiting)
            self._waiting.clear()
            self._waiting_events = 0
        _resolve_group(refused, [error] * len(refused))


def _resolve_group(group: Sequence[_Submission], outcomes: Sequence[SubmissionResult]) -> None:
    """Resolve the futures. Wake each loop once, however many futures it has."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[list[Receipt]], SubmissionResult]]] = (
        defaultdict(list)
    )
    for submission, outcome in zip(group, outcomes, strict=True):
        by_loop[submission.loop].append((submission.future, outcome))
    for loop, answers in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_results, answers)
        except RuntimeError:
            log.info("response_discarded", submissions=len(answers))  # the loop is closed


def _refuse_submission(submission: _Submission, error: Exception) -> None:
    if not isinstance(error, InvalidInput):
        log.exception("events_not_stored", events=len(submission.events))
    _resolve_group([submission], [error])


def _split_by_lock(group: Sequence[_Submission], locked: Set[str]) -> tuple[list[_Submission], list[_Submission]]:
    """Return the submissions without a `locked` customer, then those with one."""
    free: list[_Submission] = []
    held_up: list[_Submission] = []
    for each in group:
        (held_up if each.users & locked else free).append(each)
    return free, held_up


def _set_results(answers: Sequence[tuple[asyncio.Future[list[Receipt]], SubmissionResult]]) -> None:
    for future, outcome in answers:
        set_result(future, outcome)


group_commit = GroupCommit()
submit = group_commit.submit
