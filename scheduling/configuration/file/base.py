"""Define a section of the configuration file.

Other apps add sections with `settings.CONFIG_SECTIONS`. Most sections derive from `RowSection`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from django.db.models import Model

from scheduling.configuration.file.schema import Field

if TYPE_CHECKING:
    from scheduling.configuration.file.draft import Draft

Verb = Literal["added", "restored", "changed", "retired"]
KEPT = "(kept)"  #: in place of a secret in a file: keep the stored value
HIDDEN = "(secret)"  #: in place of a secret in printed output


@dataclass(frozen=True, slots=True)
class Difference:
    """One changed field of a row, in the file's notation. Secrets are already hidden."""

    path: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Change:
    """The change that a file makes to one row."""

    section: Section
    verb: Verb
    label: str
    differences: Sequence[Difference] = ()
    values: Mapping[str, Any] = field(default_factory=dict)  #: by column; empty for a retired row
    before: Mapping[str, Any] = field(default_factory=dict)
    row: Any = None  #: stored row; None for an added one

    @property
    def signature(self) -> tuple[Any, ...]:
        """Identify the change: equal for the same change to the same row."""
        return (self.section.name, self.verb, self.label, self.values, self.before, self.row and self.row.pk)


@dataclass(frozen=True, slots=True)
class Stamp:
    """The author and the reason of changes, for the history of rows and the audit log."""

    reason: str
    actor: Any = None  #: a user, or None for the command line and an API client
    client: str = ""  #: `api:<name of the key>`

    @property
    def author(self) -> str:
        return self.actor.get_username() if self.actor else self.client

    def on(self, row: Any) -> None:
        row._change_reason = (f"{self.client}: {self.reason}" if self.client else self.reason)[:100]
        if self.actor is not None:
            row._history_user = self.actor


class Section:
    """One section. Instances have no state; the draft holds what is being read."""

    name: ClassVar[str]
    noun: ClassVar[str]  #: one of its rows, in messages: "template"
    tables: ClassVar[tuple[type[Model], ...]]  #: locked while changes are stored
    fields: ClassVar[tuple[Field, ...]] = ()
    scope: ClassVar[str] = ""  #: that an API key needs beside `config.write` to change it

    def claimed(self, given: Any) -> set[str]:
        """Return the keys that the file lists, valid or not, for references from other sections."""
        return set()

    def stored(self) -> list[Any]:
        """Return all stored rows, retired ones included."""
        raise NotImplementedError

    def list_references(self, draft: Draft) -> Iterator[tuple[str, str, str]]:
        """Yield the name of each active stored row, with the section and the key of each row that it needs."""
        naming = [field for field in self.fields if field.refers in draft.document]
        for row in draft.rows(self.name) if naming else ():
            if row.retired_at is None:
                yield from ((str(row), field.refers, field.of(row)) for field in naming)

    def changes(self, given: Any, draft: Draft) -> list[Change]:
        """Read the section, add problems to the draft, and compare with the stored rows."""
        raise NotImplementedError

    def store(self, change: Change, stamp: Stamp) -> None:
        """Write one change. The rows that it refers to are already written."""
        raise NotImplementedError

    def export(self, *, with_secrets: bool) -> Any:
        """Return the section in the file's notation, or None to leave it out."""
        raise NotImplementedError
