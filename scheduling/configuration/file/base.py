"""What a section of the file is. Other apps add theirs with `settings.CONFIG_SECTIONS`; most derive `RowSection`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from django.db.models import Model

from scheduling.configuration.file.schema import Field

if TYPE_CHECKING:
    from scheduling.configuration.file.draft import Draft

Verb = Literal["added", "restored", "changed", "retired"]
KEPT = "(kept)"  #: in the place of a secret: leave what is stored
HIDDEN = "(secret)"  #: in the place of a secret in what is printed


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of one row, as the file would write it before and after. Secrets are hidden already."""

    path: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Change:
    """What the file makes of one row."""

    section: Section
    verb: Verb
    label: str
    differences: Sequence[Difference] = ()
    values: Mapping[str, Any] = field(default_factory=dict)  #: by column; nothing for a row that is retired
    before: Mapping[str, Any] = field(default_factory=dict)
    row: Any = None  #: the stored row, None where it is added

    @property
    def signature(self) -> tuple[Any, ...]:
        """The same for the same change to the same row."""
        return (self.section.name, self.verb, self.label, self.values, self.before, self.row and self.row.pk)


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who changes rows and why, for their history."""

    reason: str
    actor: Any = None  #: a user, or None for the command line

    def on(self, row: Any) -> None:
        row._change_reason = self.reason[:100]
        if self.actor is not None:
            row._history_user = self.actor


class Section:
    """One section. Stateless: what is being read lies in the draft."""

    name: ClassVar[str]
    noun: ClassVar[str]  #: one of its rows, for people: "template"
    tables: ClassVar[tuple[type[Model], ...]]  #: locked while changes are stored
    fields: ClassVar[tuple[Field, ...]] = ()

    def claimed(self, given: Any) -> set[str]:
        """The keys that the file lists, right or wrong otherwise, for references from other sections."""
        return set()

    def stored(self) -> list[Any]:
        """The rows there are, the retired ones too."""
        raise NotImplementedError

    def changes(self, given: Any, draft: Draft) -> list[Change]:
        """Read the section, note problems in the draft, and compare with what is stored."""
        raise NotImplementedError

    def store(self, change: Change, stamp: Stamp) -> None:
        """Write one change. What it refers to has been written before."""
        raise NotImplementedError

    def export(self, *, with_secrets: bool) -> Any:
        """The section as the file would say it, None to leave it out."""
        raise NotImplementedError
