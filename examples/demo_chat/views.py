"""Demo chat: a customer and an agent side by side, with the outcome of each silence.

For demos only: production settings have no route to it. It can open only sessions with the prefix `demo-`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from scheduling.admin import labels
from scheduling.models import Event, Touch
from scheduling.operations.commands import update_customer
from sessions import tokens
from sessions.admin.chats import WHY
from sessions.detection.presence import SessionPresence
from sessions.detection.silence_events import SOURCE
from sessions.frames import AGENT, USER
from sessions.models import SilencePolicy
from sessions.policy import AGENT as AFTER_AGENT
from sessions.policy import CUSTOMER as AFTER_CUSTOMER
from sessions.store import stats
from sessions.store.client import StoreUnavailable
from sessions.store.sessions import live_store

TAG = "demo"
THRESHOLD = timedelta(seconds=5)  #: of the demo's tag, so that a silence occurs within seconds
ANSWER_TAG = "demo-sla"  #: sessions with it have also the tag `TAG`, so both sides have a timer
ANSWER_WITHIN = timedelta(seconds=10)
LIFETIME = timedelta(minutes=30)
SHOWN = 10  #: silences
SESSION = re.compile(r"demo-[A-Za-z0-9_-]{6,32}", re.ASCII)
#: Why a session is paused.
PAUSES = {
    "typing": gettext_noop("the agent is typing"),
    "tool": gettext_noop("a tool is running"),
    "transfer": gettext_noop("it is being transferred"),
    "queue": gettext_noop("it waits in a queue"),
}

View = Callable[[HttpRequest], HttpResponse]


def in_demo_only(view: View) -> View:
    """Answer 404 outside a demo, also to staff: the tokens plan touches and act as an agent."""

    @wraps(view)
    def answer(request: HttpRequest) -> HttpResponse:
        if not settings.AFTERTOUCH_DEMO:
            raise Http404
        return view(request)

    return answer


@never_cache
@require_safe
@in_demo_only
def demo_page(request: HttpRequest) -> HttpResponse:
    settled = {
        "start": reverse("demo_chat_start"),
        "state": reverse("demo_chat_state"),
        "tags": _tag_thresholds(),
        "words": _page_texts(),
        "language": request.LANGUAGE_CODE,
    }
    return render(request, "demo_chat/page.html", {"settled": settled, "languages": settings.LANGUAGES})


@never_cache
@require_POST
@in_demo_only
def start_session(request: HttpRequest) -> HttpResponse:
    """Issue tokens for both sides of a new session, or of a session from another tab."""
    known = request.POST.get("session", "")
    session_id = known or f"demo-{secrets.token_urlsafe(9)}"
    tag = request.POST.get("tag", "")
    if not SESSION.fullmatch(session_id) or tag not in {each["tag"] for each in _tag_thresholds()}:
        return JsonResponse({"error": _("The page does not know this session or tag.")}, status=422)
    user_id = _demo_user_of(session_id)
    if not known:
        update_customer(user_id, {"locale": request.LANGUAGE_CODE})  # the guide message uses the page's language
    sides = {
        role: tokens.issue_token(
            tokens.Admission(session_id, user_id, session_id, tag, role, tags=(TAG,) if tag == ANSWER_TAG else ()),
            LIFETIME,
        )[0]
        for role in (USER, AGENT)
    }
    return JsonResponse({"session": session_id, "user": user_id, "tag": tag, "tokens": sides})


@never_cache
@require_safe
@in_demo_only
def session_state(request: HttpRequest) -> HttpResponse:
    """Return the session's state and its latest silences with their touches."""
    session_id = request.GET.get("session", "")
    if not SESSION.fullmatch(session_id):
        return JsonResponse({"error": _("The page does not know this session or tag.")}, status=422)
    try:
        found = stats.session_snapshot(live_store(), session_id)
    except StoreUnavailable:
        return JsonResponse({"error": _("The live sessions cannot be reached.")}, status=503)
    return JsonResponse(
        {
            "now": found.now,
            "armed_at": found.armed_at,
            "deadline": found.deadline,
            "nudges": found.nudges,
            "state": found.state,
            "awaited": found.awaited,
            "why": str(WHY[found.why]),
            "policy": found.policy.key,
            "pause": _(PAUSES.get(found.pause, found.pause)) if found.pause else "",
            "closed": found.closed,
            "silences": _latest_silences(session_id),
        }
    )


def _demo_user_of(session_id: str) -> str:
    return f"visitor-{session_id.removeprefix('demo-')}"


def _tag_thresholds() -> list[dict[str, Any]]:
    """Return every tag with its threshold. Creates the demo's own tags on first use."""
    SilencePolicy.objects.get_or_create(key=TAG, defaults={"threshold": THRESHOLD, "after": AFTER_AGENT})
    SilencePolicy.objects.get_or_create(
        key=ANSWER_TAG,
        defaults={"threshold": ANSWER_WITHIN, "after": AFTER_CUSTOMER, "max_nudges": 3, "growth": 1},
    )
    found = [
        {
            "tag": policy.key,
            "seconds": policy.threshold.total_seconds(),
            "jitter": policy.jitter.total_seconds(),
            "nudges": policy.max_nudges,
            "awaits_agent": policy.after == AFTER_CUSTOMER,
        }
        for policy in SilencePolicy.objects.filter(retired_at=None)
    ]
    return sorted(found, key=lambda each: (each["tag"] != TAG, each["seconds"]))


def _latest_silences(session_id: str) -> list[dict[str, Any]]:
    events = list(
        Event.objects.filter(
            customer__user_id=_demo_user_of(session_id),
            type__in=SessionPresence.event_types,
            source=SOURCE,
            event_id__startswith=f"{session_id}:",
        ).order_by("-occurred_at")[:SHOWN]
    )
    touches = Touch.objects.filter(event__in=events).select_related("node__channel")
    by_event: dict[Any, list[dict[str, Any]]] = {event.pk: [] for event in events}
    for touch in touches.order_by("pk"):
        by_event[touch.event_id].append(_serialize_touch(touch))
    return [
        {
            "id": event.event_id,
            "at": event.occurred_at,
            "nudge": event.data.get("nudge") or event.data.get("step"),
            "awaited": event.data.get("awaited"),
            "touches": by_event[event.pk],
        }
        for event in events
    ]


def _serialize_touch(touch: Touch) -> dict[str, Any]:
    sent = [each.started_at for each in touch.attempts]
    late = (sent[-1] - touch.planned_at) / timedelta(milliseconds=1) if sent else None
    return {
        "state": touch.state,
        "words": touch.get_state_display(),
        "reason": labels.translate_reason(touch.reason) if touch.reason else "",
        "node": touch.node.key,
        "channel": touch.node.channel.key,
        "late": None if late is None else round(late),
        "at": touch.settled_at,
    }


def _page_texts() -> dict[str, str]:
    """Return the translated strings of the page's script."""
    return {
        "connecting": _("Connecting"),
        "open": _("Connected"),
        "waiting": _("Connection lost, trying again"),
        "ended": _("Connection ended"),
        "unsent": _("not sent yet"),
        "typing": _("is typing …"),
        "user": _("Customer"),
        "agent": _("Agent"),
        "system": _("Guide message"),
        "armed_customer": _("Waiting for the customer: silent in {seconds} s"),
        "armed_agent": _("Waiting for an agent: next step in {seconds} s"),
        "not_armed": _("Timer not running: {why}"),
        "paused": _("Paused: {why}"),
        "silent": _("Silent: event recorded, no more messages follow"),
        "closed": _("Closed"),
        "away": _("The server does not answer"),
        "entry_armed": _("Timer started"),
        "entry_armed_until": _("silent at {time} unless a frame comes"),
        "why": _("{why} (policy {policy})"),
        "entry_unanswered": _("No answer"),
        "entry_step": _("step {number} while the customer waits for an agent"),
        "entry_silent": _("Silent"),
        "entry_silent_number": _("silence {number} since the customer's last action"),
        "late": _("{ms} ms after its time"),
        "by": _("node {node}, channel {channel}"),
        "no_touch": _("no node of the matrix has this trigger"),
        "go_silent": _("Go silent"),
        "come_back": _("Come back"),
        "present": _("Pings every {seconds} s: present"),
        "gone": _("No pings: the page counts as closed"),
        "left": _("The {side} has closed the session."),
    }
