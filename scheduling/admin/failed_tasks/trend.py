"""Draw how often each cause failed in the last 24 hours, as a small inline SVG with a text alternative."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils.timezone import localtime
from django.utils.translation import gettext as _

from scheduling import sql
from scheduling.admin.count_time_limits import count_within
from scheduling.admin.shown_values import describe_instant
from scheduling.ids import first_id_at

HOURS = 24
STEP, HEIGHT = 4, 20  #: of the drawing; the base line below the bars adds 1


@dataclass(frozen=True, slots=True)
class Sparkline:
    """Bars as x, y and height, and the same as a sentence."""

    bars: list[tuple[int, float, float]]
    words: str
    width: int = HOURS * STEP
    bar_width: int = STEP - 1


def draw_trends(fingerprints: Sequence[str]) -> dict[str, Sparkline]:
    """Return the trend of each cause. Empty if counting exceeds its time limit."""
    present = localtime().replace(minute=0, second=0, microsecond=0)
    since = present - timedelta(hours=HOURS - 1)
    found = count_within(lambda: _count_by_hour(fingerprints, since))
    if found is None:
        return {}
    return {each: _draw(found.get(each, {}), since) for each in fingerprints}


def _count_by_hour(fingerprints: Sequence[str], since: datetime) -> dict[str, dict[int, int]]:
    """Count failures by cause and hour after `since`. Ids grow with time, so older tasks are not read."""
    given = {"since": since, "first": first_id_at(since - timedelta(minutes=1)), "causes": list(fingerprints)}
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for fingerprint, hour, count in sql.rows(_BY_HOUR, given):
        counts[fingerprint][int(hour)] = count
    return counts


def _draw(counts: dict[int, int], since: datetime) -> Sparkline:
    most = max(counts.values(), default=0)
    bars = []
    for hour, count in sorted(counts.items()):
        if 0 <= hour < HOURS:
            height = max(round(HEIGHT * count / most, 1), 1.5)
            bars.append((hour * STEP, round(HEIGHT - height, 1), height))
    words = _("none in the last 24 hours")
    if most:
        peak = since + timedelta(hours=min(hour for hour, count in counts.items() if count == most))
        words = _("%(total)s in the last 24 hours, most at %(hour)s: %(most)s") % {
            "total": sum(counts.values()), "hour": describe_instant(peak), "most": most,
        }  # fmt: skip
    return Sparkline(bars, words)


_BY_HOUR = """
SELECT fingerprint, floor(extract(epoch FROM failed_at - %(since)s::timestamptz) / 3600), count(*)
FROM scheduling_failedtask
WHERE id >= %(first)s AND fingerprint = ANY(%(causes)s) AND failed_at >= %(since)s
GROUP BY 1, 2
"""
