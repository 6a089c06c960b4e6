"""The group `browser` of platforms and shops in a configuration file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from django.db.models import Model

from rpa_tasks.configuration.browser_settings import LISTS, SECRETS, SETTINGS, needs_new_password, normalize_address
from scheduling.configuration.file.base import HIDDEN, KEPT, Difference
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.rows import RowSection
from scheduling.configuration.file.schema import Field, ListOf, Text
from scheduling.configuration.file.secrets import explain_missing_secret, restore_secrets
from scheduling.error_text import ErrorText as _
from scheduling.models.encrypted import Sealed


@dataclass(frozen=True, slots=True)
class Member(Field):
    """A key that is stored as a member of a JSON column."""

    inside: str = ""  #: the column
    member: str = ""

    def of(self, row: Model) -> Any:
        stored = getattr(row, self.inside)
        return stored if isinstance(stored, Sealed) else stored.get(self.member, copy(self.default))

    def put(self, row: Model, value: Any) -> None:
        stored = getattr(row, self.inside)
        others = {} if isinstance(stored, Sealed) else {k: v for k, v in stored.items() if k != self.member}
        setattr(row, self.inside, {**others, self.member: value} if value else others)


BROWSER_FIELDS = (
    *(
        Member(
            f"browser.{path}", ListOf(Text(500)) if name in LISTS else Text(500, empty=True),
            default=[] if name in LISTS else "", inside="browser", member=name,
        )
        for name, path in SETTINGS.items()
    ),
    *(
        Member(f"browser.{path}", Text(255, empty=True), default="", inside="proxy_secret", member=name)
        for name, path in SECRETS.items()
    ),
)  # fmt: skip
SECRET_PATHS = {f"browser.{path}": name for name, path in SECRETS.items()}
PROXY_URL, PASSWORD = f"browser.{SETTINGS['proxy_url']}", f"browser.{SECRETS['password']}"
PROVIDER = f"browser.{SETTINGS['cdp_url']}"


class BrowserSection(RowSection):
    """Section of rows with browser settings. The secrets among them are written as `(kept)`."""

    def read_entry(self, entry: dict[str, Any], position: int, path: str, draft: Draft) -> dict[str, Any]:
        values = super().read_entry(entry, position, path, draft)
        known = all(column in values for column in self.identity)
        row = self.row_of(tuple(values[column] for column in self.identity), draft) if known else None
        stored = row.proxy_secret if row is not None else {}
        given = {name: values[key] for key, name in SECRET_PATHS.items() if key in values}
        if row is not None and KEPT in given.values() and needs_new_password(row, values.get(PROXY_URL, "")):
            draft.problem(f"{path}.{PASSWORD}", _("must be entered with the user name for another proxy"))
            return values
        restored, missing = restore_secrets(given, stored, SECRETS)
        for key, name in SECRET_PATHS.items():
            if name in missing:
                draft.problem(f"{path}.{key}", explain_missing_secret(stored))
            elif name in restored:
                values[key] = restored[name]
        return values

    def fill(self, values: dict[str, Any], position: int, path: str, draft: Draft) -> None:
        super().fill(values, position, path, draft)
        if isinstance(values.get(PROVIDER), str):
            values[PROVIDER] = normalize_address(values[PROVIDER])

    def differences(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[Difference]:
        found = super().differences(before, after)
        return [
            Difference(each.path, *(HIDDEN if value else value for value in (each.before, each.after)))
            if each.path in SECRET_PATHS else each
            for each in found
        ]  # fmt: skip

    def entries_of(self, values: Mapping[str, Any], position: int, with_secrets: bool) -> list[dict[str, Any]]:
        shown = dict(values)
        for key in SECRET_PATHS:
            if isinstance(shown.get(key), Sealed) and with_secrets:
                shown[key].open()
            if shown.get(key) and not with_secrets:
                shown[key] = KEPT
        return super().entries_of(shown, position, with_secrets)
