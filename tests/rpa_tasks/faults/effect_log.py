"""The log that the commands write, and what it must never show."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass
class Effect:
    """One run of a command from its own log. Times are seconds of the machine's monotonic clock."""

    shop: str
    task: str
    key: str
    lease: int
    pid: int
    began: float
    met: list[int]  #: processes of other runs of the shop, alive at its start
    sequel: Any = None  #: of its payload
    ended: float | None = None
    stored: bool | None = None  #: whether the table took its write


@dataclass
class EffectLog:
    path: Path
    _offset: int = 0
    _effects: dict[tuple[str, int], Effect] = field(default_factory=dict)
    twice: list[str] = field(default_factory=list)  #: runs with more than one start or end

    def effects(self) -> list[Effect]:
        """Return all runs so far by their start."""
        self._read()
        return sorted(self._effects.values(), key=lambda effect: effect.began)

    def of(self, task: str) -> list[Effect]:
        return [effect for effect in self.effects() if effect.task == task]

    def _read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole + newline)
        for line in whole.splitlines():
            self._note(json.loads(line))

    def _note(self, line: dict[str, Any]) -> None:
        run = line["task"], line["lease"]
        if line["what"] == "began":
            if run in self._effects:
                self.twice.append(f"began twice: {line}")
            told = {name: line[name] for name in ("shop", "task", "key", "lease", "pid", "met", "sequel")}
            self._effects[run] = Effect(**told, began=line["at"])
        elif line["what"] == "wrote":
            self._effects[run].stored = line["stored"]
        elif self._effects[run].ended is not None:
            self.twice.append(f"ended twice: {line}")
        else:
            self._effects[run].ended = line["at"]


def find_overlaps(effects: list[Effect]) -> list[str]:
    """Find overlapping runs of a shop, or a later run without a higher lease number.

    A run without a logged end ends where the next one starts.
    """
    found = [f"met processes of another run: {effect}" for effect in effects if effect.met]
    by_shop = defaultdict(list)
    for effect in sorted(effects, key=lambda effect: effect.began):
        by_shop[effect.shop].append(effect)
    for runs in by_shop.values():
        for earlier, later in pairwise(runs):
            if later.lease <= earlier.lease:
                found.append(f"lease numbers do not grow: {earlier} {later}")
            if earlier.ended is not None and earlier.ended > later.began:
                found.append(f"two at once: {earlier} {later}")
    return found


def max_concurrency(effects: list[Effect]) -> int:
    """How many ran at the same time, over all shops."""
    marks = [(effect.began, 1) for effect in effects] + [(effect.ended, -1) for effect in effects if effect.ended]
    most = level = 0
    for _, step in sorted(marks):
        level += step
        most = max(most, level)
    return most
