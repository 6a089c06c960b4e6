"""Merge the edits of two copies of a configuration document, field by field. Pure code."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

MISSING: Any = object()
DEFAULT_LOCALE = "zh-hans"
#: Fields whose inner keys have no meaning of their own: half of two conditions or windows is none.
WHOLE = frozenset({"when", "send_window", "hours"})
TEXT_FIELDS = frozenset({"locale", "subject", "body"})
#: Sections whose entries have no key: within a kind and scope their order identifies them.
KEYLESS = frozenset({"harassment_rules"})

Document = Mapping[str, Any]


def merge_documents(base: Document, edited: Document, onto: Document) -> dict[str, Any]:
    """Return `onto` with every difference from `base` to `edited`. For a field that both changed, `edited` counts."""
    names = [*onto, *(name for name in edited if name not in onto)]
    merged = {name: _merge_section(name, *(each.get(name, MISSING) for each in (base, edited, onto))) for name in names}
    return {name: value for name, value in merged.items() if value is not MISSING}


def _merge_section(name: str, base: Any, edited: Any, onto: Any) -> Any:
    if not all(isinstance(each, list) for each in (base, edited, onto)):
        return _merge_value(base, edited, onto)
    if name == "templates":
        folded = [_fold_templates(each) for each in (base, edited, onto)]
        return [entry for each in _merge_value(*folded).values() for entry in _unfold_template(each)]
    if name in KEYLESS:
        first = _number_entries(base)
        named = [first, _match_entries(first, edited), _match_entries(first, onto)]
    else:
        named = [{_read_key(entry): entry for entry in each} for each in (base, edited, onto)]
    return list(_merge_value(*named).values())


def _merge_value(base: Any, edited: Any, onto: Any) -> Any:
    """Merge mappings key by key, with a missing one as an empty one. Any other edited value replaces that of `onto`."""
    if edited == base:
        return onto
    if not (isinstance(edited, dict) and isinstance(onto, dict) and (base is MISSING or isinstance(base, dict))):
        return edited
    merged = {}
    for name in [*onto, *(name for name in edited if name not in onto)]:
        parts = [MISSING if each is MISSING else each.get(name, MISSING) for each in (base, edited, onto)]
        if name in WHOLE:
            merged[name] = parts[2] if parts[1] == parts[0] else parts[1]
        else:
            merged[name] = _merge_value(*parts)
    return {name: value for name, value in merged.items() if value is not MISSING}


def _read_key(entry: Mapping[str, Any]) -> Hashable:
    return entry.get("key") or entry.get("tag")


def _fold_templates(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Gather the entries of a template, one for each locale, in one mapping."""
    folded: dict[str, Any] = {}
    for entry in entries:
        template = folded.setdefault(entry["key"], {"own": {}, "texts": {}})
        template["own"] |= {name: value for name, value in entry.items() if name not in TEXT_FIELDS}
        if entry.get("body") is not None:
            text = {name: value for name, value in entry.items() if name in TEXT_FIELDS}
            template["texts"][entry.get("locale", DEFAULT_LOCALE)] = text
    return folded


def _unfold_template(folded: Mapping[str, Any]) -> list[dict[str, Any]]:
    own = folded["own"]
    return [own | text for text in folded["texts"].values()] or [own | {"body": None}]


def _number_entries(entries: Iterable[Mapping[str, Any]]) -> dict[Hashable, Any]:
    return {(_read_group(entry), number): entry for number, entry in enumerate(entries)}


def _match_entries(first: Mapping[Any, Any], entries: Iterable[Mapping[str, Any]]) -> dict[Hashable, Any]:
    """Name the entries after those of `first`: equal ones before others of the same kind and scope.

    A further entry is named by its content, so that two copies that add the same entry add it once.
    """
    free = dict(first)
    names: list[Any] = []
    entries = list(entries)
    for entry in entries:
        names.append(next((name for name, known in free.items() if known == entry), None))
        free.pop(names[-1], None)
    for place, entry in enumerate(entries):
        if names[place] is None:
            group = _read_group(entry)
            content = (group, json.dumps(entry, sort_keys=True, default=str))
            names[place] = next((name for name in free if name[0] == group), content)
            free.pop(names[place], None)
    return dict(zip(names, entries, strict=True))


def _read_group(entry: Mapping[str, Any]) -> tuple[Any, Any]:
    return entry.get("kind"), entry.get("scope", "user")
