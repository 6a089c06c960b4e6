"""Manage replays: a user starts one, a worker executes it, a user publishes or discards it.

The row is the job. A tick selects a waiting replay, or one without a heartbeat of its worker for two minutes. One
replay runs at a time, because it occupies a worker process for up to a few minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from hashlib import sha256
from typing import Any

import structlog
from django.conf import settings
from django.db import Error, transaction
from django.db.models.functions import Now
from django.utils.timezone import now

from scheduling import replica, sql
from scheduling.audit.audit_log import record_action
from scheduling.configuration import snapshot
from scheduling.configuration.file import apply, document
from scheduling.configuration.file.base import Stamp
from scheduling.configuration.file.document import InvalidDocument
from scheduling.configuration.file.schema import FileProblem
from scheduling.configuration.file.sections import sections
from scheduling.configuration.snapshot import Snapshot
from scheduling.errors import Conflict
from scheduling.experiments.replay import history
from scheduling.experiments.replay.results import replay_events
from scheduling.models import ConfigDraft, Node, Replay
from scheduling.operations.failed_tasks import Actor
from scheduling.operations.undo import Reversal, offer_undo
from scheduling.planning import rescheduling
from scheduling.planning.rescheduling import PAGE_TIME_LIMIT, MoveCounts

log = structlog.get_logger(__name__)


#: The most edited sections come first.
SECTIONS = ("nodes", "delay_rules", "harassment_rules", "holdout", "calendars", "stages", "templates")
#: Sections that a draft may change and a replay ignores. Their app may not be installed.
NOT_SIMULATED = ("silence_policies",)


def list_draft_sections() -> list[str]:
    return [name for name in (*SECTIONS, *NOT_SIMULATED) if name in sections()]


def export_live_draft() -> str:
    """Return the live configuration as a draft without changes."""
    known = sections()
    with transaction.atomic():
        given = {name: known[name].export(with_secrets=False) for name in list_draft_sections()}
    return document.format_document(
        {"version": apply.VERSION} | {name: each for name, each in given.items() if each is not None}
    )


def read_draft(text: str) -> tuple[dict[str, Any], apply.ChangePlan]:
    """Return the draft and the changes it would make.

    Raises:
        InvalidDocument: the text cannot be parsed.
        InvalidConfiguration: with all problems of the draft.
    """
    given = document.parse_document(text.encode())
    allowed = list_draft_sections()
    foreign = [name for name in given if name not in (*allowed, "version") and name in sections()]
    if foreign:
        known = ", ".join(allowed)
        problems = [FileProblem(name, f"a draft cannot change this; allowed: {known}") for name in foreign]
        raise apply.InvalidConfiguration(problems)
    return given, apply.plan_changes(given)


class _DraftRollback(Exception):
    """Rolls the transaction back."""


def build_draft_snapshot(given: Mapping[str, Any], planned: apply.ChangePlan) -> Snapshot:
    """Return the configuration that publishing would make. Store the draft, load it and roll back.

    During that time no other user can edit, and no process reads the draft.

    Raises:
        Conflict: another user edits at the same moment.
    """
    found: list[Snapshot] = []
    try:
        with transaction.atomic():
            apply.store_plan(given, planned, Stamp("replay"))
            found.append(snapshot.load_snapshot(()))
            raise _DraftRollback
    except _DraftRollback:
        return found[0]


MOST_WAITING = 5
HEARTBEAT_TIMEOUT = timedelta(minutes=2)  #: a worker without a heartbeat for that long counts as lost
TRIES = 3
REPLICA_WAIT = 5.0  #: seconds for a read replica to hold all events of the window

State = Replay.State
DECIDED = "another user has already decided, or the replay is not finished"


def create_replay(text: str, days: int, actor: Actor) -> Replay:
    """Create a replay of the last `days`.

    Raises:
        InvalidDocument, InvalidConfiguration: the draft is wrong.
        Conflict: `MOST_WAITING` replays are waiting or running.
    """
    _, planned = read_draft(text)
    if Replay.objects.filter(state__in=(State.WAITING, State.RUNNING)).count() >= MOST_WAITING:
        raise Conflict("too many replays are waiting; try again when one has finished")
    changes = [serialize_change(change) for change in planned.changes]
    return Replay.objects.create(draft=text, days=days, actor=actor.user, actor_name=actor.name, changes=changes)


def serialize_change(change: Any) -> dict[str, Any]:
    differences = [{"path": each.path, "before": each.before, "after": each.after} for each in change.differences]
    return {
        "section": change.section.name, "verb": change.verb, "label": change.label, "differences": differences,
    }  # fmt: skip


# --- worker -------------------------------------------------------------------------------------------------------


class _ReplayLost(Exception):
    """A user discarded the replay, or another worker has it."""


def execute_next_replay() -> bool:
    """Execute the oldest waiting replay, unless one is running. Return whether there was one."""
    run = _claim_replay()
    if run is None:
        return False
    try:
        _execute_replay(run)
    except _ReplayLost:
        log.info("replay_outdated", run=run.pk)
    except (apply.InvalidConfiguration, InvalidDocument, Conflict) as error:
        _end_replay(run, State.FAILED, problem=str(error))
    except Exception as error:
        log.exception("replay_failed", run=run.pk)
        _end_replay(run, State.FAILED, problem=f"{type(error).__name__}: {error}"[:2000])
        raise
    return True


def _claim_replay() -> Replay | None:
    """Select a replay. The locks on all candidates ensure that only one runs at a time."""
    with transaction.atomic():
        at = sql.now()  # with the clock of a node that is ahead, live workers would count as lost
        open_ones = list(
            Replay.objects.select_for_update(of=("self",))
            .filter(state__in=(State.WAITING, State.RUNNING))
            .order_by("id")
        )
        if any(
            run.state == State.RUNNING and run.beat_at and run.beat_at > at - HEARTBEAT_TIMEOUT for run in open_ones
        ):
            return None
        for run in open_ones:
            if run.tries < TRIES:
                run.state, run.tries, run.beat_at = State.RUNNING, run.tries + 1, at
                run.save(update_fields=["state", "tries", "beat_at"])
                return run
            run.state, run.problem, run.ended_at = State.FAILED, "the worker of this replay was lost three times", at
            run.save(update_fields=["state", "problem", "ended_at"])
    return None


def _execute_replay(run: Replay) -> None:
    given, planned = read_draft(run.draft)
    digest = compute_live_digest()
    configs = {"live": snapshot.current(), "draft": build_draft_snapshot(given, planned)}
    # The replica holds all that happened before the replay's window ends, or the primary answers.
    result = replica.read_from_replica(
        lambda age: _compute_result(run, configs), after=replica.read_primary_position(), wait=REPLICA_WAIT
    )
    _end_replay(run, State.DONE, result=result, live_digest=digest, done=result["events"])


def _compute_result(run: Replay, configs: Mapping[str, Snapshot]) -> dict[str, Any]:
    within = history.choose_window(run.created_at - timedelta(days=run.days), run.created_at)
    _update_replay(run, total=within.events, beat_at=Now())
    result = replay_events(configs, within, progress=lambda done: _update_replay(run, done=done, beat_at=Now()))
    return result | {
        "since": within.since.isoformat(), "until": within.until.isoformat(), "events": within.events,
        "shortened": within.shortened,
    }  # fmt: skip


def _end_replay(run: Replay, state: str, **values: Any) -> None:
    _update_replay(run, state=state, ended_at=Now(), **values)


def _update_replay(run: Replay, **values: Any) -> None:
    mine = Replay.objects.filter(pk=run.pk, state=State.RUNNING, tries=run.tries)
    if not mine.update(**values):
        raise _ReplayLost


def compute_live_digest() -> str:
    return _compute_digest(export_live_draft())


def _compute_digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


# --- user ---------------------------------------------------------------------------------------------------------


def publish_draft(run_id: int, actor: Actor, *, move_waiting: bool = False) -> MoveCounts | None:
    """Apply the draft, with the actor and reason in the history of each row. Close the open draft that it came from.

    Return the moved touches; None if none were to move. An open draft that was edited since stays open.

    Raises:
        Conflict: the configuration changed since the replay, or the replay was published or discarded already.
    """
    with transaction.atomic():
        run = _record_decision(run_id, State.PUBLISHED, actor, (State.DONE,))
        given, planned = read_draft(run.draft)
        before = _check_live_digest(run)
        active = _list_active_nodes()
        mark = f"replay #{run_id}"
        apply.store_plan(given, planned, Stamp(f"{actor.reason} ({mark})" if actor.reason else mark, actor.user))
        _close_open_draft(run)
        # The due times of moved touches cannot be restored exactly. A node that is switched off suppresses touches.
        if actor.user and not move_waiting and active <= _list_active_nodes():
            after = {"before": before, "digest": compute_live_digest()}
            offer_undo(actor.user, PUBLISH, [run.pk], label=f"#{run.pk}", given=after)
    if not move_waiting:
        return None
    try:
        return rescheduling.move_after_plan(planned, PAGE_TIME_LIMIT)
    except Error:  # the draft is live in any case
        log.exception("reschedule_failed", run=run_id)
        return MoveCounts(broken=True)


def _list_active_nodes() -> set[int]:
    return set(Node.objects.filter(enabled=True, retired_at=None).values_list("pk", flat=True))


def check_publishable(run: Replay) -> None:
    """Check what `publish_draft` checks again.

    Raises:
        Conflict: the replay is not finished or decided already, or the configuration changed since.
    """
    if run.state != State.DONE:
        raise Conflict(DECIDED)
    _check_live_digest(run)


def _check_live_digest(run: Replay) -> str:
    """Return the live configuration as a draft, if the replay compared with it."""
    live = export_live_draft()
    if run.live_digest != _compute_digest(live):
        raise Conflict("the configuration changed after the replay; replay the draft again")
    return live


def restore_before(run_id: str, actor: Actor, *, before: str, digest: str) -> None:
    """Take a publication back: store the configuration `before` it through the same checks. The replay is open again.

    A section of which nothing was stored before gets its defaults. `digest` is that of the configuration right after
    the publication.

    Raises:
        Conflict: the configuration changed since.
        InvalidConfiguration: something outside of the draft now needs what the publication added.
    """
    with transaction.atomic():
        # Before the digest: an edit between the two fails one of the checks.
        live, former = (document.parse_document(text.encode()) for text in (export_live_draft(), before))
        given, planned = read_draft(document.format_document({name: {} for name in live} | former))
        published = Replay.objects.filter(pk=run_id, state=State.PUBLISHED)
        if digest != compute_live_digest() or not published.update(state=State.DONE, settled_by="", settled_at=None):
            raise Conflict("the configuration changed since the publication")
        apply.store_plan(given, planned, Stamp(f"undo of replay #{run_id}", actor.user))


PUBLISH = "replay.publish"
REVERSAL = Reversal(Replay._meta.label_lower, "scheduling.publish_replay", restore_before)


def discard_replay(run_id: int, actor: Actor) -> None:
    """Discard a replay in any state before its decision.

    Raises:
        Conflict: it was published or discarded already.
    """
    with transaction.atomic():
        states = (State.WAITING, State.RUNNING, State.DONE, State.FAILED)
        _close_open_draft(_record_decision(run_id, State.DISCARDED, actor, states))


def _close_open_draft(run: Replay) -> None:
    """Delete the open draft that the replay came from, unless its owner edited it since."""
    ConfigDraft.objects.filter(owner=run.actor_id, document=run.draft).delete()


def delete_expired_replays() -> None:
    """Delete replays older than the retention time."""
    Replay.objects.filter(created_at__lt=now() - timedelta(days=settings.AFTERTOUCH_RETENTION_DAYS)).delete()


def _record_decision(run_id: int, state: str, actor: Actor, while_in: tuple[str, ...]) -> Replay:
    mine = Replay.objects.filter(pk=run_id, state__in=while_in)
    if not mine.update(state=state, settled_by=actor.name, settled_at=now()):
        raise Conflict(DECIDED)
    run = Replay.objects.get(pk=run_id)
    record_action(state, run, label=f"#{run_id}", actor=actor.name, reason=actor.reason)
    return run
