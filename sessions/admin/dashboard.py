"""Show the state of live chats: a page that refreshes itself (see scheduling/live.js) and a dashboard card.

A view costs one short script per shard and a few rows of counts. The cost does not depend on the number of chats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.admin.base import table_page
from scheduling.admin.dashboard.charts import (
    Chart,
    DashboardCard,
    Figure,
    Series,
    Span,
    count_by_span,
    link_ended,
    read_requested_days,
    split_period,
)
from scheduling.admin.lists import build_span_link
from scheduling.admin.page_reads import PageTimeLimit, count_within
from scheduling.configuration.snapshot import current
from scheduling.monitoring import statistics
from scheduling.monitoring.duration_text import describe_duration
from sessions.admin.chats import ChatPages
from sessions.detection.presence import SILENT
from sessions.detection.silence_events import count_undelivered
from sessions.models import Campaign, SilencePolicy
from sessions.policy import CUSTOMER
from sessions.store import sessions, stats
from sessions.store.client import StoreUnavailable
from sessions.store.stats import Overview, PolicyCount, WatcherState

MOST_POLICIES = 100  #: rows
LATE_MS = 1_000  #: ms of delay that is shown as bad; the promise is a tenth of it


class LivePages(ChatPages):
    """The page that shows the state of all chats, beside those of single ones."""

    @table_page("live/", "view")
    def live(self, request: HttpRequest) -> HttpResponse:
        """Render the overview."""
        found: Overview | None = None
        week: dict[str, Counter[str]] = {}
        with suppress(StoreUnavailable):
            found, week = stats.read_overview(sessions.live_store()), stats.read_week(sessions.live_store())
        title = _("Live overview")
        chats = [
            Figure(_("Live chats"), _format_count(found.live) if found else None),
            Figure(_("Timer running"), _format_count(found.armed) if found else None),
            Figure(_("Timer paused"), _format_count(found.paused) if found else None),
        ]
        sums = sum(week.values(), Counter[str]())
        guides = [
            Figure(_("Guide messages sent"), _format_count(sums["sent"])),
            Figure(_("Answered within 10 minutes"), _format_share(sums["answered"], sums["sent"])),
            Figure(_("False guide messages"), _format_share(sums["false"], sums["sent"])),
        ]
        return self.render_chats(
            request, "chat_sessions/live.html", title, found=found,
            groups=[(_("Chats"), chats), (_("Silences"), _silence_figures(found))],
            guides=guides if found else [], rows=_policy_rows(found, week) if found else [],
            watchers=[_watcher_row(each) for each in found.watchers] if found else [],
            pauses=pause_charts(week),
            campaigns=Campaign.objects.filter(retired_at=None, enabled=True, starts_at__lte=now(), ends_at__gt=now()),
        )  # fmt: skip


def _silence_figures(found: Overview | None) -> list[Figure]:
    late = found is not None and found.lag_ms >= LATE_MS
    bound = settings.AFTERTOUCH_SILENCE_BACKLOG
    waits = count_within(lambda: count_undelivered(bound))
    full = waits is not None and waits >= bound
    backlog = Figure(
        _("Not yet delivered"),
        None if waits is None else _format_count(waits) + ("+" if full else ""),
        tone="bad" if full else "",
    )
    return [
        Figure(_("A second, last minute"), _format_rate(found.a_second) if found else None),
        Figure(_("Watchers are behind by"), _format_span(found.lag_ms) if found else None, tone="bad" if late else ""),
        Figure(_("Claimed, event being recorded"), _format_count(found.in_flight) if found else None),
        backlog,
    ]


def _policy_rows(found: Overview, week: Mapping[str, Counter[str]]) -> list[dict[str, str]]:
    """Return each silence policy with its current chats and the outcomes of its guide messages."""
    chats = {each.policy: each for each in found.policies}
    guided = sorted((key for key, counts in week.items() if counts["sent"]), key=lambda key: -week[key]["sent"])
    rows = []
    for key in [*chats, *(key for key in guided if key not in chats)][:MOST_POLICIES]:
        count, counts = chats.get(key, PolicyCount(key, 0, 0)), week.get(key, Counter())
        rows.append(
            {
                "policy": key,
                "armed": _format_count(count.armed),
                "paused": _format_count(count.paused),
                "sent": _format_count(counts["sent"]),
                "answered": _format_share(counts["answered"], counts["sent"]),
                "false": _format_share(counts["false"], counts["sent"]),
            }
        )
    return rows


def _watcher_row(state: WatcherState) -> dict[str, Any]:
    return {
        "name": state.name,
        "seen": f"{max(0, round((now() - state.seen_at).total_seconds()))} s",
        "rate": _format_rate(state.last_minute / 60),
        "handed_in": _format_count(state.handed_in),
        "latest": _format_span(state.latest_ms),
        "waits": state.waits,
    }


def _format_count(count: int) -> str:
    return f"{count:,}"


def _format_share(count: int, whole: int) -> str:
    return f"{count:,} · {100 * count / whole:.1f} %" if whole else f"{count:,}"


def _format_rate(a_second: float) -> str:
    return f"{a_second:,.0f}" if a_second >= 100 else f"{a_second:.1f}"


def _format_span(ms: int) -> str:
    return f"{ms} ms" if ms < 10_000 else describe_duration(timedelta(milliseconds=ms))


SILENCES = Series("silences", gettext_lazy("Silences"), "hue0")
GUIDES = Series("guides", gettext_lazy("Guide messages"), "hue1")


def silences_chart(spans: list[Span], time_limit: PageTimeLimit) -> Chart:
    events = count_by_span(statistics.event_cache, spans, time_limit)
    ended = count_by_span(statistics.ended_cache, spans, time_limit)
    # Those that are disabled or retired now sent some of the messages.
    nodes = {node.id for node in current().nodes.values() if node.trigger == SILENT}
    counts: list[dict[str, int] | None] = []
    senders: set[tuple[Span, int]] = set()
    for span, taken, tally in zip(spans, events, ended, strict=True):
        if taken is None or tally is None:
            counts.append(None)
            continue
        sent: Counter[int] = Counter()
        for (state, _reason, node), count in tally.items():
            if state == "delivered" and node in nodes:
                sent[node] += count
        senders |= {(span, node) for node in sent}
        counts.append({SILENCES.key: taken[SILENT], GUIDES.key: sent.total()})

    def link(key: str, span: Span) -> str:
        """Return the address of the counted rows; "" if several nodes sent messages: a list filters by one."""
        if key == SILENCES.key:
            return build_span_link("scheduling_event", "received_at", span.since, span.until, type=SILENT)
        of_span = {node for bar, node in senders if span.since <= bar.since < span.until}
        if len(of_span) != 1:
            return ""
        return link_ended(span, state__exact="delivered", node__id__exact=str(of_span.pop()))

    title = _("Silences and guide messages")
    return Chart("silences", title, (SILENCES, GUIDES), spans, counts, link, is_stacked=False)


SHORTER = Series("shorter", gettext_lazy("Shorter than the threshold"), "hue0")
LONGER = Series("longer", gettext_lazy("Longer"), "hue1")
MOST_CHARTS = 8


def pause_charts(week: Mapping[str, Counter[str]]) -> list[Chart]:
    """Return a chart of customers' pauses for each policy that waits for the customer, those with most pauses first."""
    places = range(1, len(stats.PAUSE_ENDS) + 2)
    pauses = {policy: [counts[str(place)] for place in places] for policy, counts in week.items()}
    pauses = {policy: counts for policy, counts in pauses.items() if any(counts)}
    waiting = SilencePolicy.objects.filter(retired_at=None, key__in=pauses).exclude(after=CUSTOMER)
    rows = sorted(waiting, key=lambda each: -sum(pauses[each.key]))
    return [_pause_chart(each, pauses[each.key]) for each in rows[:MOST_CHARTS]]


def _pause_chart(policy: SilencePolicy, counts: Sequence[int]) -> Chart:
    seconds = policy.threshold.total_seconds()
    starts = (0, *stats.PAUSE_ENDS)
    labels = [*(f"{begins}–{end} s" for begins, end in pairwise(starts)), f"> {starts[-1]} s"]
    sides = [SHORTER if begins < seconds else LONGER for begins in starts]
    bars = [{side.key: count} for side, count in zip(sides, counts, strict=True)]
    begins = (at := now()) - timedelta(days=stats.DAYS)
    whole, short = sum(counts), sum(bar.get(SHORTER.key, 0) for bar in bars)
    return Chart(
        f"pauses-{policy.key}", _("Pauses of customers, 7 days: %(policy)s") % {"policy": policy.key},
        (SHORTER, LONGER), [Span(label, begins, at) for label in labels], bars,
        sums={SHORTER.key: _format_share(short, whole), LONGER.key: _format_share(whole - short, whole)},
        note=_("Threshold: %(span)s") % {"span": describe_duration(policy.threshold)},
    )  # fmt: skip


LATE_AFTER = timedelta(seconds=5)


def live_chats_card(request: HttpRequest) -> DashboardCard | None:
    """Show watched chats, watchers, their delay, and silences with guide messages by hour."""
    if not request.user.has_perms(["scheduling.view_event", "scheduling.view_touch"]):
        return None
    link = (
        reverse("admin:chat_sessions_silencepolicy_live")
        if request.user.has_perm("chat_sessions.view_silencepolicy")
        else ""
    )
    charts = [silences_chart(split_period(read_requested_days(request)), PageTimeLimit(settings.TIMEOUTS.dashboard))]
    try:
        found = stats.read_overview(sessions.live_store())
    except StoreUnavailable:
        note = _("Redis does not respond. Silent chats are not detected.")
        return DashboardCard(_("Live sessions"), link=link, note=note, charts=charts)
    note = "" if found.watchers else _("No watcher is running. Silent chats are not detected.")
    return DashboardCard(_("Live sessions"), _card_figures(found, link), link, note, charts)


def _card_figures(found: Overview, link: str) -> list[Figure]:
    bound = settings.AFTERTOUCH_SILENCE_BACKLOG
    waits = count_within(lambda: count_undelivered(bound), settings.TIMEOUTS.dashboard)
    silences = f"{reverse('admin:scheduling_event_changelist')}?type={SILENT}"
    # The list of waiting touches, filtered by node if a single node answers silences.
    nodes = current().triggered.get(SILENT, ())
    waiting = f"{reverse('admin:scheduling_touch_changelist')}?status=waiting"
    guides = f"{waiting}&node__id__exact={nodes[0].id}" if len(nodes) == 1 else waiting
    figures = [
        Figure(_("Watched"), found.live, link),
        Figure(_("Silent, event being recorded"), found.in_flight, silences),
        Figure(_("Guide messages not yet sent"), waits, guides, "bad" if waits and waits >= bound else ""),
        Figure(_("Watchers"), len(found.watchers), link, "" if found.watchers else "bad"),
    ]
    behind = timedelta(milliseconds=found.lag_ms)
    return (
        [*figures, Figure(_("Behind by"), describe_duration(behind), link, "bad")] if behind > LATE_AFTER else figures
    )
