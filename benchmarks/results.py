"""Collect figures with their goals, and format the table."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from math import ceil
from statistics import median

import psutil

PACKAGES = ("django", "celery", "kombu", "redis", "psycopg", "aiohttp", "uvicorn", "django-ninja")


@dataclass(frozen=True)
class Figure:
    """One measured quantity over the repetitions. The goal is an upper bound, or a lower one with `at_least`."""

    scenario: str
    name: str
    unit: str
    goal: float | None = None
    at_least: bool = False
    note: str = ""
    samples: list[float] = field(default_factory=list)

    @property
    def value(self) -> float:
        return median(self.samples)

    @property
    def ratio(self) -> float | None:
        """Return the factor by which the figure is better than its goal; 1 equals the goal."""
        if self.goal is None or not self.goal or not self.value:
            return None
        return self.value / self.goal if self.at_least else self.goal / self.value

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def cells(self) -> list[str]:
        goal = "" if self.goal is None else f"{'≥' if self.at_least else '≤'} {_number(self.goal)}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f} ×"
        verdict = {True: "met", False: "MISSED", None: ""}[self.met]
        spread = f"{_number(min(self.samples))} – {_number(max(self.samples))}" if len(self.samples) > 1 else ""
        return [self.scenario, self.name, f"{_number(self.value)} {self.unit}", spread, goal, ratio, verdict, self.note]


class Figures:
    """Samples grouped by scenario and name."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, str], Figure] = {}

    def add(
        self,
        scenario: str,
        name: str,
        value: float,
        unit: str,
        *,
        goal: float | None = None,
        at_least: bool = False,
        note: str = "",
    ) -> None:
        figure = self._figures.setdefault((scenario, name), Figure(scenario, name, unit, goal, at_least, note))
        figure.samples.append(value)
        print(f"  {scenario}: {name} {_number(value)} {unit}", flush=True)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._figures.values())

    def table(self) -> str:
        head = ["scenario", "figure", "median", "spread", "goal", "ratio", "", "note"]
        rows = [head, *(figure.cells() for figure in self)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines.insert(1, "-|-".join("-" * width for width in widths))
        return "\n".join(f"| {line} |" if number != 1 else f"|-{line}-|" for number, line in enumerate(lines))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by nearest rank, so that it is a measured value. NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(ceil(len(ordered) * percent / 100) - 1, 0)]


def describe_machine(seed: int, servers: Sequence[str]) -> str:
    load = ", ".join(f"{each:.1f}" for each in psutil.getloadavg())
    memory = psutil.virtual_memory().total / 2**30
    packages = " · ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"{psutil.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}, "
        f"load at the start {load}\nPython {platform.python_version()} · {' · '.join(servers)}\n{packages}\nseed {seed}"
    )


def _number(value: float) -> str:
    if value != value:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
