"""Settle the results of the sender: the end of a touch, its retry, its attempt, and the metrics of all of them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from uuid import UUID

import structlog
from django.db import transaction

from scheduling import batching, metrics, sql, tracing
from scheduling.channels.base import Delivered, Outcome, Permanent, Transient, Unknown
from scheduling.delivery import routing
from scheduling.delivery.outgoing import Deferred, Delivery, DeliveryResult, SendResult, Untried
from scheduling.delivery.routing import target_digest
from scheduling.ledger.failures import record_failed_touches
from scheduling.ledger.touches import touch_ledger
from scheduling.ledger.transitions import Claim, Settlement
from scheduling.models import Attempt
from scheduling.policy.guards import CANCEL_PREFIXES, HOLD, NODE_DISABLED, PAUSED, GuardVerdict
from scheduling.strict_text import storable_text

log = structlog.get_logger(__name__)

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
        attempts = {each.claim: _attempt(each, result) for each, result in results if not isinstance(result, Untried)}
        settled = touch_ledger.settle(ends, attempts=attempts)
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
    measure_settlements(Counter(ends[delivery.claim] for delivery, _ in valid))
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
            paused_by=verdict.observed if verdict.rule == PAUSED else "",
            releases_cap_slot=True,
            verdict=verdict,
        )
    state = "cancelled" if verdict.rule.startswith(CANCEL_PREFIXES) else "suppressed"
    if verdict.rule == "channel_retired":
        state = "failed"
    return Settlement(state, verdict.rule, releases_cap_slot=True, verdict=verdict)


def _settlement_by_result(delivery: Delivery, result: SendResult) -> Settlement:
    if isinstance(result, GuardVerdict):
        if result.rule == NODE_DISABLED:
            # The node may be on again. The next judgement decides, and its write checks the configuration version.
            return Settlement("scheduled", result.rule, releases_cap_slot=True, verdict=result)
        return decision_for(result)
    if isinstance(result, Delivered):
        return Settlement("delivered")
    if isinstance(result, Deferred):
        due_at = min(delivery.clock.instant(time.monotonic()) + result.delay, delivery.expires_at)
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
    due_at = delivery.clock.instant(delivery.ended_at) + delay
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
        delivery.clock.instant(delivery.sent_at),
        delivery.clock.instant(delivery.ended_at),
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
        late = [(each.clock.instant(each.sent_at) - each.due_at).total_seconds() for each in deliveries]
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
def measure_settlements(settlements: Mapping[Settlement, int]) -> None:
    """Count the verdicts and the ended touches, given the number of touches with each settlement."""
    for each, count in settlements.items():
        if verdict := each.verdict:
            metrics.verdicts.labels(verdict.decision, metrics.reason_label(verdict.rule)).inc(count)
        if each.state not in ("scheduled", "running"):
            metrics.ended.labels(each.state, metrics.reason_label(each.reason)).inc(count)


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
