"""Apply a configuration file: `manage.py apply_config FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from scheduling.configuration.file import apply
from scheduling.configuration.file.section import Stamp
from scheduling.durations import format_duration
from scheduling.errors import AftertouchError
from scheduling.planning import rescheduling
from scheduling.planning.rescheduling import SPREAD, Impact, MoveCounts, RuleImpact, list_rule_impacts
from scheduling.strict_text import MAX_SIZE, InvalidText

SIGNS = {"added": "+", "restored": "+", "changed": "~", "retired": "-"}
WIDEST = 80  #: characters of one value
#: Of what a rule covers: one, and others.
NOUNS = {
    "touches": ("waiting touch", "waiting touches"),
    "customers": ("waiting customer inside the share", "waiting customers inside the share"),
}


class Command(BaseCommand):
    help = "Apply a YAML configuration file, completely or not at all."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", help="configuration file; - reads standard input")
        parser.add_argument("--dry-run", action="store_true", help="print the difference and its impact, write nothing")
        parser.add_argument(
            "--move-waiting",
            action="store_true",
            help="apply edited delays to waiting touches; overdue ones are spread over time",
        )

    def handle(self, *, file: str, dry_run: bool, move_waiting: bool, **options: Any) -> None:
        given = self._load(file)
        try:
            planned = apply.plan_changes(given)
            for line in format_plan(planned, rescheduling.list_impacts(planned), list_rule_impacts(planned)):
                self.stdout.write(line)
            if dry_run:
                self.stdout.write("dry run: nothing was stored")
                return
            if planned.changes:
                apply.store_document(given, Stamp(f"apply_config {Path(file).name}"), planned.confirm)
                self.stdout.write("applied")
        except apply.InvalidConfiguration as error:
            raise CommandError(f"{error}\nnothing was stored") from error
        except AftertouchError as error:
            raise CommandError(str(error)) from error
        if move_waiting:
            self.stdout.write(format_moved_touches(rescheduling.move_after_plan(planned)))

    def _load(self, file: str) -> dict[str, Any]:
        enough = MAX_SIZE + 1  # one byte more than allowed shows that it is too large
        try:
            if file == "-":
                return apply.parse_document(sys.stdin.buffer.read(enough))
            with Path(file).open("rb") as stream:
                return apply.parse_document(stream.read(enough))
        except OSError as error:
            raise CommandError(f"{file}: {error.strerror}") from error
        except InvalidText as error:
            raise CommandError(f"{file}: {error}\nnothing was stored") from error


def format_plan(planned: apply.ChangePlan, impact: Iterable[Impact], of_rules: Iterable[RuleImpact]) -> Iterator[str]:
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
    for node in impact:
        text = f"node {node.node} ({node.verb}): {format_count(node.waiting, 'waiting touch')}"
        if node.moved is not None:
            text += f"; with --move-waiting {node.moved.touches} would move, {node.moved.overdue} of them overdue then"
        if node.failing is not None:
            text += f"; {node.failing.failing} of {node.failing.judged} would not meet the condition now"
        yield text
    for rule in of_rules:
        yield f"{rule.rule} ({rule.verb}): {rule.waiting} {NOUNS[rule.counted][rule.waiting != 1]}"
    for note in planned.notes:
        yield f"note: {note}"


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
