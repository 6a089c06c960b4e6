"""Decide whether a due touch may be sent now. Pure: touch, context and time give one verdict.

The order is fixed. Permanent reasons come first, so that no slot is used in vain:

 1. cancelled          an event cancelled it while a worker had it (a waiting touch is cancelled directly)
 2. expired            it waited longer than its node allows
 3. node_disabled      the node was disabled or retired while the touch waited
 4. paused             an operator paused everything, the channel or the node: paused until resumed
 5. opted_out          marketing content for a customer who opted out
 6. depth              too many touches of its journey came before it
 7. condition          the node's condition does not hold
 8. conversation       the customer has a newer conversation than the event (or a presence block with its own code)
 9. holdout, rollout   the customer belongs to a hold-out; the roll-out does not include the community yet
10. quiet_hours        quiet hours in the customer's time zone: deferred until they end
11. send_window        outside the node's send windows: deferred until the next one opens
12. dedupe             the same content type to the customer within the window (72 h)
13. community_dedupe   the same for the community
14. cap                too many messages to the customer in a rolling window (3 in 24 h)
15. community_cap      the same for the community
16. slot_hold          the last slot is reserved for a touch of higher priority that is due within a minute

An unsettled slot may still be released. If the cap is full only because of such slots, the touch is deferred. It waits
until the first of their leases ends and is never suppressed.

A suppression by rule 1 ends the touch as `cancelled`, one by a retired channel as `failed`, any other as `suppressed`
(`decision_for` in `scheduling.delivery.settling`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

from scheduling.durations import format_duration
from scheduling.policy.matrix import read_depth
from scheduling.policy.node_conditions import Facts
from scheduling.policy.send_times import (
    EXPIRY_MARGIN,
    OPENING_SPREAD,
    SPREAD,
    is_open,
    next_opening,
    spread_for,
    spread_opening,
)
from scheduling.policy.specs import CustomerSpec, NodeSpec, RuleSpec, TemplateSpec, in_holdout, in_rollout

SEND, HOLD, SUPPRESS = "send", "hold", "suppress"
NODE_DISABLED = "node_disabled"  #: a rule; also the reason of a touch that it ends
PAUSED = "paused"  #: a rule, which observes the scope of the pause
CANCEL_PREFIXES = ("event:", "restarted:")  #: prefix of the reason if an event cancelled the touch
ALL_NODES = "all nodes"  #: observed of a customer in the global hold-out

Check = Callable[["Candidate", "GuardContext", datetime], "GuardVerdict | None"]


class CapSlot(NamedTuple):
    """An earlier touch that took a slot at `at` and is perhaps not settled yet."""

    task_id: UUID
    at: datetime
    content_type: str
    counts: bool
    settled: bool
    until: datetime | None = None  #: decision time of an unsettled one: the end of its lease, or its next attempt
    node_id: int = 0
    template_id: int = 0


class AwaitedTouch(NamedTuple):
    """A waiting touch of higher priority."""

    due_at: datetime
    node_id: int = 0
    priority: int = 0


class Candidate(NamedTuple):
    """A due touch with the template chosen for it."""

    task_id: UUID
    node: NodeSpec
    customer: CustomerSpec
    template: TemplateSpec
    chat_id: str
    event_at: datetime
    expires_at: datetime
    has_cap_slot: bool = False  #: kept from an earlier attempt
    facts: Facts | None = None  #: present if the node has conditions


class GuardContext(NamedTuple):
    """The context of a verdict besides the touch."""

    rules: Sequence[RuleSpec]
    paused: frozenset[str] = frozenset()
    slots: Sequence[CapSlot] = ()  #: the customer's, any order
    community_slots: Sequence[CapSlot] = ()
    important: Sequence[AwaitedTouch] = ()  #: the customer's, due within a minute
    cancelled_by: str = ""  #: the reason if an event cancelled the touch
    presence_block: str = ""  #: presence block: "conversation", "answered", "presence_unknown"
    checks: Sequence[Check] = ()  #: `checks_for` the touch's node; empty: all


class GuardVerdict(NamedTuple):
    decision: str
    rule: str = ""
    rule_version: int | None = None
    observed: str = ""
    limit: str = ""
    next_eligible_at: datetime | None = None


_SENT = GuardVerdict(SEND)


def judge_touch(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict:
    """Return the first verdict in the documented order, or Send."""
    for check in context.checks or CHECKS:
        verdict = check(touch, context, now)
        if verdict is not None:
            # Turn a deferral beyond the touch's expiry into a suppression: it would only wake up to expire.
            if verdict.decision == HOLD and verdict.next_eligible_at and verdict.next_eligible_at > touch.expires_at:
                return verdict._replace(decision=SUPPRESS)
            return verdict
    return _SENT


def checks_for(node: NodeSpec, rules: Sequence[RuleSpec], paused: frozenset[str]) -> tuple[Check, ...]:
    """Return the checks that can object to a touch of this node under these rules and pauses, in their order.

    The verdict is the same with all checks.
    """
    return tuple(check for check in CHECKS if check not in _CONDITIONS or _CONDITIONS[check](node, rules, paused))


def _judge_cancelled(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    if not context.cancelled_by:
        return None
    return GuardVerdict(SUPPRESS, context.cancelled_by[:64], touch.node.version)


def _judge_expired(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    if now <= touch.expires_at:
        return None
    return GuardVerdict(SUPPRESS, "expired", touch.node.version, now.isoformat(), touch.expires_at.isoformat())


def _judge_node_disabled(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    return None if touch.node.enabled else GuardVerdict(SUPPRESS, NODE_DISABLED, touch.node.version)


def pause_scopes(node: NodeSpec) -> tuple[str, str, str]:
    """Return the scopes of pauses that stop the touches of a node."""
    return "all", f"channel:{node.channel.key}", f"node:{node.key}"


def _judge_paused(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    if not context.paused:
        return None
    for scope in pause_scopes(touch.node):
        if scope in context.paused:
            return GuardVerdict(HOLD, PAUSED, observed=scope)
    return None


def _judge_opted_out(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    if touch.customer.opted_out and touch.template.category == "marketing":
        return GuardVerdict(SUPPRESS, "opted_out", observed=touch.template.category)
    return None


def _judge_depth(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    node = touch.node
    depth = read_depth(node.trigger, touch.facts.data) if touch.facts and node.from_nodes else 0
    if depth <= node.most_depth:
        return None
    return GuardVerdict(SUPPRESS, "depth", node.version, str(depth), str(node.most_depth))


def _judge_condition(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    condition, facts = touch.node.condition, touch.facts
    part = condition.failing(facts) if condition and facts else None
    if part is None or facts is None:
        return None
    return GuardVerdict(SUPPRESS, "condition", touch.node.version, part.show_observed(facts)[:200], str(part)[:200])


def _judge_conversation(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    if context.presence_block and context.presence_block != "conversation":
        return verdict_for_presence_block(context.presence_block, now)
    began_at = touch.customer.conversation_at
    if not context.presence_block and (began_at is None or began_at <= touch.event_at):
        return None
    rule = next((rule for rule in context.rules if rule.kind == "conversation"), None)
    if rule is None or touch.node.guard_conversation == "ignore":
        return None
    if began_at is not None and began_at > touch.event_at:
        return GuardVerdict(SUPPRESS, "conversation", rule.version, began_at.isoformat(), touch.event_at.isoformat())
    return GuardVerdict(SUPPRESS, "conversation", rule.version, "live") if context.presence_block else None


def verdict_for_presence_block(objection: str, now: datetime) -> GuardVerdict:
    """Return the verdict for a presence block of a touch that had to ask Presence."""
    if objection == "presence_unknown":
        return GuardVerdict(HOLD, objection, next_eligible_at=now + timedelta(seconds=30))
    return GuardVerdict(SUPPRESS, objection, observed="live" if objection == "conversation" else "")


def _judge_holdout(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    everywhere = touch.node.global_holdout
    if everywhere and everywhere.includes(touch.customer.user_id):
        return GuardVerdict(SUPPRESS, "holdout", everywhere.version, ALL_NODES, f"{everywhere.percent:g} %")
    if in_holdout(touch.node, touch.customer.user_id):
        return GuardVerdict(SUPPRESS, "holdout", touch.node.version, limit=f"{touch.node.holdout_percent:g} %")
    return None


def _judge_rollout(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    if in_rollout(touch.node, touch.chat_id, touch.customer.user_id):
        return None
    observed = touch.chat_id or touch.customer.user_id
    return GuardVerdict(SUPPRESS, "rollout", touch.node.version, observed, f"{touch.node.rollout_percent:g} %")


def _judge_quiet_hours(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    if touch.node.guard_quiet_hours == "ignore":
        return None
    for rule in context.rules:
        if rule.kind == "quiet_hours":
            zone = ZoneInfo(touch.customer.timezone or rule.timezone)
            until = quiet_until(rule, zone, now)
            if until is not None:
                span = f"{rule.quiet_from:%H:%M}–{rule.quiet_to:%H:%M} {zone.key}"
                # The customer's instant after their end. It is not quiet.
                later = until + spread_for(touch.customer.user_id, _limit_spread(SPREAD, touch, until))
                resumes_at = until if quiet_until(rule, zone, later) else later
                return GuardVerdict(
                    HOLD, "quiet_hours", rule.version, f"{now.astimezone(zone):%H:%M}", span, resumes_at
                )
    return None


def _limit_spread(span: timedelta, touch: Candidate, start: datetime) -> timedelta:
    """Return the part of `span` after `start` that leaves time to send the touch before it expires."""
    return max(min(span, touch.expires_at - EXPIRY_MARGIN - start), timedelta(0))


def _judge_send_window(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    timing = touch.node.timing
    if timing is None or not timing.windows:
        return None
    customer = touch.customer
    if is_open(timing, customer.timezone, now) or (start := next_opening(timing, customer.timezone, now)) <= now:
        return None
    span = _limit_spread(OPENING_SPREAD, touch, start)
    resumes_at = spread_opening(timing, customer.timezone, start, customer.user_id, span)
    zone = timing.windows[0].zone_of(customer.timezone)
    hours = f"{'; '.join(window.text for window in timing.windows)} {zone.key}"
    return GuardVerdict(
        HOLD, "send_window", touch.node.version, f"{now.astimezone(zone):%Y-%m-%d %H:%M}", hours[:200], resumes_at
    )


def _judge_repetition(
    name: str, scope: str, touch: Candidate, context: GuardContext, now: datetime
) -> GuardVerdict | None:
    slots = context.slots if scope == "user" else context.community_slots
    if touch.has_cap_slot or touch.node.guard_dedupe == "ignore" or not slots:
        return None
    sent = touch.template.content_type
    same = [slot for slot in slots if slot.content_type == sent]
    for rule in context.rules if same else ():
        if rule.kind == "dedupe" and rule.scope == scope and rule.covers(touch.node.id, touch.template.id):
            recent = _slots_in_window(same, rule, touch, now)
            if recent:
                return _limit_reached_verdict(rule, name, recent, 1, sent, now, "suppress")
    return None


_judge_dedupe = partial(_judge_repetition, "dedupe", "user")
_judge_community_dedupe = partial(_judge_repetition, "community_dedupe", "community")


def _judge_caps(name: str, scope: str, touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    """Return the verdict of the full cap that defers longest, so that a deferred touch is woken once.

    A suppression has precedence over a deferral.
    """
    if touch.has_cap_slot or touch.node.guard_cap != "apply" or (scope == "community" and not touch.chat_id):
        return None
    slots = context.slots if scope == "user" else context.community_slots
    verdicts = []
    for rule in context.rules:
        if rule.kind != "cap" or rule.scope != scope:
            continue
        limit = rule.limit_for(touch.customer.level) if rule.limits else rule.limit
        if len(slots) >= limit and rule.covers(touch.node.id, touch.template.id):
            taken = _counted_slots(slots, rule, touch, now)
            if len(taken) >= limit:
                verdicts.append(
                    _limit_reached_verdict(rule, name, taken, limit, str(len(taken)), now, touch.node.over_cap)
                )
    return max(verdicts, key=lambda each: (each.decision == SUPPRESS, each.next_eligible_at), default=None)


_judge_cap = partial(_judge_caps, "cap", "user")
_judge_community_cap = partial(_judge_caps, "community_cap", "community")


def _counted_slots(slots: Sequence[CapSlot], rule: RuleSpec, touch: Candidate, now: datetime) -> list[CapSlot]:
    return [slot for slot in _slots_in_window(slots, rule, touch, now) if slot.counts]


def _slots_in_window(slots: Sequence[CapSlot], rule: RuleSpec, touch: Candidate, now: datetime) -> list[CapSlot]:
    begins = now - rule.window
    found = [slot for slot in slots if slot.at > begins and slot.task_id != touch.task_id]
    return found if rule.coverage is None else [slot for slot in found if rule.covers(slot.node_id, slot.template_id)]


def _limit_reached_verdict(
    rule: RuleSpec, name: str, taken: list[CapSlot], limit: int, observed: str, now: datetime, over_cap: str
) -> GuardVerdict:
    allowed = f"{limit} in {format_duration(rule.window)}" + (f" of {', '.join(rule.kinds)}" if rule.kinds else "")
    open_until = [slot.until or now for slot in taken if not slot.settled]
    if len(taken) - len(open_until) < limit and open_until:
        until = max(min(open_until), now + timedelta(seconds=1))
        return GuardVerdict(HOLD, name, rule.version, f"{observed} ({len(open_until)} unsettled)", allowed, until)
    # This slot must leave the window before a slot is available.
    leaving = sorted(slot.at for slot in taken)[max(len(taken) - limit, 0)]
    decision = HOLD if over_cap == "defer" else SUPPRESS
    return GuardVerdict(decision, name, rule.version, observed, allowed, leaving + rule.window)


def _judge_slot_hold(touch: Candidate, context: GuardContext, now: datetime) -> GuardVerdict | None:
    if touch.has_cap_slot or touch.node.guard_cap != "apply" or not context.important:
        return None
    for rule in context.rules:
        if rule.kind != "cap" or rule.scope != "user" or not rule.covers(touch.node.id, touch.template.id):
            continue
        awaited = [each.due_at for each in context.important if rule.may_cover(each.node_id)]
        room = rule.limit_for(touch.customer.level) - len(_counted_slots(context.slots, rule, touch, now))
        if awaited and room <= len(awaited):
            until = max(min(awaited), now) + timedelta(seconds=2)
            return GuardVerdict(HOLD, "slot_hold", rule.version, str(len(awaited)), str(room), until)
    return None


CHECKS: tuple[Check, ...] = (
    _judge_cancelled,
    _judge_expired,
    _judge_node_disabled,
    _judge_paused,
    _judge_opted_out,
    _judge_depth,
    _judge_condition,
    _judge_conversation,
    _judge_holdout,
    _judge_rollout,
    _judge_quiet_hours,
    _judge_send_window,
    _judge_dedupe,
    _judge_community_dedupe,
    _judge_cap,
    _judge_community_cap,
    _judge_slot_hold,
)

PLANNING_CHECKS: tuple[Check, ...] = (_judge_condition,)  #: whose objection means that no touch is planned

_Condition = Callable[[NodeSpec, Sequence[RuleSpec], frozenset[str]], bool]


def _has_rule(kind: str, scope: str) -> _Condition:
    return lambda node, rules, paused: any(rule.kind == kind and rule.scope == scope for rule in rules)


#: A check objects only while its condition holds. A check without a condition may object to any touch.
_CONDITIONS: Mapping[Check, _Condition] = {
    _judge_node_disabled: lambda node, rules, paused: not node.enabled,
    _judge_paused: lambda node, rules, paused: bool(paused),
    _judge_depth: lambda node, rules, paused: bool(node.from_nodes),
    _judge_condition: lambda node, rules, paused: node.condition is not None,
    _judge_holdout: lambda node, rules, paused: node.holdout_percent > 0 or node.global_holdout is not None,
    _judge_rollout: lambda node, rules, paused: node.rollout_percent < 100,
    _judge_quiet_hours: _has_rule("quiet_hours", "user"),
    _judge_send_window: lambda node, rules, paused: node.timing is not None and bool(node.timing.windows),
    _judge_dedupe: _has_rule("dedupe", "user"),
    _judge_community_dedupe: _has_rule("dedupe", "community"),
    _judge_cap: _has_rule("cap", "user"),
    _judge_community_cap: _has_rule("cap", "community"),
    _judge_slot_hold: _has_rule("cap", "user"),
}


def quiet_until(rule: RuleSpec, zone: ZoneInfo, now: datetime) -> datetime | None:
    """Return when the quiet hours around `now` end, or None outside of them.

    If a clock change repeats the end, the later one counts, so that the repeated hour wakes no customer. A clock change
    can skip all the time between the end and the next start. The quiet hours then continue until the next day's end.
    """
    over_midnight = rule.quiet_from > rule.quiet_to
    at, until = now, None
    while True:
        local = at.astimezone(zone)
        wall = local.time().replace(tzinfo=None)
        if over_midnight:
            quiet = wall >= rule.quiet_from or wall < rule.quiet_to
        else:
            quiet = rule.quiet_from <= wall < rule.quiet_to
        if not quiet:
            return until
        end_day = local.date() + timedelta(days=1) if over_midnight and wall >= rule.quiet_from else local.date()
        end = datetime.combine(end_day, rule.quiet_to, tzinfo=zone)
        later = max(end.astimezone(now.tzinfo), end.replace(fold=1).astimezone(now.tzinfo))
        at = until = max(later, at + timedelta(seconds=1))
