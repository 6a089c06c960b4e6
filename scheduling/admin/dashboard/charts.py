"""Charts and cards of the overview."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from itertools import chain
from typing import Any

import structlog
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.html import strip_tags
from django.utils.timezone import localtime, now
from django.utils.translation import gettext as _

from scheduling.admin.lists import build_span_link
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
class Span:
    """The time that a bar stands for."""

    label: str
    since: datetime
    until: datetime


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """Changes of one row within one bar: when and by whom it changed last, and its history."""

    changed_at: datetime
    bar: int
    words: str
    link: str


@dataclass(frozen=True)
class Chart:
    """Bars that Unfold draws with Chart.js. The page has the same numbers as a table, and links to the counted rows."""

    key: str
    title: str
    series: Sequence[Series]
    spans: Sequence[Span]  #: one for each bar
    counts: Sequence[Mapping[str, int] | None]  #: of each bar, by series; None if counting exceeded its time limit
    link: Callable[[str, Span], str] = lambda key, span: ""  #: list of the rows that a series counts in a span
    sums: Mapping[str, Any] | None = None  #: of the whole chart, where it is not the sum of the bars
    is_stacked: bool = True  #: the series are parts of a whole
    words: Callable[[int], Any] = int  #: format a value
    goal: int | None = None  #: a bar with a higher value is red
    note: str = ""
    changes: Sequence[ConfigChange] = ()

    @property
    def has_gaps(self) -> bool:
        return None in self.counts

    @property
    def legend(self) -> list[tuple[Series, Any, str]]:
        """Return each series with its sum and the list of all its rows."""
        whole, total = join_spans(self.spans), Counter[str]()
        for counts in self.counts:
            total.update(counts or {})
        sums = total if self.sums is None else self.sums
        return [(each, sums[each.key], self.link(each.key, whole)) for each in self.series]

    @cached_property
    def cells(self) -> list[list[tuple[int | None, str]]]:
        """Return value and link by bar and series. A value is None if it is unknown; zero has no link."""
        cells = []
        for span, counts in zip(self.spans, self.counts, strict=True):
            values = {each.key: None if counts is None else counts.get(each.key, 0) for each in self.series}
            cells.append([(value, self.link(key, span) if value else "") for key, value in values.items()])
        return cells

    @property
    def rows(self) -> list[tuple[str, list[tuple[Any, str]]]]:
        """Return the lines of the table: label, and formatted value with its link by series."""
        return [
            (span.label, [(None if value is None else self.words(value), link) for value, link in cells])
            for span, cells in zip(self.spans, self.cells, strict=True)
        ]

    @property
    def data(self) -> str:
        """Return the data of Chart.js."""
        datasets: list[dict[str, Any]] = []
        for each, cells in zip(self.series, zip(*self.cells, strict=True), strict=True):
            is_bad = [self.goal is not None and value is not None and value > self.goal for value, _link in cells]
            datasets.append({
                "label": str(each.words), "data": [value for value, _link in cells],
                "backgroundColor": [COLOURS["bad"] if bad else each.colour for bad in is_bad],
                "links": [link for _value, link in cells],
            })  # fmt: skip
        if self.changes:
            numbers = Counter(change.bar for change in self.changes)
            links = {each.bar: each.link if numbers[each.bar] == 1 else "#changes" for each in self.changes}
            bars = range(len(self.spans))
            datasets.append({
                "type": "line", "label": _("Configuration changes"), "data": [numbers.get(bar) for bar in bars],
                "links": [links.get(bar, "") for bar in bars], "backgroundColor": COLOURS["hue1"],
                "showLine": False, "pointStyle": "triangle", "radius": 5, "yAxisID": "changes",
            })  # fmt: skip
        return json.dumps({"labels": [strip_tags(span.label) for span in self.spans], "datasets": datasets})

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


PERIODS = (1, 7, 30)  #: days


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
            spans.append(Span(format_instant(hour, "m-d H:i"), hour, hour + HOUR))
        return spans
    for back in range(days - 1, -1, -1):
        begins = (localtime() - timedelta(days=back)).replace(hour=0, minute=0, second=0, microsecond=0)
        spans.append(Span(f"{begins:%m-%d}", begins, min(begins + timedelta(days=1), present + HOUR)))
    return spans


def join_spans(spans: Sequence[Span]) -> Span:
    """Return the whole time of consecutive bars."""
    return Span("", spans[0].since, spans[-1].until)


def link_ended(span: Span, **filters: str) -> str:
    """Return the address of the touches that ended in a span."""
    return build_span_link("scheduling_touch", "settled_at", span.since, span.until, **filters)


Counts = Sequence[Counter[Any] | None]  #: of each bar; None where counting exceeded its time limit


def count_by_span(past: HourlyCache, spans: Sequence[Span], time_limit: PageTimeLimit) -> Counts:
    hours = [hours_between(span.since, span.until) for span in spans]
    found = past.hours(chain.from_iterable(hours), now(), time_limit)
    return [add_up([found[hour] for hour in span_hours]) for span_hours in hours]


def add_up(counts: Counts) -> Counter[Any] | None:
    """Return the sum; None if a part is missing."""
    return None if None in counts else sum(filter(None, counts), Counter())


def regroup(counts: Counts, name: Callable[[Any], str | None]) -> Counts:
    """Count under other names, by bar. What gets no name is left out."""
    regrouped: list[Counter[str] | None] = []
    for found in counts:
        named = Counter[str]()
        for key, count in (found or {}).items():
            if (new := name(key)) is not None:
                named[new] += count
        regrouped.append(None if found is None else named)
    return regrouped


SHOWN = 5


def build_ranked_chart(
    key: str, title: str, spans: Sequence[Span], counts: Counts, *,
    words: Callable[[str], str], others: str, link: Callable[[str, Span], str],
) -> Chart:  # fmt: skip
    """Chart the `SHOWN` most frequent codes, and the others as one series, whose code is ""."""
    total: Counter[str] = sum(filter(None, counts), Counter())
    common = [code for code, _count in total.most_common(SHOWN)]
    series = [Series(code, words(code), f"hue{number}") for number, code in enumerate(common)]
    if len(total) > len(common):
        series.append(Series("", others, "quiet"))
    ranked = regroup(counts, lambda code: code if code in common else "")
    return Chart(key, title, series, spans, ranked, link)


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
