"""Show the state of live chats: a page that refreshes itself (see scheduling/live.js) and a dashboard card.

A view costs one short script per shard and a few rows of counts. The cost does not depend on the number of chats.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling import sql
from scheduling.admin.base import OpsAdmin
from scheduling.admin.dashboard.cards import Card, Figure
from scheduling.admin.dashboard.charts import Bucket, Chart, Series, Span, days_asked, paired, spans, tallies
from scheduling.admin.labels import spoken
from scheduling.admin.patience import Patience, patiently
from scheduling.admin.touches.touch import span_link
from scheduling.configuration.snapshot import current
from scheduling.monitoring import statistics
from scheduling.monitoring.statistics import Past, hours_between
from sessions.detection import nudge_stats
from sessions.detection.presence import SILENT
from sessions.detection.silence_events import undelivered
from sessions.models import Campaign, NudgeTally
from sessions.store import sessions, stats
from sessions.store.client import StoreAway
from sessions.store.stats import Overview, TagCount, WatcherState

MOST_TAGS = 100  #: rows
LATE = 1_000  #: ms of delay that is shown as bad; the promise is a tenth of it


@dataclass(frozen=True, slots=True)
class Row:
    """A tag with its current chats and the outcomes of its guide messages."""

    tag: str
    armed: str
    paused: str
    sent: str
    answered: str
    false: str


def page(pages: OpsAdmin, request: HttpRequest) -> HttpResponse:
    """Render the overview. Requires the view permission for silence policies."""
    if not pages.has_view_or_change_permission(request):
        raise PermissionDenied
    found, tallies = _look(), patiently(nudge_stats.lately)
    title = _("Live overview")
    answer: HttpResponse = pages.page(
        request, "chat_sessions/live.html", title, opts=None, content_title=title, found=found,
        groups=[(_("Chats"), _chats(found)), (_("Silences"), _silences(found))], day=_day(tallies),
        rows=_rows(found, tallies or []), watchers=[_watcher(each) for each in found.watchers] if found else [],
        campaigns=Campaign.objects.filter(retired_at=None, enabled=True, starts_at__lte=now(), ends_at__gt=now()),
    )  # fmt: skip
    answer["Cache-Control"] = "no-store"
    return answer


def _look() -> Overview | None:
    try:
        return stats.look(sessions.live())
    except StoreAway:
        return None


def _chats(found: Overview | None) -> list[dict[str, Any]]:
    return [
        _figure(_("Live chats"), _many(found.live) if found else None),
        _figure(_("Timer running"), _many(found.armed) if found else None),
        _figure(_("Timer paused"), _many(found.paused) if found else None),
    ]


def _silences(found: Overview | None) -> list[dict[str, Any]]:
    late = found is not None and found.lag_ms >= LATE
    return [
        _figure(_("A second, last minute"), _rate(found.a_second) if found else None),
        _figure(_("Watchers are behind by"), _span(found.lag_ms) if found else None, bad=late),
        _figure(_("Claimed, event being recorded"), _many(found.in_flight) if found else None),
        _backlog(),
    ]


def _backlog() -> dict[str, Any]:
    bound = settings.AFTERTOUCH_SILENCE_BACKLOG
    waits = patiently(lambda: undelivered(bound))
    full = waits is not None and waits >= bound
    return _figure(_("Not yet delivered"), None if waits is None else _many(waits) + ("+" if full else ""), bad=full)


def _day(tallies: list[NudgeTally] | None) -> list[dict[str, Any]]:
    known = tallies is not None
    sent, answered, false = (
        sum(getattr(each, name) for each in tallies or []) for name in ("sent", "answered", "false")
    )
    return [
        _figure(_("Guide messages sent"), _many(sent) if known else None),
        _figure(_("Answered within 10 minutes"), _part(answered, sent) if known else None),
        _figure(_("False guide messages"), _part(false, sent) if known else None),
    ]


def _figure(words: str, value: str | None, *, bad: bool = False) -> dict[str, Any]:
    return {"words": words, "value": value or "–", "bad": bad}


def _rows(found: Overview | None, tallies: list[NudgeTally]) -> list[Row]:
    counts = {each.tag: each for each in found.tags} if found else {}
    day = {each.tag: each for each in tallies}
    tags = [*counts, *(tag for tag in day if tag not in counts)]
    return [_row(tag, counts.get(tag), day.get(tag), known=found is not None) for tag in tags[:MOST_TAGS]]


def _row(tag: str, count: TagCount | None, tally: NudgeTally | None, *, known: bool) -> Row:
    sent = tally.sent if tally else 0
    return Row(
        tag,
        _many(count.armed if count else 0) if known else "–",
        _many(count.paused if count else 0) if known else "–",
        _many(sent),
        _part(tally.answered if tally else 0, sent),
        _part(tally.false if tally else 0, sent),
    )


def _watcher(state: WatcherState) -> dict[str, Any]:
    return {
        "name": state.name,
        "seen": _at(state.seen_at),
        "rate": _rate(state.last_minute / 60),
        "handed_in": _many(state.handed_in),
        "latest": _span(state.latest_ms),
        "waits": state.waits,
    }


def _at(at: datetime) -> str:
    return f"{max(0, round((now() - at).total_seconds()))} s"


def _many(count: int) -> str:
    return f"{count:,}"


def _part(count: int, whole: int) -> str:
    return f"{count:,} · {100 * count / whole:.1f} %" if whole else f"{count:,}"


def _rate(a_second: float) -> str:
    return f"{a_second:,.0f}" if a_second >= 100 else f"{a_second:.1f}"


def _span(ms: int) -> str:
    return f"{ms} ms" if ms < 10_000 else spoken(timedelta(milliseconds=ms))


SILENCES = Series("silences", gettext_lazy("Silences"), "hue0")
GUIDES = Series("guides", gettext_lazy("Guide messages"), "hue1")


def guides_sent(since: datetime, until: datetime) -> dict[datetime, Counter[str]]:
    """Count delivered guide messages by hour from `since`. Reads the five-minute counts, not the attempts."""
    found: dict[datetime, Counter[str]] = {hour: Counter() for hour in hours_between(since, until)}
    for hour, count in sql.rows(_SENT, {"since": since, "until": until}):
        found[hour][GUIDES.key] += count
    return found


_SENT = """
SELECT date_bin('1 hour', at, %(since)s), sum(sent)::bigint FROM chat_sessions_nudgetally
WHERE at >= %(since)s AND at < %(until)s GROUP BY 1
"""

past_guides = Past(guides_sent)


def silences(spans: list[Span], patience: Patience) -> Chart:
    events = tallies(statistics.past_events, spans, patience)
    guides = tallies(past_guides, spans, patience)
    buckets = []
    for span, taken, sent in zip(spans, events, guides, strict=True):
        counts = None
        if taken is not None and sent is not None:
            counts = {SILENCES.key: taken[SILENT], GUIDES.key: sent[GUIDES.key]}
        buckets.append(Bucket(span.label, counts, _links(span.hours[0], span.until)))
    whole = _links(spans[0].hours[0], spans[-1].until)
    legend = [
        (each, sum(bucket.counts[each.key] for bucket in buckets if bucket.counts), whole.get(each.key, ""))
        for each in (SILENCES, GUIDES)
    ]
    return paired("silences", _("Silences and guide messages"), legend, buckets)


def _links(since: datetime, until: datetime) -> dict[str, str]:
    """Return links to the lists behind a bar. Guide messages have a link only if a single node sends them."""
    links = {SILENCES.key: span_link("scheduling_event", "received_at", since, until, type=SILENT)}
    nodes = current().triggered.get(SILENT, ())
    if len(nodes) == 1:
        delivered = {"state__exact": "delivered", "node__id__exact": str(nodes[0].id)}
        links[GUIDES.key] = span_link("scheduling_touch", "settled_at", since, until, **delivered)
    return links


LATE_AFTER = timedelta(seconds=5)
PATIENCE = 1.0  #: seconds; time limit of the chart


def card(request: HttpRequest) -> Card | None:
    """Show watched chats, watchers, their delay, and silences with guide messages by hour."""
    if not request.user.has_perms(["scheduling.view_event", "scheduling.view_touch"]):
        return None
    link = _page(request)
    charts = [silences(spans(days_asked(request)), Patience(PATIENCE))]
    try:
        found = stats.look(sessions.live())
    except StoreAway:
        note = _("Redis does not respond. Silent chats are not detected.")
        return Card(_("Live sessions"), link=link, note=note, charts=charts)
    note = "" if found.watchers else _("No watcher is running. Silent chats are not detected.")
    return Card(_("Live sessions"), _figures(found, link), link, note, charts)


def _figures(found: Overview, link: str) -> list[Figure]:
    bound = settings.AFTERTOUCH_SILENCE_BACKLOG
    waits = patiently(lambda: undelivered(bound), "1s")
    silences = f"{reverse('admin:scheduling_event_changelist')}?type={SILENT}"
    figures = [
        Figure(_("Watched"), found.live, link),
        Figure(_("Silent, event being recorded"), found.in_flight, silences),
        Figure(_("Guide messages not yet sent"), waits, _guides(), "bad" if waits and waits >= bound else ""),
        Figure(_("Watchers"), len(found.watchers), link, "" if found.watchers else "bad"),
    ]
    behind = timedelta(milliseconds=found.lag_ms)
    return [*figures, Figure(_("Behind by"), spoken(behind), link, "bad")] if behind > LATE_AFTER else figures


def _page(request: HttpRequest) -> str:
    return reverse("admin:chat_sessions_live") if request.user.has_perm("chat_sessions.view_silencepolicy") else ""


def _guides() -> str:
    """Return the list of waiting touches, filtered by node if a single node answers silences."""
    nodes = current().triggered.get(SILENT, ())
    link = f"{reverse('admin:scheduling_touch_changelist')}?stands=waiting"
    return f"{link}&node__id__exact={nodes[0].id}" if len(nodes) == 1 else link
