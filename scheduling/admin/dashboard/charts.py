"""Draw charts on the server, and define the cards of the overview."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import structlog
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.timezone import localtime, now
from django.utils.translation import gettext as _

from scheduling.admin.page_reads import PageTimeLimit
from scheduling.admin.shown_values import describe_instant, format_instant
from scheduling.app_integrations import integrations
from scheduling.monitoring.statistics import HOUR, HourlyCache
from scheduling.replica import is_replica_failure

log = structlog.get_logger(__name__)


WIDTH, HEIGHT, GAP = 1000, 100, 0.2  #: of the drawing; the page stretches it


@dataclass(frozen=True, slots=True)
class Series:
    key: str
    words: str | Promise
    tone: str  #: CSS class of the colour


class Label(NamedTuple):
    """The name of a span of time."""

    shown: str  #: with markup
    plain: str  #: for titles, which hold no markup


@dataclass(frozen=True, slots=True)
class Bucket:
    """The counts of one span of time. `counts` is None if counting exceeded its time limit."""

    label: Label
    counts: Mapping[str, int] | None
    links: Mapping[str, str]  #: list of the counted rows, by series


@dataclass(frozen=True, slots=True)
class ChartSegment:
    x: float
    y: float
    width: float
    height: float
    tone: str
    title: str
    link: str


@dataclass(frozen=True, slots=True)
class ChartBar:
    x: float
    width: float
    label: Label
    pieces: list[ChartSegment]
    is_gap: bool
    cells: list[tuple[str, Any, str]]  #: series, count or None, link


@dataclass(frozen=True, slots=True)
class Goal:
    """The highest acceptable value of a bar."""

    most: int
    words: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line between or in bars."""

    x: float
    words: str
    link: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    key: str
    title: str
    series: list[tuple[Series, Any, str]]  #: each with its sum and link
    columns: list[ChartBar]
    top: int  #: value at full height
    scale: str  #: `top`, formatted
    goal: Goal | None = None
    mark: Mark | None = None
    changes: tuple[Mark, ...] = ()  #: of the configuration

    @property
    def gaps(self) -> int:
        return sum(column.is_gap for column in self.columns)

    @property
    def labels(self) -> list[str]:
        """Return the first, middle and last label."""
        names = [column.label.shown for column in self.columns]
        return [names[0], names[len(names) // 2], names[-1]] if len(names) > 2 else names

    @property
    def goal_y(self) -> float | None:
        """Return the height of the goal line; None if it is above the chart."""
        return HEIGHT * (1 - self.goal.most / self.top) if self.goal and self.goal.most <= self.top else None


def build_stacked_chart(
    key: str, title: str, series: Sequence[Series], buckets: Sequence[Bucket], total_link: Callable[[str], str]
) -> Chart:
    """Build a chart of stacked bars: the series are parts of a whole."""
    sums = [sum((bucket.counts or {}).get(each.key, 0) for bucket in buckets) for each in series]
    legend = [(each, count, total_link(each.key)) for each, count in zip(series, sums, strict=True)]
    return _build_chart(key, title, legend, buckets, int, is_stacked=True)


def build_grouped_chart(
    key: str, title: str, legend: Sequence[tuple[Series, Any, str]], buckets: Sequence[Bucket],
    words: Callable[[int], Any] = int, goal: Goal | None = None,
) -> Chart:  # fmt: skip
    """Build a chart of bars side by side: no series is part of another. Values beyond the goal are red."""
    return _build_chart(key, title, legend, buckets, words, is_stacked=False, goal=goal)


def _build_chart(
    key: str, title: str, legend: Sequence[tuple[Series, Any, str]], buckets: Sequence[Bucket],
    words: Callable[[int], Any], *, is_stacked: bool, goal: Goal | None = None,
) -> Chart:  # fmt: skip
    join = sum if is_stacked else max
    top = round_up(max((join(bucket.counts.values()) for bucket in buckets if bucket.counts), default=0))
    step = WIDTH / max(len(buckets), 1)
    margin = step * GAP / 2
    width = step - 2 * margin
    bars = []
    for number, bucket in enumerate(buckets):
        x, y, wide = number * step + margin, float(HEIGHT), width if is_stacked else width / len(legend)
        pieces: list[ChartSegment] = []
        cells: list[tuple[str, Any, str]] = []
        for place, (each, _sum, _link) in enumerate(legend):
            link = bucket.links.get(each.key, "")
            count = (bucket.counts or {}).get(each.key, 0)
            cells.append((str(each.words), None if bucket.counts is None else words(count), link))
            if count:
                height = HEIGHT * count / top
                y = (y if is_stacked else HEIGHT) - height
                left = x if is_stacked else x + place * wide
                tone = "bad" if goal and count > goal.most else each.tone
                text = _("%(when)s · %(what)s: %(count)s") % {
                    "when": bucket.label.plain, "what": each.words, "count": words(count),
                }  # fmt: skip
                pieces.append(
                    ChartSegment(round(left, 2), round(y, 2), round(wide, 2), round(height, 2), tone, text, link)
                )
        bars.append(ChartBar(round(x, 2), round(width, 2), bucket.label, pieces, bucket.counts is None, cells))
    return Chart(key, title, list(legend), bars, top, str(words(top)), goal)


def round_up(most: int) -> int:
    """Round up to 1, 2 or 5 times a power of ten."""
    scale = 1
    while scale * 10 <= most:
        scale *= 10
    return next(step * scale for step in (1, 2, 5, 10) if step * scale >= most)


PERIODS = (1, 7, 30)  #: days

T = TypeVar("T", bound="Counter[Any]")


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive hours up to `until`."""

    label: Label
    hours: list[datetime]
    until: datetime


def read_requested_days(request: HttpRequest, offered: Sequence[int] = PERIODS, usual: int = PERIODS[0]) -> int:
    """Return the period that the request selects, in days."""
    return next((each for each in offered if str(each) == request.GET.get("days")), usual)


def split_period(days: int) -> list[Span]:
    """Split a period into bars: hours for one day, otherwise days in the server's time zone, up to now."""
    present = localtime().replace(minute=0, second=0, microsecond=0)
    spans = []
    if days <= 1:
        for back in range(23, -1, -1):
            hour = present - HOUR * back
            label = Label(format_instant(hour, "m-d H:i"), describe_instant(hour))
            spans.append(Span(label, [hour], hour + HOUR))
        return spans
    for back in range(days - 1, -1, -1):
        begins = (localtime() - timedelta(days=back)).replace(hour=0, minute=0, second=0, microsecond=0)
        ends = min(begins + timedelta(days=1), present + HOUR)
        day = f"{begins:%m-%d}"
        hours = [begins + HOUR * number for number in range((ends - begins) // HOUR)]
        spans.append(Span(Label(day, day), hours, ends))
    return spans


def get_span_bounds(spans: list[Span], span: Span | None) -> tuple[datetime, datetime]:
    """Return start and end of a bar; of the whole chart if `span` is None."""
    first, last = (span, span) if span else (spans[0], spans[-1])
    return first.hours[0], last.until


def count_by_span(past: HourlyCache[T], spans: list[Span], time_limit: PageTimeLimit) -> list[T | None]:
    """Count by bar; None where counting exceeded its time limit."""
    found = past.hours([hour for span in spans for hour in span.hours], now(), time_limit)
    counted: list[Any] = []
    for span in spans:
        parts: list[Any] = [found[hour] for hour in span.hours]
        counted.append(None if None in parts else sum(parts, Counter()))
    return counted


SHOWN = 5


def build_ranked_chart(
    key: str, title: str, spans: Sequence[Span], counts: Sequence[Counter[str] | None], *,
    words: Callable[[str], str], others: str, link: Callable[[str, Span | None], str],
) -> Chart:  # fmt: skip
    """Chart the `SHOWN` most frequent codes, and the others as one series.

    `link(code, span)` leads to the counted rows. Code "" means all codes, span None the whole period.
    """
    total: Counter[str] = sum((each for each in counts if each), Counter())
    common = [code for code, _count in total.most_common(SHOWN)]
    series = [Series(code, words(code), f"hue{number}") for number, code in enumerate(common)]
    if len(total) > len(common):
        series.append(Series("", others, "quiet"))
    buckets = []
    for span, found in zip(spans, counts, strict=True):
        shown: Counter[str] = Counter()
        for code, count in (found or {}).items():
            shown[code if code in common else ""] += count
        links = {each.key: link(each.key, span) for each in series}
        buckets.append(Bucket(span.label, None if found is None else shown, links))
    return build_stacked_chart(key, title, series, buckets, lambda code: link(code, None))


@dataclass(frozen=True, slots=True)
class Figure:
    """A labelled number of a card. `value` is None if the count exceeded its time limit."""

    words: str | Promise
    value: Any
    link: str = ""  #: list of the counted rows
    tone: str = ""  #: "bad" if a user must act, "quiet" for explanations
    hint: str | Promise = ""


@dataclass(frozen=True, slots=True)
class DashboardCard:
    title: str | Promise
    figures: list[Figure] = field(default_factory=list)
    link: str = ""
    note: str | Promise = ""  #: error or missing source
    charts: list[Chart] = field(default_factory=list)  #: shown with the other charts


@dataclass(frozen=True, slots=True)
class ActionLine:
    """Work that waits for a person."""

    icon: str
    words: str | Promise
    link: str
    detail: str | Promise = ""
    tone: str = "bad"  #: or "wait"


def format_capped_count(count: int | None, most: int) -> str | None:
    """Format a count, as "10000+" if it exceeds `most`; None if it is unknown."""
    return None if count is None else f"{most}+" if count > most else str(count)


def load_app_cards(request: HttpRequest) -> Iterator[DashboardCard]:
    """Yield the cards of other apps. A card that fails shows an error, so that the page still loads."""
    for build in [build for app in integrations() for build in app.cards]:
        try:
            card = build(request)
        except Exception as error:
            if is_replica_failure(error):
                raise
            log.exception("dashboard_card_failed", card=f"{build.__module__}.{build.__qualname__}")
            card = DashboardCard(
                build.__module__.split(".")[0], note=_("This part could not be loaded. The log contains the reason.")
            )
        if card is not None:
            yield card
