"""Dispatch due rows and rescue lost ones, in passes.

Any number of passes may run at once on any node. Each pass is idempotent.

Publish wake-up messages in batches. A lost message only delays its touches until their lease expires.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

import structlog
from celery import current_app
from django.conf import settings
from django.db import transaction
from django.db.models.functions import Now
from kombu.exceptions import OperationalError

from scheduling import metrics, tracing
from scheduling.batching import BackgroundBatcher
from scheduling.broker_health import broker_alarm, connect_broker
from scheduling.configuration import snapshot
from scheduling.ledger.failures import record_failed_touches
from scheduling.ledger.touches import AGE_UNKNOWN, touch_ledger
from scheduling.ledger.transitions import Settlement, WakeUp
from scheduling.models import Attempt, Touch
from scheduling.policy.specs import NodeSpec
from scheduling.queue_names import TOUCH_QUEUES

log = structlog.get_logger(__name__)


# --- passes -----------------------------------------------------------------------------------------------------------


PASS_LIMIT = 1000
DISPATCH_LIMIT = 5_000  #: touches per statement
POLL = 0.1  #: seconds between two looks at a backlog; the window holds more than workers take in this time
IDLE_LOOKS = 5  #: without a claim in between, after which a pass ends: its process may be the one that would claim
RESUME_SPREAD = timedelta(minutes=2)
LONGEST_PASS = 4.0  #: seconds; below the interval of the tick, so that passes do not accumulate
LONGEST_DISPATCH = 4.8  #: seconds; the next pass begins soon after, so that a backlog does not pause


def dispatch_due_touches() -> int:
    """Dispatch the touches that fall due within the horizon. Return their number.

    What is dispatched is bounded (see `TouchLedger.dispatch_due`). While touches are held back and fall due before the
    next pass, the pass continues, and dispatches as many as workers have claimed. While the broker accepts no messages,
    touches stay in the table. There they do not count as lost wake-ups.
    """
    ends_at = time.monotonic() + LONGEST_DISPATCH
    dispatched, idle_looks = _dispatch_within(settings.AFTERTOUCH_HORIZON, ends_at), 0
    while idle_looks < IDLE_LOOKS:
        wait = touch_ledger.seconds_until_due(timedelta(seconds=LONGEST_DISPATCH))
        pause = max(wait or 0, POLL)
        if wait is None or broker_alarm.is_on() or time.monotonic() + pause > ends_at:
            break
        time.sleep(pause)
        more = _dispatch_within(timedelta(0), ends_at)
        dispatched, idle_looks = dispatched + more, 0 if more else idle_looks + 1
    return dispatched


def dispatch_waiting_touches() -> int:
    """Dispatch touches that are due, at most one window per priority. Return their number."""
    return _dispatch_within(timedelta(0), time.monotonic() + LONGEST_DISPATCH)


def _dispatch_within(horizon: timedelta, ends_at: float) -> int:
    dispatched = 0
    while not broker_alarm.is_on() and time.monotonic() < ends_at:
        wakeups = touch_ledger.dispatch_due(
            horizon=horizon, limit=DISPATCH_LIMIT, window=settings.AFTERTOUCH_DISPATCH_WINDOW
        )
        publish_wakeups(wakeups)
        dispatched += len(wakeups)
        if len(wakeups) < DISPATCH_LIMIT:
            break
    return dispatched


def publish_wakeups(wakeups: list[WakeUp]) -> None:
    """Publish wake-ups for dispatched touches."""
    if wakeups:
        publish_touches(wakeups, snapshot.current().nodes)


def rescue_lost_work() -> tuple[int, int]:
    """Return lost work to the ledger: wake-ups that no worker used, and runs whose worker is lost.

    Return the number of touches and of runs.
    """
    runs = _repeat_until_empty(rescue_expired_runs)  # first: it needs no broker
    return requeue_lost_wakeups(), runs


def _repeat_until_empty(rescue: Callable[[], int]) -> int:
    """Call `rescue` until nothing is left or its share of `LONGEST_PASS` is over. Return the total.

    A flushed broker loses all dispatched touches. One thousand per tick would never catch up with the touches that fall
    due.
    """
    rescued, ends_at = 0, time.monotonic() + LONGEST_PASS / 2
    while True:
        count = rescue()
        rescued += count
        if count < PASS_LIMIT or time.monotonic() >= ends_at:
            return rescued


def requeue_lost_wakeups() -> int:
    if broker_alarm.is_on() or not touch_ledger.has_expired_wakeups():
        return 0
    try:
        backlog = {
            priority: oldest
            for priority, name in TOUCH_QUEUES.items()
            if (oldest := oldest_message_at(name)) is not None
        }
    except (OperationalError, OSError) as error:
        # Publishing would fail as well. The rows wait in the table until the broker is reachable.
        log.warning("broker_unreachable", error=str(error))
        return 0
    rescued = _repeat_until_empty(lambda: touch_ledger.requeue_expired(trusted_since=backlog, limit=PASS_LIMIT))
    if rescued:
        log.info("wakeups_requeued", count=rescued)
    return rescued


def rescue_expired_runs() -> int:
    """Settle runs with an expired lease.

    A run that was not sending returns to `scheduled` at once. A run that was sending may have had its effect, and keeps
    its cap slot: an idempotent channel gets the same key again, until its retries are used up. For any other channel
    an operator decides. Before it is sent again, the touch is judged again, also whether its channel has changed.
    """
    with transaction.atomic():
        expired = touch_ledger.expired_runs(limit=PASS_LIMIT)
        if not expired:
            return 0
        nodes = snapshot.current().nodes
        # PostgreSQL's time: with the clock of a node that is ahead, the rows would wait.
        rows = Touch.objects.annotate(at=Now()).in_bulk([claim.task_id for claim, _ in expired])
        settlements, lost = {}, {}
        for claim, was_sending in expired:
            row = rows[claim.task_id]
            channel = nodes[row.node_id].channel
            exhausted = row.attempt > len(channel.retry_delays)
            if was_sending and (not channel.idempotent or exhausted):
                settlements[claim] = Settlement("unknown", "worker_lost")
            else:
                settlements[claim] = Settlement("scheduled", "worker_lost", due_at=row.at)
            if was_sending:
                # No worker reported its result. The stored attempt keeps the outcome unknown across the next attempts.
                assert row.sending_at is not None
                lost[claim] = Attempt(
                    row.attempt, claim.lease_no, row.sending_at, outcome="unknown", reason="worker_lost"
                )
        touch_ledger.settle(settlements, attempts=lost)
        record_failed_touches([claim.task_id for claim, end in settlements.items() if end.state == "unknown"])
    if unknown := sum(end.state == "unknown" for end in settlements.values()):
        metrics.count(metrics.ended, "unknown", "worker_lost", by=unknown)
    log.warning("runs_rescued", count=len(settlements))
    for state in ("scheduled", "unknown"):
        names = [tracing.trace_label(None, claim.task_id) for claim, end in settlements.items() if end.state == state]
        tracing.log_touches("touches_settled", names, state=state, reason="worker_lost")
    return len(settlements)


def resume_unpaused() -> int:
    """Resume touches whose pause is over, spread over `RESUME_SPREAD`. Return their number.

    An interrupted pass is safe: the next one continues.
    """
    resumed = set(touch_ledger.paused_scopes()) - snapshot.current().paused
    changed, ends_at = 0, time.monotonic() + LONGEST_PASS
    for scope in sorted(resumed):
        while time.monotonic() < ends_at and (count := touch_ledger.resume_paused(scope, spread=RESUME_SPREAD)):
            changed += count
    return changed


#: Wake-ups that it loses: the leases of their rows expire, and the rescue dispatches them again.
background_publisher = BackgroundBatcher(publish_wakeups, name="wakeups")


# --- messages ---------------------------------------------------------------------------------------------------------


#: Touches that fall due within this span share a message, at the instant of the last one.
DUE_SPAN = timedelta(milliseconds=10)
#: Fewer touches wait up to `LONGEST_SPAN` for others. A message costs a worker as much as several touches.
FEW, LONGEST_SPAN = 8, timedelta(milliseconds=50)
ETA_MARGIN = timedelta(milliseconds=1)  #: so that a clock that is a fraction of it ahead claims no touch too early
MESSAGE_LIMIT = 500  #: ids per message
DELIVER_TASK = "scheduling.deliver"


def publish_touches(wakeups: Sequence[WakeUp], nodes: Mapping[int, NodeSpec]) -> None:
    """Publish wake-ups, grouped by queue, channel and due time.

    A channel gets messages of its own, so that a slow one delays no other. Nodes that `nodes` lacks share messages: a
    snapshot may be older than a new node. Raises nothing: if the broker is unavailable, the leases of the rows expire
    and they are dispatched again.
    """
    if not wakeups:
        return
    messages = list(build_wakeup_messages(wakeups, nodes))
    if broker_alarm.is_on():
        log.warning("wakeups_lost", messages=len(messages), error="the broker takes no messages")
        return
    try:
        with (
            current_app.producer_pool.acquire(block=True, timeout=settings.TIMEOUTS.broker_producer) as producer,
            producer.batch(max_size=200),
        ):
            for queue, eta, task_ids in messages:
                current_app.send_task(
                    DELIVER_TASK,
                    args=[task_ids],
                    queue=queue,
                    eta=eta,
                    producer=producer,
                    headers=publication_headers(),
                )
    except (OperationalError, OSError, TimeoutError) as error:
        log.warning("wakeups_lost", messages=len(messages), error=str(error))
    except Exception:
        log.exception("wakeups_lost", messages=len(messages))


def build_wakeup_messages(
    wakeups: Iterable[WakeUp], nodes: Mapping[int, NodeSpec]
) -> Iterator[tuple[str, datetime | None, list[str]]]:
    """Yield the queue, the earliest time and the task ids of each message, the most important first."""
    now = datetime.now(UTC)

    def queue_and_channel(wakeup: WakeUp) -> tuple[int, int]:
        node = nodes.get(wakeup.owner)
        return wakeup.priority, node.channel.id if node else 0

    ordered = sorted(wakeups, key=lambda wakeup: (queue_and_channel(wakeup), wakeup.due_at))
    shared = [
        message for _, alike in groupby(ordered, key=queue_and_channel) for message in _share_messages(alike, now)
    ]
    for members in sorted(shared, key=lambda members: (members[0].priority, members[0].due_at)):
        last = members[-1].due_at
        eta = last + ETA_MARGIN if last > now + DUE_SPAN else None
        yield TOUCH_QUEUES[members[0].priority], eta, [str(wakeup.task_id) for wakeup in members]


def _share_messages(wakeups: Iterable[WakeUp], now: datetime) -> Iterator[list[WakeUp]]:
    """Yield the members of each message. `wakeups` are in the order of their due times."""
    members: list[WakeUp] = []
    for wakeup in wakeups:
        if members:
            first = members[0].due_at
            span = DUE_SPAN if first <= now or len(members) >= FEW else LONGEST_SPAN
            if len(members) == MESSAGE_LIMIT or wakeup.due_at - max(first, now) > span:
                yield members
                members = []
        members.append(wakeup)
    if members:
        yield members


def publication_headers() -> dict[str, Any]:
    return {"published_at": datetime.now(UTC).timestamp()}


def oldest_message_at(queue: str) -> datetime | None:
    """Return when the oldest waiting message of `queue` was published; None for an empty queue.

    RabbitMQ does not show waiting messages: the result is `AGE_UNKNOWN` if its queue is not empty.

    Raises:
        OperationalError: the broker is unreachable, or refuses the question.
    """
    with connect_broker(settings.TIMEOUTS.broker_age) as connection:
        try:
            channel = connection.default_channel
            if hasattr(channel, "client"):
                # kombu adds the prefix only to commands that it uses itself; LINDEX is not one of them.
                raw = channel.client.lindex(f"{channel.global_keyprefix}{queue}", -1)
                instant = read_publication_time(raw) if raw else None
                # Subtract a margin: the clock of the publishing node may be a second ahead of PostgreSQL's clock.
                return instant - timedelta(seconds=2) if instant else None
            try:
                waiting = channel.queue_declare(queue, passive=True).message_count
            except connection.channel_errors:
                return None
            return AGE_UNKNOWN if waiting else None
        except (*connection.connection_errors, *connection.channel_errors) as error:
            # Those of redis-py and amqp have no class in common that callers could name.
            raise OperationalError(str(error)) from error


def read_publication_time(raw: bytes) -> datetime | None:
    """Return the publication time of a message as stored in Redis, by the publisher's clock; None if absent."""
    try:
        return datetime.fromtimestamp(json.loads(raw)["headers"]["published_at"], UTC)
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
