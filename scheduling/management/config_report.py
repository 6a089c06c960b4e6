"""Format the changes of a configuration plan for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from scheduling.configuration.file.apply import ChangePlan
from scheduling.durations import format_duration
from scheduling.planning.rescheduling import SPREAD, Impact, MoveCounts

SIGNS = {"added": "+", "restored": "+", "changed": "~", "retired": "-"}
WIDEST = 80  #: characters of one value


def format_plan(planned: ChangePlan, impact: Iterable[Impact]) -> Iterator[str]:
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
            yield f"      {each.path}: {format_config_value(each.before)} → {format_config_value(each.after)}"
    yield from _format_impact(impact)
    for note in planned.notes:
        yield f"note: {note}"


def _format_impact(impact: Iterable[Impact]) -> Iterator[str]:
    for each in impact:
        text = f"node {each.node} ({each.verb}): {format_count(each.waiting, 'waiting touch')}"
        if each.moved is not None:
            text += f"; with --move-waiting {each.moved.touches} would move, {each.moved.overdue} of them overdue then"
        yield text


def format_moved_touches(result: MoveCounts) -> str:
    text = f"{format_count(result.touches, 'waiting touch')} moved"
    return f"{text}, {result.overdue} overdue ones spread over {format_duration(SPREAD)}" if result.overdue else text


def format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es'}"


def format_config_value(value: Any) -> str:
    if value is None or value == "":
        return "(none)"
    text = " ".join(value.split()) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"
