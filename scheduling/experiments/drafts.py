"""Collect edits in the draft of a user, replay past events under it, and publish it.

The draft and the live configuration meet in a transaction that is rolled back: the edits of the draft are stored over
the live rows, and the result is read. Edits that other users made since stay. A row that both edited is a conflict.
Every write locks the draft's row. That of a draft's page names the content that the page showed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any

import structlog
from django.db import Error, IntegrityError, transaction
from django.db.models import Model
from django.db.models.functions import Now

from scheduling import replica, sql
from scheduling.configuration import snapshot
from scheduling.configuration.file import apply
from scheduling.configuration.file.apply import ChangePlan, InvalidConfiguration
from scheduling.configuration.file.section import Change, Stamp
from scheduling.configuration.file.sections import sections
from scheduling.configuration.snapshot import Snapshot
from scheduling.error_text import ErrorText
from scheduling.error_text import ErrorText as _
from scheduling.errors import AftertouchError, Conflict, FieldError
from scheduling.experiments.replay import choose_window, replay_events
from scheduling.models import ConfigDraft
from scheduling.operations.failed_tasks import Actor
from scheduling.planning import rescheduling
from scheduling.planning.rescheduling import PAGE_TIME_LIMIT, MoveCounts
from scheduling.strict_text import InvalidText, write_yaml

log = structlog.get_logger(__name__)

NOT_SIMULATED = ("silence_policies",)  #: sections that a replay ignores
#: Sections that a draft may change if their app is installed. The most edited ones come first.
DRAFTED = (
    "nodes", "delay_rules", "harassment_rules", "holdout", "calendars", "stages", "templates", *NOT_SIMULATED
)  # fmt: skip

CHANGED = _("The draft changed after you opened the page. Reload the page.")
NEEDED = _("This does not fit another change of the draft. Discard the draft, or change its text.")
NOT_REPLAYED = _("The draft has not been replayed.")
LOST = _("The worker of this replay was lost. Start the replay again.")
State = ConfigDraft.State


# --- texts ---


def list_drafted() -> list[str]:
    return [name for name in DRAFTED if name in sections()]


def is_draftable(model: type[Model]) -> bool:
    """Return whether a draft can hold edits of these rows."""
    return any(model in sections()[name].tables for name in list_drafted())


def export_live_draft() -> str:
    """Return the live configuration as a draft without changes."""
    return write_yaml(apply.export_document(list_drafted()))


def read_draft(text: str) -> dict[str, Any]:
    """Return the document of a draft, which is not compared with the live configuration yet.

    Raises:
        InvalidText: the text cannot be parsed.
        InvalidConfiguration: it has sections that a draft cannot change.
    """
    given = apply.parse_document(text.encode())
    allowed = list_drafted()
    if foreign := [name for name in given if name not in (*allowed, "version") and name in sections()]:
        problem = _("a draft cannot change this; allowed: %(known)s", known=", ".join(allowed))
        raise InvalidConfiguration(*(FieldError(name, problem) for name in foreign))
    return given


# --- the edits of a draft ---


def plan_edits(draft: ConfigDraft) -> ChangePlan:
    """Return the edits of a draft, without those that other users made since.

    Raises:
        Conflict: another user edited the same rows since; the error names them.
        InvalidConfiguration: the draft does not fit the live configuration.
    """
    return _choose_edits(draft, apply.plan_changes(read_draft(draft.document)))


def _choose_edits(draft: ConfigDraft, planned: ChangePlan) -> ChangePlan:
    """Leave out the changes that would only take back what others edited since the draft was started."""
    live = apply.export_document(list_drafted())
    if write_yaml(live) == draft.base:
        return planned
    # A section of which nothing was stored then gets its defaults.
    then: dict[str, Any] = {name: {} for name in live}
    then |= apply.parse_document(draft.base.encode())
    back = apply.plan_changes(then).changes
    signatures, rows = [each.signature for each in back], [_identify_row(each) for each in back]
    own = [each for each in planned.changes if each.signature not in signatures]
    if clashes := [each.label for each in own if _identify_row(each) in rows]:
        raise Conflict(
            _(
                "Another user edited the same rows since the draft was started: %(rows)s. Discard the draft and make"
                " its edits again.",
                rows=", ".join(clashes),
            )
        )
    return planned.only(own)


def _identify_row(change: Change) -> tuple[str, object]:
    return change.section.name, change.before.pk if change.before else change.label


def _store_edits(draft: ConfigDraft, stamp: Stamp) -> ChangePlan:
    """Store the edits of the draft over the live configuration. Raises the errors of `plan_edits`."""
    return apply.store_document(read_draft(draft.document), stamp, partial(_choose_edits, draft))


@contextmanager
def _rolled_back() -> Iterator[None]:
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


def compute_seen(draft: ConfigDraft | None) -> str:
    """Name the content of a draft; without one, the live configuration that a new draft starts from."""
    base, text = (draft.base, draft.document) if draft else (live := export_live_draft(), live)
    return sha256(f"{base}\0{text}".encode()).hexdigest()


def find_draft(user: Any) -> ConfigDraft | None:
    return ConfigDraft.objects.filter(owner=user).first()


def _lock_draft(seen: str, **which: Any) -> ConfigDraft:
    draft = ConfigDraft.objects.select_for_update(of=("self",)).filter(**which).first()
    if draft is None or compute_seen(draft) != seen:
        raise Conflict(CHANGED)
    return draft


def _store_text(draft: ConfigDraft, base: str, text: str) -> None:
    """Store a new text. Its replay is cleared. A draft without edits is deleted."""
    if text == base:
        draft.delete()
        return
    draft.base, draft.document = base, text
    draft.state, draft.state_at, draft.result, draft.problems = State.OPEN, Now(), None, []
    draft.save()


def capture_edit(user: Any, save: Callable[[], bool]) -> bool:
    """Call `save`, add what it changes in the live rows to the user's draft, and roll it back.

    Columns that `save` changes are stored over the edits that the draft has already. Return False if `save` returns
    False, as for an invalid form, or changes nothing that a draft holds.

    Raises:
        Conflict: the draft, or this edit on top of it, does not fit the live configuration.
    """
    with transaction.atomic():
        draft, is_new = ConfigDraft.objects.select_for_update(of=("self",)).get_or_create(
            owner=user, defaults={"base": "", "document": ""}
        )
        text = ""
        with _rolled_back(), apply.edit_sections(list_drafted()):
            live, before = export_live_draft(), _read_rows()
            with _rolled_back():
                after = _read_rows() if save() else before
            if after != before:
                if not is_new:
                    _store_edits(draft, Stamp("draft"))
                _write_rows(before, after)
                text = export_live_draft()
        if not text or (is_new and text == live):
            transaction.set_rollback(True)
            return False
        _store_text(draft, live, text)
        return True


Rows = dict[tuple[type[Model], Any], dict[str, Any]]


def _read_rows() -> Rows:
    models = [model for name in list_drafted() for model in sections()[name].tables]
    return {(model, row[model._meta.pk.attname]): row for model in models for row in model._default_manager.values()}


def _write_rows(before: Rows, after: Rows) -> None:
    try:
        for (model, pk), row in after.items():
            was = before.get((model, pk))
            if was is None:
                model._default_manager.bulk_create([model(**row)])
                continue
            changed = {name: value for name, value in row.items() if value != was[name]}
            stored = model._default_manager.filter(pk=pk)
            if "retired_at" in row and row["retired_at"] is was["retired_at"] is None:
                stored = stored.filter(retired_at=None)
            if changed and not stored.update(**changed):
                raise Conflict(NEEDED)  # the draft deletes or retires the row
        for model, pk in before.keys() - after.keys():
            model._default_manager.filter(pk=pk).delete()
    except IntegrityError:
        raise Conflict(NEEDED) from None


def replace_text(user: Any, text: str, seen: str) -> ConfigDraft | None:
    """Store a text as the draft and return it; None if the text is the live configuration.

    Raises:
        Conflict: another page changed or opened the draft, or the live configuration that a new one starts from.
    """
    with transaction.atomic():
        live = export_live_draft()
        draft, _is_new = ConfigDraft.objects.select_for_update(of=("self",)).get_or_create(
            owner=user, defaults={"base": live, "document": live}
        )
        if compute_seen(draft) != seen:
            raise Conflict(CHANGED)
        _store_text(draft, draft.base, text)
        return draft if draft.pk else None


def discard_draft(user: Any, seen: str) -> None:
    """Delete the user's draft. Idempotent.

    Raises:
        Conflict: another page changed the draft.
    """
    with transaction.atomic():
        mine = ConfigDraft.objects.filter(owner=user)
        if mine.select_for_update(of=("self",)).first() is not None:  # waits for the end of another click
            _lock_draft(seen, owner=user).delete()


# --- replay ---

DAYS = 7
#: A replay takes less than a minute, because its events are bounded. Later its worker counts as lost.
MOST_TIME = timedelta(minutes=10)
REPLICA_WAIT = 5.0  #: seconds for a read replica to hold all events of the window


def request_replay(user: Any, seen: str) -> ConfigDraft:
    """Let a worker replay the draft. Idempotent while a replay waits or runs.

    Raises:
        Conflict: the draft changed, or another user edited the same rows.
        InvalidConfiguration: the draft is wrong.
    """
    with transaction.atomic():
        draft = _lock_draft(seen, owner=user)
        plan_edits(draft)
        if draft.state not in (State.WAITING, State.RUNNING):
            draft.state, draft.state_at, draft.result, draft.problems = State.WAITING, Now(), None, []
            draft.save()
        return draft


def run_next_replay() -> bool:
    """Replay the draft that waits longest, unless a replay runs. Return whether there was one.

    A replay whose worker dies fails after `MOST_TIME`; its owner may start it again. A late result is dropped.
    """
    draft = _claim_replay()
    if draft is None:
        return False
    outcome: dict[str, Any] = {"state": State.FAILED}
    try:
        configs = {"live": snapshot.current(), "draft": build_draft_snapshot(draft)}
        until = sql.now()
        # The replica holds all that happened before the replay's window ends, or the primary answers.
        result = replica.read_from_replica(
            lambda age: replay_events(configs, choose_window(until - timedelta(days=DAYS), until)),
            after=replica.read_primary_position(), wait=REPLICA_WAIT,
        )  # fmt: skip
        outcome = {"state": State.DONE, "result": result}
    except (AftertouchError, InvalidText) as error:
        outcome["problems"] = [ErrorText.dump(str(each)) for each in getattr(error, "errors", [error])]
    except Exception as error:
        outcome["problems"] = [ErrorText.dump(f"{type(error).__name__}: {error}"[:2000])]
        log.exception("replay_failed", draft=draft.pk)
    mine = ConfigDraft.objects.filter(pk=draft.pk, state=State.RUNNING, state_at=draft.state_at)
    if not mine.update(**outcome, state_at=Now()):
        log.info("replay_outdated", draft=draft.pk)
    return True


def _claim_replay() -> ConfigDraft | None:
    """Claim one replay. The locks on all candidates ensure that one runs at a time: it occupies a worker process."""
    with transaction.atomic():
        at, drafts = sql.now(), ConfigDraft.objects
        running = drafts.filter(state=State.RUNNING)
        candidates = drafts.select_for_update(of=("self",)).filter(state__in=(State.WAITING, State.RUNNING))
        waiting = [each for each in candidates.order_by("state_at") if each.state == State.WAITING]
        lost = running.filter(state_at__lte=at - MOST_TIME)
        lost.update(state=State.FAILED, state_at=at, problems=[ErrorText.dump(LOST)])
        if not waiting or running.exists():
            return None
        draft = waiting[0]
        draft.state, draft.state_at = State.RUNNING, at
        draft.save(update_fields=["state", "state_at"])
        return draft


def build_draft_snapshot(draft: ConfigDraft) -> Snapshot:
    """Return the configuration that publishing would make. For that moment no other user can edit.

    Raises:
        Conflict: another user edits at the same moment, or edited the same rows.
    """
    with _rolled_back():
        _store_edits(draft, Stamp("replay"))
        return snapshot.load_snapshot(())


# --- publication ---


def publish_draft(draft_id: int, seen: str, actor: Actor, *, move_waiting: bool = False) -> MoveCounts | None:
    """Store the edits of a replayed draft, with the actor and reason in the history of each row. Delete the draft.

    Return the moved touches; None if none were to move.

    Raises:
        Conflict: the draft changed or was published, is not replayed, or another user edited the same rows.
        InvalidConfiguration: the draft does not fit the live configuration any more.
    """
    with transaction.atomic():
        draft = _lock_draft(seen, pk=draft_id)
        if draft.state != State.DONE:
            raise Conflict(NOT_REPLAYED)
        planned = _store_edits(draft, Stamp(actor.reason, actor.user))
        draft.delete()
    if not move_waiting:
        return None
    try:
        return rescheduling.move_after_plan(planned, PAGE_TIME_LIMIT)
    except Error:  # the draft is live in any case
        log.exception("reschedule_failed", draft=draft_id)
        return MoveCounts(broken=True)
