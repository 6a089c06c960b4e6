"""Call channels concurrently from one thread per worker process, so that a dead endpoint blocks no worker.

A delivery passes: lane (calls in flight per receiver) → quota → Presence → `mark_sending` → channel → settling.
Admission asks for room before a touch is claimed, so `submit` never waits. `mark_sending` is one fenced write per
chunk; it checks consent, pauses and the node again. Presence counts only what it permits. Results are settled together
every 100 ms. A touch ends as delivered, is retried, fails, or has an unknown outcome that an operator decides.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar
from uuid import UUID

import structlog
from django.conf import settings
from django.db import close_old_connections, connections, transaction

from scheduling import batching, metrics, sql, tracing
from scheduling.channels.base import Delivered, Outcome, Permanent, Quotas, Transient, Unknown
from scheduling.channels.http_client import before_first_byte
from scheduling.channels.quota import NEAR_SLOT, Grant, HeldSlot, QuotaGate, SlotRequest, receiver_key
from scheduling.delivery import presence, routing
from scheduling.delivery.lanes import ReceiverLanes, report_lanes
from scheduling.delivery.outgoing import LEASE, Deferred, Delivery, DeliveryResult, SendResult, Untried
from scheduling.delivery.routing import lane_key, target_digest
from scheduling.ledger.failures import record_failed_touches
from scheduling.ledger.touches import Stop, touch_ledger
from scheduling.ledger.transitions import Claim, Settlement
from scheduling.models import Attempt
from scheduling.policy.guards import (
    CANCEL_PREFIXES,
    HOLD,
    NODE_DISABLED,
    SUPPRESS,
    GuardVerdict,
    verdict_for_presence_block,
)
from scheduling.strict_text import storable_text

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
#: By task id: None permits to send the touch. A time span asks again after it.
Permits = dict[object, Deferred | GuardVerdict | timedelta | None]


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
        """Take over these deliveries. Never waits: `pipeline.admit_batch` bounds what this process holds."""
        if not deliveries:
            return
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="sender", daemon=True).start()
                threading.Thread(target=self._settle_loop, name="settler", daemon=True).start()
                threading.Thread(target=report_lanes, args=(self.lanes,), name="reporter", daemon=True).start()
            loop = self._loop
        with self._changed:
            self._pending += len(deliveries)
        accepted = []
        for delivery in deliveries:
            try:
                receiver = delivery.receiver or lane_key(delivery.spec, delivery.channel, delivery.message)
            except Exception as error:
                log.exception("channel_call_failed", channel=delivery.spec.key)
                delivery.sent_at = delivery.ended_at = time.monotonic()
                self._report(delivery, Permanent("channel_error", f"{type(error).__name__}: {error}"[:500]))
                continue
            delivery.receiver = receiver
            self.lanes.hold(receiver, delivery.channel, delivery.priority, delivery.message.chat_id)
            accepted.append(delivery)
        loop.call_soon_threadsafe(self._accept, accepted)

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
                    permits, notes = await self._run_in(marking.thread, self._mark_permitted, chunk)
                except Exception:
                    log.exception("mark_failed", count=len(chunk))
                    permits, notes = {}, []
                if notes:  # before a customer can answer; a slow Redis delays the calls no longer than this
                    await asyncio.wait({self._run_in(marking.thread, presence.note_sending, notes)}, timeout=NOTE_WAIT)
                for delivery in chunk:
                    refusal = permits.get(delivery.claim.task_id, UNMARKED)
                    if refusal is None:
                        self._spawn(self._send(delivery))
                    elif isinstance(refusal, timedelta):
                        asyncio.get_running_loop().call_later(refusal.total_seconds(), self._mark_again, delivery)
                    else:
                        self._release(delivery, refusal)
        finally:
            marking.active = False

    def _mark_permitted(self, chunk: list[Delivery]) -> tuple[Permits, list[presence.SendingNote]]:
        """Return for each delivery None (send it) or why not, and what Presence counts.

        Runs in a thread because it calls Redis and PostgreSQL. The fenced write comes last, so that no decision
        separates what it reads from the calls.
        """
        close_old_connections()
        permits: Permits = self._over_quota(chunk)
        permits |= _find_presence_blocks([delivery for delivery in chunk if delivery.claim.task_id not in permits])
        rest = [delivery for delivery in chunk if delivery.claim.task_id not in permits]
        if rest:
            margin = max(delivery.spec.timeout for delivery in rest) + timedelta(seconds=2)
            if any(delivery.question for delivery in rest):
                margin += timedelta(seconds=NOTE_WAIT)
            stops = touch_ledger.mark_sending([delivery.sending for delivery in rest], margin=margin)
            permits |= {task_id: _verdict_for_stop(stop) if stop else None for task_id, stop in stops.items()}
        return permits, _list_sending_notes(chunk, permits)

    def _over_quota(self, chunk: list[Delivery]) -> Permits:
        """Take slots for a chunk. Channel rows may share a receiver, and each has its own quotas."""
        groups: dict[Quotas, dict[str, list[Delivery]]] = {}
        for each in chunk:
            if quotas := each.channel.quotas:
                groups.setdefault(quotas, {}).setdefault(receiver_key(each.channel, each.message), []).append(each)
        held: Permits = {}
        for quotas, by_receiver in groups.items():
            wanted, asked_at = {key: len(found) for key, found in by_receiver.items()}, time.monotonic()
            for receiver, grant in self.quotas.acquire(quotas, wanted).items():
                for delivery in by_receiver[receiver][: grant.granted]:
                    delivery.granted = True
                    delivery.slot = HeldSlot(self.quotas, quotas, receiver, grant.slot, asked_at)
                    self.lanes.note_grant(delivery.receiver)
                held |= self._plan_denied(receiver, by_receiver[receiver][grant.granted :], grant)
        return held

    def _plan_denied(self, receiver: str, denied: list[Delivery], grant: Grant) -> Permits:
        """Let deliveries wait here for a quota slot that is near. Reserve one of its own for each of the others.

        Slots that were reserved apart may come together after an outage.
        """
        now = time.monotonic()
        if grant.next_in <= NEAR_SLOT:
            wait = max(grant.next_in, SHORTEST_QUOTA_WAIT)
            held: Permits = {each.claim.task_id: wait for each in denied if each.left(now) > NEAR_SLOT.total_seconds()}
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
            receiver = receiver_key(delivery.channel, delivery.message)
            muting = self._run_in(self._throttle_threads, self.quotas.throttle, receiver, outcome.retry_after)
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
        if delivery.receiver:
            self.lanes.release(delivery.receiver, delivery.priority, granted=delivery.granted)
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


def _find_presence_blocks(deliveries: list[Delivery]) -> dict[object, GuardVerdict]:
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
        delivery.claim.task_id: verdict_for_presence_block(answer, delivery.instant(monotonic))
        for delivery, answer in zip(asked, answers, strict=True)
        if answer
    }


def _list_sending_notes(deliveries: Sequence[Delivery], permits: Permits) -> list[presence.SendingNote]:
    """Return the questions about events of presence providers, each with whether its touch is sent now.

    Only a refusal is reported as not sent. A deferred delivery is judged again. An earlier attempt may have been sent,
    so a refused retry is not reported.
    """
    types = presence.provider_event_types()
    asked = [(each, permits.get(each.claim.task_id, UNMARKED)) for each in deliveries]
    return [
        (each.question, refusal is None)
        for each, refusal in asked
        if each.question and each.question.event_type in types
        if refusal is None or (isinstance(refusal, GuardVerdict) and each.attempt == 1)
    ]


def _verdict_for_stop(stop: Stop) -> GuardVerdict:
    match stop.code:
        case "paused":
            return GuardVerdict(HOLD, "paused", observed=stop.scope, paused_by=stop.scope)
        case "opted_out":
            return GuardVerdict(SUPPRESS, "opted_out", observed="marketing")
        case "conversation":
            return GuardVerdict(SUPPRESS, "conversation", observed=f"{stop.conversation_at:%Y-%m-%dT%H:%M:%S.%f%z}")
        case _:
            return GuardVerdict(SUPPRESS, stop.code, stop.node_version)


# --- settling ---------------------------------------------------------------------------------------------------------


FAILED_ENDS = ("failed", "unknown")  #: each has a failed task
RETRY_JITTER = 0.1  #: share of a retry's delay, so that touches that failed together are not retried together


def settle_results(results: Sequence[DeliveryResult]) -> None:
    """Settle the results of the sender.

    A result that cannot be stored must not affect others: the batch is halved until it is alone. It is then settled by
    its meaning, without its details.

    Raises:
        django.db.Error: PostgreSQL is unavailable.
    """
    batching.bisect(
        results,
        _settle_results,
        _settle_without_detail,
        concerns_all=lambda error, _: isinstance(error, sql.UNAVAILABLE_ERRORS),
    )


def _settle_without_detail(result: DeliveryResult, error: Exception) -> None:
    delivery, outcome = result
    log.error("touch_settlement_failed", task_id=str(delivery.claim.task_id), exc_info=error)
    _settle_results([(delivery, without_detail(outcome))])


def _settle_results(results: Sequence[DeliveryResult]) -> None:
    """Settle in one transaction with the attempts and the failed tasks. Drop results with an outdated `lease_no`."""
    with transaction.atomic():
        ends = {delivery.claim: settlement_of(delivery, result) for delivery, result in results}
        refused = {delivery.claim: result for delivery, result in results if isinstance(result, GuardVerdict)}
        attempts = {each.claim: _attempt(each, result) for each, result in results if not isinstance(result, Untried)}
        settled = touch_ledger.settle(ends, attempts=attempts, verdicts=refused)
        valid = [each for each in results if each[0].claim in settled]
        record_failed_touches([each.claim.task_id for each, _ in valid if ends[each.claim].state in FAILED_ENDS])
        disable_targets(results)
        routing.store_vendor_ids(
            (each.spec.id, result.vendor_id, each.message.delivery_key)
            for each, result in results
            if isinstance(result, Delivered) and result.vendor_id
        )
    measure_attempts(valid)
    measure_deferrals(
        Counter((delivery.spec.kind, result.reason) for delivery, result in valid if isinstance(result, Deferred))
    )
    measure_verdicts((verdict, 1) for claim, verdict in refused.items() if claim in settled)
    measure_ends(Counter((ends[each.claim].state, ends[each.claim].reason) for each, _ in valid))
    _log_ends([delivery for delivery, _ in valid], ends)
    if len(valid) < len(results):
        log.warning("stale_results_dropped", count=len(results) - len(valid))


def _log_ends(deliveries: Iterable[Delivery], ends: Mapping[Claim, Settlement]) -> None:
    alike: dict[tuple[str, str, str], list[str]] = {}
    for delivery in deliveries:
        task_id, trace_id, channel, end = (
            delivery.claim.task_id, delivery.message.trace_id, delivery.spec.key, ends[delivery.claim],
        )  # fmt: skip
        if end.state in FAILED_ENDS:
            log_failed(task_id, trace_id, end, channel=channel, attempt=delivery.attempt)
        else:
            alike.setdefault((end.state, end.reason, channel), []).append(tracing.trace_label(trace_id, task_id))
    for (state, reason, channel), names in alike.items():
        tracing.log_touches("touches_settled", names, state=state, reason=reason, channel=channel)


def log_failed(task_id: UUID, trace_id: UUID | None, end: Settlement, **more: object) -> None:
    trace = trace_id.hex if trace_id else ""
    log.warning("touch_failed", task_id=str(task_id), trace_id=trace, state=end.state, reason=end.reason, **more)


def settlement_of(delivery: Delivery, result: SendResult) -> Settlement:
    ended = _settlement_by_result(delivery, result)
    return keep_outcome_unknown(ended) if delivery.with_unknown_outcome else ended


def keep_outcome_unknown(ended: Settlement) -> Settlement:
    """Keep the outcome of an earlier attempt unknown.

    The end of a retry is no evidence about that attempt. The cap slot stays taken. An end that would mean "not
    delivered" becomes `unknown`, and an operator decides.
    """
    state = "unknown" if ended.state in ("failed", "suppressed") else ended.state
    return ended._replace(state=state, releases_cap_slot=False)


def decision_for(verdict: GuardVerdict) -> Settlement:
    """Return the settlement for a verdict other than `send`."""
    if verdict.decision == HOLD:
        return Settlement(
            "scheduled",
            verdict.rule,
            due_at=verdict.next_eligible_at,
            paused_by=verdict.paused_by,
            releases_cap_slot=True,
        )
    if verdict.rule == "channel_retired":
        return Settlement("failed", verdict.rule, releases_cap_slot=True)
    state = "cancelled" if verdict.rule.startswith(CANCEL_PREFIXES) else "suppressed"
    return Settlement(state, verdict.rule, releases_cap_slot=True)


def _settlement_by_result(delivery: Delivery, result: SendResult) -> Settlement:
    if isinstance(result, GuardVerdict):
        if result.rule == NODE_DISABLED:
            # The node may be on again. The next judgement decides, and its write checks the configuration version.
            return Settlement("scheduled", result.rule, releases_cap_slot=True)
        return decision_for(result)
    if isinstance(result, Delivered):
        return Settlement("delivered")
    if isinstance(result, Deferred):
        due_at = min(delivery.instant(time.monotonic()) + result.delay, delivery.expires_at)
        return Settlement("scheduled", result.reason, due_at=due_at, releases_cap_slot=True)
    if isinstance(result, Transient) or (isinstance(result, Unknown) and delivery.spec.idempotent):
        return _retry_settlement(delivery, result)
    if isinstance(result, Permanent):
        return Settlement("failed", result.reason, releases_cap_slot=True)
    assert isinstance(result, Unknown)
    return Settlement("unknown", result.reason)


def _retry_settlement(delivery: Delivery, result: Transient | Unknown) -> Settlement:
    """Retry by the channel's schedule, or later if the receiver asks for it. After the last retry settle the touch.

    A last result of `Unknown` leaves the decision to an operator.
    """
    delays = delivery.spec.retry_delays
    certain = isinstance(result, Transient)
    if delivery.attempt > len(delays):
        state = "failed" if certain else "unknown"
        return Settlement(state, result.reason, releases_cap_slot=certain)
    delay = delays[delivery.attempt - 1] * (1 + random.random() * RETRY_JITTER)  # noqa: S311
    if isinstance(result, Transient) and result.retry_after:
        delay = max(delay, result.retry_after)
    due_at = delivery.instant(delivery.ended_at) + delay
    if due_at > delivery.expires_at:
        state = "failed" if certain else "unknown"
        return Settlement(state, result.reason, releases_cap_slot=certain)
    return Settlement("scheduled", result.reason, due_at=due_at)


def without_detail(result: SendResult) -> Outcome | Deferred:
    """Return the result without its details, for one that could not be stored. It must not cause another send."""
    if isinstance(result, Delivered):
        return Delivered()
    if isinstance(result, Unknown):
        return Unknown("internal_error")
    if isinstance(result, Untried):
        return Deferred("internal_error", timedelta(seconds=2))
    return Permanent("internal_error")


def _attempt(delivery: Delivery, outcome: SendResult) -> Attempt:
    """Return the stored form of a call of a channel."""
    return Attempt(
        delivery.attempt,
        delivery.claim.lease_no,
        delivery.instant(delivery.sent_at),
        delivery.instant(delivery.ended_at),
        _OUTCOMES[type(outcome)],
        getattr(outcome, "reason", "")[:64],
        storable_text(getattr(outcome, "detail", "") or getattr(outcome, "reply", "")),
        getattr(outcome, "status", None),
        storable_text(delivery.message.subject),
        storable_text(delivery.message.body),
    )


@metrics.never_raises
def measure_attempts(results: Sequence[DeliveryResult]) -> None:
    """Measure lateness, duration and outcome of the calls. Equal labels are written once."""
    alike: dict[tuple[int, str, str], list[Delivery]] = {}
    for delivery, outcome in results:
        if not isinstance(outcome, Untried):
            key = (delivery.spec.id, _OUTCOMES[type(outcome)], getattr(outcome, "reason", ""))
            alike.setdefault(key, []).append(delivery)
    for (_, outcome_name, reason), deliveries in alike.items():
        late = [each.late + each.sent_at - each.clock for each in deliveries]
        took = [each.ended_at - each.sent_at for each in deliveries]
        spec = deliveries[0].spec
        metrics.attempts.labels(spec.key, outcome_name, metrics.reason_label(reason)).inc(len(deliveries))
        metrics.observe_all(metrics.lateness.labels(spec.kind), late)
        metrics.observe_all(metrics.send_duration.labels(spec.kind, outcome_name), took)


@metrics.never_raises
def measure_deferrals(deferrals: Mapping[tuple[str, str], int]) -> None:
    """Count touches that returned untried, by kind of their channel and reason."""
    for (kind, reason), count in deferrals.items():
        metrics.deferrals.labels(kind, metrics.reason_label(reason)).inc(count)


@metrics.never_raises
def measure_verdicts(verdicts: Iterable[tuple[GuardVerdict, int]]) -> None:
    """Count verdicts, given with the number of touches that got them."""
    for verdict, count in verdicts:
        metrics.verdicts.labels(verdict.decision, metrics.reason_label(verdict.rule)).inc(count)


@metrics.never_raises
def measure_ends(ends: Mapping[tuple[str, str], int]) -> None:
    """Count ended touches by state and reason."""
    for (state, reason), count in ends.items():
        if state not in ("scheduled", "running"):
            metrics.ended.labels(state, metrics.reason_label(reason)).inc(count)


def disable_targets(results: Sequence[DeliveryResult]) -> None:
    """Disable the targets of receivers that answered that they are gone."""
    routing.store_disabled_targets(
        (
            delivery.spec.id,
            target_digest(delivery.spec, delivery.message.target),
            delivery.message.chat_id,
            storable_text(result.detail[:200] or result.reason),
        )
        for delivery, result in results
        if isinstance(result, Permanent) and result.disable_target
    )


_OUTCOMES = {Delivered: "delivered", Transient: "transient", Permanent: "permanent", Unknown: "unknown"}
