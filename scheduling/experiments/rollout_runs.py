"""Run automatic roll-outs: an operator starts one, passes advance it, and its figures may pause it.

Operators own the node. A pass that finds it changed since the last move does not write to it: the roll-out pauses with
that reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db import close_old_connections, transaction

from scheduling import sql
from scheduling.errors import Conflict, InvalidInput
from scheduling.experiments.rollout_stats import count_version_results, persist_older_counts
from scheduling.models import AutomaticRollout, Node, RolloutMove
from scheduling.models.versioned import lock_for_write
from scheduling.operations.failed_tasks import Actor
from scheduling.policy.rollout import GROW, PAUSE, PLAN_DEFAULTS, Judgement, judge_step, read_plan

log = structlog.get_logger(__name__)

MAX_UNJUDGED = timedelta(minutes=5)  #: longest time without a judgement, after which the canary is withdrawn
SYSTEM_ACTOR = Actor("")  #: actor of automatic moves
State, Verb = AutomaticRollout.State, RolloutMove.Verb
OPEN = (State.RUNNING, State.PAUSED)


# --- the pass -------------------------------------------------------------------------------------------------------


def advance_all_rollouts() -> int:
    """Judge all running roll-outs. Return the number that moved. The failure of one does not stop the others.

    Each move is one transaction that locks the roll-out, then its node. It judges the figures, edits the node's
    percentage as a new version with history, and stores the move. Figures are counted before it, so that a pausing
    operator never waits for a count. Of two concurrent passes the second finds the row locked or judged, and skips it.
    Counts stored by an interrupted pass stay, and the next pass continues there.
    """
    running = AutomaticRollout.objects.filter(state=State.RUNNING).order_by("judged_at", "pk")
    moved = 0
    for pk in list(running.values_list("pk", flat=True)):
        try:
            moved += _advance_rollout(pk)
        except Exception:
            log.exception("rollout_not_judged", rollout=pk)
            close_old_connections()
            moved += _pause_unjudged_rollout(pk)
    return moved


def _advance_rollout(pk: int) -> bool:
    seen = AutomaticRollout.objects.filter(pk=pk, state=State.RUNNING).first()
    if seen is None or not persist_older_counts(seen, settings.TIMEOUTS.rollout):
        return False
    with sql.limit_statement_time(settings.TIMEOUTS.rollout):
        at = sql.now()
        canary, stable = count_version_results(seen)
    with sql.limit_statement_time(settings.TIMEOUTS.rollout):
        rollout = _lock_running_rollout(pk)
        if rollout is None or (rollout.step_at, rollout.judged_at) != (seen.step_at, seen.judged_at):
            return False  # the counts belong to an earlier step or judgement
        judgement = judge_step(read_plan(rollout.plan), canary, stable, at - rollout.step_at)
        rollout.judged_at, rollout.figures = at, {"canary": asdict(canary), "stable": asdict(stable)}
        rollout.counted = seen.counted
        return _apply_judgement(rollout, judgement, at)


def _pause_unjudged_rollout(pk: int) -> bool:
    """Pause a roll-out that was not judged for `MAX_UNJUDGED`. Without figures a harmful canary would continue."""
    try:
        with sql.limit_statement_time(settings.TIMEOUTS.rollout):
            rollout, at = _lock_running_rollout(pk), sql.now()
            if rollout is None or at - (rollout.judged_at or rollout.step_at) < MAX_UNJUDGED:
                return False
            return _apply_judgement(rollout, Judgement(PAUSE, "unseen"), at)
    except Exception:
        log.exception("rollout_not_paused", rollout=pk)
        close_old_connections()
        return False


def _lock_running_rollout(pk: int) -> AutomaticRollout | None:
    """Return the locked roll-out; None if another transaction holds it or it no longer runs."""
    found = AutomaticRollout.objects.select_for_update(skip_locked=True, of=("self",))
    return found.filter(pk=pk, state=State.RUNNING).first()


def _apply_judgement(rollout: AutomaticRollout, judgement: Judgement, at: datetime) -> bool:
    node = _lock_node(rollout.node_id)
    if edited := _find_node_edit(rollout, node):
        # A changed text was not judged, so the canary is withdrawn. An operator's edit of the node stays.
        _pause_rollout(rollout, node, edited, at, SYSTEM_ACTOR, back=edited == "content")
    elif judgement.decision == PAUSE:
        _pause_rollout(rollout, node, judgement.reason, at, SYSTEM_ACTOR, back=True)
    elif judgement.decision == GROW:
        _grow_rollout(rollout, node, at)
    else:
        rollout.reason = judgement.reason
        rollout.save()
        return False
    return True


def _find_node_edit(rollout: AutomaticRollout, node: Node) -> str:
    """Return how an operator changed the basis of the roll-out: "edited", "content", or ""."""
    left = (rollout.stable_id, rollout.canary_id, rollout.percent, rollout.communities, None)
    found = (node.template_id, node.canary_template_id, node.canary_percent, node.canary_communities, node.retired_at)
    if left != found:
        return "edited"
    versions = (rollout.stable_version, rollout.canary_version)
    return "content" if versions != _get_template_versions(node) else ""


def _get_template_versions(node: Node) -> tuple[int, int]:
    assert node.canary_template is not None
    return node.template.version, node.canary_template.version


def _grow_rollout(rollout: AutomaticRollout, node: Node, at: datetime) -> None:
    if rollout.step + 1 == len(rollout.plan["steps"]):
        rollout.state, rollout.reason, rollout.ended_at = State.FINISHED, "", at
        _record_rollout_move(rollout, node, Verb.FINISHED, at, SYSTEM_ACTOR)
        return
    rollout.step, rollout.step_at, rollout.reason = rollout.step + 1, at, ""
    edit_node(node, rollout.percent, rollout.communities, f"automatic roll-out {rollout}: grows", SYSTEM_ACTOR)
    _record_rollout_move(rollout, node, Verb.GREW, at, SYSTEM_ACTOR)


def _pause_rollout(
    rollout: AutomaticRollout, node: Node, reason: str, at: datetime, actor: Actor, *, back: bool
) -> None:
    """Pause the roll-out. With `back` no community gets the canary, not even the fixed ones."""
    rollout.state, rollout.reason = State.PAUSED, reason
    if back:
        edit_node(node, 0, [], f"automatic roll-out {rollout}: paused, {reason}", actor)
    _record_rollout_move(rollout, node, Verb.PAUSED, at, actor)


def edit_node(node: Any, percent: float, communities: list[str], why: str, actor: Actor, **others: Any) -> None:
    """Change the canary of a node and store the version with its reason and actor."""
    for name, value in {"canary_percent": percent, "canary_communities": communities, **others}.items():
        setattr(node, name, value)
    node._change_reason = why[:100]
    if actor.user is not None:
        node._history_user = actor.user
    node.save()


def _record_rollout_move(rollout: AutomaticRollout, node: Node, verb: str, at: datetime, actor: Actor) -> None:
    rollout.save()
    RolloutMove.objects.create(
        rollout=rollout, at=at, verb=verb, reason=rollout.reason, percent=node.canary_percent,
        node_version=node.version, figures=rollout.figures, actor=actor.user, actor_name=actor.name,
    )  # fmt: skip
    write_log = log.warning if verb == Verb.PAUSED else log.info
    fields = {"percent": node.canary_percent, "reason": rollout.reason, "actor": actor.name, **rollout.figures}
    transaction.on_commit(lambda: write_log(f"rollout_{verb}", rollout=rollout.pk, node=node.key, **fields))


def _lock_node(node_id: int) -> Node:
    return lock_for_write(Node.objects.select_related("template", "canary_template")).get(pk=node_id)


# --- operator -------------------------------------------------------------------------------------------------------


def start_rollout(node_id: int, plan: Mapping[str, Any], actor: Actor) -> AutomaticRollout:
    """Start a roll-out at its first step. The node stores the plan as the default of the next one.

    Raises:
        InvalidInput: by key of the plan, or the node has no canary of its own.
        Conflict: the node is retired, or it has an open roll-out.
    """
    plan = {**PLAN_DEFAULTS, **plan}
    read_plan(plan)
    with transaction.atomic():
        node = _lock_node(node_id)
        _check_startable(node)
        assert node.canary_template is not None
        at, versions = sql.now(), _get_template_versions(node)
        rollout = AutomaticRollout(
            node=node, stable=node.template, stable_version=versions[0], canary=node.canary_template,
            canary_version=versions[1], plan=plan, communities=node.canary_communities, started_at=at, step_at=at,
        )  # fmt: skip
        rollout.save()
        why = f"automatic roll-out {rollout}: started"
        edit_node(node, rollout.percent, rollout.communities, why, actor, canary_guard=plan)
        _record_rollout_move(rollout, node, Verb.STARTED, at, actor)
    return rollout


def _check_startable(node: Node) -> None:
    if node.retired_at is not None:
        raise Conflict("the node is retired")
    if node.canary_template is None or node.canary_template_id == node.template_id:
        raise InvalidInput.of("canary_template", "must be another template than the stable one; choose it first")
    if node.automatic_rollouts.filter(state__in=OPEN).exists():
        raise Conflict("an automatic roll-out of this node is under way; stop it first")


def pause_rollout(rollout_id: int, actor: Actor) -> None:
    """Return all communities to the stable version until an operator resumes.

    Raises:
        Conflict: the roll-out does not run.
    """
    with transaction.atomic():
        rollout = _lock_open_rollout(rollout_id, State.RUNNING)
        node, at = _lock_node(rollout.node_id), sql.now()
        edited = _find_node_edit(rollout, node)
        _pause_rollout(rollout, node, "person", at, actor, back=edited != "edited")


def resume_rollout(rollout_id: int, actor: Actor) -> None:
    """Continue at the paused step, with counts from now on.

    Raises:
        Conflict: the roll-out is not paused, or the node has other templates than at the start.
    """
    with transaction.atomic():
        rollout = _lock_open_rollout(rollout_id, State.PAUSED)
        node, at = _lock_node(rollout.node_id), sql.now()
        if (node.template_id, node.canary_template_id, node.retired_at) != (rollout.stable_id, rollout.canary_id, None):
            raise Conflict("the node was changed after the start of this roll-out; stop it and start another")
        rollout.stable_version, rollout.canary_version = _get_template_versions(node)
        rollout.state, rollout.reason, rollout.figures = State.RUNNING, "", {}
        rollout.step_at, rollout.judged_at = at, None
        edit_node(node, rollout.percent, rollout.communities, f"automatic roll-out {rollout}: resumed", actor)
        _record_rollout_move(rollout, node, Verb.RESUMED, at, actor)


def stop_rollout(rollout_id: int, actor: Actor) -> None:
    """End the roll-out. The canary is withdrawn, unless an operator has edited the node: then the edit stays.

    Raises:
        Conflict: the roll-out has already ended.
    """
    with transaction.atomic():
        rollout = _lock_open_rollout(rollout_id, *OPEN)
        node, at = _lock_node(rollout.node_id), sql.now()
        mine = rollout.state == State.RUNNING and _find_node_edit(rollout, node) != "edited"
        rollout.state, rollout.reason, rollout.ended_at = State.STOPPED, "", at
        if mine:
            edit_node(node, 0, [], f"automatic roll-out {rollout}: stopped", actor)
        _record_rollout_move(rollout, node, Verb.STOPPED, at, actor)


def _lock_open_rollout(rollout_id: int, *states: str) -> AutomaticRollout:
    found = AutomaticRollout.objects.select_for_update(of=("self",)).filter(pk=rollout_id, state__in=states).first()
    if found is None:
        raise Conflict("the roll-out changed since you loaded it; reload and try again")
    return found
