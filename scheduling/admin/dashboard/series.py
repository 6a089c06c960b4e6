"""What ended, over time: the charts of the overview and the sums below them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.admin.dashboard.charts import Bucket, Chart, Series, stacked
from scheduling.admin.dashboard.columns import Span, reach, tallies
from scheduling.admin.dashboard.ranked import Names, ranked
from scheduling.admin.labels import reason
from scheduling.admin.patience import Patience
from scheduling.admin.touches.spans import span_link
from scheduling.monitoring import statistics
from scheduling.monitoring.statistics import Tally

TOUCHES = "scheduling_touch"
STATES = (
    Series("delivered", gettext_lazy("Delivered"), "good"),
    Series("suppressed", gettext_lazy("Suppressed"), "wait"),
    Series("cancelled", gettext_lazy("Cancelled"), "quiet"),
    Series("failed", gettext_lazy("Failed"), "bad"),
    Series("unknown", gettext_lazy("Unknown"), "doubt"),
)


@dataclass(frozen=True, slots=True)
class Ended:
    """`tallies` by column, None where there is too much to count now."""

    spans: list[Span]
    tallies: list[Tally | None]

    @property
    def since(self) -> datetime:
        return self.spans[0].hours[0]

    @property
    def whole(self) -> Tally | None:
        """The sum, None where a part is missing."""
        return None if None in self.tallies else sum(filter(None, self.tallies), Tally())

    def link(self, span: Span | None = None, **filters: str) -> str:
        since, until = reach(self.spans, span)
        return span_link(TOUCHES, "settled_at", since, until, **filters)


def read(spans: list[Span], patience: Patience) -> Ended:
    return Ended(spans, tallies(statistics.past, spans, patience))


def by_state(ended: Ended) -> Chart:
    def bucket(span: Span, tally: Tally | None) -> Bucket:
        links = {each.key: ended.link(span, state__exact=each.key) for each in STATES}
        return Bucket(span.label, None if tally is None else counted(tally), links)

    buckets = [bucket(*each) for each in zip(ended.spans, ended.tallies, strict=True)]
    title = _("What ended, and how")
    return stacked("ended", title, STATES, buckets, lambda key: ended.link(state__exact=key))


def by_reason(ended: Ended) -> Chart:
    """Of the suppressed: the commonest reasons, and the others together."""
    return _reasons("reasons", _("Why touches were not sent"), ended, ["suppressed"], {"state__exact": "suppressed"})


def by_cause(ended: Ended) -> Chart:
    """The same of those that failed, or may have."""
    return _reasons("failures", _("Why touches failed"), ended, ["failed", "unknown"], {"stands": "bad"})


def _reasons(key: str, title: str, ended: Ended, states: Collection[str], filters: dict[str, str]) -> Chart:
    def link(code: str, span: Span | None) -> str:
        return ended.link(span, **filters, **({"reason": code} if code else {}))

    counts = [None if tally is None else reasons(tally, states) for tally in ended.tallies]
    return ranked(key, title, ended.spans, counts, Names(reason, _("Other reasons"), link))


def counted(tally: Tally) -> Counter[str]:
    """By state."""
    found: Counter[str] = Counter()
    for (state, _reason, _node), count in tally.items():
        found[state] += count
    return found


def reasons(tally: Tally, states: Collection[str]) -> Counter[str]:
    """Of those that ended like this."""
    found: Counter[str] = Counter()
    for (state, code, _node), count in tally.items():
        if state in states:
            found[code] += count
    return found
