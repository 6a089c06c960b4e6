"""Build the figures of a replay's result and the list of a draft's changes, for templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _

from scheduling.admin.labels import translate_reason
from scheduling.experiments.replay import runs

HEIGHT = 120  #: of a day's bars, in units of the drawing
STEP, WIDTH = 24, 9
PARTS = ("planned", "delivered", "suppressed", "held", "cancelled", "failed", "waiting")


@dataclass(frozen=True, slots=True)
class ComparedCount:
    """One number of the live configuration and of the draft."""

    words: str
    live: int
    draft: int
    widest: int = 1

    @property
    def change(self) -> int:
        return self.draft - self.live

    @property
    def signed(self) -> str:
        return f"{self.change:+d}".replace("-", "−") if self.change else "="

    @property
    def live_width(self) -> int:
        return round(100 * self.live / self.widest)

    @property
    def draft_width(self) -> int:
        return round(100 * self.draft / self.widest)


@dataclass(frozen=True, slots=True)
class Bar:
    x: int
    y: int
    height: int


@dataclass(frozen=True, slots=True)
class Day:
    text: str
    live: int
    draft: int
    live_bar: Bar
    draft_bar: Bar
    x: int


def build_result_context(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template context of a replay's result."""
    live, draft = result["live"], result["draft"]
    return {
        "events": result["events"],
        "since": parse_datetime(result["since"]),
        "until": parse_datetime(result["until"]),
        "shortened": result["shortened"],
        "waiting_incomplete": result.get("waiting_incomplete", False),  # missing in results of earlier versions
        "carried": live["totals"].get("carried", 0),
        "figures": _compare_totals(live, draft),
        "suppressed": _compare_reasons(live["suppressed"], draft["suppressed"]),
        "held": _compare_reasons(live["held"], draft["held"]),
        "failed": _compare_reasons(live["failed"], draft["failed"]),
        "cancelled": _compare_reasons(live["cancelled"], draft["cancelled"]),
        "nodes": _compare_nodes(live["nodes"], draft["nodes"]),
        "columns": _list_part_titles(),
        "sends": _compare_send_counts(live["sends_a_customer"], draft["sends_a_customer"]),
        "days": (days := _build_day_bars(live["days"], draft["days"])),
        "wide": max(len(days), 1) * STEP,
        "high": HEIGHT,
    }


def build_changes_context(changes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the template context of a draft's changes to the live configuration."""
    verbs = {"added": _("added"), "changed": _("changed"), "restored": _("restored"), "retired": _("retired")}
    return [
        {
            **each,
            "words": verbs.get(each["verb"], each["verb"]),
            "is_simulated": each["section"] not in runs.NOT_SIMULATED,
            "differences": [
                {
                    "path": one["path"],
                    "before": _format_change_value(one["before"]),
                    "after": _format_change_value(one["after"]),
                }
                for one in each["differences"]
            ],
        }
        for each in changes
    ]


def _format_change_value(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _compare_totals(live: Mapping[str, Any], draft: Mapping[str, Any]) -> list[ComparedCount]:
    totals = [
        (_("Sent"), "delivered"), (_("Suppressed"), "suppressed"), (_("Temporarily deferred"), "held"),
        (_("Cancelled"), "cancelled"), (_("Failed"), "failed"), (_("Still waiting at the end"), "waiting"),
    ]  # fmt: skip
    found = [ComparedCount(words, live["totals"].get(key, 0), draft["totals"].get(key, 0)) for words, key in totals]
    more = [
        (_("Customers reached"), "customers_reached"), (_("Customers at their limit"), "customers_at_cap"),
        (_("Communities at their limit"), "communities_at_cap"),
    ]  # fmt: skip
    return found + [ComparedCount(words, live[key], draft[key]) for words, key in more]


def _compare_reasons(live: Mapping[str, int], draft: Mapping[str, int]) -> list[ComparedCount]:
    """Pair counts by reason, the most frequent first."""
    widest = max([*live.values(), *draft.values()], default=1)
    pairs = [
        ComparedCount(translate_reason(code), live.get(code, 0), draft.get(code, 0), widest)
        for code in live.keys() | draft.keys()
    ]
    return sorted(pairs, key=lambda pair: (-max(pair.live, pair.draft), pair.words))


def _list_part_titles() -> list[str]:
    return [
        _("planned"), _("sent"), _("suppressed"), _("temporarily deferred"), _("cancelled"), _("failed"),
        _("still waiting"),
    ]  # fmt: skip


def _compare_nodes(live: Mapping[str, Any], draft: Mapping[str, Any]) -> list[dict[str, Any]]:
    words = _list_part_titles()
    return [
        {
            "key": key,
            "parts": [
                ComparedCount(word, live.get(key, {}).get(part, 0), draft.get(key, {}).get(part, 0))
                for word, part in zip(words, PARTS, strict=True)
            ],
        }
        for key in sorted(live.keys() | draft.keys())
    ]


def _compare_send_counts(live: Mapping[str, int], draft: Mapping[str, int]) -> list[ComparedCount]:
    """Pair the numbers of customers who got one, two, three or more touches."""
    widest = max([*live.values(), *draft.values()], default=1)
    words = {"1": _("1 touch"), "2": _("2 touches"), "3": _("3 touches"), "4": _("4 touches or more")}
    return [ComparedCount(text, live.get(key, 0), draft.get(key, 0), widest) for key, text in words.items()]


def _build_day_bars(live: Mapping[str, int], draft: Mapping[str, int]) -> list[Day]:
    highest = max([*live.values(), *draft.values()], default=1)

    def bar(x: int, count: int) -> Bar:
        height = max(round(HEIGHT * count / highest), 1 if count else 0)
        return Bar(x, HEIGHT - height, height)

    found = []
    for place, day in enumerate(_list_days({*live, *draft})):
        a, b, x = live.get(day, 0), draft.get(day, 0), place * STEP
        found.append(Day(day, a, b, bar(x + 2, a), bar(x + 3 + WIDTH, b), x))
    return found


def _list_days(days: Iterable[str]) -> list[str]:
    """Return every day from the first to the last, including days without a send."""
    known = sorted(map(date.fromisoformat, days))
    if not known:
        return []
    return [(known[0] + timedelta(days=number)).isoformat() for number in range((known[-1] - known[0]).days + 1)]
