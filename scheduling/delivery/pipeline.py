"""Process a batch of touches: lock → judge → render → decide → commit → send → settle.

One transaction locks, judges and writes, each row once. It locks the customers first, sorted. It counts their history
in a later statement than the lock: a count in the locking statement uses the snapshot from before the wait. That
granted 32 messages of a cap of 3. The transaction makes no external call.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings
from django.db import transaction

from scheduling import metrics, sql, tracing
from scheduling.channels.base import Delivered, Message, is_immediate
from scheduling.channels.quota import QuotaGate
from scheduling.configuration import snapshot
from scheduling.configuration.snapshot import Snapshot
from scheduling.delivery import due_batch, presence, settlement
from scheduling.delivery.presence import Question
from scheduling.delivery.routing import NoTarget, channel_of, community_targets, disabled_for, target_for
from scheduling.delivery.sender import LEASE, Parcel, Refused, Result, Sender
from scheduling.dispatch.publisher import publish_touches
from scheduling.ledger import dead_letters, locks
from scheduling.ledger.touches import Content, Decision, Reconfigured, touches
from scheduling.ledger.transitions import Hint, Settlement
from scheduling.models.encrypted import Unreadable
from scheduling.planning.disabled_targets import Target
from scheduling.policy import guards
from scheduling.policy.guards import Candidate, Slot, Surroundings, Verdict
from scheduling.policy.specs import CustomerSpec, template_for
from scheduling.rendering import CannotRender, render, text_for

log = structlog.get_logger(__name__)

#: Deferral while an operator changes keys node by node. Another node may have the key and deliver the touch.
UNREADABLE_FOR = timedelta(minutes=1)
LONGEST_JUDGING = 3.0  #: seconds per batch, during which its customers are locked
MOST_BYTES = 16 * 1024 * 1024  #: event data per batch
JUDGEMENTS = 5  #: tries for a batch whose configuration changes while it is judged


def deliver(task_ids: Sequence[UUID]) -> None:
    """Deliver the touches that are due and that no other worker has locked.

    An unexpected error must not affect other touches: the batch is halved until the faulty touch fails alone. A batch
    that exceeds a time limit of PostgreSQL is halved as well. A touch whose secrets this node cannot decrypt is
    deferred.

    Raises:
        django.db.Error: PostgreSQL is unavailable, or it exceeded its time limit for a single touch.
            The latter may mean that the machine was suspended.
        Reconfigured: the configuration changed during each of `JUDGEMENTS` tries.
    """
    try:
        _deliver(task_ids)
    except Reconfigured:
        raise
    except Exception as error:
        if isinstance(error, sql.AWAY) and not (sql.took_too_long(error) and len(task_ids) > 1):
            raise
        if len(task_ids) == 1:
            if isinstance(error, Unreadable):
                log.error("secrets_unreadable", task_id=str(task_ids[0]), error=str(error))
                _hold(task_ids[0])
                return
            log.exception("touch_broke", task_id=str(task_ids[0]))
            _fail(task_ids[0])
            return
        half = len(task_ids) // 2
        deliver(task_ids[:half])
        deliver(task_ids[half:])


@transaction.atomic
def _fail(task_id: UUID) -> None:
    claimed = _settle_untried(task_id, "failed", "internal_error")
    dead_letters.bury_touches(claimed, details={task_id: traceback.format_exc(limit=-5)})


@transaction.atomic
def _hold(task_id: UUID) -> None:
    _settle_untried(task_id, "scheduled", "secrets_unreadable", sql.now() + UNREADABLE_FOR)


def _settle_untried(task_id: UUID, state: str, reason: str, due_at: datetime | None = None) -> list[UUID]:
    """Settle a touch without an attempt. An earlier attempt may still have an unknown outcome.

    Return the claimed id, or nothing if the claim failed.
    """
    claims = touches.claim([task_id], lease=LEASE)
    ends = [Settlement(each.task_id, each.lease_no, state, reason, due_at, frees_slot=True) for each in claims]
    in_doubt = touches.in_doubt([task_id])
    touches.settle([settlement.still_in_doubt(end) if in_doubt else end for end in ends])
    return [claim.task_id for claim in claims]


def _deliver(task_ids: Sequence[UUID]) -> None:
    for attempt in range(JUDGEMENTS):
        batch = _Batch(task_ids, snapshot.current())
        batch.ask_presence()
        try:
            with transaction.atomic():
                if batch.lock():
                    batch.judge()
                    batch.write()
            break
        except Reconfigured:
            if attempt == JUDGEMENTS - 1:
                raise
    batch.announce_early()
    batch.announce_rest()
    batch.send()
    batch.measure()


def conclude(results: Sequence[Result]) -> None:
    """Settle the results of the sender.

    A result that cannot be stored must not affect others: the batch is halved until it is alone. It is then settled by
    its meaning, without its details.

    Raises:
        django.db.Error: PostgreSQL is unavailable.
    """
    try:
        _conclude(results)
    except sql.AWAY:
        raise
    except Exception:
        if len(results) == 1:
            log.exception("answer_broke", task_id=str(results[0][0].claim.task_id))
            _conclude([(results[0][0], settlement.bare(results[0][1]))])
            return
        half = len(results) // 2
        conclude(results[:half])
        conclude(results[half:])


def _conclude(results: Sequence[Result]) -> None:
    """Settle in one transaction with the attempts and the failed tasks. Drop results with an outdated `lease_no`."""
    with transaction.atomic():
        settlements = [settlement.settlement(parcel, result) for parcel, result in results]
        stood = touches.settle(settlements)
        ends = [each for each in settlements if each.task_id in stood]
        told = [each for each in results if each[0].claim.task_id in stood]
        settlement.record_attempts(told)
        refused = [(parcel.claim.task_id, result.verdict) for parcel, result in told if isinstance(result, Refused)]
        if refused:
            _record_verdicts(refused, sql.now())
        dead_letters.bury_touches([each.task_id for each in ends if each.state in ("failed", "unknown")])
        settlement.disable_targets(results)
    settlement.measure(told)
    settlement.measure_verdicts(verdict for _, verdict in refused)
    settlement.measure_ends(Counter((each.state, each.reason) for each in ends))
    _say_ends(told, {each.task_id: each for each in ends})
    if len(stood) < len(results):
        log.warning("stale_results_dropped", count=len(results) - len(stood))


def _say_ends(told: Sequence[Result], ends: Mapping[UUID, Settlement]) -> None:
    alike: dict[tuple[str, str, str], list[str]] = {}
    for parcel, _ in told:
        task_id, trace_id, channel = parcel.claim.task_id, parcel.message.trace_id, parcel.spec.key
        end = ends[task_id]
        if end.state in ("failed", "unknown"):
            _say(task_id, trace_id, end, channel=channel, attempt=parcel.attempt)
        else:
            alike.setdefault((end.state, end.reason, channel), []).append(tracing.name(trace_id, task_id))
    for (state, reason, channel), names in alike.items():
        tracing.say("touches_settled", names, state=state, reason=reason, channel=channel)


def _say(task_id: UUID, trace_id: UUID | None, end: Settlement | Decision, **more: object) -> None:
    trace = trace_id.hex if trace_id else ""
    log.warning("touch_failed", task_id=str(task_id), trace_id=trace, state=end.state, reason=end.reason, **more)


@cache
def sender() -> Sender:
    """Return the sender of this process. The first batch creates it, because threads do not survive a fork."""
    return Sender(conclude, QuotaGate.connect(settings.REDIS_URL))


@dataclass(slots=True)
class _Batch:
    """The touches of one message in one transaction."""

    task_ids: Sequence[UUID]
    config: Snapshot
    questions: dict[UUID, Question] = field(default_factory=dict)
    objections: dict[UUID, str] = field(default_factory=dict)
    due: list[due_batch.Due] = field(default_factory=list)
    rest: list[Hint] = field(default_factory=list)  #: left to the next batch: too many bytes, or no time to judge them
    customers: dict[int, CustomerSpec] = field(default_factory=dict)
    around: due_batch.History = field(init=False)
    communities: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    disabled: set[Target] = field(default_factory=set)
    now: datetime = field(init=False)
    clock: float = 0.0
    verdicts: list[tuple[UUID, Verdict]] = field(default_factory=list)
    decisions: dict[Decision, list[UUID]] = field(default_factory=dict)
    parcels: list[Parcel] = field(default_factory=list)  #: for the sender, after the commit
    delivered: list[Result] = field(default_factory=list)
    failed: dict[UUID, str] = field(default_factory=dict)
    buried: dict[UUID, Decision] = field(default_factory=dict)

    def ask_presence(self) -> None:
        """Ask the presence providers before the transaction, because they are outside PostgreSQL."""
        self.questions = due_batch.questions(self.task_ids, self.config)
        answers = presence.objections(list(self.questions.values()))
        self.objections = dict(zip(self.questions, answers, strict=True))

    def lock(self) -> bool:
        """Lock customers, communities and due touches. Return whether there is anything to judge."""
        self.customers = locks.lock_customers(self.task_ids)
        if self.config.counts_communities:
            locks.lock_communities(self.task_ids)
        self.clock = time.monotonic()
        self.due, self.rest, locked_at = due_batch.lock_due(self.task_ids, most_bytes=MOST_BYTES)
        if locked_at is None:
            return False
        self.now = locked_at
        return True

    def judge(self) -> None:
        """Judge the most important touches first: the first one gets a free cap slot.

        Customers and touches are locked for at most `LONGEST_JUDGING` seconds. Touches not judged by then stay
        unchanged for the next batch.
        """
        self.around = due_batch.load(self.due, self.config)
        self.communities = community_targets(row.event.chat_id for row in self.due)
        wanted = (
            (self.config.nodes[r.node_id].channel, self.customers[r.customer_id], r.event.chat_id) for r in self.due
        )
        self.disabled = disabled_for(wanted, self.communities)
        ends_at = time.monotonic() + LONGEST_JUDGING
        ordered = sorted(self.due, key=lambda row: (row.priority, row.due_at))
        for number, row in enumerate(ordered):
            if number and time.monotonic() > ends_at:
                self.due, left = ordered[:number], ordered[number:]
                self.rest += [Hint(row.claim.task_id, row.due_at, row.priority, row.node_id) for row in left]
                break
            candidate = self._candidate(row)
            verdict = guards.judge(candidate, self._surroundings(row), self.now)
            self.verdicts.append((row.claim.task_id, verdict))
            if verdict.decision == guards.SEND:
                self._prepare(row, candidate)
            else:
                self._decide(row, settlement.turned_down(verdict))

    def _candidate(self, row: due_batch.Due) -> Candidate:
        node = self.config.nodes[row.node_id]
        first = self.around.first_attempts.get(row.claim.task_id)
        template_id = first.template_id if first else row.template_id
        kept = self.config.templates.get(template_id) if template_id else None
        if first and kept:
            kept = first.pin(kept)
        return Candidate(
            task_id=row.claim.task_id,
            node=node,
            customer=self.customers[row.customer_id],
            template=kept or template_for(node, row.event.chat_id, row.event.user_id),
            chat_id=row.event.chat_id,
            event_at=row.event.occurred_at,
            expires_at=row.expires_at,
            has_slot=row.reserved_at is not None,
        )

    def _surroundings(self, row: due_batch.Due) -> Surroundings:
        return Surroundings(
            rules=self.config.rules,
            paused=self.config.paused,
            slots=self.around.slots.get(row.customer_id, ()),
            community_slots=self.around.community_slots.get(row.event.chat_id, ()),
            important=[at for level, at in self.around.important.get(row.customer_id, ()) if level < row.priority],
            called_off=self.around.called_off.get(row.claim.task_id, ""),
            objection=self.objections.get(row.claim.task_id, ""),
        )

    def _prepare(self, row: due_batch.Due, candidate: Candidate) -> None:
        """Render the message and find its target before it takes a cap slot.

        A failure after that would use a slot that other touches need.
        """
        template, counts = candidate.template, candidate.node.guard_cap != "ignore"
        content = Content(template.content_type, template.id, template.version, counts)
        try:
            parcel = self._parcel(row, candidate)
        except (CannotRender, NoTarget) as error:
            reason = "template_data_missing" if isinstance(error, CannotRender) else error.reason
            self.failed[row.claim.task_id] = str(error)
            self._decide(row, Decision("failed", reason, frees_slot=True, content=content))
            return
        parcel.late = (self.now - row.due_at).total_seconds()
        immediate = is_immediate(parcel.channel)
        if immediate:
            parcel.sent_at = parcel.ended_at = self.clock
            self.delivered.append((parcel, Delivered()))
        else:
            self.parcels.append(parcel)
        self._decide(row, Decision("delivered" if immediate else "running", content=content))
        if not candidate.has_slot:
            until = None if immediate else self.now + LEASE
            slot = Slot(row.claim.task_id, self.now, template.content_type, counts, immediate, until)
            self.around.take(row, slot)

    def _decide(self, row: due_batch.Due, decision: Decision) -> None:
        if decision.state not in ("running", "delivered") and row.claim.task_id in self.around.in_doubt:
            decision = settlement.still_in_doubt(decision)
        self.decisions.setdefault(decision, []).append(row.claim.task_id)

    def _parcel(self, row: due_batch.Due, candidate: Candidate) -> Parcel:
        spec = candidate.node.channel
        channel = channel_of(spec)
        target = target_for(spec, channel, candidate.customer, row.event.chat_id, self.communities, self.disabled)
        subject, body, locale = self._render(row, candidate)
        event = row.event
        message = Message(
            task_id=row.claim.task_id,
            delivery_key=row.root_id,
            user_id=event.user_id,
            chat_id=event.chat_id,
            node=candidate.node.key,
            content_type=candidate.template.content_type,
            category=candidate.template.category,
            subject=subject,
            body=body,
            locale=locale,
            event={"source": event.source, "id": event.event_id, "type": event.type, "time": event.occurred_at},
            repeatable=spec.idempotent,
            target=target,
            trace_id=event.trace_id,
        )
        return Parcel(
            row.claim, message, channel, spec, row.attempt + 1, self.now, row.expires_at, self.clock,
            node_id=row.node_id,
            event_at=event.occurred_at if row.node_id in self.config.asking_presence else None,
            question=self.questions.get(row.claim.task_id),
            in_doubt=row.claim.task_id in self.around.in_doubt,
        )  # fmt: skip

    def _render(self, row: due_batch.Due, candidate: Candidate) -> tuple[str, str, str]:
        """Return subject, body and locale.

        A retry under the same delivery key repeats the content of the first attempt. A receiver that honours the key
        may keep either message.
        """
        first = self.around.first_attempts.get(row.claim.task_id)
        if first and first.body:
            return first.subject, first.body, text_for(candidate.template, candidate.customer.locale).locale
        return render(candidate.template, candidate.customer, row.event)

    def write(self) -> None:
        version = self.config.version if self.delivered else None
        touches.decide(self.decisions, at=self.now, lease=LEASE, version=version)
        settlement.record_attempts(self.delivered)
        _record_verdicts(self.verdicts, self.now)
        self.buried = {
            task_id: decision
            for decision, task_ids in self.decisions.items()
            if decision.state in ("failed", "unknown")
            for task_id in task_ids
        }
        dead_letters.bury_touches(list(self.buried), details=self.failed)

    def announce_early(self) -> None:
        """Publish again the premature wake-ups, which a node with a fast clock caused."""
        if len(self.due) + len(self.rest) < len(self.task_ids):
            self._announce(touches.early(self.task_ids))

    def announce_rest(self) -> None:
        """Publish the rest at once, without waiting for its lease. The lease covers a lost message."""
        self._announce(self.rest)

    def _announce(self, hints: list[Hint]) -> None:
        if hints:
            nodes = self.config.nodes
            publish_touches(hints, {hint.route: nodes[hint.route].channel.id for hint in hints})

    def send(self) -> None:
        for parcel, _ in self.delivered:
            parcel.channel.send_now(parcel.message)  # type: ignore[attr-defined]
        self._say_turned_down()
        if self.parcels:
            sender().submit(self.parcels)

    def _say_turned_down(self) -> None:
        """Log the touches that were not sent. The local channel or the sender logs the others."""
        turned_down = [each for each in self.decisions.items() if each[0].state not in ("running", "delivered")]
        if not turned_down:
            return
        rows = {row.claim.task_id: row for row in self.due}
        alike: dict[tuple[str, str], list[str]] = {}
        for decision, task_ids in turned_down:
            for row in (rows[task_id] for task_id in task_ids):
                if row.claim.task_id in self.buried:
                    _say(row.claim.task_id, row.event.trace_id, decision, node=self.config.nodes[row.node_id].key)
                else:
                    named = tracing.name(row.event.trace_id, row.claim.task_id)
                    alike.setdefault((decision.state, decision.reason), []).append(named)
        for (state, reason), names in alike.items():
            tracing.say("touches_settled", names, state=state, reason=reason)

    @metrics.harmless
    def measure(self) -> None:
        """Update the metrics, once per batch and after the commit."""
        settlement.measure_verdicts(verdict for _, verdict in self.verdicts)
        ends: Counter[tuple[str, str]] = Counter()
        for made, task_ids in self.decisions.items():
            ends[made.state, made.reason] += len(task_ids)
        settlement.measure_ends(ends)
        settlement.measure(self.delivered)


def _record_verdicts(verdicts: Sequence[tuple[UUID, Verdict]], at: datetime) -> None:
    judged_at = at.isoformat()  # formatted once for all rows
    sql.copy(
        _COPY_VERDICTS,
        [
            (
                task_id, judged_at, each.decision, each.rule, each.rule_version, each.observed[:200], each.limit[:200],
                each.next_eligible_at,
            )
            for task_id, each in verdicts
        ],
    )  # fmt: skip


_COPY_VERDICTS = """
COPY scheduling_verdict (touch_id, at, decision, rule, rule_version, observed, "limit", next_eligible_at) FROM STDIN
"""
