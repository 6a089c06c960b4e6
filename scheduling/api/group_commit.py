"""Events of many requests in one transaction: a commit costs the same for one event as for five hundred.

While one group commits, the next gathers; nobody waits for a clock. A request's answer comes after its own commit.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog
from django.db import connection, reset_queries

from scheduling import sql
from scheduling.api import metrics
from scheduling.dispatcher import doorbell
from scheduling.errors import AftertouchError, InvalidInput
from scheduling.intake import NewEvent, Receipt, record_events
from scheduling.ledger import Hint

log = structlog.get_logger(__name__)

GROUP_LIMIT = 500  #: events in a transaction, unless one request alone has more
WAITING_LIMIT = 10_000  #: events that may wait; more than a few seconds' worth would only be answered too late

Record = Callable[[Sequence[NewEvent]], list[Receipt]]
Outcome = list[Receipt] | Exception


class DatabaseUnavailable(AftertouchError):
    """The database cannot be reached. Nothing is lost by sending it again."""


class Overloaded(AftertouchError):
    """Too many events wait to be stored. Send it again in a moment."""


@dataclass(frozen=True, slots=True)
class _Submission:
    events: Sequence[NewEvent]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Receipt]]


def record_and_ring(events: Sequence[NewEvent]) -> list[Receipt]:
    """Store the events; what falls due soon is published by the doorbell's own thread, after the commit."""
    return record_events(events, announce=_ring)


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

    def submit(self, events: Sequence[NewEvent]) -> Awaitable[list[Receipt]]:
        """Hand in events that belong together; await the receipts, which exist once they are committed.

        Awaiting raises `InvalidInput`, `DatabaseUnavailable`, or whatever else storing them raised. Raises
        `Overloaded` at once where too much waits. Cancelling the wait does not take the events back.
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
                _answer(group, self._store(group))
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

    def _store(self, group: list[_Submission]) -> Sequence[Outcome]:
        """One transaction for all. Where its content makes it fail, halve until what is to blame fails alone."""
        try:
            return self._commit(group)
        except sql.AWAY as error:
            log.warning("database_unavailable", submissions=len(group), error=str(error))
            unavailable = DatabaseUnavailable()
            self._refuse_waiting(unavailable)
            return [unavailable] * len(group)
        except Exception as error:
            if len(group) == 1:
                if not isinstance(error, InvalidInput):
                    log.exception("events_not_stored", events=len(group[0].events))
                return [error]
            half = len(group) // 2
            return [*self._store(group[:half]), *self._store(group[half:])]

    def _commit(self, group: list[_Submission]) -> Sequence[Outcome]:
        """Once more after a lost connection or a deadlock: events are stored once however often they are handed in."""
        events = [event for submission in group for event in submission.events]
        try:
            receipts = self._record(events)
        except sql.AWAY:
            connection.close()
            receipts = self._record(events)
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
