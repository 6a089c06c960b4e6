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
from django.db import close_old_connections, transaction

from scheduling import sql
from scheduling.errors import Conflict, InvalidInput
from scheduling.experiments.rollout_stats import catch_up, tallies
from scheduling.models import GuardedRollout, Node, RolloutMove
from scheduling.models.versioned import locked_to_write
from scheduling.operations.failed_tasks import Actor
from scheduling.policy.rollout import GROW, PAUSE, USUAL, Judgement, judge, read_plan

log = structlog.get_logger(__name__)

PATIENCE = "20s"  #: time limit of counting for one roll-out
BLIND = timedelta(minutes=5)  #: longest time without a judgement, after which the canary is withdrawn
ITSELF = Actor("")  #: actor of automatic moves
State, Verb = GuardedRollout.State, RolloutMove.Verb
OPEN = (State.RUNNING, State.PAUSED)


# --- the pass -------------------------------------------------------------------------------------------------------


def advance() -> int:
    """Judge all running roll-outs. Return the number that moved. The failure of one does not stop the others.

    Each move is one transaction that locks the roll-out, then its node. It judges the figures, edits the node's
    percentage as a new version with history, and stores the move. Figures are counted before it, so that a pausing
    operator never waits for a count. Of two concurrent passes the second finds the row locked or judged, and skips it.
    Counts stored by an interrupted pass stay, and the next pass continues there.
    """
    running = GuardedRollout.objects.filter(state=State.RUNNING).order_by("judged_at", "pk")
    moved = 0
    for pk in list(running.values_list("pk", flat=True)):
        try:
            moved += _advance(pk)
        except Exception:
            log.exception("rollout_not_judged", rollout=pk)
            close_old_connections()
            moved += _give_up(pk)
    return moved


def _advance(pk: int) -> bool:
    seen = GuardedRollout.objects.filter(pk=pk, state=State.RUNNING).first()
    if seen is None or not catch_up(seen, PATIENCE):
        return False
    with sql.within(PATIENCE):
        at = sql.now()
        canary, stable = tallies(seen)
    with sql.within(PATIENCE):
        rollout = _running(pk)
        if rollout is None or (rollout.step_at, rollout.judged_at) != (seen.step_at, seen.judged_at):
            return False  # the counts belong to an earlier step or judgement
        judgement = judge(read_plan(rollout.plan), canary, stable, at - rollout.step_at)
        rollout.judged_at, rollout.figures = at, {"canary": asdict(canary), "stable": asdict(stable)}
        rollout.counted = seen.counted
        return _act(rollout, judgement, at)


def _give_up(pk: int) -> bool:
    """Pause a roll-out that was not judged for `BLIND`. Without figures a harmful canary would continue."""
    try:
        with sql.within(PATIENCE):
            rollout, at = _running(pk), sql.now()
            if rollout is None or at - (rollout.judged_at or rollout.step_at) < BLIND:
                return False
            return _act(rollout, Judgement(PAUSE, "unseen"), at)
    except Exception:
        log.exception("rollout_not_paused", rollout=pk)
        close_old_connections()
        return False


def _running(pk: int) -> GuardedRollout | None:
    """Return the locked roll-out; None if another transaction holds it or it no longer runs."""
    found = GuardedRollout.objects.select_for_update(skip_locked=True, of=("self",))
    return found.filter(pk=pk, state=State.RUNNING).first()


def _act(rollout: GuardedRollout, judgement: Judgement, at: datetime) -> bool:
    node = _locked(rollout.node_id)
    if edited := _edited(rollout, node):
        # A changed text was not judged, so the canary is withdrawn. An operator's edit of the node stays.
        _pause(rollout, node, edited, at, ITSELF, back=edited == "content")
    elif judgement.decision == PAUSE:
        _pause(rollout, node, judgement.reason, at, ITSELF, back=True)
    elif judgement.decision == GROW:
        _grow(rollout, node, at)
    else:
        rollout.reason = judgement.reason
        rollout.save()
        return False
    return True


def _edited(rollout: GuardedRollout, node: Node) -> str:
    """Return how an operator changed the basis of the roll-out: "edited", "content", or ""."""
    left = (rollout.stable_id, rollout.canary_id, rollout.percent, rollout.communities, None)
    found = (node.template_id, node.canary_template_id, node.canary_percent, node.canary_communities, node.retired_at)
    if left != found:
        return "edited"
    versions = (rollout.stable_version, rollout.canary_version)
    return "content" if versions != _versions(node) else ""


def _versions(node: Node) -> tuple[int, int]:
    assert node.canary_template is not None
    return node.template.version, node.canary_template.version


def _grow(rollout: GuardedRollout, node: Node, at: datetime) -> None:
    if rollout.step + 1 == len(rollout.plan["steps"]):
        rollout.state, rollout.reason, rollout.ended_at = State.FINISHED, "", at
        _note(rollout, node, Verb.FINISHED, at, ITSELF)
        return
    rollout.step, rollout.step_at, rollout.reason = rollout.step + 1, at, ""
    _edit(node, rollout.percent, rollout.communities, f"guarded roll-out {rollout}: grows", ITSELF)
    _note(rollout, node, Verb.GREW, at, ITSELF)


def _pause(rollout: GuardedRollout, node: Node, reason: str, at: datetime, actor: Actor, *, back: bool) -> None:
    """Pause the roll-out. With `back` no community gets the canary, not even the fixed ones."""
    rollout.state, rollout.reason = State.PAUSED, reason
    if back:
        _edit(node, 0, [], f"guarded roll-out {rollout}: paused, {reason}", actor)
    _note(rollout, node, Verb.PAUSED, at, actor)


def _edit(node: Any, percent: float, communities: list[str], why: str, actor: Actor, **others: Any) -> None:
    for name, value in {"canary_percent": percent, "canary_communities": communities, **others}.items():
        setattr(node, name, value)
    node._change_reason = why[:100]
    if actor.user is not None:
        node._history_user = actor.user
    node.save()


def _note(rollout: GuardedRollout, node: Node, verb: str, at: datetime, actor: Actor) -> None:
    rollout.save()
    RolloutMove.objects.create(
        rollout=rollout, at=at, verb=verb, reason=rollout.reason, percent=node.canary_percent,
        node_version=node.version, figures=rollout.figures, actor=actor.user, actor_name=actor.name,
    )  # fmt: skip
    say = log.warning if verb == Verb.PAUSED else log.info
    told = {"percent": node.canary_percent, "reason": rollout.reason, "actor": actor.name, **rollout.figures}
    transaction.on_commit(lambda: say(f"rollout_{verb}", rollout=rollout.pk, node=node.key, **told))


def _locked(node_id: int) -> Node:
    return locked_to_write(Node.objects.select_related("template", "canary_template")).get(pk=node_id)


# --- operator -------------------------------------------------------------------------------------------------------


def start(node_id: int, plan: Mapping[str, Any], actor: Actor) -> GuardedRollout:
    """Start a roll-out at its first step. The node stores the plan as the default of the next one.

    Raises:
        InvalidInput: by key of the plan, or the node has no canary of its own.
        Conflict: the node is retired, or it has an open roll-out.
    """
    plan = {**USUAL, **plan}
    read_plan(plan)
    with transaction.atomic():
        node = _locked(node_id)
        _check_startable(node)
        assert node.canary_template is not None
        at, versions = sql.now(), _versions(node)
        rollout = GuardedRollout(
            node=node, stable=node.template, stable_version=versions[0], canary=node.canary_template,
            canary_version=versions[1], plan=plan, communities=node.canary_communities, started_at=at, step_at=at,
        )  # fmt: skip
        rollout.save()
        why = f"guarded roll-out {rollout}: started"
        _edit(node, rollout.percent, rollout.communities, why, actor, canary_guard=plan)
        _note(rollout, node, Verb.STARTED, at, actor)
    return rollout


def _check_startable(node: Node) -> None:
    if node.retired_at is not None:
        raise Conflict("the node is retired")
    if node.canary_template is None or node.canary_template_id == node.template_id:
        raise InvalidInput.of("canary_template", "must be another template than the stable one; choose it first")
    if node.guarded_rollouts.filter(state__in=OPEN).exists():
        raise Conflict("a guarded roll-out of this node is under way; stop it first")


def pause(rollout_id: int, actor: Actor) -> None:
    """Return all communities to the stable version until an operator resumes.

    Raises:
        Conflict: the roll-out does not run.
    """
    with transaction.atomic():
        rollout = _open(rollout_id, State.RUNNING)
        node, at = _locked(rollout.node_id), sql.now()
        edited = _edited(rollout, node)
        _pause(rollout, node, "person", at, actor, back=edited != "edited")


def resume(rollout_id: int, actor: Actor) -> None:
    """Continue at the paused step, with counts from now on.

    Raises:
        Conflict: the roll-out is not paused, or the node has other templates than at the start.
    """
    with transaction.atomic():
        rollout = _open(rollout_id, State.PAUSED)
        node, at = _locked(rollout.node_id), sql.now()
        if (node.template_id, node.canary_template_id, node.retired_at) != (rollout.stable_id, rollout.canary_id, None):
            raise Conflict("the node says something else now than when this roll-out began; stop it and start another")
        rollout.stable_version, rollout.canary_version = _versions(node)
        rollout.state, rollout.reason, rollout.figures = State.RUNNING, "", {}
        rollout.step_at, rollout.judged_at = at, None
        _edit(node, rollout.percent, rollout.communities, f"guarded roll-out {rollout}: resumed", actor)
        _note(rollout, node, Verb.RESUMED, at, actor)


def stop(rollout_id: int, actor: Actor) -> None:
    """End the roll-out. The canary is withdrawn, unless an operator has edited the node: then the edit stays.

    Raises:
        Conflict: the roll-out has already ended.
    """
    with transaction.atomic():
        rollout = _open(rollout_id, *OPEN)
        node, at = _locked(rollout.node_id), sql.now()
        mine = rollout.state == State.RUNNING and _edited(rollout, node) != "edited"
        rollout.state, rollout.reason, rollout.ended_at = State.STOPPED, "", at
        if mine:
            _edit(node, 0, [], f"guarded roll-out {rollout}: stopped", actor)
        _note(rollout, node, Verb.STOPPED, at, actor)


def _open(rollout_id: int, *states: str) -> GuardedRollout:
    found = GuardedRollout.objects.select_for_update(of=("self",)).filter(pk=rollout_id, state__in=states).first()
    if found is None:
        raise Conflict("the roll-out changed since you loaded it; reload and try again")
    return found
