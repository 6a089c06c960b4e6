"""Count the touches that ended at each node yesterday and in the last seven days, for the cards of the matrix."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from django.conf import settings
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.admin.count_time_limits import PageTimeLimit
from scheduling.admin.dashboard.charts import Span, split_period
from scheduling.admin.dashboard.series import EndedTouches, count_ended_by_span
from scheduling.monitoring.statistics import OutcomeCounts

DAYS = 7  #: today included


@dataclass(frozen=True, slots=True)
class CardOutcome:
    tone: str
    words: str | Promise
    states: frozenset[str]
    filters: dict[str, str]  #: of the list of touches


CARD_OUTCOMES = (
    CardOutcome("good", gettext_lazy("Sent"), frozenset({"delivered"}), {"state__exact": "delivered"}),
    CardOutcome("wait", gettext_lazy("Suppressed"), frozenset({"suppressed"}), {"state__exact": "suppressed"}),
    CardOutcome("bad", gettext_lazy("Failed"), frozenset({"failed", "unknown"}), {"status": "bad"}),
)


@dataclass(frozen=True, slots=True)
class CardFigure:
    outcome: CardOutcome
    count: int | None  #: None if counting exceeded its time limit
    link: str


@dataclass(frozen=True, slots=True)
class CardPeriod:
    title: str
    figures: list[CardFigure]


class CardFigures:
    """Figures of all nodes, from one count that the page's time limit bounds."""

    def __init__(self) -> None:
        self._ended = count_ended_by_span(split_period(DAYS), PageTimeLimit(settings.TIMEOUTS.overview))
        yesterday = self._ended.spans[-2]
        self._periods = [
            (_("Yesterday"), yesterday, _sum_by_node(self._ended.tallies[-2])),
            (_("7 days"), None, _sum_by_node(self._ended.whole)),
        ]

    def list_periods(self, node_id: int) -> list[CardPeriod]:
        return [
            CardPeriod(title, [_build_figure(self._ended, span, counts, each, node_id) for each in CARD_OUTCOMES])
            for title, span, counts in self._periods
        ]


def _sum_by_node(tally: OutcomeCounts | None) -> Counter[tuple[int, str]] | None:
    """Count by node and tone of the outcome; None if the tally is missing."""
    if tally is None:
        return None
    found: Counter[tuple[int, str]] = Counter()
    for (state, _reason, node_id), count in tally.items():
        for each in CARD_OUTCOMES:
            if state in each.states:
                found[node_id, each.tone] += count
    return found


def _build_figure(
    ended: EndedTouches, span: Span | None, counts: Counter[tuple[int, str]] | None, outcome: CardOutcome, node_id: int
) -> CardFigure:
    count = None if counts is None else counts[node_id, outcome.tone]
    return CardFigure(outcome, count, ended.link(span, node__id__exact=str(node_id), **outcome.filters))
