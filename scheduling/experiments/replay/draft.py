"""A draft: a configuration file that speaks of content, nodes, delays and limits only. What it does not say stays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import transaction

from scheduling.configuration import snapshot
from scheduling.configuration.file import apply, document
from scheduling.configuration.file.base import Stamp
from scheduling.configuration.file.registry import sections
from scheduling.configuration.file.schema import Problem
from scheduling.configuration.snapshot import Snapshot

SECTIONS = ("nodes", "delay_rules", "harassment_rules", "stages", "templates")  #: what is edited most comes first


def live_text() -> str:
    """What is live, as a draft that changes nothing."""
    known = sections()
    with transaction.atomic():
        given = {name: known[name].export(with_secrets=False) for name in SECTIONS}
    return document.dump({"version": apply.VERSION} | {name: each for name, each in given.items() if each is not None})


def read(text: str) -> tuple[dict[str, Any], apply.Plan]:
    """The draft and what it would change. Raises `InvalidDocument`, or `InvalidConfiguration` with every problem."""
    given = document.load(text.encode())
    foreign = [name for name in given if name not in (*SECTIONS, "version") and name in sections()]
    if foreign:
        known = ", ".join(SECTIONS)
        problems = [Problem(name, f"a draft cannot change this; it may hold {known}") for name in foreign]
        raise apply.InvalidConfiguration(problems)
    return given, apply.plan(given)


class _Rehearsed(Exception):
    """Roll back."""


def rehearse(given: Mapping[str, Any], planned: apply.Plan) -> Snapshot:
    """The configuration that publishing would make, by storing the draft and rolling it back. For that moment others
    cannot edit; nobody ever reads it. Raises `Conflict` where somebody edits at the same moment."""
    found: list[Snapshot] = []
    try:
        with transaction.atomic():
            apply.store(given, planned, Stamp("what-if"))
            found.append(snapshot.load(()))
            raise _Rehearsed
    except _Rehearsed:
        return found[0]
