"""The result of a replay, as its page shows it: figures, bars and tables, live beside draft."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _

from scheduling.admin.labels import reason

HEIGHT = 120  #: of the bars of days, in units of the drawing
STEP, WIDTH = 24, 9
PARTS = ("planned", "delivered", "suppressed", "held", "cancelled", "failed", "waiting")


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure of both worlds."""

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


def told(result: Mapping[str, Any]) -> dict[str, Any]:
    live, draft = result["live"], result["draft"]
    return {
        "events": result["events"],
        "since": parse_datetime(result["since"]),
        "until": parse_datetime(result["until"]),
        "shortened": result["shortened"],
        "waiting_incomplete": result.get("waiting_incomplete", False),  # not said by those from before
        "carried": live["totals"].get("carried", 0),
        "figures": _figures(live, draft),
        "suppressed": _codes(live["suppressed"], draft["suppressed"]),
        "held": _codes(live["held"], draft["held"]),
        "failed": _codes(live["failed"], draft["failed"]),
        "cancelled": _codes(live["cancelled"], draft["cancelled"]),
        "nodes": _nodes(live["nodes"], draft["nodes"]),
        "columns": _columns(),
        "sends": _sends(live["sends_a_customer"], draft["sends_a_customer"]),
        "days": (days := _days(live["days"], draft["days"])),
        "wide": max(len(days), 1) * STEP,
        "high": HEIGHT,
    }


def told_changes(changes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    verbs = {"added": _("added"), "changed": _("changed"), "restored": _("brought back"), "retired": _("retired")}
    return [
        {
            **each,
            "words": verbs.get(each["verb"], each["verb"]),
            "differences": [
                {"path": one["path"], "before": _shown(one["before"]), "after": _shown(one["after"])}
                for one in each["differences"]
            ],
        }
        for each in changes
    ]


def _shown(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _figures(live: Mapping[str, Any], draft: Mapping[str, Any]) -> list[Pair]:
    totals = [
        (_("Sent"), "delivered"), (_("Suppressed"), "suppressed"), (_("Held back for a while"), "held"),
        (_("Called off"), "cancelled"), (_("Failed"), "failed"), (_("Still waiting at the end"), "waiting"),
    ]  # fmt: skip
    found = [Pair(words, live["totals"].get(key, 0), draft["totals"].get(key, 0)) for words, key in totals]
    more = [
        (_("Customers reached"), "customers_reached"), (_("Customers at their limit"), "customers_at_cap"),
        (_("Communities at their limit"), "communities_at_cap"),
    ]  # fmt: skip
    return found + [Pair(words, live[key], draft[key]) for words, key in more]


def _codes(live: Mapping[str, int], draft: Mapping[str, int]) -> list[Pair]:
    """By reason, the most frequent first."""
    widest = max([*live.values(), *draft.values()], default=1)
    pairs = [Pair(reason(code), live.get(code, 0), draft.get(code, 0), widest) for code in live.keys() | draft.keys()]
    return sorted(pairs, key=lambda pair: (-max(pair.live, pair.draft), pair.words))


def _columns() -> list[str]:
    return [
        _("planned"), _("sent"), _("suppressed"), _("held back"), _("called off"), _("failed"), _("still waiting")
    ]  # fmt: skip


def _nodes(live: Mapping[str, Any], draft: Mapping[str, Any]) -> list[dict[str, Any]]:
    words = _columns()
    return [
        {
            "key": key,
            "parts": [
                Pair(word, live.get(key, {}).get(part, 0), draft.get(key, {}).get(part, 0))
                for word, part in zip(words, PARTS, strict=True)
            ],
        }
        for key in sorted(live.keys() | draft.keys())
    ]


def _sends(live: Mapping[str, int], draft: Mapping[str, int]) -> list[Pair]:
    """How many customers got one, two, three, or more."""
    widest = max([*live.values(), *draft.values()], default=1)
    words = {"1": _("1 touch"), "2": _("2 touches"), "3": _("3 touches"), "4": _("4 touches or more")}
    return [Pair(text, live.get(key, 0), draft.get(key, 0), widest) for key, text in words.items()]


def _days(live: Mapping[str, int], draft: Mapping[str, int]) -> list[Day]:
    highest = max([*live.values(), *draft.values()], default=1)

    def bar(x: int, count: int) -> Bar:
        height = max(round(HEIGHT * count / highest), 1 if count else 0)
        return Bar(x, HEIGHT - height, height)

    found = []
    for place, day in enumerate(_span({*live, *draft})):
        a, b, x = live.get(day, 0), draft.get(day, 0), place * STEP
        found.append(Day(day, a, b, bar(x + 2, a), bar(x + 3 + WIDTH, b), x))
    return found


def _span(days: Iterable[str]) -> list[str]:
    """Every day from the first to the last, those without a send too."""
    known = sorted(map(date.fromisoformat, days))
    if not known:
        return []
    return [(known[0] + timedelta(days=number)).isoformat() for number in range((known[-1] - known[0]).days + 1)]
