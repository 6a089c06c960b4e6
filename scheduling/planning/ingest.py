"""Store events and plan their touches, a batch in one transaction.

Locks follow the order of all writers: customers by id, nodes, touches. Unknown customers are inserted after the known
ones are locked, in the order of their user ids. Nothing waits for a customer's lock after an insert, so an insert that
waits for another one closes no circle. The locks also keep the rows that events and touches refer to; no foreign key
constraint does (see `Touch`).

Touches that fall due soon are dispatched at once, within a bound: workers hold such messages in memory.

`GroupCommit` stores the events of many requests in one transaction: a commit costs the same for one event as for five
hundred. While one group commits, the next group gathers; no timer delays a group. A request gets its response after its
own commit.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from heapq import heappop, heappush
from time import monotonic
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings
from django.db import connection, reset_queries, transaction
from psycopg.types.json import Jsonb
from pydantic_core import to_json

from scheduling import sql, tracing
from scheduling.batching import bisect, halve, set_result
from scheduling.configuration import snapshot
from scheduling.dispatch import background_publisher
from scheduling.errors import AftertouchError, InvalidInput
from scheduling.ids import new_id
from scheduling.ledger import locks, new_touches
from scheduling.ledger.locks import locked_users
from scheduling.ledger.transitions import WakeUp
from scheduling.models import CustomerChange, EventType
from scheduling.planning import earlier_events, request_metrics
from scheduling.planning.cancellation import Cancellation
from scheduling.policy import matrix
from scheduling.policy.matrix import PASSIVE_TYPES, Activity, PlannedTouch, advance_activity
from scheduling.policy.node_conditions import EventTimes, add_event_time, count_recent
from scheduling.policy.specs import CustomerSpec, EventSpec

log = structlog.get_logger(__name__)

MAX_EVENT_TYPES = 2_000  #: Types register themselves. The limit stops a sender that invents types.
ACTIVITY_GRAIN = timedelta(minutes=1)  #: `last_active_at` is not rewritten for a smaller change


@dataclass(frozen=True, slots=True)
class NewEvent:
    """A received event. Without `occurred_at` the time of receipt applies, by PostgreSQL's clock."""

    source: str
    event_id: str
    type: str
    user_id: str
    chat_id: str = ""
    occurred_at: datetime | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    trace_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result for one event: its planned touches; for a duplicate, those of the first receipt."""

    id: UUID
    duplicate: bool
    task_ids: tuple[UUID, ...] = ()


def record_events(
    new_events: Sequence[NewEvent], *, publishes: bool = False, lock_wait: float | None = None
) -> list[Receipt]:
    """Store events and plan their touches in one transaction. Idempotent by source and id.

    Touches that `early_dispatch` admits are stored as `queued`. With `publishes` a background thread publishes their
    wake-ups after the commit. Otherwise, and if it fails, they wait until their leases expire. `lock_wait` is the
    longest wait for one lock in seconds; default `TIMEOUTS.event_lock`.

    Raises:
        InvalidInput: an event type exceeds the limit of the registry.
        OperationalError: PostgreSQL is unavailable, or (`sql.is_lock_timeout`) another transaction holds a customer.
    """
    while True:
        try:
            with transaction.atomic():
                at = sql.limit_lock_waits(settings.TIMEOUTS.event_lock if lock_wait is None else lock_wait)
                batch = _EventBatch(new_events, at)
                batch.lock_customers()
                batch.load_condition_facts()
                batch.insert_events()
                batch.plan()
                batch.insert_touches()
                batch.update_customers()
                transaction.on_commit(batch.log_touches)
                if publishes and batch.wakeups:
                    # Robust: an error after the commit must not look like a failed commit.
                    transaction.on_commit(batch.publish_wakeups, robust=True)
        except _CustomersChanged:
            continue
        return batch.receipts()


def record_and_publish(events: Sequence[NewEvent], lock_wait: float | None = None) -> list[Receipt]:
    """Store events as `record_events` does, and publish the wake-ups of touches that fall due soon."""
    return record_events(events, publishes=True, lock_wait=lock_wait)


class _CustomersChanged(Exception):
    """Another transaction inserted a customer after the locks. A later lock would break the order of locks."""


class _EventBatch:
    """One transaction of events, with its steps in the order of `record_events`."""

    def __init__(self, new_events: Sequence[NewEvent], at: datetime) -> None:
        """Take the events, and PostgreSQL's time, which `insert_events` replaces by the time of its insert."""
        self.now = at
        self.config = snapshot.current()
        self.customers: dict[str, CustomerSpec] = {}
        #: By user id: last activity and conversation, with the events planned so far.
        self.activity: dict[str, Activity] = {}
        #: The same for inserted customers, if no event turns out to be a duplicate: it saves an update of each row.
        self.inserted: dict[str, Activity] = {}
        self.events = [
            EventSpec(
                new_id(), event.source, event.event_id, event.type, event.occurred_at or at, event.user_id,
                event.chat_id, event.data, event.trace_id,
            )
            for event in new_events
        ]  # fmt: skip
        #: By customer id: times of events of counted types, with the events planned so far.
        self.event_times: dict[int, EventTimes] = {}
        self.duplicates: dict[UUID, EventSpec] = {}
        self.touches: list[PlannedTouch] = []
        self.wakeups: list[WakeUp] = []

    def lock_customers(self) -> None:
        user_ids = sorted({event.user_id for event in self.events})
        self.customers = locks.lock_customers_by_user_id(user_ids)
        unknown = {user_id for user_id in user_ids if user_id not in self.customers}
        if not unknown:
            return
        for event in self.events:
            if event.user_id in unknown:
                before = self.inserted.get(event.user_id, (None, None))
                self.inserted[event.user_id] = advance_activity(before, event, self.config.activity_types)
        ids = locks.insert_customers(self.inserted)
        if len(ids) < len(unknown):
            raise _CustomersChanged
        self.customers |= {user_id: CustomerSpec(id=key, user_id=user_id) for user_id, key in ids.items()}

    def load_condition_facts(self) -> None:
        """Load what the conditions of the triggered nodes read: profiles, and earlier events before the new ones."""
        config = self.config
        if not config.judging_facts:
            return
        triggered = {event.type: config.triggered.get(event.type, ()) for event in self.events}
        judging = {key: [node for node in nodes if node.condition] for key, nodes in triggered.items()}
        concerned = {event.user_id: self.customers[event.user_id].id for event in self.events if judging[event.type]}
        reading = any(node.condition.reads_profile for nodes in judging.values() for node in nodes if node.condition)
        profiles = locks.load_profiles(concerned.values()) if reading else {}
        for user_id, customer_id in concerned.items():
            if profile := profiles.get(customer_id):
                self.customers[user_id] = self.customers[user_id]._replace(profile=profile)
        counted = {kind for nodes in judging.values() for node in nodes for kind in node.counted}
        oldest = min((event.occurred_at for event in self.events), default=self.now)
        self.event_times = earlier_events.load_event_times(concerned.values(), counted, oldest)

    def insert_events(self) -> None:
        unseen = sorted({event.type for event in self.events} - self.config.activity_types.keys())
        if unseen and len(self.config.activity_types) + len(unseen) > MAX_EVENT_TYPES:
            raise InvalidInput.of("type", f"{unseen[0]} is not known, and no more than {MAX_EVENT_TYPES} types can be")
        if unseen:
            EventType.objects.bulk_create(
                [EventType(key=key, is_activity=key not in PASSIVE_TYPES) for key in unseen], ignore_conflicts=True
            )
        ordered = sorted(self.events, key=lambda event: (event.source, event.event_id, event.id))
        ids = [event.id for event in ordered]
        # The touches of the batch get the time of its events. It follows the customers' locks: only events of later
        # batches are received after a touch. It also follows the transaction's id, as an end needs (`ledger.ends`).
        ((inserted, self.now),) = sql.rows(
            _INSERT_EVENTS,
            {
                "ids": ids,
                "sources": [event.source for event in ordered],
                "event_ids": [event.event_id for event in ordered],
                "types": [event.type for event in ordered],
                "times": [event.occurred_at for event in ordered],
                "customers": [self.customers[event.user_id].id for event in ordered],
                "user_ids": [event.user_id for event in ordered],
                "chat_ids": [event.chat_id for event in ordered],
                "data": [Jsonb(event.data, to_json) for event in ordered],
                "traces": [event.trace_id for event in ordered],
            },
        )
        self.accepted_events = self.events
        if inserted < len(self.events):
            stored = {row[0] for row in sql.rows(_STORED, {"ids": ids})}
            self.accepted_events = [event for event in self.events if event.id in stored]
            self.duplicates = {event.id: event for event in self.events if event.id not in stored}
        self.cancellation = Cancellation(
            self.config, self.accepted_events, {user_id: customer.id for user_id, customer in self.customers.items()}
        )

    def plan(self) -> None:
        """Plan in order of arrival. An event sees the activity of earlier events, not its own."""
        types = {event.type for event in self.accepted_events}
        named = {each: self.config.triggered.get(each, ()) for each in types}
        # The snapshot may name a node that was deleted since.
        kept = locks.lock_nodes({node.id for nodes in named.values() for node in nodes})
        triggered = {each: [node for node in nodes if node.id in kept] for each, nodes in named.items()}
        self.cancellation.cancel_waiting()
        for event in self.accepted_events:
            customer = self.customers[event.user_id]
            activity = self.activity.get(event.user_id)  # after the batch's earlier events
            if activity:
                customer = customer._replace(last_active_at=activity[0], conversation_at=activity[1])
            else:
                activity = customer.last_active_at, customer.conversation_at
            earlier = count_recent(self.event_times.get(customer.id, {}), event.occurred_at)
            planned = matrix.plan_touches(
                event, customer, triggered[event.type], self.config.delay_rules, earlier=earlier,
                time_scale=settings.AFTERTOUCH_TIME_SCALE,
            )  # fmt: skip
            for touch in planned:
                touch.task_id = new_id()
            self.touches += planned
            self.activity[event.user_id] = advance_activity(activity, event, self.config.activity_types)
            if self.config.counting_earlier:
                add_event_time(self.event_times.setdefault(customer.id, {}), event.type, event.occurred_at)
        self.touches = self.cancellation.apply_to_planned(self.touches)

    def insert_touches(self) -> None:
        self.wakeups = [
            WakeUp(touch.task_id, touch.due_at, touch.node.priority, touch.node.id)
            for touch in self.touches
            if not touch.cancelled_as and early_dispatch.admit(touch.node.priority, touch.due_at, at=self.now)
        ]
        new_touches.insert_planned(self.touches, {wakeup.task_id for wakeup in self.wakeups}, at=self.now)

    def update_customers(self) -> None:
        """Advance the times of activity and conversation.

        A complaint opts its customer out of marketing and refers to its touch.
        """
        complaints = [event for event in self.accepted_events if event.type == "complaint.received"]
        unhappy = {event.user_id for event in complaints}
        if self.duplicates and (wrong := [user for user, at in self.inserted.items() if self.activity.get(user) != at]):
            sql.execute(_FORGET_ACTIVITY, {"ids": [self.customers[user].id for user in wrong]})
        changed = {
            user: activity
            for user, activity in self.activity.items()
            if self.inserted.get(user) != activity or user in unhappy
        }
        if changed:
            parameters = {
                "ids": [self.customers[user].id for user in changed],
                "active": [active_at for active_at, _ in changed.values()],
                "talking": [talking_at for _, talking_at in changed.values()],
                "unhappy": [user in unhappy for user in changed],
                "grain": ACTIVITY_GRAIN,
                "now": self.now,
            }
            sql.execute(_NOTE_CUSTOMERS, parameters)
        for event in complaints:
            task_id: UUID | None = None  # stays None for a complaint that names no touch
            with suppress(KeyError, ValueError):
                task_id = UUID(str(event.data["task_id"]))
            parameters = {
                "event": event.id,
                "customer": self.customers[event.user_id].id,
                "at": event.occurred_at,
                "task_id": task_id,
            }
            sql.execute(_INSERT_COMPLAINT, parameters)
        CustomerChange.objects.bulk_create(
            CustomerChange(
                id=new_id(), customer_id=self.customers[event.user_id].id, at=self.now, actor=event.source[:160],
                before={"opted_out": self.customers[event.user_id].opted_out},
                after={"opted_out": True, "objected_at": self.now.isoformat()},
            )
            for event in complaints
        )  # fmt: skip

    def publish_wakeups(self) -> None:
        background_publisher.submit(self.wakeups)

    def log_touches(self) -> None:
        """Log each stored event, once for each touch it planned and at least once."""
        planned = defaultdict(list)
        for touch in self.touches:
            planned[touch.event.id].append(touch.task_id)
        tracing.log_touches(
            "events_stored",
            (
                tracing.trace_label(event.trace_id or event.id, task_id)
                for event in self.accepted_events
                for task_id in planned.get(event.id, ("",))
            ),
        )

    def receipts(self) -> list[Receipt]:
        by_event: dict[UUID, list[UUID]] = {key: list(value) for key, value in self.cancellation.kept_touches.items()}
        for touch in self.touches:
            by_event.setdefault(touch.event.id, []).append(touch.task_id)
        earlier = self._receipts_of_duplicates()
        return [
            Receipt(event.id, False, tuple(by_event.get(event.id, ())))
            if event.id not in self.duplicates
            # Deleted by retention since the insert found it: still a duplicate, so its touches are not listed.
            else earlier.get((event.source, event.event_id), Receipt(event.id, True))
            for event in self.events
        ]

    def _receipts_of_duplicates(self) -> dict[tuple[str, str], Receipt]:
        """Return the receipts of the first arrival of each duplicate."""
        if not self.duplicates:
            return {}
        parameters = {
            "sources": [event.source for event in self.duplicates.values()],
            "event_ids": [event.event_id for event in self.duplicates.values()],
        }
        return {
            (source, event_id): Receipt(key, True, tuple(task_ids))
            for source, event_id, key, task_ids in sql.rows(_EARLIER, parameters, replan=True)
        }


_INSERT_EVENTS = """
WITH stored AS (
    INSERT INTO scheduling_event
        (id, source, event_id, type, occurred_at, received_at, customer_id, user_id, chat_id, data, trace_id)
    SELECT id, source, event_id, type, occurred_at, statement_timestamp(), customer_id, user_id, chat_id, data, trace_id
    FROM unnest(%(ids)b::uuid[], %(sources)b::text[], %(event_ids)b::text[], %(types)b::text[],
                %(times)b::timestamptz[], %(customers)b::bigint[], %(user_ids)b::text[], %(chat_ids)b::text[],
                %(data)b::jsonb[], %(traces)b::uuid[])
        AS e(id, source, event_id, type, occurred_at, customer_id, user_id, chat_id, data, trace_id)
    ON CONFLICT (source, event_id) DO NOTHING
    RETURNING 1
)
SELECT count(*), statement_timestamp() FROM stored
"""
_STORED = "SELECT id FROM scheduling_event WHERE id = ANY(%(ids)b)"

_FORGET_ACTIVITY = """
UPDATE scheduling_customer SET last_active_at = NULL, conversation_at = NULL WHERE id = ANY(%(ids)b)
"""

_NOTE_CUSTOMERS = """
UPDATE scheduling_customer AS c
SET last_active_at = GREATEST(c.last_active_at, v.active),
    conversation_at = GREATEST(c.conversation_at, v.talking),
    opted_out = c.opted_out OR v.unhappy,
    opted_out_at = CASE WHEN v.unhappy AND NOT c.opted_out THEN %(now)s ELSE c.opted_out_at END,
    objected_at = CASE WHEN v.unhappy THEN %(now)s ELSE c.objected_at END
FROM unnest(%(ids)b::bigint[], %(active)b::timestamptz[], %(talking)b::timestamptz[], %(unhappy)b::bool[])
    AS v(id, active, talking, unhappy)
WHERE c.id = v.id
  AND ((v.active IS NOT NULL AND (c.last_active_at IS NULL OR v.active > c.last_active_at + %(grain)s))
       OR v.talking IS DISTINCT FROM c.conversation_at OR v.unhappy)
"""

_INSERT_COMPLAINT = """
INSERT INTO scheduling_complaint (event_id, customer_id, touch_id, complained_at)
SELECT %(event)s, %(customer)s, (
    SELECT task_id FROM scheduling_touch_ended
    WHERE customer_id = %(customer)s AND state = 'delivered' AND reserved_at <= %(at)s
      AND (%(task_id)s::uuid IS NULL OR task_id = %(task_id)s::uuid)
    ORDER BY reserved_at DESC LIMIT 1
    FOR KEY SHARE
), %(at)s
"""

_EARLIER = """
SELECT e.source, e.event_id, e.id, ARRAY(
    SELECT t.task_id FROM scheduling_touch AS t WHERE t.event_id = e.id AND t.retry_of IS NULL ORDER BY t.task_id
)
FROM (SELECT DISTINCT * FROM unnest(%(sources)b::text[], %(event_ids)b::text[])) AS v(source, event_id)
JOIN scheduling_event AS e ON e.source = v.source AND e.event_id = v.event_id
"""


# --- early dispatch ---------------------------------------------------------------------------------------------------


class EarlyDispatch:
    """What this process dispatched ahead, by priority. Thread-safe."""

    def __init__(self) -> None:
        self._ahead: defaultdict[int, list[datetime]] = defaultdict(list)  #: heaps of due times
        self._lock = threading.Lock()

    def admit(self, priority: int, due_at: datetime, *, at: datetime) -> bool:
        """Return whether intake dispatches a touch at once, and count it if it is not due.

        Touches that are due always are. Of later ones within the horizon, up to `AFTERTOUCH_DISPATCH_WINDOW` of a
        priority are. A transaction that is rolled back gives its places back when their touches would be due.
        """
        if due_at <= at:
            return True
        if due_at > at + settings.AFTERTOUCH_HORIZON:
            return False
        with self._lock:
            ahead = self._ahead[priority]
            while ahead and ahead[0] <= at:
                heappop(ahead)
            if len(ahead) >= settings.AFTERTOUCH_DISPATCH_WINDOW:
                return False
            heappush(ahead, due_at)
            return True


early_dispatch = EarlyDispatch()


# --- groups of requests -----------------------------------------------------------------------------------------------


GROUP_LIMIT = 500  #: events in a transaction; a single larger request is stored alone
WAITING_LIMIT = 10_000  #: waiting events; more would exceed a few seconds of work and be answered too late
#: seconds; longest lock wait for a customer who was locked recently, so that one lock delays no group twice
SHORT_LOCK_WAIT = 0.05
SEPARATE_WITHIN = 1.0  #: seconds for separating the locked customers of a group from the others
REMEMBER_LOCKED = 2.0  #: seconds during which the events of a locked customer are stored separately

SubmissionResult = list[Receipt] | Exception


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


class GroupCommit:
    """Collect submitted events and commit them in groups, in one writer thread per process.

    `submit` works on any event loop; the result is set on that loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Submission] = deque()
        self._waiting_events = 0
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
            if self._waiting and self._waiting_events + len(events) > WAITING_LIMIT:
                raise IngestOverloaded
            self._waiting.append(_Submission(events, loop, future))
            self._waiting_events += len(events)
            if self._thread is None or not self._thread.is_alive():
                self._closing = False
                self._thread = threading.Thread(target=self._run, name="group-commit", daemon=True)
                self._thread.start()
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
            receipts = record_and_publish(events, lock_wait)
        except sql.UNAVAILABLE_ERRORS as error:
            if sql.is_lock_timeout(error):
                raise
            connection.close()
            receipts = record_and_publish(events, lock_wait)
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
