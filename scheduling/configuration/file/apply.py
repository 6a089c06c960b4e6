"""Read a configuration file, compare it with the database, and store all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.db import OperationalError, connection, transaction

from scheduling.audit.audit_log import record_action
from scheduling.configuration.file.base import Change, Stamp
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.schema import FileProblem
from scheduling.configuration.file.sections import RESERVED, sections
from scheduling.error_text import ErrorText as _
from scheduling.errors import AftertouchError, Conflict
from scheduling.models import Configuration

VERSION = 1


class InvalidConfiguration(AftertouchError):
    """The file cannot be applied."""

    def __init__(self, problems: Sequence[FileProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


@dataclass(frozen=True)
class ChangePlan:
    """The changes of a file, in the order of storage."""

    changes: Sequence[Change]
    notes: Sequence[str]
    given: frozenset[str]  #: sections that the file contains

    def of(self, name: str) -> list[Change]:
        return [change for change in self.changes if change.section.name == name]

    def only_additions(self) -> ChangePlan:
        """Return the plan without changes and retirements of existing rows."""
        return self.only([each for each in self.changes if each.verb in ("added", "restored")])

    def only(self, changes: Sequence[Change]) -> ChangePlan:
        return ChangePlan(changes, self.notes, self.given)


def plan_changes(document: Mapping[str, Any]) -> ChangePlan:
    """Compare a file with the stored configuration. Reads only.

    Raises:
        InvalidConfiguration: with every problem of the file.
    """
    known = sections()
    draft = Draft(document, known)
    _check_top_level(draft)
    changes = [
        change
        for name, section in known.items()
        if name in document
        for change in section.changes(document[name], draft)
    ]
    for problem in _find_used_retirements(draft, changes):
        draft.problems.append(problem)
    if draft.problems:
        raise InvalidConfiguration(draft.problems)
    return ChangePlan(changes, draft.notes, frozenset(document.keys() & known.keys()))


def _check_top_level(draft: Draft) -> None:
    version = draft.document.get("version", VERSION)
    if version != VERSION or isinstance(version, bool):
        draft.problem("version", _("must be %(version)s", version=VERSION))
    for name in draft.document.keys() - draft.sections.keys() - {"version"}:
        if name in RESERVED:
            draft.problem(name, _("this section needs app “%(app)s”, which is not installed", app=RESERVED[name]))
        else:
            draft.problem(
                name, _("is not known here; known are %(known)s", known=", ".join(["version", *draft.sections]))
            )


def _find_used_retirements(draft: Draft, changes: Sequence[Change]) -> Iterator[FileProblem]:
    """Yield rows that the file retires although a section outside the file refers to them."""
    retired = {(each.section.name, each.label) for each in changes if each.verb == "retired"}
    absent = [section for name, section in draft.sections.items() if name not in draft.document]
    for section in absent if retired else ():
        for user, name, key in dict.fromkeys(section.list_references(draft)):
            if (name, key) in retired:
                noun = draft.sections[name].noun
                yield FileProblem(
                    name,
                    _(
                        "%(noun)s “%(key)s” is not listed, but %(other)s “%(user)s” still uses it",
                        noun=noun,
                        key=key,
                        other=section.noun,
                        user=user,
                    ),
                )


def store_plan(document: Mapping[str, Any], planned: ChangePlan, stamp: Stamp) -> None:
    """Store a plan in one transaction.

    Raises:
        Conflict: another transaction changed the same rows since the plan, or locks the tables for 10 s.
    """
    with hold_sections(planned.given):
        fresh = plan_changes(document)
        if [each.signature for each in fresh.changes] != [each.signature for each in planned.changes]:
            raise Conflict(_("another user changed the configuration at the same time; nothing was stored, try again"))
        _write_changes(fresh.changes, stamp)


def store_additions(document: Mapping[str, Any], stamp: Stamp) -> ChangePlan:
    """Store the rows that do not exist yet and return them. Existing rows stay unchanged. Idempotent."""
    return store_chosen(document, ChangePlan.only_additions, stamp)


def store_chosen(document: Mapping[str, Any], choose: Callable[[ChangePlan], ChangePlan], stamp: Stamp) -> ChangePlan:
    """Store the part of the plan that `choose` returns, and return it."""
    with transaction.atomic():
        lock_sections(document)
        part = choose(plan_changes(document))
        _write_changes(part.changes, stamp)
    return part


@contextmanager
def hold_sections(given: Collection[str]) -> Iterator[None]:
    """Run the block in a transaction in which no other user edits these sections.

    Raises:
        Conflict: another transaction locks the tables for 10 s.
    """
    try:
        with transaction.atomic():
            lock_sections(given)
            yield
    except OperationalError as error:
        raise Conflict(
            _("another user edits the configuration; nothing was stored, try again (%(error)s)", error=error)
        ) from error


def _write_changes(changes: Sequence[Change], stamp: Stamp) -> None:
    for change in changes:
        change.section.store(change, stamp)
    if changes:
        record_action(
            "published", (Configuration._meta.label_lower, 1), reason=stamp.reason, label=stamp.reason,
            actor=stamp.author,
            changes=[(f"{each.section.name} {each.label}", None, each.verb) for each in changes],
        )  # fmt: skip


def lock_sections(given: Collection[str]) -> None:
    """Block writes to the tables of these sections until the transaction ends. Reads continue. Waits at most 10 s."""
    locked = (section for name, section in sections().items() if name in given)
    names = [connection.ops.quote_name(model._meta.db_table) for section in locked for model in section.tables]
    if names:
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = '10s'")
            cursor.execute(f"LOCK TABLE {', '.join(sorted(names))} IN SHARE ROW EXCLUSIVE MODE")
