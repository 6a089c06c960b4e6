"""A guarded roll-out from its start to its end: begun by a person, moved by a pass, paused by its figures.

Every move is one transaction that holds the lock of the roll-out, then that of its node: the figures are judged, the
node's percentage is edited (a new version with its history, as by a person) and the move is noted, or none of it. They
are counted before it, so that a person who pauses never waits for a count. Two passes at once: the second finds the row
locked, or judged meanwhile, and leaves it. What a pass counted for good is kept even where it comes no further, so that
the next one goes on there.

The node belongs to people. A pass that finds it otherwise than the last move left it writes nothing into it: the
roll-out pauses and says so.
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

PATIENCE = "20s"  #: that counting one roll-out may take
BLIND = timedelta(minutes=5)  #: without a judgement; then one that cannot be judged goes back
ITSELF = Actor("")  #: the roll-out
State, Verb = GuardedRollout.State, RolloutMove.Verb
OPEN = (State.RUNNING, State.PAUSED)


# --- the pass -------------------------------------------------------------------------------------------------------


def advance() -> int:
    """Judge every roll-out that runs. Returns how many moved; one that fails does not keep the others from it."""
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
            return False  # what was counted is not what it is about any more
        judgement = judge(read_plan(rollout.plan), canary, stable, at - rollout.step_at)
        rollout.judged_at, rollout.figures = at, {"canary": asdict(canary), "stable": asdict(stable)}
        rollout.counted = seen.counted
        return _act(rollout, judgement, at)


def _give_up(pk: int) -> bool:
    """A guard that cannot see would let a harmful canary be: after a while nobody gets it."""
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
    """Locked; None where another one has it, or it does not run any more."""
    found = GuardedRollout.objects.select_for_update(skip_locked=True, of=("self",))
    return found.filter(pk=pk, state=State.RUNNING).first()


def _act(rollout: GuardedRollout, judgement: Judgement, at: datetime) -> bool:
    node = _locked(rollout.node_id)
    if edited := _edited(rollout, node):
        # Another text was not judged, so it goes back; what somebody wrote into the node stays as it is.
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
    """How somebody changed what the roll-out counts on, or ""."""
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
    """With `back` the canary goes back to nobody, those who always got it included."""
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


# --- the person's side ----------------------------------------------------------------------------------------------


def start(node_id: int, plan: Mapping[str, Any], actor: Actor) -> GuardedRollout:
    """Bring the node's canary to the first step. The plan stays with the node, where the next one begins with it.

    Raises `InvalidInput` by key of the plan, `Conflict` where there is nothing to try or a roll-out is under way."""
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
    """Back to the stable version until somebody resumes. Raises `Conflict` where it does not run."""
    with transaction.atomic():
        rollout = _open(rollout_id, State.RUNNING)
        node, at = _locked(rollout.node_id), sql.now()
        edited = _edited(rollout, node)
        _pause(rollout, node, "person", at, actor, back=edited != "edited")


def resume(rollout_id: int, actor: Actor) -> None:
    """Back to the step where it paused, counting anew from here. Raises `Conflict` where it is not paused, or where
    another canary or text would be tried than it was started for."""
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
    """For good. The canary goes back to nobody, unless somebody edited the node meanwhile: then that holds. Raises
    `Conflict` where it is over already."""
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
        raise Conflict("somebody decided about it already, or it moved by itself")
    return found
