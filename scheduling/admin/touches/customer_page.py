"""All there is to know about one customer, on one page."""

from __future__ import annotations

from typing import Any

from django.db.models import F, Prefetch, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.timezone import now
from django.utils.translation import gettext as _

from scheduling.admin.labels import reason, spoken
from scheduling.admin.touches.timeline import clock, figure
from scheduling.models import WAITING, Complaint, Customer, Event, Touch, Verdict
from scheduling.operations import eligibility
from scheduling.operations.eligibility import Answer, Eligibility

SHOWN = 30  #: of each


def customer_context(request: HttpRequest, customer: Customer) -> dict[str, Any]:
    may = request.user.has_perm
    context: dict[str, Any] = {
        "may_see_touches": may("scheduling.view_touch"),
        "may_see_events": may("scheduling.view_event"),
        "shown": SHOWN,
    }
    if context["may_see_touches"]:
        context |= _touches(customer)
        context["eligibility"] = _eligibility(eligibility.of_customer(customer.spec(), now()), customer)
    if context["may_see_events"]:
        context |= _events(customer)
    if may("scheduling.view_complaint"):
        found = Complaint.objects.filter(customer=customer).select_related("touch__node").order_by("-pk")
        context["complaints"] = list(found[:SHOWN])
    return context


# --- may be sent again ------------------------------------------------------------------------------------------------


def _eligibility(found: Eligibility, customer: Customer) -> dict[str, Any]:
    return {
        "open": found.is_open,
        "at": clock(found.opens_at) if found.opens_at else "",
        "wait": spoken(found.opens_at - now()) if found.opens_at and found.opens_at > now() else "",
        "rooms": [
            _("%(taken)s of %(limit)s in %(span)s")
            % {"taken": room.taken, "limit": room.rule.limit, "span": spoken(room.rule.window)}
            for room in found.rooms
        ],
        "nodes": [_answer(each) for each in found.answers],
        "marketing_only": customer.opted_out,
    }


def _answer(each: Answer) -> dict[str, Any]:
    verdict = each.verdict
    tones = {"send": ("success", _("May be sent")), "hold": ("warning", _("Would wait")),
             "suppress": ("danger", _("Would not be sent"))}  # fmt: skip
    tone, words = tones[verdict.decision]
    return {
        "node": each.node.key,
        "link": reverse("admin:scheduling_node_change", args=[each.node.id]),
        "tone": tone,
        "words": words,
        "why": reason(verdict.rule) if verdict.rule else "",
        "figures": _figures(verdict),
        "again": clock(verdict.next_eligible_at) if verdict.next_eligible_at else "",
    }


# --- what was and what will be ----------------------------------------------------------------------------------------


#: Of each touch the verdict that says why it waits or was not sent. It may have hundreds of others.
EXPLAINING = Prefetch(
    "verdicts", Verdict.objects.exclude(rule="").filter(rule=F("touch__reason")).order_by("-pk")[:1], "explaining"
)


def _touches(customer: Customer) -> dict[str, Any]:
    touches = Touch.objects.filter(customer=customer).select_related("node", "event").prefetch_related(EXPLAINING)
    link = f"{reverse('admin:scheduling_touch_changelist')}?{urlencode({'q': customer.user_id})}"
    upcoming = touches.filter(state__in=WAITING).order_by("due_at")
    past = touches.exclude(state__in=WAITING).order_by("-task_id")
    return {"upcoming": _listed(upcoming), "past": _listed(past), "touches_link": link}


def _listed(rows: QuerySet[Touch]) -> list[dict[str, Any]]:
    from scheduling.admin.touches.touch import STATE_TONES

    return [
        {
            "row": row,
            "why": reason("paused") if row.parked else reason(row.reason),
            "tone": STATE_TONES[row.state],
            "figures": _figures(last) if (last := next(iter(row.explaining), None)) else "",  # type: ignore[attr-defined]
            "again": clock(last.next_eligible_at) if last and last.next_eligible_at else "",
        }
        for row in rows[:SHOWN]
    ]


def _figures(verdict: Any) -> str:
    """What was observed against what is allowed."""
    return " / ".join(figure(each) for each in (verdict.observed, verdict.limit) if each)


def _events(customer: Customer) -> dict[str, Any]:
    events = Event.objects.filter(customer=customer)
    link = f"{reverse('admin:scheduling_event_changelist')}?{urlencode({'q': customer.user_id})}"
    return {"events": list(events.order_by("-pk")[:SHOWN]), "events_link": link}
