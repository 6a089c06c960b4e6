"""Call channels concurrently from one thread per worker process, so that a dead endpoint blocks no worker.

A delivery passes: lane (calls in flight per receiver) → quota → Presence → `mark_sending` → channel → settling.
Admission asks for room before a touch is claimed, so `submit` never waits. `mark_sending` is one fenced write per
chunk; it checks consent, pauses and the node again. Presence counts only what it permits. Results are settled together
every 100 ms. A touch ends as delivered, is retried, fails, or has an unknown outcome that an operator decides.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar
from uuid import UUID

import structlog
from django.conf import settings
from django.db import close_old_connections, connections

from scheduling.channels.base import Quotas, Transient
from scheduling.channels.http_client import before_first_byte
from scheduling.channels.quota import NEAR_SLOT, Grant, HeldSlot, QuotaGate, SlotRequest
from scheduling.delivery import presence
from scheduling.delivery.lanes import ReceiverLanes, report_lanes
from scheduling.delivery.outgoing import LEASE, Deferred, Delivery, DeliveryResult, SendResult
from scheduling.delivery.settling import settle_results
from scheduling.ledger.touches import touch_ledger
from scheduling.policy.guards import (
    GuardVerdict,
    verdict_for_presence_block,
)

log = structlog.get_logger(__name__)


# --- sending ----------------------------------------------------------------------------------------------------------


CHUNK = 500
SETTLE_INTERVAL = 0.1
#: seconds that marked deliveries wait for Presence to count them, and throttled ones for Redis to mute the robot; the
#: margin of the lease covers it
NOTE_WAIT = 0.5
SHORTEST_QUOTA_WAIT = timedelta(milliseconds=10)
THROTTLE_THREADS = 2  #: threads that store a vendor's throttling in Redis for all workers


Answer = TypeVar("Answer")

#: The row was locked or the claim is no longer valid. Settling determines which.
UNMARKED = Deferred("mark_failed", timedelta(seconds=2))
#: By task id: why a touch is not sent now, or None: send it. A time span asks again after it. Without an answer the
#: touch is `UNMARKED`.
Answers = dict[UUID, Deferred | GuardVerdict | timedelta | None]


@dataclass(slots=True)
class MarkingQueue:
    """A queue of deliveries to mark, processed in chunks by one thread."""

    thread: ThreadPoolExecutor
    ready: deque[Delivery] = field(default_factory=deque)
    active: bool = False


@cache
def sender() -> Sender:
    """Return the sender of this process. The first batch creates it, because threads do not survive a fork."""
    return Sender(QuotaGate.connect(settings.REDIS_URL))


class Sender:
    """The sending thread of this process, one settling thread and two marking threads.

    Threads start with the first delivery. Settling and marking each keep a database connection; other threads must not.
    Deliveries that need Redis are marked in a separate thread, so that a Redis that hangs delays no others.

    A delivery that cannot start within 20 s of the claim is released untried. The lease (45 s) outlasts this deadline
    plus the longest timeout; a system check asserts that.

    One race remains: a process may be suspended beyond its lease between its last check of the clock and the first byte
    sent. Receivers that honour the delivery key see no second effect. For the others a non-idempotent channel never
    retries by itself.
    """

    def __init__(self, quotas: QuotaGate) -> None:
        self.quotas = quotas
        self.lanes = ReceiverLanes()
        self._plain = MarkingQueue(ThreadPoolExecutor(1, "marker"))
        self._asking = MarkingQueue(ThreadPoolExecutor(1, "asking-marker"))
        self._throttle_threads = ThreadPoolExecutor(THROTTLE_THREADS, "muter")
        self._tasks: set[asyncio.Task[None]] = set()
        self._results: list[DeliveryResult] = []
        self._pending = 0
        self._finishing = False
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    # --- from the worker's thread ---------------------------------------------------------------------------------

    def submit(self, deliveries: list[Delivery]) -> None:
        """Take over these deliveries. Never waits: `admission.admit_batch` bounds what this process holds."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="sender", daemon=True).start()
                threading.Thread(target=self._settle_loop, name="settler", daemon=True).start()
                threading.Thread(target=report_lanes, args=(self.lanes,), name="reporter", daemon=True).start()
            loop = self._loop
        with self._changed:
            self._pending += len(deliveries)
        for delivery in deliveries:
            self.lanes.hold(delivery.receiver, delivery.channel, delivery.priority, delivery.message.chat_id)
        loop.call_soon_threadsafe(self._accept, deliveries)

    def drain(self, timeout: float) -> bool:
        """Wait until all deliveries are settled.

        Return False after `timeout` seconds; expired leases then return the rest.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout=timeout)

    def finish(self, timeout: float) -> bool:
        """Await the calls in flight, then end the marking threads and their connections.

        Other deliveries are deferred untried: a call that starts now may outlast the process, with an unknown outcome.
        The sender accepts nothing afterwards.
        """
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop_starting)
        drained = self.drain(timeout)
        if drained:
            for marking in (self._plain, self._asking):
                marking.thread.submit(connections.close_all)
                marking.thread.shutdown()
            self._throttle_threads.shutdown(cancel_futures=True)  # a Redis that hangs does not delay the end
        return drained

    # --- in the sending thread ------------------------------------------------------------------------------------

    def _accept(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.lanes[delivery.receiver].waiting[delivery.priority].append(delivery)
        for receiver in {delivery.receiver for delivery in deliveries}:
            self._start_next(receiver)

    def _stop_starting(self) -> None:
        self._finishing = True
        for receiver in self.lanes.list_held():
            self._start_next(receiver)

    def _start_next(self, receiver: str) -> None:
        """Move deliveries from a lane with capacity to the next chunk to mark."""
        lane, now = self.lanes[receiver], time.monotonic()
        for waiting in lane.waiting:
            while waiting and (self._finishing or waiting[0].left(now) <= 0):
                self._defer(waiting.popleft(), "target_busy", now)
        while lane.in_flight < lane.limit and (first := lane.next_waiting(now)):
            if rest := self.lanes.admit_call(receiver, now):
                for each in lane.waiting:
                    while each:
                        self._defer(each.popleft(), "target_down", now + rest)
                break
            lane.in_flight += 1
            delivery = first.popleft()
            delivery.started_at = now
            (self._asking if delivery.asks_redis else self._plain).ready.append(delivery)
        for marking in (self._plain, self._asking):
            self._start_marking(marking)

    def _defer(self, delivery: Delivery, reason: str, earliest: float) -> None:
        """Return a delivery untried."""
        self._report(delivery, self._plan_deferral(delivery, reason, earliest))

    def _plan_deferral(self, delivery: Delivery, reason: str, earliest: float) -> Deferred:
        """Reserve an instant of its own for a delivery, at the receiver's pace."""
        at = self.lanes.reserve_instant(delivery.receiver, earliest, delivery.priority)
        return Deferred(reason, timedelta(seconds=at - time.monotonic()))

    def _start_marking(self, marking: MarkingQueue) -> None:
        if marking.ready and not marking.active:
            marking.active = True
            self._spawn(self._mark(marking))

    def _mark_again(self, delivery: Delivery) -> None:
        self._asking.ready.append(delivery)
        self._start_marking(self._asking)

    async def _mark(self, marking: MarkingQueue) -> None:
        """Process one chunk at a time: quota and Presence, the fenced write, then the calls.

        Deliveries that arrive during a write share the next one.
        """
        try:
            while marking.ready:
                chunk = [marking.ready.popleft() for _ in range(min(CHUNK, len(marking.ready)))]
                if self._finishing:
                    for delivery in chunk:
                        self._release(delivery, self._plan_deferral(delivery, "target_busy", time.monotonic()))
                    continue
                try:
                    answers, notes = await self._run_in(marking.thread, self._mark_permitted, chunk)
                except Exception:
                    log.exception("mark_failed", count=len(chunk))
                    answers, notes = {}, []
                if notes:  # before a customer can answer; a slow Redis delays the calls no longer than this
                    await asyncio.wait({self._run_in(marking.thread, presence.note_sending, notes)}, timeout=NOTE_WAIT)
                for delivery in chunk:
                    refusal = answers.get(delivery.claim.task_id, UNMARKED)
                    if refusal is None:
                        self._spawn(self._send(delivery))
                    elif isinstance(refusal, timedelta):
                        asyncio.get_running_loop().call_later(refusal.total_seconds(), self._mark_again, delivery)
                    else:
                        self._release(delivery, refusal)
        finally:
            marking.active = False

    def _mark_permitted(self, chunk: list[Delivery]) -> tuple[Answers, list[presence.SendingNote]]:
        """Return for each delivery None (send it) or why not, and what Presence counts.

        Runs in a thread because it calls Redis and PostgreSQL. The fenced write comes last, so that no decision
        separates what it reads from the calls.
        """
        close_old_connections()
        answers: Answers = self._over_quota(chunk)
        answers |= _find_presence_blocks([delivery for delivery in chunk if delivery.claim.task_id not in answers])
        rest = [delivery for delivery in chunk if delivery.claim.task_id not in answers]
        if rest:
            margin = max(delivery.spec.timeout for delivery in rest) + timedelta(seconds=2)
            if any(delivery.question for delivery in rest):
                margin += timedelta(seconds=NOTE_WAIT)
            answers |= touch_ledger.mark_sending([delivery.sending for delivery in rest], margin=margin)
        return answers, _list_sending_notes(chunk, answers)

    def _over_quota(self, chunk: list[Delivery]) -> Answers:
        """Take slots for a chunk. Channel rows may share a receiver, and each has its own quotas."""
        groups: dict[Quotas, dict[str, list[Delivery]]] = {}
        for each in chunk:
            if quotas := each.channel.quotas:
                groups.setdefault(quotas, {}).setdefault(each.vendor_key, []).append(each)
        held: Answers = {}
        for quotas, by_receiver in groups.items():
            wanted, asked_at = {key: len(found) for key, found in by_receiver.items()}, time.monotonic()
            for receiver, grant in self.quotas.acquire(quotas, wanted).items():
                for delivery in by_receiver[receiver][: grant.granted]:
                    delivery.slot = HeldSlot(self.quotas, quotas, receiver, grant.slot, asked_at)
                    self.lanes.note_grant(delivery.receiver)
                held |= self._plan_denied(receiver, by_receiver[receiver][grant.granted :], grant)
        return held

    def _plan_denied(self, receiver: str, denied: list[Delivery], grant: Grant) -> Answers:
        """Let deliveries wait here for a quota slot that is near. Reserve one of its own for each of the others.

        Slots that were reserved apart may come together after an outage.
        """
        now = time.monotonic()
        if grant.next_in <= NEAR_SLOT:
            wait = max(grant.next_in, SHORTEST_QUOTA_WAIT)
            held: Answers = {each.claim.task_id: wait for each in denied if each.left(now) > NEAR_SLOT.total_seconds()}
            denied = [each for each in denied if each.claim.task_id not in held]
        else:
            held = {}
        wanted: dict[tuple[str, int], list[Delivery]] = {}
        for each in denied:
            wanted.setdefault((receiver, each.priority), []).append(each)
        if wanted:
            quotas = denied[0].channel.quotas
            requests = {key: [SlotRequest(each.expires_in(now)) for each in group] for key, group in wanted.items()}
            for key, waits in self.quotas.reserve(quotas, requests).items():
                for each, slot in zip(wanted[key], waits, strict=True):
                    held[each.claim.task_id] = Deferred("quota", each.expires_in(now) if slot is None else slot)
        return held

    async def _send(self, delivery: Delivery) -> None:
        delivery.sent_at = time.monotonic()
        before_first_byte.set(delivery.slot.renew if delivery.slot else None)
        outcome = await delivery.channel.send(delivery.outgoing)
        delivery.ended_at = time.monotonic()
        if isinstance(outcome, Transient) and not outcome.asked:
            # Hundreds of robots share the connections to their vendor. None of their retries is used up, and the
            # circuit breaker learns nothing of the receiver.
            self._release(delivery, self._plan_deferral(delivery, "target_busy", delivery.ended_at))
            return
        self.lanes.end_call(delivery.receiver, outcome, delivery.ended_at, delivery.started_at)
        if delivery.channel.quotas and isinstance(outcome, Transient) and outcome.retry_after:
            # The vendor throttles this robot. The other touches of the robot need not fail one by one.
            muting = self._run_in(
                self._throttle_threads, self.quotas.throttle, delivery.vendor_key, outcome.retry_after
            )
            await asyncio.wait({muting}, timeout=NOTE_WAIT)  # the result must be stored before its lease ends
        self._release(delivery, outcome)

    def _release(self, delivery: Delivery, result: SendResult) -> None:
        """Release a delivery from its lane and report its result."""
        self.lanes[delivery.receiver].in_flight -= 1
        self._start_next(delivery.receiver)
        self._report(delivery, result)

    def _run_in(
        self, threads: ThreadPoolExecutor, act: Callable[..., Answer], *arguments: Any
    ) -> asyncio.Future[Answer]:
        assert self._loop is not None
        return self._loop.run_in_executor(threads, act, *arguments)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- settling -------------------------------------------------------------------------------------------------

    def _report(self, delivery: Delivery, result: SendResult) -> None:
        self.lanes.release(delivery.receiver, delivery.priority, granted=delivery.slot is not None)
        with self._changed:
            self._results.append((delivery, result))
            self._changed.notify_all()

    def _settle_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._results))
            time.sleep(SETTLE_INTERVAL)  # collect the results of a chunk
            with self._changed:
                results, self._results = self._results[:CHUNK], self._results[CHUNK:]
            self._settle_with_retry(results)
            with self._changed:
                self._pending -= len(results)
                self._changed.notify_all()

    def _settle_with_retry(self, results: list[DeliveryResult]) -> None:
        """Settle results whose effect may have happened.

        Retry until the leases expire and the rescue has settled them.
        """
        gives_up_at = time.monotonic() + LEASE.total_seconds()
        pause = 0.2
        while True:
            try:
                close_old_connections()
                settle_results(results)
                return
            except Exception:
                log.exception("settle_failed", count=len(results))
                if time.monotonic() > gives_up_at:
                    return
                time.sleep(pause)
                pause = min(pause * 2, 5)


def _find_presence_blocks(deliveries: list[Delivery]) -> Answers:
    """Return the deliveries that a presence block stops now.

    The first question may be 20 seconds old: a chat continues while its message waits. Deliveries without a block are
    marked next.
    """
    asked = [delivery for delivery in deliveries if delivery.question]
    answers = presence.presence_blocks(
        [delivery.question._replace(about_to_send=True) for delivery in asked if delivery.question]
    )
    monotonic = time.monotonic()
    return {
        delivery.claim.task_id: verdict_for_presence_block(answer, delivery.clock.instant(monotonic))
        for delivery, answer in zip(asked, answers, strict=True)
        if answer
    }


def _list_sending_notes(deliveries: Sequence[Delivery], answers: Answers) -> list[presence.SendingNote]:
    """Return the questions about events of presence providers, each with whether its touch is sent now.

    Only a refusal is reported as not sent. A deferred delivery is judged again. An earlier attempt may have been sent,
    so a refused retry is not reported.
    """
    types = presence.provider_event_types()
    asked = [(each, answers.get(each.claim.task_id, UNMARKED)) for each in deliveries]
    return [
        (each.question, refusal is None)
        for each, refusal in asked
        if each.question and each.question.event_type in types
        if refusal is None or (isinstance(refusal, GuardVerdict) and each.attempt == 1)
    ]
