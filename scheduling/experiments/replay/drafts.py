"""Collect edits in the draft of a user, replay past events under it, and publish it.

The draft and the live configuration meet in a transaction that is rolled back: the edits of the draft are stored over
the live rows, and the result is read. Edits that other users made since stay. A row that both edited is a conflict.
Every write locks the draft's row and names the content that its page showed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any

import structlog
from django.core.exceptions import ObjectDoesNotExist
from django.db import Error, IntegrityError, transaction
from django.db.models import Model
from django.db.models.functions import Now

from scheduling import replica, sql
from scheduling.configuration import snapshot
from scheduling.configuration.file import apply, document
from scheduling.configuration.file.apply import ChangePlan, InvalidConfiguration
from scheduling.configuration.file.base import Change, Stamp
from scheduling.configuration.file.document import InvalidDocument
from scheduling.configuration.file.schema import FileProblem
from scheduling.configuration.file.sections import sections
from scheduling.configuration.snapshot import Snapshot
from scheduling.error_text import ErrorText
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict
from scheduling.experiments.replay import history
from scheduling.experiments.replay.results import replay_events
from scheduling.models import ConfigDraft, Node
from scheduling.operations.failed_tasks import Actor
from scheduling.operations.undo import Reversal, offer_undo
from scheduling.planning import rescheduling
from scheduling.planning.rescheduling import PAGE_TIME_LIMIT, MoveCounts

log = structlog.get_logger(__name__)

#: The most edited sections come first.
SECTIONS = ("nodes", "delay_rules", "harassment_rules", "holdout", "calendars", "stages", "templates")
#: Sections that a draft may change and a replay ignores. Their app may not be installed.
NOT_SIMULATED = ("silence_policies",)

CHANGED = _("The draft changed after you opened the page. Reload the page.")
CLASH = _("Another user edited the same rows since the draft was started. Open your draft and resolve the conflict.")
NEEDED = _("This does not fit another change of the draft. Remove that one first.")
NOT_REPLAYED = _("The draft has not been replayed.")
LOST = _("The worker of this replay was lost. Start the replay again.")
State = ConfigDraft.State


# --- texts ---


def list_draft_sections() -> list[str]:
    return [name for name in (*SECTIONS, *NOT_SIMULATED) if name in sections()]


def is_draftable(model: type[Model]) -> bool:
    """Return whether a draft can hold edits of these rows."""
    return any(model in sections()[name].tables for name in list_draft_sections())


def export_live_draft() -> str:
    """Return the live configuration as a draft without changes."""
    known = sections()
    with transaction.atomic():
        given = {name: known[name].export(with_secrets=False) for name in list_draft_sections()}
    return document.format_document(
        {"version": apply.VERSION} | {name: each for name, each in given.items() if each is not None}
    )


def read_draft(text: str) -> tuple[dict[str, Any], ChangePlan]:
    """Return the draft and the changes from the live configuration to it.

    Raises:
        InvalidDocument: the text cannot be parsed.
        InvalidConfiguration: with all problems of the draft.
    """
    given = document.parse_document(text.encode())
    allowed = list_draft_sections()
    foreign = [name for name in given if name not in (*allowed, "version") and name in sections()]
    if foreign:
        known = ", ".join(allowed)
        problem = _("a draft cannot change this; allowed: %(known)s", known=known)
        problems = [FileProblem(name, problem) for name in foreign]
        raise InvalidConfiguration(problems)
    return given, apply.plan_changes(given)


def serialize_change(change: Change) -> dict[str, Any]:
    differences = [{"path": each.path, "before": each.before, "after": each.after} for each in change.differences]
    return {
        "section": change.section.name, "verb": change.verb, "label": change.label, "differences": differences,
    }  # fmt: skip


# --- the edits of a draft ---


@dataclass(frozen=True, slots=True)
class DraftReview:
    """The edits of a draft, without those that other users made since."""

    changes: Sequence[Change] = ()
    conflicts: Sequence[Change] = ()  #: those of `changes` whose row another user edited too
    problem: InvalidConfiguration | None = None


def review_draft(draft: ConfigDraft) -> DraftReview:
    try:
        return DraftReview(*_separate_edits(draft, read_draft(draft.document)[1].changes))
    except InvalidConfiguration as error:
        return DraftReview(problem=error)


def check_conflicts(draft: ConfigDraft) -> None:
    """Raise `Conflict` if another user edited rows of the draft, `InvalidConfiguration` if the draft is wrong."""
    review = review_draft(draft)
    if review.problem:
        raise review.problem
    if review.conflicts:
        raise Conflict(CLASH)


def _separate_edits(draft: ConfigDraft, changes: Sequence[Change]) -> tuple[list[Change], list[Change]]:
    """Return the draft's own edits among the changes to its text, and those of them that are in conflict.

    The other changes would only take back what others edited since the draft was started.

    Raises:
        InvalidConfiguration: what the draft started from does not fit the live configuration any more.
    """
    live = export_live_draft()
    if live == draft.base:
        return list(changes), []
    # A section of which nothing was stored then gets its defaults.
    sections_then: dict[str, Any] = {name: {} for name in document.parse_document(live.encode())}
    back = apply.plan_changes(sections_then | document.parse_document(draft.base.encode())).changes
    signatures, rows = [each.signature for each in back], [_identify_row(each) for each in back]
    own = [each for each in changes if each.signature not in signatures]
    return own, [each for each in own if _identify_row(each) in rows]


def _identify_row(change: Change) -> tuple[str, object]:
    return change.section.name, change.row.pk if change.row else change.label


def _store_edits(draft: ConfigDraft, stamp: Stamp) -> ChangePlan:
    """Store the edits of the draft over the live configuration.

    Raises:
        Conflict: another user edited the same rows since, or edits at the same moment.
        InvalidConfiguration: the draft does not fit the live configuration.
    """

    def choose(plan: ChangePlan) -> ChangePlan:
        own, conflicts = _separate_edits(draft, plan.changes)
        if conflicts:
            raise Conflict(CLASH)
        return plan.only(own)

    with apply.hold_sections(list_draft_sections()):
        return apply.store_chosen(read_draft(draft.document)[0], choose, stamp)


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
        with _rolled_back(), apply.hold_sections(list_draft_sections()):
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
    models = [model for name in list_draft_sections() for model in sections()[name].tables]
    return {(model, row[model._meta.pk.attname]): row for model in models for row in model._default_manager.values()}


def _write_rows(before: Rows, after: Rows) -> None:
    try:
        for (model, pk), row in after.items():
            was = before.get((model, pk))
            if was is None:
                model._default_manager.bulk_create([model(**row)])
                continue
            changed = {name: value for name, value in row.items() if value != was[name]}
            if changed and not model._default_manager.filter(pk=pk).update(**changed):
                raise Conflict(NEEDED)  # the draft deletes the row
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


def remove_changes(user: Any, seen: str, row: tuple[str, str] | None = None) -> None:
    """Remove the change of the row with this section and label from the draft; without one, all that are in conflict.

    The draft starts from the live configuration of now. A draft without changes is deleted.

    Raises:
        Conflict: the draft changed, another change needs this one, or conflicts are left.
    """
    with transaction.atomic():
        draft = _lock_draft(seen, owner=user)

        def choose(plan: ChangePlan) -> ChangePlan:
            own, conflicts = _separate_edits(draft, plan.changes)
            if row and conflicts:
                raise Conflict(CLASH)
            return plan.only([each for each in own if (each.section.name, each.label) != row and each not in conflicts])

        try:
            with _rolled_back(), apply.hold_sections(list_draft_sections()):
                live = export_live_draft()
                apply.store_chosen(read_draft(draft.document)[0], choose, Stamp("draft"))
                text = export_live_draft()
            read_draft(text)
        except (ObjectDoesNotExist, IntegrityError, InvalidConfiguration):
            raise Conflict(NEEDED) from None
        _store_text(draft, live, text)


def discard_draft(user: Any) -> None:
    ConfigDraft.objects.filter(owner=user).delete()


# --- replay ---

DAYS = 7
MOST_TIME = timedelta(
    minutes=10
)  #: a replay takes less than a minute, its events are bounded; later its worker counts as lost
REPLICA_WAIT = 5.0  #: seconds for a read replica to hold all events of the window


def request_replay(user: Any, seen: str) -> ConfigDraft:
    """Let a worker replay the draft. Idempotent while a replay waits or runs.

    Raises:
        Conflict: the draft changed, or another user edited the same rows.
        InvalidConfiguration: the draft is wrong.
    """
    with transaction.atomic():
        draft = _lock_draft(seen, owner=user)
        check_conflicts(draft)
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
        outcome = {"state": State.DONE, "result": _replay_draft(draft)}
    except InvalidConfiguration as error:
        outcome["problems"] = [ErrorText.dump(str(each)) for each in error.problems]
    except (InvalidDocument, Conflict) as error:
        outcome["problems"] = [ErrorText.dump(str(error))]
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
        at = sql.now()
        running = ConfigDraft.objects.filter(state=State.RUNNING)
        candidates = ConfigDraft.objects.select_for_update(of=("self",)).filter(
            state__in=(State.WAITING, State.RUNNING)
        )
        waiting = [each for each in candidates.order_by("state_at") if each.state == State.WAITING]
        lost = running.filter(state_at__lte=at - MOST_TIME)
        lost.update(state=State.FAILED, state_at=at, problems=[ErrorText.dump(LOST)])
        if not waiting or running.exists():
            return None
        draft = waiting[0]
        draft.state, draft.state_at = State.RUNNING, at
        draft.save(update_fields=["state", "state_at"])
        return draft


def _replay_draft(draft: ConfigDraft) -> dict[str, Any]:
    configs = {"live": snapshot.current(), "draft": build_draft_snapshot(draft)}
    until = sql.now()
    # The replica holds all that happened before the replay's window ends, or the primary answers.
    return replica.read_from_replica(
        lambda age: replay_events(configs, history.choose_window(until - timedelta(days=DAYS), until)),
        after=replica.read_primary_position(), wait=REPLICA_WAIT,
    )  # fmt: skip


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
        check_publishable(draft)
        with apply.hold_sections(list_draft_sections()):
            before, active = export_live_draft(), _list_active_nodes()
            planned = _store_edits(draft, Stamp(actor.reason, actor.user))
            # The due times of moved touches cannot be restored exactly. A node that is switched off suppresses touches.
            if actor.user and not move_waiting and active <= _list_active_nodes():
                given = {"before": before, "after": export_live_draft(), "owner": draft.owner_id}
                offer_undo(actor.user, PUBLISH, [draft.pk], label=str(draft), given=given)
        draft.delete()
    if not move_waiting:
        return None
    try:
        return rescheduling.move_after_plan(planned, PAGE_TIME_LIMIT)
    except Error:  # the draft is live in any case
        log.exception("reschedule_failed", draft=draft_id)
        return MoveCounts(broken=True)


def check_publishable(draft: ConfigDraft) -> None:
    """Check what `publish_draft` checks again.

    Raises:
        Conflict: the draft is not replayed, or another user edited the same rows since.
        InvalidConfiguration: the draft does not fit the live configuration any more.
    """
    if draft.state != State.DONE:
        raise Conflict(NOT_REPLAYED)
    check_conflicts(draft)


def _list_active_nodes() -> set[int]:
    return set(Node.objects.filter(enabled=True, retired_at=None).values_list("pk", flat=True))


def restore_before(draft_id: int, actor: Actor, *, before: str, after: str, owner: int) -> None:
    """Take a publication back: store the configuration `before` it through the same checks, and open the draft again.

    Raises:
        Conflict: the configuration is not the one right `after` the publication any more.
        InvalidConfiguration: something outside of the draft now needs what the publication added.
    """
    with apply.hold_sections(list_draft_sections()):
        if export_live_draft() != after:
            raise Conflict(_("the configuration changed since the publication"))
        # A section of which nothing was stored before gets its defaults.
        live, former = (document.parse_document(text.encode()) for text in (after, before))
        given, planned = read_draft(document.format_document({name: {} for name in live} | former))
        apply.store_plan(given, planned, Stamp("undo of a published draft", actor.user))
        ConfigDraft.objects.get_or_create(owner_id=owner, defaults={"base": export_live_draft(), "document": after})


PUBLISH = "draft.publish"
REVERSAL = Reversal(ConfigDraft._meta.label_lower, "scheduling.publish_configdraft", restore_before)
