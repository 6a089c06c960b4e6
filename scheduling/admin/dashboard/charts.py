"""Columns over time, drawn on the server: shapes for an inline SVG, and the same figures as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.functional import Promise
from django.utils.translation import gettext as _

WIDTH, HEIGHT, GAP = 1000, 100, 0.2  #: of the drawing; the page stretches it


@dataclass(frozen=True, slots=True)
class Series:
    key: str
    words: str | Promise
    tone: str  #: the class that colours it


@dataclass(frozen=True, slots=True)
class Bucket:
    """One column: a span of time. `counts` None: too much to count now."""

    label: str
    counts: Mapping[str, int] | None
    links: Mapping[str, str]  #: by series, the rows behind it


@dataclass(frozen=True, slots=True)
class Piece:
    x: float
    y: float
    width: float
    height: float
    tone: str
    title: str
    link: str


@dataclass(frozen=True, slots=True)
class Column:
    x: float
    width: float
    label: str
    pieces: list[Piece]
    is_gap: bool
    cells: list[tuple[str, Any, str]]  #: series, count or None, link


@dataclass(frozen=True, slots=True)
class Goal:
    """What no column should be higher than."""

    most: int
    words: str


@dataclass(frozen=True, slots=True)
class Chart:
    key: str
    title: str
    series: list[tuple[Series, Any, str]]  #: with the sum and its link
    columns: list[Column]
    top: int  #: what the full height stands for
    scale: str  #: the same in words
    goal: Goal | None = None

    @property
    def gaps(self) -> int:
        return sum(column.is_gap for column in self.columns)

    @property
    def labels(self) -> list[str]:
        """The first, the middle and the last."""
        names = [column.label for column in self.columns]
        return [names[0], names[len(names) // 2], names[-1]] if len(names) > 2 else names

    @property
    def goal_y(self) -> float | None:
        """None where it is above everything."""
        return HEIGHT * (1 - self.goal.most / self.top) if self.goal and self.goal.most <= self.top else None


def stacked(
    key: str, title: str, series: Sequence[Series], buckets: Sequence[Bucket], total_link: Callable[[str], str]
) -> Chart:
    """Parts of a whole, one on the other."""
    top = round_up(max((sum(bucket.counts.values()) for bucket in buckets if bucket.counts), default=0))
    sums = [sum((bucket.counts or {}).get(each.key, 0) for bucket in buckets) for each in series]
    legend = [(each, count, total_link(each.key)) for each, count in zip(series, sums, strict=True)]

    def pieces(bucket: Bucket, x: float, width: float) -> list[Piece]:
        found, y = [], float(HEIGHT)
        for each in series:
            if count := (bucket.counts or {}).get(each.key, 0):
                height = HEIGHT * count / top
                y -= height
                found.append(_piece(bucket, each, (x, y, width, height), str(count)))
        return found

    return Chart(key, title, legend, _columns(series, buckets, pieces, int), top, str(top))


def paired(
    key: str, title: str, legend: Sequence[tuple[Series, Any, str]], buckets: Sequence[Bucket],
    words: Callable[[int], Any] = int, goal: Goal | None = None,
) -> Chart:  # fmt: skip
    """Figures of which none is a part of another, side by side; red what is beyond the goal."""
    series = [each for each, _sum, _link in legend]
    top = round_up(max((max(bucket.counts.values()) for bucket in buckets if bucket.counts), default=0))

    def pieces(bucket: Bucket, x: float, width: float) -> list[Piece]:
        found, wide = [], width / len(series)
        for number, each in enumerate(series):
            if count := (bucket.counts or {}).get(each.key, 0):
                height, tone = HEIGHT * count / top, "bad" if goal and count > goal.most else ""
                place = (x + number * wide, HEIGHT - height, wide, height)
                found.append(_piece(bucket, each, place, str(words(count)), tone))
        return found

    return Chart(key, title, list(legend), _columns(series, buckets, pieces, words), top, str(words(top)), goal)


def round_up(most: int) -> int:
    """A number that is easy to read: 1, 2 or 5 with zeros."""
    scale = 1
    while scale * 10 <= most:
        scale *= 10
    return next(step * scale for step in (1, 2, 5, 10) if step * scale >= most)


def _columns(
    series: Sequence[Series], buckets: Sequence[Bucket],
    pieces: Callable[[Bucket, float, float], list[Piece]], words: Callable[[int], Any],
) -> list[Column]:  # fmt: skip
    step = WIDTH / max(len(buckets), 1)
    margin = step * GAP / 2
    columns = []
    for number, bucket in enumerate(buckets):
        x, width, counts = number * step + margin, step - 2 * margin, bucket.counts
        cells = [
            (
                str(each.words),
                None if counts is None else words(counts.get(each.key, 0)),
                bucket.links.get(each.key, ""),
            )
            for each in series
        ]
        drawn = pieces(bucket, x, width)
        columns.append(Column(round(x, 2), round(width, 2), bucket.label, drawn, counts is None, cells))
    return columns


def _piece(
    bucket: Bucket, series: Series, place: tuple[float, float, float, float], count: str, tone: str = ""
) -> Piece:
    title = _("%(when)s · %(what)s: %(count)s") % {"when": bucket.label, "what": series.words, "count": count}
    x, y, width, height = (round(each, 2) for each in place)
    return Piece(x, y, width, height, tone or series.tone, title, bucket.links.get(series.key, ""))
