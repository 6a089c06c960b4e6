"""Hold one configuration file during reading: its sections, the stored rows and all problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scheduling.configuration.file.base import Section
from scheduling.configuration.file.schema import Field, FileProblem
from scheduling.error_text import ErrorText as _


class Draft:
    def __init__(self, document: Mapping[str, Any], sections: Mapping[str, Section]) -> None:
        self.document = document
        self.sections = sections
        self.problems: list[FileProblem] = []
        self.notes: list[str] = []
        self._found: dict[str, Any] = {}

    def problem(self, path: str, message: str) -> None:
        self.problems.append(FileProblem(path, message))

    def has_problem(self, path: str) -> bool:
        """Return whether there is a problem at `path` or below it."""
        return any(each.path == path or each.path.startswith((f"{path}.", f"{path}[")) for each in self.problems)

    def note(self, text: str) -> None:
        """Add a remark about something that is allowed and may be a mistake."""
        if text not in self.notes:
            self.notes.append(text)

    def rows(self, name: str) -> list[Any]:
        """Return the stored rows of a section, read once per draft."""
        rows: list[Any] = self.once(f"rows of {name}", self.sections[name].stored)
        return rows

    def once(self, what: str, find: Callable[[], Any]) -> Any:
        """Return the result of `find`, computed once per draft."""
        if what not in self._found:
            self._found[what] = find()
        return self._found[what]

    def keys(self, name: str) -> set[str]:
        """Return the active keys of a section as of after the file is applied."""
        keys: set[str] = self.once(f"keys of {name}", lambda: self._keys(name))
        return keys

    def _keys(self, name: str) -> set[str]:
        if name in self.document:
            return self.sections[name].claimed(self.document[name])
        return {row.key for row in self.rows(name) if row.retired_at is None}

    def check_references(self, fields: tuple[Field, ...], values: Mapping[str, Any], path: str) -> None:
        for field in fields:
            key = values.get(field.name)
            if field.refers and key is not None and key not in self.keys(field.refers):
                noun = self.sections[field.refers].noun
                self.problem(f"{path}.{field.path}", _("there is no %(noun)s “%(name)s”", noun=noun, name=key))
