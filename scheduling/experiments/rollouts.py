"""Run automatic roll-outs: an operator starts one, and a pass grows or withdraws the canary.

Operators own the node. A pass that finds it changed since the last move does not write to it: the roll-out ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db import close_old_connections, transaction
from django.db.models import F, QuerySet

from scheduling import sql
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, InvalidInput
from scheduling.ids import MAX_CLOCK_LAG, first_id_at
from scheduling.models import AutomaticRollout, Node
from scheduling.models.versioned import lock_for_write
from scheduling.operations.failed_tasks import Actor
from scheduling.policy.rollout import GROW, PLAN_DEFAULTS, WITHDRAW, CanaryCounts, judge_canary, read_plan

log = structlog.get_logger(__name__)

MAX_UNJUDGED = timedelta(minutes=5)  #: longest time without a judgement, after which the canary is withdrawn
#: Age below which an end is not counted yet. A touch of a transaction that stays open for longer may be missed; no
#: transaction stays open so long.
MIN_AGE = timedelta(minutes=2)
STRETCH = timedelta(hours=1)  #: of ends that one pass counts, after a time without passes
SYSTEM_ACTOR = Actor("")  #: actor of automatic moves
State = AutomaticRollout.State


def advance_rollouts() -> None:
    """Judge all running roll-outs. The failure of one does not stop the others.

    A canary over a limit goes to 0 %, with its communities; otherwise it takes its next step after its time. The edit
    of the node is a new version with history. Of two concurrent passes the second finds the row locked or judged.
    """
    for pk in list(AutomaticRollout.objects.filter(state=State.RUNNING).values_list("pk", flat=True)):
        try:
            _advance_rollout(pk)
        except Exception:
            log.exception("rollout_not_judged", node=pk)
            close_old_connections()
            _withdraw_unjudged(pk)


def _advance_rollout(pk: int) -> None:
    seen = AutomaticRollout.objects.get(pk=pk)
    with sql.limit_statement_time(settings.TIMEOUTS.rollout):
        at = sql.now()
        until = min(seen.counted_until + STRETCH, at - MIN_AGE)
        counts = _count_canary(seen, max(until, seen.counted_until))
    with sql.limit_statement_time(settings.TIMEOUTS.rollout):
        rollout = _lock_running(pk)
        if rollout is None or (rollout.step_at, rollout.judged_at) != (seen.step_at, seen.judged_at):
            return  # the counts belong to an earlier step or judgement
        rollout.ended, rollout.failed, rollout.complained = counts.ended, counts.failed, counts.complained
        rollout.counted_until, rollout.judged_at = max(until, seen.counted_until), at
        node = _lock_node(pk)
        canary = node.canary_template
        if canary is None or _is_edited(rollout, node) or canary.version != rollout.canary_version:
            _end(rollout, node, State.WITHDRAWN, "content")  # a changed text was not judged
            return
        judgement = judge_canary(read_plan(rollout.plan), counts, at - rollout.step_at)
        if judgement.decision == WITHDRAW:
            _end(rollout, node, State.WITHDRAWN, judgement.reason)
        elif judgement.decision == GROW and until < at - MIN_AGE:
            rollout.save()  # older ends are left to count
        elif judgement.decision == GROW and rollout.step + 1 == len(rollout.plan["steps"]):
            _end(rollout, node, State.FINISHED, "")
        elif judgement.decision == GROW:
            _start_step(rollout, rollout.step + 1, at)
            _move_canary(node, rollout.percent, node.canary_communities, "grows", SYSTEM_ACTOR)
        else:
            rollout.reason = judgement.reason
            rollout.save()


def _withdraw_unjudged(pk: int) -> None:
    """Withdraw a canary that was not judged for `MAX_UNJUDGED`. Without figures a harmful one would stay."""
    try:
        with sql.limit_statement_time(settings.TIMEOUTS.rollout):
            rollout, at = _lock_running(pk), sql.now()
            if rollout is not None and at - (rollout.judged_at or rollout.step_at) >= MAX_UNJUDGED:
                _end(rollout, _lock_node(pk), State.WITHDRAWN, "unseen")
    except Exception:
        log.exception("rollout_not_withdrawn", node=pk)
        close_old_connections()


def _is_edited(rollout: AutomaticRollout, node: Node) -> bool:
    """Return whether an operator has changed the canary since the last move, or retired the node."""
    left = (rollout.canary_id, rollout.percent, None)
    return left != (node.canary_template_id, node.canary_percent, node.retired_at)


def _start_step(rollout: AutomaticRollout, step: int, at: datetime) -> None:
    rollout.step, rollout.step_at, rollout.counted_until, rollout.reason = step, at, at, ""
    rollout.ended = rollout.failed = rollout.complained = 0
    rollout.save()


def _end(rollout: AutomaticRollout, node: Node, state: str, reason: str, actor: Actor = SYSTEM_ACTOR) -> None:
    """End a roll-out. A withdrawn or stopped canary goes to 0 %. If an operator has edited the node, the edit stays."""
    if is_edited := _is_edited(rollout, node):
        state, reason = State.STOPPED, "edited"
    rollout.state, rollout.reason = state, reason
    rollout.save()
    if state != State.FINISHED and not is_edited:
        _move_canary(node, 0, [], f"{state} {reason}".strip(), actor)
    figures = {name: getattr(rollout, name) for name in ("ended", "failed", "complained")}
    write_log = log.warning if state == State.WITHDRAWN else log.info
    transaction.on_commit(lambda: write_log(f"rollout_{state}", node=node.key, reason=reason, **figures))


def _move_canary(node: Any, percent: float, communities: list[str], why: str, actor: Actor, **others: Any) -> None:
    for name, value in {"canary_percent": percent, "canary_communities": communities, **others}.items():
        setattr(node, name, value)
    node._change_reason = f"automatic roll-out: {why}"[:100]
    if actor.user is not None:
        node._history_user = actor.user
    node.save()


def _lock_running(pk: int) -> AutomaticRollout | None:
    """Return the locked roll-out; None if another transaction holds it or it no longer runs."""
    mine = AutomaticRollout.objects.select_for_update(skip_locked=True, of=("self",))
    return mine.filter(pk=pk, state=State.RUNNING).first()


def _lock_node(pk: int) -> Node:
    return lock_for_write(Node.objects.select_related("template", "canary_template")).get(pk=pk)


def withdrawn_canaries() -> QuerySet[AutomaticRollout]:
    """Return the withdrawn roll-outs whose canary waits for a person: it is still that of the node, at 0 %."""
    waiting = AutomaticRollout.objects.filter(node__canary_template=F("canary"), node__canary_percent=0)
    return waiting.filter(state=State.WITHDRAWN, node__retired_at=None).select_related("node").order_by("judged_at")


# --- operator -------------------------------------------------------------------------------------------------------


@transaction.atomic
def start_rollout(node_id: int, plan: Mapping[str, Any], actor: Actor) -> None:
    """Start a roll-out at its first step. The node stores the plan as the default of the next one.

    Raises:
        InvalidInput: by key of the plan, or the node has no canary of its own.
        Conflict: the node is retired, or its roll-out runs.
    """
    plan = {**PLAN_DEFAULTS, **plan}
    read_plan(plan)
    before = AutomaticRollout.objects.select_for_update(of=("self",)).filter(pk=node_id).first()
    node = _lock_node(node_id)
    if node.retired_at is not None:
        raise Conflict(_("The node is retired."))
    if node.canary_template is None or node.canary_template_id == node.template_id:
        problem = _("Choose a canary template that is not the stable one, and save the node.")
        raise InvalidInput.of("canary_template", problem)
    # Two starts at once: the second waits for the node, and then finds the row of the first.
    if AutomaticRollout.objects.filter(pk=node_id, state=State.RUNNING).exists():
        raise Conflict(_("An automatic roll-out of this node is under way; stop it first."))
    rollout = before or AutomaticRollout(node=node)
    rollout.canary, rollout.canary_version, rollout.plan = node.canary_template, node.canary_template.version, plan
    rollout.state, rollout.judged_at = State.RUNNING, None
    _start_step(rollout, 0, sql.now())
    _move_canary(node, rollout.percent, node.canary_communities, "started", actor, canary_guard=plan)


@transaction.atomic
def stop_rollout(node_id: int, actor: Actor) -> None:
    """End the roll-out. The canary is withdrawn, unless an operator has edited the node: then the edit stays.

    Raises:
        Conflict: the roll-out has already ended.
    """
    rollout = AutomaticRollout.objects.select_for_update(of=("self",)).filter(pk=node_id, state=State.RUNNING).first()
    if rollout is None:
        raise Conflict(_("The roll-out changed since you loaded the page. Reload and try again."))
    _end(rollout, _lock_node(node_id), State.STOPPED, "", actor)


# --- counts ---------------------------------------------------------------------------------------------------------


def _count_canary(rollout: AutomaticRollout, until: datetime) -> CanaryCounts:
    """Return the counts of this step with the touches that ended before `until`.

    There may be millions of touches, and an end is final: each is counted once and stored. Complaints arrive later and
    are few, so their touches are found through them.
    """
    given = {
        "node": rollout.node_id, "canary": rollout.canary_id, "version": rollout.canary_version, "until": until,
        "since": rollout.step_at, "from": rollout.counted_until,
        "first_event": first_id_at(rollout.step_at - MAX_CLOCK_LAG),
    }  # fmt: skip
    ((ended, failed),) = sql.rows(_ENDED, given)
    ((complained,),) = sql.rows(_COMPLAINED, given)
    return CanaryCounts(rollout.ended + ended, rollout.failed + failed, complained)


_OF_CANARY = """t.node_id = %(node)s AND t.template_id = %(canary)s AND t.template_version = %(version)s
  AND t.retry_of IS NULL AND t.settled_at < %(until)s"""

_ENDED = f"""
SELECT count(*), count(*) FILTER (WHERE t.state <> 'delivered') FROM scheduling_touch_ended AS t
WHERE t.settled_at >= %(from)s AND {_OF_CANARY} AND t.state IN ('delivered', 'failed', 'unknown')
"""  # noqa: S608 (made of constants)

# The event of a complaint is stored with it, and its id grows with time.
_COMPLAINED = f"""
SELECT count(DISTINCT t.task_id)
FROM scheduling_complaint AS c JOIN scheduling_touch_ended AS t ON t.task_id = c.touch_id
WHERE c.event_id >= %(first_event)s AND t.settled_at >= %(since)s AND {_OF_CANARY} AND t.state = 'delivered'
"""  # noqa: S608 (made of constants)
