"""What ended, over time: the charts of the overview and the sums below them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils.timezone import localtime, now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling import pulse
from scheduling.admin.charts import Bucket, Chart, Series, stacked
from scheduling.admin.patience import Patience
from scheduling.admin.spans import span_link
from scheduling.admin.wording import reason
from scheduling.pulse import HOUR, Tally

TOUCHES = "scheduling_touch"
SHOWN_REASONS = 5
STATES = (
    Series("delivered", gettext_lazy("Delivered"), "good"),
    Series("suppressed", gettext_lazy("Suppressed"), "wait"),
    Series("cancelled", gettext_lazy("Cancelled"), "quiet"),
    Series("failed", gettext_lazy("Failed"), "bad"),
    Series("unknown", gettext_lazy("Unknown"), "doubt"),
)


@dataclass(frozen=True, slots=True)
class Span:
    """One column: some hours that follow each other, until `until`."""

    label: str
    hours: list[datetime]
    until: datetime


@dataclass(frozen=True, slots=True)
class Ended:
    """`tallies` by column, None where there is too much to count now."""

    spans: list[Span]
    tallies: list[Tally | None]

    @property
    def since(self) -> datetime:
        return self.spans[0].hours[0]

    @property
    def until(self) -> datetime:
        return self.spans[-1].until

    @property
    def whole(self) -> Tally | None:
        """The sum, None where a part is missing."""
        return None if None in self.tallies else sum(filter(None, self.tallies), Tally())

    def link(self, span: Span | None = None, **filters: str) -> str:
        since, until = (span.hours[0], span.until) if span else (self.since, self.until)
        return span_link(TOUCHES, "settled_at", since, until, **filters)


def read(days: int, patience: Patience) -> Ended:
    spans = list(_days(days) if days > 1 else _hours())
    tallies = pulse.past.hours([hour for span in spans for hour in span.hours], now(), patience)
    return Ended(spans, [_sum([tallies[hour] for hour in span.hours]) for span in spans])


def _hours() -> Iterator[Span]:
    """The present one and the 23 before."""
    present = localtime().replace(minute=0, second=0, microsecond=0)
    for back in range(23, -1, -1):
        hour = present - HOUR * back
        yield Span(f"{localtime(hour):%m-%d %H:%M}", [hour], hour + HOUR)


def _days(count: int) -> Iterator[Span]:
    """Today and those before, by the house's calendar."""
    present = localtime().replace(minute=0, second=0, microsecond=0)
    for back in range(count - 1, -1, -1):
        begins = (localtime() - timedelta(days=back)).replace(hour=0, minute=0, second=0, microsecond=0)
        ends = min(begins + timedelta(days=1), present + HOUR)
        yield Span(f"{begins:%m-%d}", [begins + HOUR * number for number in range((ends - begins) // HOUR)], ends)


def _sum(parts: Sequence[Tally | None]) -> Tally | None:
    return None if None in parts else sum(filter(None, parts), Tally())


def by_state(ended: Ended) -> Chart:
    def bucket(span: Span, tally: Tally | None) -> Bucket:
        links = {each.key: ended.link(span, state__exact=each.key) for each in STATES}
        return Bucket(span.label, None if tally is None else counted(tally), links)

    buckets = [bucket(*each) for each in zip(ended.spans, ended.tallies, strict=True)]
    title = _("What ended, and how")
    return stacked("ended", title, STATES, buckets, lambda key: ended.link(state__exact=key))


def by_reason(ended: Ended) -> Chart:
    """Of the suppressed: the commonest reasons, and the others together."""
    total: Counter[str] = sum((suppressed(tally) for tally in ended.tallies if tally), Counter())
    common = [code for code, _count in total.most_common(SHOWN_REASONS)]
    series = [Series(code, reason(code), f"hue{number}") for number, code in enumerate(common)]
    if len(total) > len(common):
        series.append(Series("", gettext_lazy("Other reasons"), "quiet"))

    def link(code: str, span: Span | None = None) -> str:
        return ended.link(span, state__exact="suppressed", **({"reason": code} if code else {}))

    def bucket(span: Span, tally: Tally | None) -> Bucket:
        counts: Counter[str] = Counter()
        for code, count in suppressed(tally).items() if tally else ():
            counts[code if code in common else ""] += count
        links = {each.key: link(each.key, span) for each in series}
        return Bucket(span.label, None if tally is None else counts, links)

    buckets = [bucket(*each) for each in zip(ended.spans, ended.tallies, strict=True)]
    return stacked("reasons", _("Why touches were not sent"), series, buckets, link)


def counted(tally: Tally) -> Counter[str]:
    """By state."""
    found: Counter[str] = Counter()
    for (state, _reason, _node), count in tally.items():
        found[state] += count
    return found


def suppressed(tally: Tally) -> Counter[str]:
    found: Counter[str] = Counter()
    for (state, code, _node), count in tally.items():
        if state == "suppressed":
            found[code] += count
    return found
