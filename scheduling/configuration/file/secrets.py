"""Handle secrets in a file. `"(kept)"` means the stored value; printed output shows no secret."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from scheduling.channels.base import Channel
from scheduling.channels.kinds import channel_kinds
from scheduling.configuration.file.base import HIDDEN, KEPT, Difference
from scheduling.error_text import ErrorText as _
from scheduling.models.encrypted import Sealed


def secret_fields(kind: type[Channel] | None, settings: Mapping[str, Any]) -> Collection[str]:
    """Return the names of the secret settings: all of them if the kind is unknown."""
    return settings.keys() if kind is None else kind.secret_fields


def find_channel_kind(name: str) -> type[Channel] | None:
    return channel_kinds().get(name)


def mask_secrets(settings: Mapping[str, Any], secret: Collection[str]) -> dict[str, Any]:
    """Return the settings sorted by name, with the marker in place of secrets."""
    return {name: KEPT if name in secret and value else value for name, value in sorted(settings.items())}


def restore_secrets(
    given: Mapping[str, Any], stored: Mapping[str, Any], secret: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Replace the markers in `given` by stored values. Return also the names that have none."""
    marked = [name for name in given if given[name] == KEPT and name in secret]
    missing = marked if isinstance(stored, Sealed) else [name for name in marked if not stored.get(name)]
    return {**given, **{name: stored[name] for name in marked if name not in missing}}, missing


def explain_missing_secret(stored: Mapping[str, Any]) -> str:
    unreadable = isinstance(stored, Sealed)
    return _("what is stored cannot be read here") if unreadable else _("there is nothing stored to keep")


def unreadable_difference(column: str) -> Difference:
    """Return the difference for an unreadable stored value that the file replaces."""
    return Difference(column, "(unreadable)", HIDDEN)


def setting_differences(
    prefix: str, before: Mapping[str, Any], after: Mapping[str, Any], secret: Collection[str]
) -> Iterator[Difference]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name) or (name in before) != (name in after):
            shown = [HIDDEN if name in secret and value else value for value in (before.get(name), after.get(name))]
            yield Difference(f"{prefix}{name}", *shown)
