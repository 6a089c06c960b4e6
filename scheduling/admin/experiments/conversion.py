"""Show conversion by node and content version beside the control group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext as _

from scheduling.admin.count_time_limits import count_within
from scheduling.admin.replica_pages import read_for_page
from scheduling.experiments.conversion import NodeEffect, compute_effects
from scheduling.models import Node
from scheduling.monitoring.duration_text import describe_duration
from scheduling.policy.rollout import Lift, Share

PERIODS = (30, 90, 180)  #: days
USUAL = 90


def effect_page(nodes_admin: Any, request: HttpRequest) -> HttpResponse:
    if not (nodes_admin.has_view_or_change_permission(request) and request.user.has_perm("scheduling.view_touch")):
        raise PermissionDenied
    days = next((each for each in PERIODS if str(each) == request.GET.get("days")), USUAL)
    until = now()
    found = read_for_page(
        request,
        lambda: count_within(
            lambda: compute_effects(until - timedelta(days=days), until), settings.TIMEOUTS.conversion
        ),
    )
    links = dict(Node.objects.values_list("key", "pk"))
    return nodes_admin.page(  # type: ignore[no-any-return]
        request,
        "ops/conversion.html",
        _("Effect"),
        nodes=None if found is None else [_describe_effect(each, links) for each in found],
        periods=[(each, describe_duration(timedelta(days=each)), each == days) for each in PERIODS],
    )


def _describe_effect(effect: NodeEffect, links: dict[str, int]) -> dict[str, Any]:
    lift = effect.lift
    return {
        "key": effect.node,
        "link": reverse("admin:scheduling_node_change", args=[links[effect.node]]) if effect.node in links else "",
        "goal": effect.goal,
        "treated": _describe_share_bar(lift.treated),
        "control": _describe_share_bar(lift.control),
        "everywhere": _describe_share_bar(effect.overall.control) if effect.overall.control.of else None,
        "difference": _format_difference(lift),
        "overall": _format_difference(effect.overall),
        "verdict": judge_lift(lift),
        "versions": [
            {"template": each.template, "number": each.number, **_describe_share_bar(each.share)}
            for each in effect.versions
        ],
    }


def _describe_share_bar(share: Share) -> dict[str, Any]:
    """Return a bar for a share: its interval, and a mark at the rate, in percent of the width."""
    low, high = share.interval
    return {
        "hits": share.hits,
        "of": share.of,
        "percent": f"{100 * share.rate:.1f} %" if share.of else "–",
        "interval": f"{100 * low:.1f}–{100 * high:.1f} %" if share.of else "–",
        "from": round(100 * low),
        "span": max(round(100 * (high - low)), 1),
        "mark": min(round(100 * share.rate), 99),
    }


def _format_difference(lift: Lift) -> str:
    if not (lift.treated.of and lift.control.of):
        return "–"
    low, high = lift.interval
    words = _("%(difference)s points (%(low)s to %(high)s)") % {
        "difference": f"{100 * lift.difference:+.1f}", "low": f"{100 * low:+.1f}", "high": f"{100 * high:+.1f}",
    }  # fmt: skip
    return words.replace("-", "−")


def judge_lift(lift: Lift) -> tuple[str, str]:
    """Return the tone and the sentence of a measured effect."""
    if not lift.control.of:
        return "", _("No control group. Set a hold-out at the node to measure its effect.")
    if not lift.treated.of:
        return "", _("The goal period of no customer has ended yet.")
    if not lift.certain:
        return "wait", _("May be chance: zero lies inside the interval.")
    return ("good", _("More than chance.")) if lift.difference > 0 else ("bad", _("Less than without it."))
