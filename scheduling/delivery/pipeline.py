"""From a hint to a settled touch: lock → judge → render → decide → commit → send → settle, a batch at a time.

One transaction locks, judges and writes, each row once. It locks the customers first, sorted, and counts their history
in a later statement than the lock: a count that shares the statement of the lock sees the table as it was before the
wait, and granted 32 of a cap of 3. Nothing outside is called inside it.
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

#: While keys are changed, node by node. Another node may have the key, and takes it then.
UNREADABLE_FOR = timedelta(minutes=1)
LONGEST_JUDGING = 3.0  #: seconds of a batch, which has its customers locked meanwhile
MOST_BYTES = 16 * 1024 * 1024  #: of a batch's event data
JUDGEMENTS = 5  #: of a batch whose configuration is edited while it is judged


def deliver(task_ids: Sequence[UUID]) -> None:
    """Deliver those of these touches that are due and in nobody's hands.

    A touch that nobody has thought of must not take its neighbours with it: the batch is halved until it stands alone,
    and then it fails by itself. A batch for which PostgreSQL waited too long is halved as well. What this node has not
    the key for is no touch's fault either: it waits. Raises one of `sql.AWAY` where the database is the trouble, or
    where it waited too long for a single touch: the machine may have been suspended. Raises `Reconfigured` where the
    configuration was edited during each of `JUDGEMENTS` tries.
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
    """Without an attempt now; an earlier one may still be in doubt. Returns what was claimed for it: this one, or
    none."""
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
    """Settle what the sender reports. An answer that cannot be settled as it is must not take its neighbours with it:
    halved until it stands alone, it is settled by what it means and without what it says. Raises one of `sql.AWAY`
    where the database is the trouble."""
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
    """In one transaction with the attempts and the failed tasks."""
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
    """This process's sender, made by the first batch: threads do not outlive a fork."""
    return Sender(conclude, QuotaGate.connect(settings.REDIS_URL))


@dataclass(slots=True)
class _Batch:
    """The touches of one message on their way through one transaction."""

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
        """Before the transaction: Presence lives outside the database."""
        self.questions = due_batch.questions(self.task_ids, self.config)
        answers = presence.objections(list(self.questions.values()))
        self.objections = dict(zip(self.questions, answers, strict=True))

    def lock(self) -> bool:
        """Whether there is anything to judge."""
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
        """The most important first: who is judged first gets the slot. What is not judged within `LONGEST_JUDGING`
        stays as it is, for the next batch: customers and touches are locked for that long."""
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
        """Render it and find where it goes, before it takes a slot that others would miss."""
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
        """Return subject, body and locale. A repeat under the same delivery key says what the first attempt said: a
        receiver that honours the key may keep either."""
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
        """A hint that came too soon, because this node's clock is ahead, is owed again."""
        if len(self.due) + len(self.rest) < len(self.task_ids):
            self._announce(touches.early(self.task_ids))

    def announce_rest(self) -> None:
        """At once, not when its lease ends. Where the message is lost the lease brings it back."""
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
        """What is delivered has its line from the channel that calls nobody, or from the sender."""
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
        """Once a batch, after the commit."""
        settlement.measure_verdicts(verdict for _, verdict in self.verdicts)
        ends: Counter[tuple[str, str]] = Counter()
        for made, task_ids in self.decisions.items():
            ends[made.state, made.reason] += len(task_ids)
        settlement.measure_ends(ends)
        settlement.measure(self.delivered)


def _record_verdicts(verdicts: Sequence[tuple[UUID, Verdict]], at: datetime) -> None:
    judged_at = at.isoformat()  # written once, not for each
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
