"""Live sessions on the overview."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext as _

from scheduling.admin.dashboard.cards import Card, Figure
from scheduling.admin.dashboard.columns import days_asked, spans
from scheduling.admin.labels import spoken
from scheduling.admin.patience import Patience, patiently
from scheduling.configuration.snapshot import current
from sessions.admin.hours import silences
from sessions.detection.presence import SILENT
from sessions.detection.silence_events import undelivered
from sessions.store import overview, sessions
from sessions.store.client import StoreAway
from sessions.store.overview import Overview

LATE_AFTER = timedelta(seconds=5)
PATIENCE = 1.0  #: seconds, for the chart


def card(request: HttpRequest) -> Card | None:
    """How many are watched, by how many watchers, whether these keep up, and what came of it by the hour."""
    if not request.user.has_perms(["scheduling.view_event", "scheduling.view_touch"]):
        return None
    link = _page(request)
    charts = [silences(spans(days_asked(request)), Patience(PATIENCE))]
    try:
        found = overview.look(sessions.live())
    except StoreAway:
        note = _("Redis does not answer: nobody can say who is silent.")
        return Card(_("Live sessions"), link=link, note=note, charts=charts)
    note = "" if found.watchers else _("No watcher is running: nobody is found silent.")
    return Card(_("Live sessions"), _figures(found, link), link, note, charts)


def _figures(found: Overview, link: str) -> list[Figure]:
    bound = settings.AFTERTOUCH_SILENCE_BACKLOG
    waits = patiently(lambda: undelivered(bound), "1s")
    silences = f"{reverse('admin:scheduling_event_changelist')}?type={SILENT}"
    figures = [
        Figure(_("Watched"), found.live, link),
        Figure(_("Silent, being handed in"), found.in_flight, silences),
        Figure(_("Guide messages not yet sent"), waits, _guides(), "bad" if waits and waits >= bound else ""),
        Figure(_("Watchers"), len(found.watchers), link, "" if found.watchers else "bad"),
    ]
    behind = timedelta(milliseconds=found.lag_ms)
    return [*figures, Figure(_("Behind by"), spoken(behind), link, "bad")] if behind > LATE_AFTER else figures


def _page(request: HttpRequest) -> str:
    return reverse("admin:chat_sessions_live") if request.user.has_perm("chat_sessions.view_silencepolicy") else ""


def _guides() -> str:
    """Where one node answers silences: its touches that wait."""
    nodes = current().triggered.get(SILENT, ())
    link = f"{reverse('admin:scheduling_touch_changelist')}?stands=waiting"
    return f"{link}&node__id__exact={nodes[0].id}" if len(nodes) == 1 else link
