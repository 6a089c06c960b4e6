"""Live sessions on the overview."""

from __future__ import annotations

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext as _

from scheduling.admin.cards import Card, Figure
from scheduling.admin.patience import patiently
from scheduling.admin.wording import spoken
from scheduling.configuration import current
from sessions import reports, store
from sessions.hand_in import undelivered
from sessions.presence import SILENT
from sessions.server import StoreAway


def card(request: HttpRequest) -> Card | None:
    """How many are watched, by how many watchers, and whether these keep up."""
    if not request.user.has_perms(["scheduling.view_event", "scheduling.view_touch"]):
        return None
    live = store.live()
    try:
        shards, watchers = live.shards(), reports.watchers(live)
    except StoreAway:
        return Card(_("Live sessions"), note=_("Redis does not answer: nobody can say who is silent."))
    first = min((shard.first_due_ms for shard in shards if shard.first_due_ms >= 0), default=None)
    behind = now() - store.instant(first) if first is not None else None
    bound = settings.AFTERTOUCH_SILENCE_BACKLOG
    waits = patiently(lambda: undelivered(bound), "1s")
    silences = f"{reverse('admin:scheduling_event_changelist')}?type={SILENT}"
    figures = [
        Figure(_("Watched"), sum(shard.armed for shard in shards)),
        Figure(_("Silent, being handed in"), sum(shard.in_flight for shard in shards), silences),
        Figure(_("Guide messages not yet sent"), waits, _guides(), "bad" if waits and waits >= bound else ""),
        Figure(_("Watchers"), len(watchers), "", "" if watchers else "bad"),
    ]
    if behind is not None and behind.total_seconds() > 5:
        figures.append(Figure(_("Behind by"), spoken(behind), "", "bad"))
    return Card(
        _("Live sessions"), figures, note="" if watchers else _("No watcher is running: nobody is found silent.")
    )


def _guides() -> str:
    """Where one node answers silences: its touches that wait."""
    nodes = current().triggered.get(SILENT, ())
    link = f"{reverse('admin:scheduling_touch_changelist')}?stands=waiting"
    return f"{link}&node__id__exact={nodes[0].id}" if len(nodes) == 1 else link
