"""Show the list of recorded silences with the outcomes of their touches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext as _

from scheduling.admin.base import OpsAdmin
from scheduling.admin.count_time_limits import count_within
from scheduling.admin.labels import translate_reason
from scheduling.models import Event, Touch
from sessions.admin.chats import (
    build_chat_link,
    check_chat_permission,
    name_silence,
    name_silence_policy,
    render_chat_page,
)
from sessions.detection.presence import SessionPresence, parse_event_id
from sessions.detection.silence_events import SOURCE
from sessions.frames import ID_LENGTH

MOST_SHOWN, MOST_READ = 200, 1_000  #: silences; `tag` selects from the newest that are read
SHOWN_DAYS = 7


@dataclass(frozen=True, slots=True)
class SilenceRow:
    what: str
    link: str
    session_id: str
    chat_link: str
    user_id: str
    tags: str
    policy: str
    deadline: datetime
    outcomes: list[tuple[str, str, str]]  #: state, node with reason, and link of each touch


def silences_page(pages: OpsAdmin, request: HttpRequest) -> HttpResponse:
    """Render the newest silences of both kinds, those of the tag `tag` and the customer `user` if given."""
    check_chat_permission(pages, request)
    wanted = {name: request.GET.get(name, "").strip()[:ID_LENGTH] for name in ("user", "tag")}
    found = Event.objects.filter(
        type__in=SessionPresence.event_types, source=SOURCE, received_at__gte=now() - timedelta(days=SHOWN_DAYS)
    )
    if wanted["user"]:
        found = found.filter(customer__user_id=wanted["user"])
    # Ids are in the order of time.
    newest = found.select_related("customer").order_by("-pk")[: MOST_READ if wanted["tag"] else MOST_SHOWN]
    read = count_within(lambda: list(newest))
    events = [each for each in read or () if not wanted["tag"] or wanted["tag"] in each.data.get("tags", ())]
    return render_chat_page(
        pages, request, "chat_sessions/silences.html", _("Silences"), wanted=wanted, slow=read is None,
        rows=_silence_rows(events[:MOST_SHOWN]),
    )  # fmt: skip


def _silence_rows(events: Sequence[Event]) -> list[SilenceRow]:
    outcomes: dict[UUID, list[tuple[str, str, str]]] = defaultdict(list)
    for touch in Touch.objects.filter(event__in=events).select_related("node"):
        words = " · ".join(filter(None, [touch.node.key, translate_reason(touch.reason) if touch.reason else ""]))
        link = reverse("admin:scheduling_touch_change", args=[touch.pk])
        outcomes[touch.event_id].append((str(touch.get_state_display()), words, link))
    return [_silence_row(each, outcomes[each.pk]) for each in events]


def _silence_row(event: Event, outcomes: list[tuple[str, str, str]]) -> SilenceRow:
    session_id = parse_event_id(event.event_id)[0]
    return SilenceRow(
        what=name_silence(event),
        link=reverse("admin:scheduling_event_change", args=[event.pk]),
        session_id=session_id,
        chat_link=build_chat_link(session_id),
        user_id=event.user_id,
        tags=", ".join(event.data.get("tags", ())),
        policy=name_silence_policy(event),
        deadline=event.occurred_at,
        outcomes=outcomes,
    )
