"""Charts and cards of the overview."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.html import strip_tags
from django.utils.timezone import localtime, now
from django.utils.translation import gettext as _

from scheduling.admin.page_reads import PageTimeLimit
from scheduling.admin.shown_values import format_instant
from scheduling.app_integrations import integrations
from scheduling.monitoring.statistics import HOUR, HourlyCache, hours_between
from scheduling.replica import is_replica_failure

log = structlog.get_logger(__name__)


#: Colours by tone. They are legible on light and on dark cards.
COLOURS = {
    "good": "#2f9e62", "wait": "#c08a2b", "bad": "#d6454a", "doubt": "#b658b6", "quiet": "#9ca3af",
    "hue0": "#c28432", "hue1": "#4a8fd0", "hue2": "#33a07a", "hue3": "#ad63ba", "hue4": "#97a244",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Series:
    key: str
    words: str | Promise
    tone: str  #: of `COLOURS`

    @property
    def colour(self) -> str:
        return COLOURS[self.tone]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The counts of one span of time. `counts` is None if counting exceeded its time limit."""

    label: str
    counts: Mapping[str, int] | None
    links: Mapping[str, str]  #: list of the counted rows, by series


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """Changes of one row within one bar: when and by whom it changed last, and its history."""

    changed_at: datetime
    bar: int
    words: str
    link: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars that Unfold draws with Chart.js. The page has the same numbers as a table, and links to the counted rows."""

    key: str
    title: str
    series: Sequence[tuple[Series, Any, str]]  #: each with its sum and link
    buckets: Sequence[Bucket]
    is_stacked: bool = True  #: the series are parts of a whole
    words: Callable[[int], Any] = int  #: format a value
    goal: int | None = None  #: a bar with a higher value is red
    note: str = ""
    changes: Sequence[ConfigChange] = ()

    @property
    def has_gaps(self) -> bool:
        return any(bucket.counts is None for bucket in self.buckets)

    @property
    def rows(self) -> list[tuple[str, list[tuple[Any, str]]]]:
        """Return the lines of the table: label, and value with its link by series; None for a value that is unknown."""
        return [
            (
                bucket.label,
                [
                    (
                        None if bucket.counts is None else self.words(bucket.counts.get(each.key, 0)),
                        bucket.links.get(each.key, "") if bucket.counts and bucket.counts.get(each.key) else "",
                    )
                    for each, _sum, _link in self.series
                ],
            )
            for bucket in self.buckets
        ]

    @property
    def data(self) -> str:
        """Return the data of Chart.js."""
        datasets: list[dict[str, Any]] = []
        for each, _sum, _link in self.series:
            values = [None if bucket.counts is None else bucket.counts.get(each.key, 0) for bucket in self.buckets]
            is_bad = [self.goal is not None and value is not None and value > self.goal for value in values]
            datasets.append({
                "label": str(each.words), "data": values,
                "backgroundColor": [COLOURS["bad"] if bad else each.colour for bad in is_bad],
                "links": [bucket.links.get(each.key, "") for bucket in self.buckets],
            })  # fmt: skip
        if self.changes:
            numbers = Counter(change.bar for change in self.changes)
            links = {each.bar: each.link if numbers[each.bar] == 1 else "#changes" for each in self.changes}
            bars = range(len(self.buckets))
            datasets.append({
                "type": "line", "label": _("Configuration changes"), "data": [numbers.get(bar) for bar in bars],
                "links": [links.get(bar, "") for bar in bars], "backgroundColor": COLOURS["hue1"],
                "showLine": False, "pointStyle": "triangle", "radius": 5, "yAxisID": "changes",
            })  # fmt: skip
        return json.dumps({"labels": [strip_tags(bucket.label) for bucket in self.buckets], "datasets": datasets})

    @property
    def options(self) -> str:
        """Return the options of Chart.js. They hold no functions, which a page without inline scripts cannot have."""
        ticks = {"color": "#8b93a1", "maxRotation": 0, "maxTicksLimit": 4, "precision": 0}
        scales = {
            "x": {"stacked": self.is_stacked, "grid": {"display": False}, "ticks": ticks},
            "y": {"stacked": self.is_stacked, "grid": {}, "ticks": ticks, "beginAtZero": True},
            "changes": {"axis": "y", "display": False, "beginAtZero": True},
        }
        return json.dumps({
            "animation": False, "maintainAspectRatio": False, "scales": scales,
            "plugins": {"legend": {"display": False}, "tooltip": {"mode": "index", "intersect": False}},
        })  # fmt: skip


def build_stacked_chart(
    key: str, title: str, series: Sequence[Series], buckets: Sequence[Bucket], total_link: Callable[[str], str]
) -> Chart:
    return Chart(key, title, [(each, sum_series(buckets, each), total_link(each.key)) for each in series], buckets)


def sum_series(buckets: Sequence[Bucket], series: Series) -> int:
    return sum((bucket.counts or {}).get(series.key, 0) for bucket in buckets)


PERIODS = (1, 7, 30)  #: days


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive hours up to `until`."""

    label: str
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
            spans.append(Span(format_instant(hour, "m-d H:i"), [hour], hour + HOUR))
        return spans
    for back in range(days - 1, -1, -1):
        begins = (localtime() - timedelta(days=back)).replace(hour=0, minute=0, second=0, microsecond=0)
        ends = min(begins + timedelta(days=1), present + HOUR)
        spans.append(Span(f"{begins:%m-%d}", hours_between(begins, ends), ends))
    return spans


def get_span_bounds(spans: list[Span], span: Span | None) -> tuple[datetime, datetime]:
    """Return start and end of a bar; of the whole chart if `span` is None."""
    first, last = (span, span) if span else (spans[0], spans[-1])
    return first.hours[0], last.until


def count_by_span(past: HourlyCache, spans: list[Span], time_limit: PageTimeLimit) -> list[Counter[Any] | None]:
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
