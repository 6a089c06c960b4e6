"""Collect edits in the open draft of a user, and start its replay.

Every write locks the draft's row. A write for a page names the draft that the page showed and is refused if another
page changed it since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from django.core.exceptions import ObjectDoesNotExist
from django.db import IntegrityError, transaction
from django.db.models import Model

from scheduling.configuration.file import apply, document
from scheduling.configuration.file.apply import InvalidConfiguration
from scheduling.configuration.file.base import Change, Stamp
from scheduling.configuration.file.schema import FileProblem
from scheduling.configuration.file.sections import sections
from scheduling.errors import Conflict
from scheduling.experiments.replay import merging, runs
from scheduling.models import ConfigDraft, Replay
from scheduling.operations.failed_tasks import Actor

BUSY = "another user edits the configuration at the same moment; try again"
CHANGED = "the draft changed after you opened the page; reload the page"
OUTDATED = "the live configuration changed after the draft was started; rebase the draft first"
NEEDED = "another change of the draft needs this one; remove that one first"


@dataclass(frozen=True, slots=True)
class DraftReview:
    """A draft beside the live configuration."""

    draft: ConfigDraft
    seen: str  #: names this content of the draft in later writes
    is_outdated: bool  #: the live configuration changed since; `changes` are those after a rebase
    changes: Sequence[Change]
    problems: Sequence[FileProblem]


def is_draftable(model: type[Model]) -> bool:
    """Return whether a draft can hold edits of these rows."""
    known = sections()
    return any(model in known[name].tables for name in runs.list_draft_sections())


def find_draft(user: Any) -> ConfigDraft | None:
    return ConfigDraft.objects.filter(owner=user).first()


def review_draft(draft: ConfigDraft) -> DraftReview:
    live = runs.export_live_draft()
    text = _rebase_text(draft, live) if (outdated := live != draft.base) else draft.document
    try:
        changes, problems = runs.read_draft(text)[1].changes, ()
    except InvalidConfiguration as error:
        return DraftReview(draft, compute_seen(draft), outdated, (), error.problems)
    return DraftReview(draft, compute_seen(draft), outdated, changes, problems)


def compute_seen(draft: ConfigDraft | None) -> str:
    return sha256(f"{draft.base}\0{draft.document}".encode()).hexdigest() if draft else ""


class _EditRollback(Exception):
    """Rolls the transaction back."""


TRIES = 3


def capture_edit(user: Any, save: Callable[[], bool]) -> bool:
    """Call `save`, add to the draft what it changes in the live configuration, and roll it back.

    Return False if `save` returns False, as for an invalid form, or changes nothing that a draft holds.

    Raises:
        Conflict: another user edits at the same moment. An edit committed during `save` would seem part of it.
    """
    for _ in range(TRIES):
        before, after = runs.export_live_draft(), ""
        try:
            with transaction.atomic():
                if save():
                    after = runs.export_live_draft()
                raise _EditRollback
        except _EditRollback:
            pass
        if not after or after == before:
            return False
        if runs.export_live_draft() == before:
            _add_edit(user, before, after)
            return True
    raise Conflict(BUSY)


def _add_edit(user: Any, before: str, after: str) -> None:
    """Merge an edit into the draft. A publication or discard may delete the draft between its creation and its lock."""
    draft = None
    while draft is None:
        with transaction.atomic():
            ConfigDraft.objects.get_or_create(owner=user, defaults={"base": before, "document": before})
            draft = ConfigDraft.objects.select_for_update().filter(owner=user).first()
            if draft is not None:
                draft.document = _merge_texts(before, after, draft.document)
                draft.save(update_fields=["document"])


def _merge_texts(base: str, edited: str, onto: str) -> str:
    given = [document.parse_document(each.encode()) for each in (base, edited, onto)]
    return document.format_document(merging.merge_documents(*given))


def _rebase_text(draft: ConfigDraft, live: str) -> str:
    return _merge_texts(draft.base, draft.document, live)


def rebase_draft(user: Any, seen: str) -> None:
    """Put the edits of the draft on top of the live configuration.

    Raises:
        Conflict: another page changed the draft.
    """
    with transaction.atomic():
        draft, live = _lock_draft(user, seen), runs.export_live_draft()
        draft.document, draft.base = _rebase_text(draft, live), live
        draft.save(update_fields=["document", "base"])


def replace_text(user: Any, text: str, seen: str) -> ConfigDraft | None:
    """Store a text as the draft and return it; None if there is no draft and the text is the live configuration.

    Raises:
        Conflict: another page changed or opened the draft.
    """
    with transaction.atomic():
        if seen:
            draft = _lock_draft(user, seen)
            draft.document = text
            draft.save(update_fields=["document"])
            return draft
        live = runs.export_live_draft()
        if text == live:
            return None
        draft, is_new = ConfigDraft.objects.get_or_create(owner=user, defaults={"base": live, "document": text})
        if not is_new:
            raise Conflict(CHANGED)
        return draft


def drop_change(user: Any, position: int, seen: str) -> None:
    """Remove one change, by its place in the plan. A draft without changes is deleted.

    Raises:
        Conflict: the draft or the live configuration changed, or another change needs this one.
    """
    with transaction.atomic():
        draft = _lock_draft(user, seen)
        draft.document = _export_without(draft, position)
        if draft.document == draft.base:
            draft.delete()
        else:
            draft.save(update_fields=["document"])


def _export_without(draft: ConfigDraft, position: int) -> str:
    """Store the other changes, export them and roll back."""
    given, texts = runs.read_draft(draft.document)[0], []
    try:
        with transaction.atomic():
            if runs.export_live_draft() != draft.base:
                raise Conflict(OUTDATED)
            apply.store_chosen(given, lambda planned: planned.without_change(position), Stamp("draft"))
            texts.append(runs.export_live_draft())
            raise _EditRollback
    except _EditRollback:
        pass
    except (ObjectDoesNotExist, IntegrityError):
        raise Conflict(NEEDED) from None
    try:
        runs.read_draft(texts[0])
    except InvalidConfiguration:
        raise Conflict(NEEDED) from None
    return texts[0]


def discard_open_draft(user: Any) -> None:
    ConfigDraft.objects.filter(owner=user).delete()


def replay_open_draft(user: Any, days: int, seen: str, actor: Actor) -> Replay:
    """Start the replay of a user's draft. The draft stays open until the replay is published.

    Raises:
        Conflict: the draft or the live configuration changed, or too many replays wait.
        InvalidConfiguration: the draft is wrong.
    """
    with transaction.atomic():
        draft = _lock_draft(user, seen)
        if runs.export_live_draft() != draft.base:
            raise Conflict(OUTDATED)
        return runs.create_replay(draft.document, days, actor)


def _lock_draft(user: Any, seen: str) -> ConfigDraft:
    draft = ConfigDraft.objects.select_for_update().filter(owner=user).first()
    if draft is None or compute_seen(draft) != seen:
        raise Conflict(CHANGED)
    return draft
