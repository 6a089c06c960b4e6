"""Format the changes of a configuration plan for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from scheduling.configuration.file.apply import Plan
from scheduling.durations import format_duration
from scheduling.planning.rescheduling import SPREAD, Impact, Moved

SIGNS = {"added": "+", "restored": "+", "changed": "~", "retired": "-"}
WIDEST = 80  #: characters of one value


def lines(planned: Plan, impact: Iterable[Impact]) -> Iterator[str]:
    """Yield the lines of a plan: changes by section, impact on waiting touches, and remarks."""
    if not planned.changes:
        yield "no changes"
    section = ""
    for change in planned.changes:
        if change.section.name != section:
            section = change.section.name
            yield section
        remark = {"retired": " (retired)", "restored": " (was retired)"}.get(change.verb, "")
        yield f"  {SIGNS[change.verb]} {change.label}{remark}"
        for each in change.differences:
            yield f"      {each.path}: {shown(each.before)} → {shown(each.after)}"
    yield from _impact(impact)
    for note in planned.notes:
        yield f"note: {note}"


def _impact(impact: Iterable[Impact]) -> Iterator[str]:
    for each in impact:
        text = f"node {each.node} ({each.verb}): {counted(each.waiting, 'waiting touch')}"
        if each.moved is not None:
            text += f"; with --move-waiting {each.moved.touches} would move, {each.moved.overdue} of them overdue then"
        yield text


def moved(result: Moved) -> str:
    text = f"{counted(result.touches, 'waiting touch')} moved"
    return f"{text}, {result.overdue} overdue ones spread over {format_duration(SPREAD)}" if result.overdue else text


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es'}"


def shown(value: Any) -> str:
    if value is None or value == "":
        return "(none)"
    text = " ".join(value.split()) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"
