"""Read a configuration file, compare it with the database, and store all of it or nothing; export what is stored.

The stored configuration has a version, so that a client publishes on top of the one that it has read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.db import OperationalError, connection, transaction
from django.utils.crypto import salted_hmac

from scheduling import sql
from scheduling.audit import record_action
from scheduling.configuration.file.section import Change, Plan, Stamp
from scheduling.configuration.file.sections import sections
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, ErrorCollector, FieldError, InvalidInput
from scheduling.models import Configuration
from scheduling.models.encrypted import Unreadable
from scheduling.strict_text import MAX_SIZE, InvalidText, read_yaml

VERSION = 1  #: of the format
LOCK_WAIT = 10.0  #: seconds
_LOCK = "SELECT pg_advisory_xact_lock(hashtext('scheduling_configuration.document'))::text"


def parse_document(raw: bytes) -> dict[str, Any]:
    """Parse a configuration file of at most `MAX_SIZE` bytes.

    Raises:
        InvalidText: with the line, if it is known.
    """
    if len(raw) > MAX_SIZE:
        raise InvalidText(_("the file must not be larger than %(most)s bytes", most=MAX_SIZE))
    try:
        document = read_yaml(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InvalidText(_("the file must be UTF-8")) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise InvalidText(_("the file must be a mapping of sections"))
    return document


def export_document(names: Iterable[str] = (), *, with_secrets: bool = False) -> dict[str, Any]:
    """Export these sections, or all, as of one moment: an edit of several sections is in the export or is not.

    Inside a transaction of the caller, locks must keep others from editing these sections.
    """
    document: dict[str, Any] = {"version": VERSION}
    is_own = not connection.in_atomic_block
    with transaction.atomic():
        if is_own:
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        for name in names or sections():
            given = sections()[name].export(with_secrets=with_secrets)
            if given is not None:
                document[name] = given
    return document


class InvalidConfiguration(InvalidInput):
    """The file cannot be applied. Fields are places: `nodes[2].template`."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))


@dataclass(frozen=True)
class ChangePlan:
    """The changes of a file, in the order of storage."""

    changes: Sequence[Change]
    notes: Sequence[str]
    given: frozenset[str]  #: sections that the file contains

    def of(self, name: str) -> list[Change]:
        return [change for change in self.changes if change.section.name == name]

    def only(self, changes: Sequence[Change]) -> ChangePlan:
        return ChangePlan(changes, self.notes, self.given)

    def without_existing(self) -> ChangePlan:
        """Return the part that leaves rows in use unchanged."""
        return self.only([each for each in self.changes if each.verb in ("added", "restored")])

    def confirm(self, fresh: ChangePlan) -> ChangePlan:
        """Return a later plan of the same file, if it has the same changes.

        Raises:
            Conflict: another user changed the same rows in between.
        """
        if [each.signature for each in fresh.changes] != [each.signature for each in self.changes]:
            raise Conflict(_("another user changed the configuration at the same time; nothing was stored, try again"))
        return fresh


def plan_changes(document: Mapping[str, Any]) -> ChangePlan:
    """Compare a file with the stored configuration. Reads only, with a number of queries that rows do not change.

    Raises:
        InvalidConfiguration: with the errors of the first wrong entry.
    """
    plan = Plan(document, sections())
    try:
        _check_top_level(plan)
        given = [section for name, section in plan.sections.items() if name in document]
        for section in given:
            plan.listed[section.name] = section.read(document[section.name], plan)
        for section in given:
            section.check([*plan.listed[section.name].values()], plan)
        changes = [change for section in given for change in section.list_changes(plan)]
    except InvalidInput as error:
        raise InvalidConfiguration(*error.errors) from None
    _check_retirements(plan, changes)
    return ChangePlan(changes, plan.notes, frozenset(plan.listed))


def _check_top_level(plan: Plan) -> None:
    found = ErrorCollector()
    version = plan.document.get("version", VERSION)
    if version != VERSION or isinstance(version, bool):
        found.add("version", _("must be %(version)s", version=VERSION))
    known = ", ".join(["version", *plan.sections])
    for name in plan.document:
        if name not in plan.sections and name != "version":
            found.add(name, _("is not known here; known are %(known)s", known=known))
    found.raise_if_any()


def _check_retirements(plan: Plan, changes: Sequence[Change]) -> None:
    """Refuse to retire a row to which a row refers that the file does not list."""
    retired = {(each.section.model, each.label) for each in changes if each.verb == "retired"}
    models = {model for model, _label in retired}
    found: list[FieldError] = []
    for section in plan.sections.values():
        for row in plan.unlisted(section) if any(map(section.may_refer_to, models)) else ():
            for _place, model, key in section.list_references(row):
                if (model, key) in retired:
                    owner = plan.section_of[model]
                    message = _(
                        "%(noun)s “%(key)s” is not listed, but %(other)s “%(user)s” still uses it",
                        noun=_(owner.noun), key=key, other=_(section.noun), user=section.label(row),
                    )  # fmt: skip
                    found.append(FieldError(owner.name, message))
    if found:
        raise InvalidConfiguration(*dict.fromkeys(found))


class Busy(Conflict):
    """Another transaction holds the rows of these sections."""


@contextmanager
def edit_sections(names: Collection[str]) -> Iterator[None]:
    """Run the block in a transaction in which no other user edits these sections or stores a file. Reads continue.

    Files are stored one after another, so that of two clients with one version the second is refused, whatever
    sections they give. The locks of the tables keep edits of the back office from coming between the comparison and
    the writes.

    Raises:
        Busy: another transaction holds a lock for 10 s.
    """
    tables = {
        connection.ops.quote_name(model._meta.db_table)
        for name, section in sections().items() if name in names for model in section.tables
    }  # fmt: skip
    try:
        with transaction.atomic():
            sql.limit_lock_waits(LOCK_WAIT)
            sql.rows(_LOCK, {})
            if tables:
                with connection.cursor() as cursor:
                    cursor.execute(f"LOCK TABLE {', '.join(sorted(tables))} IN SHARE ROW EXCLUSIVE MODE")
            yield
    except OperationalError as error:
        raise Busy(
            _("another user edits the configuration; nothing was stored, try again (%(error)s)", error=error)
        ) from error


def store_document(document: Mapping[str, Any], stamp: Stamp, choose: Callable[[ChangePlan], ChangePlan]) -> ChangePlan:
    """Store the part of a file's changes that `choose` returns, in one transaction. Return it.

    Raises:
        InvalidConfiguration: the file cannot be applied.
        Busy: another transaction holds a lock for 10 s.
    """
    with edit_sections(document):
        part = choose(plan_changes(document))
        _write_changes(part.changes, stamp)
    return part


def _write_changes(changes: Sequence[Change], stamp: Stamp) -> None:
    for change in changes:
        change.section.store(change, stamp)
    if changes:
        record_action(
            "published", (Configuration._meta.label_lower, 1), reason=stamp.reason, label=stamp.reason,
            actor=stamp.author,
            changes=[(f"{each.section.name} {each.label}", None, each.verb) for each in changes],
        )  # fmt: skip


# --- versions ---


class OutdatedVersion(Conflict):
    """The configuration changed after this version was read."""


def compute_version() -> str:
    """Return the version of the stored configuration. The same content has the same version.

    It covers secrets. A key of this installation keeps readers of the version from guessing them.

    Raises:
        Conflict: a stored secret cannot be read here.
    """
    return _name_version(_export_secrets())


def _export_secrets(names: Iterable[str] = ()) -> dict[str, Any]:
    try:
        return export_document(names, with_secrets=True)
    except Unreadable as error:
        raise Conflict(str(error)) from error


def _name_version(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True)
    return salted_hmac("scheduling.configuration.version", text, algorithm="sha256").hexdigest()[:32]


def publish_document(
    document: Mapping[str, Any],
    stamp: Stamp,
    expected: str | None,
    check: Callable[[ChangePlan], object],
    *,
    may_repeat: bool = False,
) -> tuple[ChangePlan, str]:
    """Store a document; return its changes and the new version, without edits of other sections during the publication:
    the client has not read them, and its next publication must be refused.

    `check` raises what it has against the plan. With `may_repeat` a document that is stored already is accepted with
    any version: the client repeats its publication.

    Raises:
        OutdatedVersion: the stored version is not `expected`; None expects any. Nothing was stored.
        Conflict: a stored secret cannot be read here.
        InvalidConfiguration: the document cannot be applied.
        Busy: another transaction holds a lock for 10 s.
    """
    with edit_sections(document):
        # With any version expected, too: no row is overwritten or retired whose secret cannot be read here.
        before = _export_secrets()
        is_outdated = expected not in (_name_version(before), None)
        if is_outdated and not may_repeat:  # it may also be invalid because of what it does not know
            raise OutdatedVersion
        planned = plan_changes(document)
        if is_outdated and planned.changes:
            raise OutdatedVersion
        check(planned)
        _write_changes(planned.changes, stamp)
        after = before | _export_secrets(planned.given) if planned.given else before
        return planned, _name_version(after)
