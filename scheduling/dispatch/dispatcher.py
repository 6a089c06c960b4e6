"""Dispatch due rows and rescue lost ones, in passes.

Any number of passes may run at once on any node. Each pass is idempotent.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import structlog
from django.conf import settings
from django.db import close_old_connections, transaction
from django.db.models.functions import Now
from kombu.exceptions import OperationalError

from scheduling import metrics, tracing
from scheduling.configuration import snapshot
from scheduling.dispatch.broker_health import alarm
from scheduling.dispatch.publisher import TOUCH_QUEUES, oldest_message_at, publish_touches
from scheduling.ledger import dead_letters
from scheduling.ledger.touches import touches
from scheduling.ledger.transitions import Hint, Settlement
from scheduling.models import Attempt, Touch

log = structlog.get_logger(__name__)

PASS_LIMIT = 1000
RESUME_SPREAD = timedelta(minutes=2)
LONGEST_PASS = timedelta(seconds=4)  #: below the interval of the tick, so that passes do not accumulate


def hand_over_due() -> int:
    """Dispatch the touches that fall due within the horizon. Return their number.

    While the broker accepts no messages, touches stay in the table. There they do not count as lost wake-ups.
    """
    if alarm.is_on():
        return 0
    handed_over, ends_at = 0, datetime.now(UTC) + LONGEST_PASS
    while datetime.now(UTC) < ends_at:
        hints = touches.hand_over(horizon=settings.AFTERTOUCH_HORIZON, limit=PASS_LIMIT)
        announce(hints)
        handed_over += len(hints)
        if len(hints) < PASS_LIMIT:
            break
    return handed_over


def announce(hints: list[Hint]) -> None:
    """Publish wake-ups for dispatched touches."""
    if hints:
        nodes = snapshot.current().nodes
        publish_touches(hints, {hint.route: nodes[hint.route].channel.id for hint in hints})


def rescue() -> tuple[int, int]:
    """Return lost work to the ledger: wake-ups that no worker used, and runs whose worker is lost.

    Return the number of touches and of runs.
    """
    unpark_resumed()
    return _rescue_hints(), _repeat(_rescue_runs)


def _repeat(rescue: Callable[[], int]) -> int:
    """Call `rescue` until nothing is left or its share of `LONGEST_PASS` is over. Return the total.

    A flushed broker loses all dispatched touches. One thousand per tick would never catch up with the touches that fall
    due.
    """
    rescued, ends_at = 0, datetime.now(UTC) + LONGEST_PASS / 2
    while True:
        count = rescue()
        rescued += count
        if count < PASS_LIMIT or datetime.now(UTC) >= ends_at:
            return rescued


def _rescue_hints() -> int:
    if alarm.is_on() or not touches.has_lapsed_hints():
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
    rescued = _repeat(lambda: touches.rescue_hints(trusted_since=backlog, limit=PASS_LIMIT))
    if rescued:
        log.info("wakeups_requeued", count=rescued)
    return rescued


def _rescue_runs() -> int:
    """Settle runs with an expired lease.

    A run that was not sending returns to `scheduled` at once. A run that was sending may have had its effect: an
    idempotent channel gets the same key again. For any other channel an operator decides.
    """
    with transaction.atomic():
        lapsed = touches.lapsed_runs(limit=PASS_LIMIT)
        if not lapsed:
            return 0
        nodes = snapshot.current().nodes
        # PostgreSQL's time: with the clock of a node that is ahead, the rows would wait.
        rows = Touch.objects.annotate(at=Now()).in_bulk([claim.task_id for claim, _ in lapsed])
        settlements = {}
        for claim, was_sending in lapsed:
            channel = nodes[rows[claim.task_id].node_id].channel
            exhausted = rows[claim.task_id].attempt > len(channel.retry_delays)
            if was_sending and (not channel.idempotent or exhausted):
                settlements[claim] = Settlement("unknown", "worker_lost")
            else:
                at = rows[claim.task_id].at
                settlements[claim] = Settlement("scheduled", "worker_lost", due_at=at)
        touches.settle(settlements)
        Attempt.objects.bulk_create(
            [_lost_attempt(rows[claim.task_id], claim.lease_no) for claim, was_sending in lapsed if was_sending]
        )
        dead_letters.bury_touches([claim.task_id for claim, end in settlements.items() if end.state == "unknown"])
    metrics.worker_lost(sum(end.state == "unknown" for end in settlements.values()))
    log.warning("runs_rescued", count=len(settlements))
    for state in ("scheduled", "unknown"):
        names = [tracing.name(None, claim.task_id) for claim, end in settlements.items() if end.state == state]
        tracing.say("touches_settled", names, state=state, reason="worker_lost")
    return len(settlements)


def _lost_attempt(row: Touch, lease_no: int) -> Attempt:
    """Return an attempt with an unknown outcome.

    No worker reported its result. The stored attempt keeps the outcome unknown across the next attempts.
    """
    assert row.sending_at is not None
    return Attempt(
        touch=row, number=row.attempt, lease_no=lease_no, started_at=row.sending_at, outcome="unknown",
        reason="worker_lost",
    )  # fmt: skip


def unpark_resumed() -> int:
    """Resume touches whose pause is over, spread over `RESUME_SPREAD`. Return their number.

    An interrupted pass is safe: the next one continues.
    """
    resumed = set(touches.parked_scopes()) - snapshot.current().paused
    unparked, ends_at = 0, datetime.now(UTC) + LONGEST_PASS
    for scope in sorted(resumed):
        while datetime.now(UTC) < ends_at and (count := touches.unpark(scope, spread=RESUME_SPREAD)):
            unparked += count
    return unparked


class Doorbell:
    """Publish dispatched touches in a background thread, so that no request or commit waits for the broker.

    Wake-ups beyond the capacity are dropped. The leases of their rows expire and the rescue dispatches them again.
    """

    def __init__(self, publish: Callable[[list[Hint]], None], *, capacity: int = 1000) -> None:
        self._publish = publish
        self._waiting: queue.Queue[list[Hint]] = queue.Queue(capacity)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def ring(self, hints: list[Hint]) -> None:
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="doorbell", daemon=True)
                self._thread.start()
        try:
            self._waiting.put_nowait(hints)
        except queue.Full:
            log.warning("wakeups_dropped", count=len(hints))

    def _run(self) -> None:
        while True:
            hints = self._waiting.get()
            while len(hints) < PASS_LIMIT:
                try:
                    hints = hints + self._waiting.get_nowait()
                except queue.Empty:
                    break
            try:
                close_old_connections()
                self._publish(hints)
            except Exception:
                log.exception("wakeups_lost", count=len(hints))


doorbell = Doorbell(announce)
