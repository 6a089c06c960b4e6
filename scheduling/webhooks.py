"""Send outgoing webhooks: subscriptions, the outbox of their messages, and the thread that sends them.

Ends of touches are read with a mark (`scheduling.ledger.ends`). Other changes are facts, stored by the transaction of
the change. Each becomes a message for each subscription that wants it. Without a subscription nothing is written and
nothing is read.

A pass wakes the sending thread of a worker process every few seconds. It collects, claims, sends and settles until
nothing has been due for `LINGER`. Each subscription has its own requests in flight, so a slow receiver delays no other.

Any number of processes share the work. A claim is a lease of a minute: a killed sender's messages return after it.
`attempt` fences every result. Of an object only the first waiting message can be claimed, so the next one waits until
it is confirmed or given up.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import structlog
from django.conf import settings
from django.db import IntegrityError, close_old_connections, connections, transaction
from django.utils.timezone import now
from psycopg.types.json import Jsonb

from scheduling import metrics, sql
from scheduling.channels.base import Failure, NotSent
from scheduling.channels.http_client import close_shared_transport, parse_retry_after, shared_transport
from scheduling.channels.options import write_instant
from scheduling.channels.webhook import read_secrets, sign_request
from scheduling.configuration import snapshot
from scheduling.configuration.file.section import check_row
from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput, NotFound
from scheduling.ids import new_id
from scheduling.ledger import ends
from scheduling.ledger.anonymization import Identity
from scheduling.models import WebhookEndpoint, WebhookEvent, WebhookFact, WebhookMessage, WebhookSubscription
from scheduling.models.encrypted import Sealed
from scheduling.models.versioned import lock_for_write
from scheduling.policy.specs import WebhookSpec

log = structlog.get_logger(__name__)


# --- collecting -------------------------------------------------------------------------------------------------------


READER = "webhooks"  #: of ends of touches
MOST_COLLECTED = 500  #: of each source in a transaction
_COLLECTING = 5_104_231  #: advisory lock: ids of messages ascend in the order of events of an object
TOUCH_ENDED = WebhookEvent.TOUCH_ENDED.value


class Occurrence(NamedTuple):
    """Something that happened to an object, as subscriptions see it."""

    message_id: UUID
    type: str
    object_key: str
    at: datetime
    data: Mapping[str, Any]


def note_facts(facts: Sequence[WebhookFact]) -> None:
    """Store facts that a subscription wants. Call it in the transaction of the change; without one it costs nothing."""
    wanted = snapshot.current().webhook_events
    if wanted and (noted := [each for each in facts if each.type in wanted]):
        WebhookFact.objects.bulk_create(noted)


def collect_messages() -> bool:
    """Write the messages of the next events. Return whether more events wait.

    Events and messages change in one transaction: a killed process loses and repeats nothing. Of concurrent passes one
    works, and the others return.
    """
    config = snapshot.current()
    with transaction.atomic():
        if not sql.rows("SELECT pg_try_advisory_xact_lock(%(lock)s)", {"lock": _COLLECTING})[0][0]:
            return False
        gone = WebhookEndpoint.objects.filter(disabled_at__isnull=False).values_list("pk", flat=True)
        hooks = [hook for hook in config.webhooks.values() if hook.id not in set(gone)]
        found = [Occurrence(new_id(), *row[1:]) for row in sorted(sql.rows(_TAKE_FACTS, {"most": MOST_COLLECTED}))]
        more = len(found) == MOST_COLLECTED
        if TOUCH_ENDED in config.webhook_events:
            batch = ends.take_ends(READER, most=MOST_COLLECTED)
            found += _describe_ends(batch.ends, config)
            more |= batch.more
        else:
            ends.drop_reader(READER)
        write_messages((hook.id, each) for each in found for hook in hooks if wants_message(hook, each))
    return more


def forget_events() -> None:
    """Drop events that no subscription waits for, so that a later one does not get them."""
    WebhookFact.objects.all().delete()
    ends.drop_reader(READER)


def wants_message(hook: WebhookSpec, event: Occurrence) -> bool:
    """Return whether type and filter match. A filter does not concern a message without its field."""
    if event.type not in hook.events:
        return False
    data = event.data
    given = {"node": data.get("node"), "platform": data.get("platform")}
    given["shop"] = f"{given['platform']}/{data['shop_id']}" if data.get("shop_id") else None
    return all(not given[name] or given[name] in wanted for name, wanted in hook.filter.items())


def write_messages(wanted: Iterable[tuple[int, Occurrence]]) -> int:
    """Insert messages by id of their subscription. Return their number."""
    at = sql.now()  # the claim compares with PostgreSQL's clock
    records = [
        (hook, each.message_id, each.type, each.object_key, each.at, Jsonb(each.data), "waiting", at, 0, "")
        for hook, each in wanted
    ]
    sql.copy_rows(_COPY_MESSAGES, records, tuple(_MESSAGE_COLUMNS.values()))
    return len(records)


def _describe_ends(found: Sequence[ends.EndedTouch], config: snapshot.Snapshot) -> list[Occurrence]:
    """Return the ends with their events. The id of the touch is that of the message: an end read again repeats it."""
    if not found:
        return []
    ids = list({each.event_id for each in found})
    events = {row[0]: row[1:] for row in sql.rows(_EVENTS_OF_ENDS, {"ids": ids})}
    described = []
    for each in found:
        source, event_id, event_type, user_id = events[each.event_id]
        data = {
            "task_id": str(each.task_id),
            "delivery_key": str(each.root_id),
            "state": each.state,
            "reason": each.reason,
            "node": config.nodes[each.node_id].key,
            "user_id": user_id,
            "chat_id": each.chat_id,
            "event": {"source": source, "id": event_id, "type": event_type},
        }
        described.append(Occurrence(each.task_id, TOUCH_ENDED, f"touch:{each.task_id}", each.settled_at, data))
    return described


_TAKE_FACTS = """
DELETE FROM scheduling_webhookfact
WHERE id = ANY(ARRAY(SELECT id FROM scheduling_webhookfact ORDER BY id LIMIT %(most)s))
RETURNING id, type, object_key, at, data
"""
_EVENTS_OF_ENDS = "SELECT id, source, event_id, type, user_id FROM scheduling_event WHERE id = ANY(%(ids)b)"
_MESSAGE_COLUMNS = {
    "subscription_id": "int8", "message_id": "uuid", "type": "varchar", "object_key": "varchar",
    "occurred_at": "timestamptz", "data": "jsonb", "state": "varchar", "due_at": "timestamptz", "attempt": "int4",
    "problem": "varchar",
}  # fmt: skip
_COPY_MESSAGES = f"COPY {WebhookMessage._meta.db_table} ({', '.join(_MESSAGE_COLUMNS)}) FROM STDIN (FORMAT BINARY)"


# --- messages ---------------------------------------------------------------------------------------------------------


MOST_REPLAYED = 100_000  #: messages in one request
TEST_EVENT = "webhook.test"
DELETED_AT_ONCE = 5_000
LONGEST_DELETION = 1.0  #: seconds


def replay_messages(hook: WebhookSubscription, since: datetime, until: datetime, *, by: str) -> int:
    """Send again what happened from `since` to `until` and has been delivered or given up. Return the number.

    Messages keep their `webhook-id`. Those that wait stay as they are, so a repeated request adds nothing to them.

    Raises:
        InvalidInput: the range is empty or has more than `MOST_REPLAYED` messages.
    """
    if since >= until:
        raise InvalidInput.of("to", _("must be later than “from”"))
    with transaction.atomic():
        given = {"hook": hook.pk, "since": since, "until": until, "most": MOST_REPLAYED + 1}
        count = sql.execute(_REPLAY, given)
        if count > MOST_REPLAYED:
            raise InvalidInput.of("to", _("more than %(most)s messages; choose a shorter range", most=MOST_REPLAYED))
    log.info("webhook_replayed", webhook=hook.key, count=count, by=by)
    return count


def write_test_message(hook: WebhookSubscription) -> None:
    """Write a message of type `webhook.test`, whatever events the subscription has."""
    message_id = new_id()
    test = Occurrence(message_id, TEST_EVENT, f"test:{message_id}", sql.now(), {"webhook": hook.key})
    with transaction.atomic():
        write_messages([(hook.pk, test)])


def pause_endpoint(hook: WebhookSubscription) -> None:
    """Send nothing. Messages are still collected. Idempotent."""
    WebhookEndpoint.objects.filter(pk=hook.pk, paused_at=None).update(paused_at=sql.now())


def enable_endpoint(hook: WebhookSubscription) -> None:
    """End a pause, a rest or a disabled state, and the delays of waiting messages. Idempotent."""
    with transaction.atomic():
        WebhookEndpoint.objects.filter(pk=hook.pk).update(
            paused_at=None, disabled_at=None, rest_until=None, failures=0, failing_since=None
        )
        sql.execute(_END_DELAYS, {"hook": hook.pk, "lease": LEASE})


def delete_old_messages() -> int:
    """Delete messages of events older than `AFTERTOUCH_WEBHOOK_RETENTION_DAYS`, in batches, for a second at most.

    Messages that still wait by then are deleted too. Return the number.
    """
    before = sql.now() - timedelta(days=settings.AFTERTOUCH_WEBHOOK_RETENTION_DAYS)
    deleted, ends_at = 0, time.monotonic() + LONGEST_DELETION
    for hook in WebhookSubscription.objects.values_list("pk", flat=True):
        gone = DELETED_AT_ONCE
        while gone == DELETED_AT_ONCE and time.monotonic() < ends_at:
            gone = sql.execute(_DELETE_OLD, {"hook": hook, "before": before, "most": DELETED_AT_ONCE})
            deleted += gone
    return deleted


def find_messages_of_customer(user_id: str, most: int) -> list[int]:
    """Return the ids of the latest messages that name a customer, at most `most`."""
    return [row[0] for row in sql.rows(_OF_CUSTOMER, {"user_id": user_id, "most": most})]


def erase_messages_of_customer(who: Identity) -> int:
    """Remove a customer from stored messages: its ids and those of its chat, session and events. Idempotent.

    A pass that has read its events before they became anonymous stores its messages first.
    """
    given = {"user_id": who.user_id}
    with transaction.atomic():
        # Wait for a running pass, and let none start before this transaction ends.
        sql.rows("SELECT pg_advisory_xact_lock(%(lock)s)", {"lock": _COLLECTING})
        return sum(sql.execute(statement, given) for statement in (_ERASE_ENDED, _ERASE_WAITING, _ERASE_FACTS))


# A message that is due sooner may be in flight. Its lease must not end.
_END_DELAYS = """
UPDATE scheduling_webhookmessage SET due_at = statement_timestamp()
WHERE subscription_id = %(hook)s AND state = 'waiting' AND due_at > statement_timestamp() + %(lease)s::interval
"""
_REPLAY = """
UPDATE scheduling_webhookmessage
SET state = 'waiting', due_at = statement_timestamp(), ended_at = NULL, first_tried_at = NULL
WHERE id = ANY(ARRAY(
    SELECT id FROM scheduling_webhookmessage
    WHERE subscription_id = %(hook)s AND occurred_at >= %(since)s AND occurred_at <= %(until)s AND state <> 'waiting'
    ORDER BY occurred_at LIMIT %(most)s FOR UPDATE))
"""
_DELETE_OLD = """
DELETE FROM scheduling_webhookmessage WHERE id = ANY(ARRAY(
    SELECT id FROM scheduling_webhookmessage WHERE subscription_id = %(hook)s AND occurred_at < %(before)s
    ORDER BY occurred_at LIMIT %(most)s FOR UPDATE SKIP LOCKED))
"""
# Ended messages have an index of users, waiting ones are few.
_ENDED_OF = "state <> 'waiting' AND data ? 'user_id' AND data ->> 'user_id' = %(user_id)s"
_WAITING_OF = "state = 'waiting' AND data ->> 'user_id' = %(user_id)s"
_OF_CUSTOMER = f"""
SELECT id FROM scheduling_webhookmessage WHERE {_ENDED_OF}
UNION ALL SELECT id FROM scheduling_webhookmessage WHERE {_WAITING_OF}
ORDER BY id DESC LIMIT %(most)s
"""  # noqa: S608 (made of constants)
_ERASED = """
SET data = data - '{user_id,chat_id,session_id,event}'::text[],
    object_key = CASE WHEN object_key LIKE 'session:%%' THEN 'erased:' || id ELSE object_key END
"""
_ERASE_ENDED = f"UPDATE scheduling_webhookmessage {_ERASED} WHERE {_ENDED_OF}"
_ERASE_WAITING = f"UPDATE scheduling_webhookmessage {_ERASED} WHERE {_WAITING_OF}"
_ERASE_FACTS = f"UPDATE scheduling_webhookfact {_ERASED} WHERE data ->> 'user_id' = %(user_id)s"


# --- subscriptions ----------------------------------------------------------------------------------------------------


SECRET_SETTINGS = ("url", "secret")


def find_subscription(key: str) -> WebhookSubscription:
    """Return the subscription. Raises `NotFound`."""
    row = WebhookSubscription.objects.filter(key=key, retired_at=None).select_related("endpoint").first()
    if row is None:
        raise NotFound(_("There is no webhook %(key)s.", key=key))
    return row


def put_subscription(key: str, given: Mapping[str, Any], *, actor: str) -> None:
    """Create a subscription or change the given fields. Others stay.

    Raises:
        InvalidInput: with all errors by field.
    """
    try:
        _write_subscription(key, given, actor)
    except IntegrityError:  # another one has created it since its row was looked for
        _write_subscription(key, given, actor)


@transaction.atomic
def _write_subscription(key: str, given: Mapping[str, Any], actor: str) -> None:
    row = lock_for_write(WebhookSubscription.objects.all()).filter(key=key).first()
    row = row or WebhookSubscription(key=key)
    if row.retired_at:
        row = WebhookSubscription(pk=row.pk, key=key, version=row.version)
    stored = {} if isinstance(row.config, Sealed) else row.config
    config = stored | {name: given[name] for name in SECRET_SETTINGS if name in given}
    values = {name: given.get(name, getattr(row, name)) for name in ("events", "filter", "enabled")}
    for name, value in (*values.items(), ("config", config), ("retired_at", None)):
        setattr(row, name, value)
    try:
        check_row(row)
    except InvalidInput as error:
        raise InvalidInput(
            *(FieldError(each.field.removeprefix("config."), each.message) for each in error.errors)
        ) from None
    row._change_reason = actor[:100]  # type: ignore[attr-defined]
    row.save()


def retire_subscription(key: str, *, actor: str) -> None:
    """Send nothing more. Waiting messages are deleted at the end of their retention. Raises `NotFound`."""
    with transaction.atomic():
        row = lock_for_write(WebhookSubscription.objects.all()).filter(key=key, retired_at=None).first()
        if row is None:
            raise NotFound(_("There is no webhook %(key)s.", key=key))
        row.retired_at = now()
        row._change_reason = actor[:100]  # type: ignore[attr-defined]
        row.save()


# --- claims -----------------------------------------------------------------------------------------------------------


LEASE = timedelta(seconds=60)
GIVE_UP_AFTER = timedelta(hours=24)  #: from the first attempt
FIRST_DELAY = timedelta(seconds=5)  #: each further delay is as long as the time since the first attempt
LONGEST_REST = timedelta(minutes=10)
FAILURES_TO_REST = 5  #: failures without a success in between, after which a receiver rests


class ClaimedMessage(NamedTuple):
    id: int
    attempt: int
    message_id: UUID
    type: str
    occurred_at: datetime
    data: str  #: JSON text


class AttemptResult(NamedTuple):
    id: int
    attempt: int
    outcome: str  #: delivered | failed | released (not attempted)
    problem: str = ""
    status: int | None = None
    retry_after: timedelta | None = None

    @property
    def gone(self) -> bool:
        return self.status == HTTPStatus.GONE


class SendableHook(NamedTuple):
    id: int
    probing: bool  #: it failed before: one message shows whether it answers again


def find_sendable(hooks: Sequence[int]) -> list[SendableHook]:
    """Return those of the subscriptions that have due messages and whose receiver does not rest."""
    rows = sql.rows(_SENDABLE, {"hooks": list(hooks), "failures": FAILURES_TO_REST})
    return [SendableHook(*row) for row in rows]


def claim_messages(hook: int, version: int, most: int) -> list[ClaimedMessage]:
    """Claim due messages, at most `most`, for `LEASE`. Any number of processes may claim at once.

    Nothing is claimed while the receiver rests, is paused or is disabled, nor for another version of the subscription:
    the caller knows an old address or an old secret.
    """
    rows = sql.rows(_CLAIM_MESSAGES, {"hook": hook, "version": version, "most": most, "lease": LEASE})
    return sorted((ClaimedMessage(*row) for row in rows), key=lambda each: each.id)


def settle_attempts(hook: int, version: int, results: Sequence[AttemptResult]) -> None:
    """Store results, and what they show about the receiver. A result of an expired lease changes nothing.

    A failed message waits as long again as since its first attempt, at least `FIRST_DELAY`, and at least as long as the
    receiver asks. The last attempt is a day after the first. Results of another `version` of the subscription than the
    stored one may be from another receiver.
    """
    columns = {
        "ids": [each.id for each in results],
        "attempts": [each.attempt for each in results],
        "outcomes": [each.outcome for each in results],
        "problems": [each.problem[:300] for each in results],
        "statuses": [each.status or 0 for each in results],
        "waits": [(each.retry_after or timedelta(0)).total_seconds() for each in results],
    }
    spans = {"day": GIVE_UP_AFTER, "first": FIRST_DELAY}
    sql.execute(_SETTLE_ATTEMPTS, columns | spans)
    _note_endpoint({"hook": hook, "version": version}, [each for each in results if each.outcome != "released"])


def _note_endpoint(of: Mapping[str, int], results: Sequence[AttemptResult]) -> None:
    failed = [each for each in results if each.outcome == "failed"]
    asked = max((each.retry_after for each in failed if each.retry_after), default=None)
    if len(failed) < len(results):
        sql.execute(_NOTE_SUCCESS, of)
    elif failed:
        given = {"count": len(failed), "enough": FAILURES_TO_REST, "first": FIRST_DELAY, "longest": LONGEST_REST}
        sql.execute(_NOTE_FAILURES, {**given, **of})
    if failed:
        problem = next((each.problem for each in failed if each.gone), failed[-1].problem)
        gone = any(each.gone for each in failed)
        sql.execute(_NOTE_PROBLEM, {**of, "problem": problem[:300], "gone": gone, "asked": asked})


_TAKES_MESSAGES = """
e.disabled_at IS NULL AND e.paused_at IS NULL AND (e.rest_until IS NULL OR e.rest_until <= statement_timestamp())
"""

_SENDABLE = f"""
SELECT e.subscription_id, e.failures >= %(failures)s FROM scheduling_webhookendpoint AS e
WHERE e.subscription_id = ANY(%(hooks)b) AND {_TAKES_MESSAGES}
  AND EXISTS (SELECT FROM scheduling_webhookmessage AS m WHERE m.state = 'waiting'
              AND m.subscription_id = e.subscription_id AND m.due_at <= statement_timestamp())
"""  # noqa: S608  (only our own words)

# The scalar subquery is an index look-up for each row. NOT EXISTS may read all waiting messages into a hash table.
# The EXISTS names no column of a message, so PostgreSQL evaluates it once.
_CLAIM_MESSAGES = f"""
WITH head AS MATERIALIZED (
    SELECT m.id FROM scheduling_webhookmessage AS m
    WHERE m.state = 'waiting' AND m.subscription_id = %(hook)s AND m.due_at <= statement_timestamp()
      AND m.id = (
          SELECT o.id FROM scheduling_webhookmessage AS o
          WHERE o.state = 'waiting' AND o.subscription_id = m.subscription_id AND o.object_key = m.object_key
          ORDER BY o.id LIMIT 1)
      AND EXISTS (
          SELECT FROM scheduling_webhookendpoint AS e
          JOIN scheduling_webhooksubscription AS s ON s.id = e.subscription_id
          WHERE e.subscription_id = %(hook)s AND {_TAKES_MESSAGES}
            AND s.version = %(version)s AND s.enabled AND s.retired_at IS NULL)
    ORDER BY m.due_at, m.id LIMIT %(most)s FOR UPDATE OF m SKIP LOCKED
)
UPDATE scheduling_webhookmessage AS m SET attempt = m.attempt + 1, due_at = statement_timestamp() + %(lease)s
FROM head WHERE m.id = head.id
RETURNING m.id, m.attempt, m.message_id, m.type, m.occurred_at, m.data::text
"""  # noqa: S608  (only our own words)

_SETTLE_ATTEMPTS = """
UPDATE scheduling_webhookmessage AS m
SET state = v.state, status = NULLIF(v.status, 0), problem = v.problem, first_tried_at = v.first_tried_at,
    ended_at = CASE WHEN v.state <> 'waiting' THEN statement_timestamp() END,
    due_at = CASE v.outcome WHEN 'failed' THEN GREATEST(
        LEAST(statement_timestamp() + GREATEST(%(first)s::interval, statement_timestamp() - v.first_tried_at)
              * (0.9 + 0.2 * random()), GREATEST(v.first_tried_at + %(day)s, statement_timestamp() + %(first)s)),
        statement_timestamp() + v.wait * interval '1 second')
        ELSE statement_timestamp() END
FROM (
    SELECT given.*, CASE outcome WHEN 'released' THEN o.first_tried_at
                    ELSE COALESCE(o.first_tried_at, statement_timestamp()) END AS first_tried_at,
           CASE WHEN outcome = 'delivered' THEN 'delivered'
                WHEN outcome = 'failed' AND o.first_tried_at <= statement_timestamp() - %(day)s::interval
                THEN 'given_up' ELSE 'waiting' END AS state
    FROM unnest(%(ids)b::bigint[], %(attempts)b::int[], %(outcomes)b::text[], %(problems)b::text[],
                %(statuses)b::smallint[], %(waits)b::float8[]) AS given(id, attempt, outcome, problem, status, wait)
    JOIN scheduling_webhookmessage AS o ON o.id = given.id
) AS v
WHERE m.id = v.id AND m.attempt = v.attempt AND m.state = 'waiting'
"""

_OF_VERSION = """
subscription_id = %(hook)s
  AND EXISTS (SELECT FROM scheduling_webhooksubscription WHERE id = %(hook)s AND version = %(version)s)
"""

# Nothing is claimed during a rest. A success within it is of an earlier request and does not end it: the receiver may
# have named its end.
_NOTE_SUCCESS = f"""
UPDATE scheduling_webhookendpoint
SET failures = 0, failing_since = NULL, delivered_at = statement_timestamp()
WHERE {_OF_VERSION}
  AND (failures > 0 OR COALESCE(delivered_at, '-infinity') < statement_timestamp() - interval '10 seconds')
"""  # noqa: S608  (only our own words)

# The rest is as long as the receiver has failed, so it doubles. It shortens no rest that the receiver asked for.
_NOTE_FAILURES = f"""
UPDATE scheduling_webhookendpoint
SET failures = failures + %(count)s, failing_since = COALESCE(failing_since, statement_timestamp()),
    rest_until = CASE WHEN failures + %(count)s >= %(enough)s THEN GREATEST(
        rest_until, statement_timestamp() + LEAST(%(longest)s::interval,
        GREATEST(%(first)s::interval, statement_timestamp() - COALESCE(failing_since, statement_timestamp()))))
        ELSE rest_until END
WHERE {_OF_VERSION}
"""  # noqa: S608  (only our own words)

_NOTE_PROBLEM = f"""
UPDATE scheduling_webhookendpoint
SET problem = %(problem)s, problem_at = statement_timestamp(),
    disabled_at = CASE WHEN %(gone)s THEN COALESCE(disabled_at, statement_timestamp()) ELSE disabled_at END,
    rest_until = GREATEST(rest_until, statement_timestamp() + %(asked)s::interval)
WHERE {_OF_VERSION}
"""  # noqa: S608  (only our own words)


# --- sending ----------------------------------------------------------------------------------------------------------


R = TypeVar("R")

TIMEOUT = timedelta(seconds=10)  #: of one request, from its claim to the end of the answer
MOST_IN_FLIGHT = 200  #: of one subscription in a process; the transport has as many connections to a host
PACE = 0.03  #: seconds between two turns of a subscription: results of that time share a statement
IDLE = 0.5  #: seconds between two looks for new events
LINGER = 15.0  #: seconds; longer than the interval of the pass that wakes the thread
#: A request that could not start by then is dropped, because another process may have the message after the lease.
LATEST_START = (LEASE - 2 * TIMEOUT).total_seconds()
RETRY_STATEMENTS = 1.0  #: seconds, while PostgreSQL is unavailable


@cache
def outbox_sender() -> OutboxSender:
    """Return the sender of this process."""
    return OutboxSender()


class OutboxSender:
    def __init__(self, linger: float = LINGER) -> None:
        self._linger = linger
        self._stop = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def wake(self) -> None:
        """Start the thread, unless it runs."""
        with self._starting:
            if not self._stop and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self.run, name="webhooks", daemon=True)
                self._thread.start()

    def finish(self, timeout: float) -> None:
        """Claim nothing more, and wait until what is in flight is settled. Leases return the rest."""
        self._stop = True
        if self._thread is not None:
            self._thread.join(timeout)

    def run(self) -> None:
        """Send until nothing has been due for the linger time, or `finish` is called."""
        try:
            asyncio.run(_Turns(lambda: self._stop, self._linger).serve())
        except Exception:
            log.exception("webhook_sender_failed")


class _Turns:
    """The event loop of a sender. One thread runs all statements, on one connection."""

    def __init__(self, stopping: Callable[[], bool], linger: float) -> None:
        self._stopping = stopping
        self._linger = linger
        self._statements = ThreadPoolExecutor(1, "webhook-statements")
        self._lanes: dict[int, asyncio.Task[None]] = {}
        self._busy_at = time.monotonic()
        self._unusable: dict[int, WebhookSpec] = {}  #: their secrets cannot be decrypted here

    async def serve(self) -> None:
        try:
            while not self._stopping():
                more, hooks = await self._call(_look_for_work) or (False, [])
                self._lanes = {hook: lane for hook, lane in self._lanes.items() if not lane.done()}
                for spec, each in hooks:
                    if spec.id not in self._lanes and self._unusable.get(spec.id) is not spec:
                        limit = 1 if each.probing else MOST_IN_FLIGHT
                        self._lanes[spec.id] = asyncio.create_task(self._drain(spec, limit))
                await asyncio.sleep(PACE if more else IDLE)
                if more or not all(lane.done() for lane in self._lanes.values()):
                    self._busy_at = time.monotonic()
                elif time.monotonic() - self._busy_at > self._linger:
                    break
            await asyncio.gather(*self._lanes.values())
        finally:
            await close_shared_transport()
            self._statements.submit(connections.close_all)
            self._statements.shutdown()

    async def _call(self, act: Callable[[], R]) -> R | None:
        """Run statements. Return None after a pause if they failed."""

        def act_on_usable_connection() -> R:
            close_old_connections()
            return act()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._statements, act_on_usable_connection)
        except sql.UNAVAILABLE_ERRORS as error:
            log.warning("database_unavailable", error=str(error))
        except Exception:
            log.exception("webhook_pass_failed")
        await asyncio.sleep(RETRY_STATEMENTS)
        return None

    async def _drain(self, hook: WebhookSpec, limit: int) -> None:
        """Send due messages of one subscription until none can be claimed, or its receiver has to rest."""
        try:
            post = partial(self._attempt, hook, read_secrets(hook.config), str(hook.config["url"]))
        except Exception:  # secrets that this server cannot decrypt: another one may send
            log.exception("webhook_unusable", webhook=hook.key)
            self._unusable[hook.id] = hook
            return
        flying: set[asyncio.Task[AttemptResult]] = set()
        results: list[AttemptResult] = []
        halted = False
        while True:
            landed = {each for each in flying if each.done()}
            flying -= landed
            results += [each.result() for each in landed]
            halted = halted or self._stopping() or _must_rest(results)
            if any(each.outcome == "delivered" for each in results):
                limit = MOST_IN_FLIGHT
            room = 0 if halted else limit - len(flying)
            claimed: list[ClaimedMessage] = []
            stored = True
            if results or room > 0:
                taken = await self._call(partial(_settle_and_claim, hook, tuple(results), room))
                claimed, stored = taken or [], taken is not None
            results = [] if stored else results
            if claimed:
                self._busy_at = time.monotonic()
            flying |= {asyncio.create_task(post(each, time.monotonic())) for each in claimed}
            if not flying and not results and (halted or not claimed):
                return
            if flying:
                await asyncio.wait(flying, timeout=PACE)
            if self._stopping() and not stored:
                return  # the leases return them

    async def _attempt(
        self, hook: WebhookSpec, secrets: tuple[str, ...], url: str, message: ClaimedMessage, claimed_at: float
    ) -> AttemptResult:
        if time.monotonic() - claimed_at > LATEST_START:
            return AttemptResult(message.id, message.attempt, "released")
        body = build_body(message)
        headers = sign_request(message.message_id, body, datetime.now(UTC), secrets)
        outcome: dict[str, Any]
        try:
            response = await shared_transport().request("POST", url, body, headers, timeout=TIMEOUT, repeatable=True)
        except NotSent as failure:
            outcome = {"outcome": "released" if failure.reason == "busy" else "failed", "problem": str(failure)}
        except Failure as failure:
            outcome = {"outcome": "failed", "problem": str(failure)}
        except Exception as error:
            log.exception("webhook_attempt_failed", webhook=hook.key)
            outcome = {"outcome": "failed", "problem": type(error).__name__}
        else:
            delivered = 200 <= response.status < 300
            wait = None if delivered or response.status not in (429, 503) else parse_retry_after(response)
            outcome = {
                "outcome": "delivered" if delivered else "failed", "status": response.status, "retry_after": wait,
                "problem": "" if delivered else f"http_{response.status}",
            }  # fmt: skip
        metrics.count(metrics.webhook_attempts, hook.key, outcome["outcome"])
        return AttemptResult(message.id, message.attempt, **outcome)


def build_body(message: ClaimedMessage) -> bytes:
    """Return `{type, timestamp, data}` as UTF-8 JSON. `timestamp` is when it happened, the same in each attempt."""
    at = write_instant(message.occurred_at, "milliseconds")
    return f'{{"type":"{message.type}","timestamp":"{at}","data":{message.data}}}'.encode()


def _must_rest(results: list[AttemptResult]) -> bool:
    """Return whether to send nothing more for now: the receiver asks for it, or all that has ended failed."""
    failed = [each for each in results if each.outcome == "failed"]
    return any(each.retry_after or each.gone for each in failed) or (bool(failed) and len(failed) == len(results))


def _look_for_work() -> tuple[bool, list[tuple[WebhookSpec, SendableHook]]]:
    """Return whether more events wait, and the subscriptions with due messages."""
    config = snapshot.current()
    if not config.webhooks:
        return False, []
    more = collect_messages()
    return more, [(config.webhooks[each.id], each) for each in find_sendable(list(config.webhooks))]


def _settle_and_claim(hook: WebhookSpec, results: tuple[AttemptResult, ...], room: int) -> list[ClaimedMessage]:
    if results:
        settle_attempts(hook.id, hook.version, results)
    return claim_messages(hook.id, hook.version, room) if room > 0 else []
