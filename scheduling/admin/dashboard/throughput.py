"""Build the overview's cards of throughput, lateness and broker queues."""

from __future__ import annotations

from datetime import timedelta

from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext as _

from scheduling.admin.count_time_limits import PageTimeLimit
from scheduling.admin.dashboard.cards import DashboardCard, Figure
from scheduling.admin.touches.touch import build_span_link
from scheduling.monitoring import statistics
from scheduling.monitoring.duration_text import describe_duration
from scheduling.monitoring.wanted_numbers import BrokerReading, QueueStats
from scheduling.queue_names import CORE_QUEUES, TOUCH_QUEUES

TOUCHES = "admin:scheduling_touch_changelist"
OTHERS = 6  #: queues of other apps that are shown, longest first


def build_pace_card(time_limit: PageTimeLimit) -> DashboardCard:
    """Build the card of lateness and rates."""
    lateness, rates = time_limit(statistics.measure_lateness), time_limit(statistics.measure_touch_rates)
    at = now()
    delivered = build_span_link("scheduling_touch", "settled_at", at - timedelta(hours=1), at, state__exact="delivered")
    lately = build_span_link("scheduling_touch", "settled_at", at - statistics.RATE_WINDOW, at)
    return DashboardCard(
        _("Pace"),
        [
            Figure(_("Lateness, median"), lateness and format_seconds(lateness.p50), delivered,
                   hint=_("From due to sent, over the latest deliveries of the last hour.")),
            Figure(_("Lateness, P99"), lateness and format_seconds(lateness.p99), delivered),
            Figure(_("Dispatched per minute"), rates and f"{rates.dispatched:.1f}",
                   reverse(TOUCHES) + "?state__exact=queued", hint=_("To the broker, over the last five minutes.")),
            Figure(_("Ended per minute"), rates and f"{rates.ended:.1f}", lately),
        ],
    )  # fmt: skip


def format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return _("%(ms)s ms") % {"ms": round(seconds * 1000)} if seconds < 1 else _("%(s)s s") % {"s": f"{seconds:.1f}"}


def build_queues_card(reading: BrokerReading | None) -> DashboardCard:
    """Build the card of broker queues; a note replaces the numbers while the broker does not respond."""
    page = reverse("admin:scheduling_touch_workers")
    if reading is None:
        note = _("The broker does not respond. Touches are kept and sent after it recovers.")
        return DashboardCard(_("Queues"), link=page, note=note)
    found = reading.queues
    own = sorted((each for each in found if each.name in CORE_QUEUES), key=lambda each: CORE_QUEUES.index(each.name))
    others = sorted(
        (each for each in found if each.name not in CORE_QUEUES and each.length), key=lambda each: -each.length
    )
    figures = [_build_queue_figure(each) for each in (*own, *others[:OTHERS])]
    unacked = [each.unacked for each in found if each.unacked is not None]
    if unacked:
        figures.append(Figure(_("Not acknowledged"), sum(unacked), f"{reverse(TOUCHES)}?state__exact=queued"))
    note = ""
    if reading.accepts_messages is False:
        note = _(
            "The broker is short of memory or disk and rejects messages. Touches are kept and sent after it recovers."
        )
    return DashboardCard(_("Queues"), figures, page, note)


def _build_queue_figure(each: QueueStats) -> Figure:
    priority = next((key for key, name in TOUCH_QUEUES.items() if name == each.name), None)
    link = reverse("admin:scheduling_touch_workers")
    if priority is not None:
        link = f"{reverse(TOUCHES)}?state__exact=queued&priority__exact={priority}"
    age = timedelta(seconds=round(each.oldest_age)) if each.length and each.oldest_age else None
    hint = _("the oldest for %(span)s") % {"span": describe_duration(age)} if age else ""
    return Figure(each.name, each.length, link, hint=hint)
