"""Show the list of live chats, one chat with its timeline, and the recorded silences. No text of a message is shown."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.admin.base import OpsAdmin, table_page
from scheduling.admin.labels import translate_reason
from scheduling.admin.navigation import Entry, Group, Tab
from scheduling.admin.page_reads import count_within
from scheduling.models import Event, Touch
from scheduling.monitoring.duration_text import describe_duration
from sessions.detection.presence import SessionPresence, parse_event_id
from sessions.detection.silence_events import SOURCE
from sessions.frames import ID_LENGTH, USER_LENGTH
from sessions.store import inbox, sessions, stats
from sessions.store.client import StoreUnavailable
from sessions.store.stats import SessionSnapshot

MENU: tuple[Group, ...] = (
    (
        gettext_lazy("Live chats"),
        (
            Entry(
                "forum",
                (
                    Tab(gettext_lazy("Live overview"), "chat_sessions_silencepolicy_live",
                        "chat_sessions.view_silencepolicy"),
                    Tab(gettext_lazy("Silence policies"), "chat_sessions_silencepolicy_changelist"),
                    Tab(gettext_lazy("Campaigns"), "chat_sessions_campaign_changelist"),
                ),
            ),
        ),
    ),
)  # fmt: skip


REASONS = {
    "no_session": gettext_lazy("The customer has no chat that is open"),
    "inapp_away": gettext_lazy("The live sessions cannot be reached, trying again"),
    "inapp_busy": gettext_lazy("Too many messages wait for the live sessions, trying again"),
    "stale": gettext_lazy("Too late for a guide message"),
}

#: State of a chat, with the tone of its label.
STATES = {
    "idle": (gettext_lazy("no timer"), ""),
    "armed": (gettext_lazy("timer running"), "info"),
    "paused": (gettext_lazy("paused"), "warning"),
    "silent": (gettext_lazy("silent"), "warning"),
    "closed": (gettext_lazy("closed"), ""),
}
SIDES = {"customer": gettext_lazy("customer"), "agent": gettext_lazy("agent"), "bot": gettext_lazy("bot")}

#: Why the timer of a chat runs or not (see `SessionSnapshot.why`).
WHY = {
    "no_message": gettext_lazy("the customer has not written yet"),
    "customer_wrote": gettext_lazy("the customer wrote last; the timer runs after a message of an agent"),
    "agent_wrote": gettext_lazy("an agent wrote last; the timer runs after a message of the customer"),
    "unknown_writer": gettext_lazy("Redis lost the chat; the timer starts after the next message"),
    "policy_changed": gettext_lazy("the policy changed; the next frame starts the timer"),
    "tool": gettext_lazy("a tool is running"),
    "transfer": gettext_lazy("the chat is being transferred"),
    "queue": gettext_lazy("the chat waits in a queue"),
    "armed": gettext_lazy("the timer runs"),
    "outside_hours": gettext_lazy("outside the opening hours; the timer continues when they start"),
    "silent": gettext_lazy("a silence was recorded; the next message starts the timer"),
    "closed": gettext_lazy("the chat is closed"),
}


SECOND = timedelta(seconds=1)
MOST_CHATS, MOST_SILENCES, MOST_MESSAGES = 200, 50, 100
MOST_READ = 2_000  #: chats from which `state` and `tag` select
MOST_SHOWN, MOST_SILENCES_READ = 200, 1_000  #: silences; `tag` selects from the newest that are read
SHOWN_DAYS = 7
VIEW_CHATS = ("scheduling.view_event", "scheduling.view_touch")


@dataclass(frozen=True, slots=True)
class ChatMoment:
    at: datetime
    what: str
    detail: str = ""
    link: str = ""


class ChatPages(OpsAdmin):
    """Pages of live chats. No text of a message is shown."""

    def render_chats(self, request: HttpRequest, template: str, title: str, **context: Any) -> HttpResponse:
        answer = self.page(request, template, title, opts=None, **context)
        answer["Cache-Control"] = "no-store"
        return answer

    @table_page("chats/", "view", *VIEW_CHATS)
    def chats(self, request: HttpRequest) -> HttpResponse:
        """Render up to `MOST_CHATS` live chats, or those that the session id `q`, `user`, `state` and `tag` select.

        Chats without a timer come last, those that lost it last first. A session id or a user finds each chat.
        """
        wanted = {name: request.GET.get(name, "").strip()[:ID_LENGTH] for name in ("q", "user", "state", "tag")}
        store = sessions.live_store()
        try:
            found = _find_chats(store, **wanted)
        except StoreUnavailable:
            found = None
        return self.render_chats(
            request, "chat_sessions/chats.html", _("List of live chats"), away=found is None, wanted=wanted,
            unwatched=found is not None and _is_unwatched(store), selected=any(wanted.values()),
            states=[(key, words) for key, (words, _tone) in STATES.items()],
            rows=[_chat_row(each) for each in (found or [])[:MOST_CHATS]], full=len(found or []) >= MOST_CHATS,
        )  # fmt: skip

    @table_page("chat/", "view", *VIEW_CHATS)
    def chat(self, request: HttpRequest) -> HttpResponse:
        """Render the chat whose session id is `session`, with its messages, silences and touches."""
        session_id, user_id = request.GET.get("session", "")[:ID_LENGTH], request.GET.get("user", "")[:USER_LENGTH]
        store = sessions.live_store()
        found: SessionSnapshot | None = None
        entries: list[inbox.Entry] = []
        with suppress(StoreUnavailable):
            entries = store.messages_since(session_id, inbox.START, MOST_MESSAGES)
            found = stats.session_snapshot(store, session_id)
        # A link names the user: a closed session has no owner, and its id may be another user's now.
        owner = (
            user_id or (found and found.user_id) or next((each.owner for each in reversed(entries) if each.owner), "")
        )
        entries = [each for each in entries if each.owner in ("", owner)]
        moments = [*_message_moments(entries), *_silence_moments(session_id, owner)]
        moments.sort(key=lambda each: each.at, reverse=True)
        state = found if found and found.user_id in ("", owner) else None
        row = _chat_row(state) if state and state.armed_at else None
        # The policies of both sides: whom each waits for, its key and the tags that chose it.
        chosen = [("customer", state.guide), ("agent", state.answer)] if state else []
        policies = [
            {"awaited": SIDES[side], "key": each.key, "because": " + ".join(each.tags)} for side, each in chosen if each
        ]
        return self.render_chats(
            request, "chat_sessions/chat.html", _("Live chat"), away=found is None, chat=row, moments=moments,
            unwatched=found is not None and _is_unwatched(store), session_id=session_id, policies=policies,
            awaited=SIDES.get(state.awaited, "") if state else "",
        )  # fmt: skip

    @table_page("silences/", "view", *VIEW_CHATS)
    def silences(self, request: HttpRequest) -> HttpResponse:
        """Render the newest silences of both kinds, those of the tag `tag` and the customer `user` if given."""
        wanted = {name: request.GET.get(name, "").strip()[:ID_LENGTH] for name in ("user", "tag")}
        found = Event.objects.filter(
            type__in=SessionPresence.event_types, source=SOURCE, received_at__gte=now() - timedelta(days=SHOWN_DAYS)
        )
        if wanted["user"]:
            found = found.filter(customer__user_id=wanted["user"])
        # Ids are in the order of time.
        newest = found.select_related("customer").order_by("-pk")[: MOST_SILENCES_READ if wanted["tag"] else MOST_SHOWN]
        read = count_within(lambda: list(newest))
        events = [each for each in read or () if not wanted["tag"] or wanted["tag"] in each.data.get("tags", ())]
        return self.render_chats(
            request, "chat_sessions/silences.html", _("Silences"), wanted=wanted, slow=read is None,
            rows=_silence_rows(events[:MOST_SHOWN]),
        )  # fmt: skip


def _is_unwatched(store: sessions.Store) -> bool:
    """Return whether no watcher reports. A node of a cluster that does not answer may have the reports of some."""
    try:
        return not stats.running_watchers(store)
    except StoreUnavailable:
        return False


def _find_chats(store: sessions.Store, q: str, user: str, state: str, tag: str) -> list[SessionSnapshot]:
    session_id = q or (user and store.sessions_of([user])[0]) or ""
    if q or user:
        found = [stats.session_snapshot(store, session_id)]
    else:
        found = stats.list_live_sessions(store, MOST_READ if state or tag else MOST_CHATS, state)
    return [
        each
        for each in found
        if each.armed_at
        and (not user or each.user_id == user)
        and (not state or each.state == state)
        and (not tag or tag in each.tags)
    ]


def _chat_row(found: SessionSnapshot) -> dict[str, Any]:
    words, tone = STATES[found.state]
    last = "–"
    times = [(at, side) for at, side in ((found.last_user_at, "customer"), (found.last_agent_at, "agent")) if at]
    if times:
        at, side = max(times)
        span = describe_duration(max(found.now - at, SECOND))
        last = _("%(side)s, %(span)s ago") % {"side": SIDES[side], "span": span}
    return {
        "session_id": found.session_id,
        "link": build_chat_link(found.session_id, found.user_id),
        "user_id": found.user_id,
        "state": words,
        "tone": tone,
        "tags": ", ".join(found.tags),
        "policy": found.policy.key,
        "deadline": describe_duration(max(found.deadline - found.now, timedelta(0))) if found.deadline else "–",
        "last": last,
        "why": WHY[found.why],
    }


def build_chat_link(session_id: str, user_id: str) -> str:
    query = urlencode({"session": session_id, "user": user_id})
    return f"{reverse('admin:chat_sessions_silencepolicy_chat')}?{query}"


def _message_moments(entries: Sequence[inbox.Entry]) -> list[ChatMoment]:
    writers = {
        "user": _("Message: %(side)s") % {"side": SIDES["customer"]},
        "agent": _("Message: %(side)s") % {"side": SIDES["agent"]},
        "bot": _("Message: %(side)s") % {"side": SIDES["bot"]},
        inbox.SYSTEM: _("Guide message"),
    }
    found = []
    for entry in entries:
        body = json.loads(entry.body)
        at = datetime.fromisoformat(inbox.stored_at(entry.cursor))
        found.append(ChatMoment(at, writers.get(body.get("from", ""), ""), body.get("node", "")))
    return found


def _silence_moments(session_id: str, user_id: str) -> list[ChatMoment]:
    """Return the silences of the session and what happened to their touches."""
    events = list(
        Event.objects.filter(
            customer__user_id=user_id,
            type__in=SessionPresence.event_types,
            source=SOURCE,
            event_id__startswith=f"{session_id}:",
        ).order_by("-occurred_at")[:MOST_SILENCES]
    )
    silences = [
        ChatMoment(
            each.occurred_at,
            name_silence(each),
            name_silence_policy(each),
            reverse("admin:scheduling_event_change", args=[each.pk]),
        )
        for each in events
    ]
    touches = [ChatMoment(touch.settled_at or touch.due_at, *outcome) for touch, outcome in _touches_of(events)]
    return silences + touches


def name_silence(event: Event) -> str:
    number = event.data.get("step") or event.data.get("nudge")
    awaits_agent = event.data.get("awaited") == "agent"
    what = _("No answer, step %(number)s") if awaits_agent else _("Silence, message %(number)s")
    return what % {"number": number}


def name_silence_policy(event: Event) -> str:
    return f"{event.data.get('policy', '')} v{event.data.get('policy_version', 1)}"


def _touches_of(events: Sequence[Event]) -> Iterator[tuple[Touch, tuple[str, str, str]]]:
    """Yield the touches of events, each with its state, its node with the reason, and its link."""
    for touch in Touch.objects.filter(event__in=events).select_related("node"):
        words = " · ".join(filter(None, [touch.node.key, translate_reason(touch.reason) if touch.reason else ""]))
        link = reverse("admin:scheduling_touch_change", args=[touch.pk])
        yield touch, (str(touch.get_state_display()), words, link)


def _silence_rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    outcomes: dict[UUID, list[tuple[str, str, str]]] = defaultdict(list)
    for touch, outcome in _touches_of(events):
        outcomes[touch.event_id].append(outcome)
    rows = []
    for event in events:
        session_id = parse_event_id(event.event_id)[0]
        rows.append(
            {
                "what": name_silence(event),
                "link": reverse("admin:scheduling_event_change", args=[event.pk]),
                "session_id": session_id,
                "chat_link": build_chat_link(session_id, event.user_id),
                "user_id": event.user_id,
                "tags": ", ".join(event.data.get("tags", ())),
                "policy": name_silence_policy(event),
                "deadline": event.occurred_at,
                "outcomes": outcomes[event.pk],
            }
        )
    return rows
