"""Stacked columns over time, drawn on the server: shapes for an inline SVG, and the same figures as a table."""

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
    y: float
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
class Chart:
    key: str
    title: str
    series: list[tuple[Series, int, str]]  #: with the sum and its link
    columns: list[Column]
    top: int  #: what the full height stands for
    gaps: int

    @property
    def labels(self) -> list[str]:
        """The first, the middle and the last."""
        names = [column.label for column in self.columns]
        return [names[0], names[len(names) // 2], names[-1]] if len(names) > 2 else names


def stacked(
    key: str, title: str, series: Sequence[Series], buckets: Sequence[Bucket], total_link: Callable[[str], str]
) -> Chart:
    heights = [sum(bucket.counts.values()) for bucket in buckets if bucket.counts]
    top = round_up(max(heights, default=0))
    step = WIDTH / max(len(buckets), 1)
    columns = [_column(bucket, series, number * step, step, top) for number, bucket in enumerate(buckets)]
    sums = [sum((bucket.counts or {}).get(each.key, 0) for bucket in buckets) for each in series]
    legend = [(each, count, total_link(each.key)) for each, count in zip(series, sums, strict=True)]
    return Chart(key, title, legend, columns, top, sum(column.is_gap for column in columns))


def round_up(most: int) -> int:
    """A number that is easy to read: 1, 2 or 5 with zeros."""
    scale = 1
    while scale * 10 <= most:
        scale *= 10
    return next(step * scale for step in (1, 2, 5, 10) if step * scale >= most)


def _column(bucket: Bucket, series: Sequence[Series], x: float, step: float, top: int) -> Column:
    pieces, y = [], float(HEIGHT)
    for each in series if bucket.counts else ():
        count = (bucket.counts or {}).get(each.key, 0)
        if count:
            height = HEIGHT * count / top
            y -= height
            title = _("%(when)s · %(what)s: %(count)s") % {"when": bucket.label, "what": each.words, "count": count}
            pieces.append(Piece(round(y, 2), round(height, 2), each.tone, title, bucket.links.get(each.key, "")))
    counts = bucket.counts
    cells = [
        (str(s.words), None if counts is None else counts.get(s.key, 0), bucket.links.get(s.key, "")) for s in series
    ]
    margin = step * GAP / 2
    return Column(round(x + margin, 2), round(step - 2 * margin, 2), bucket.label, pieces, counts is None, cells)
