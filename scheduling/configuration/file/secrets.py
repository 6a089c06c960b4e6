"""Secrets in a file: `"(kept)"` stands for what is stored, and nothing that is printed shows one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from scheduling.channels.base import Channel
from scheduling.channels.registry import channel_kinds
from scheduling.configuration.file.base import HIDDEN, KEPT, Difference
from scheduling.models.encrypted import Sealed


def secret_fields(kind: type[Channel] | None, settings: Mapping[str, Any]) -> Collection[str]:
    """Everything is a secret where the kind is not there to say."""
    return settings.keys() if kind is None else kind.secret_fields


def kind_named(name: str) -> type[Channel] | None:
    return channel_kinds().get(name)


def masked(settings: Mapping[str, Any], secret: Collection[str]) -> dict[str, Any]:
    """In a stable order, with the marker in the place of secrets."""
    return {name: KEPT if name in secret and value else value for name, value in sorted(settings.items())}


def restored(
    given: Mapping[str, Any], stored: Mapping[str, Any], secret: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """`given` with the markers replaced by what is stored, and the names for which nothing is."""
    marked = [name for name in given if given[name] == KEPT and name in secret]
    missing = marked if isinstance(stored, Sealed) else [name for name in marked if not stored.get(name)]
    return {**given, **{name: stored[name] for name in marked if name not in missing}}, missing


def why_missing(stored: Mapping[str, Any]) -> str:
    return "what is stored cannot be read here" if isinstance(stored, Sealed) else "there is nothing stored to keep"


def written_over(column: str) -> Difference:
    """Something that cannot be read here becomes what the file says."""
    return Difference(column, "(unreadable)", HIDDEN)


def setting_differences(
    prefix: str, before: Mapping[str, Any], after: Mapping[str, Any], secret: Collection[str]
) -> Iterator[Difference]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name) or (name in before) != (name in after):
            shown = [HIDDEN if name in secret and value else value for value in (before.get(name), after.get(name))]
            yield Difference(f"{prefix}{name}", *shown)
