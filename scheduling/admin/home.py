"""The first page, and what every page carries."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db import OperationalError, connection, transaction
from django.db.models import Count
from django.http import HttpRequest
from django.urls import reverse
from django.utils.timezone import now

from scheduling.admin.pause import active_pauses
from scheduling.admin.wording import reason
from scheduling.models import FailedTask, Touch

MOST = 10_000  #: shown as "10000+": nobody needs the exact figure beyond
PATIENCE = "2s"


def every_page(request: HttpRequest) -> dict[str, Any]:
    """The banner while anything is paused."""
    user = request.user
    if not (user.is_authenticated and user.is_staff):
        return {}
    return {"active_pauses": active_pauses(), "may_resume": user.has_perm("scheduling.delete_pause")}


def overview(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    context["may_see_touches"] = request.user.has_perm("scheduling.view_touch")
    context["may_see_failed"] = request.user.has_perm("scheduling.view_failedtask")
    if context["may_see_touches"]:
        context["due_soon"] = patiently(_due_soon)
        context["lately"] = patiently(_lately)
    if context["may_see_failed"]:
        context["open_failed"] = patiently(lambda: FailedTask.objects.filter(state="open")[: MOST + 1].count())
    context["most"] = MOST
    return context


def _due_soon() -> int:
    soon = Touch.objects.filter(state="scheduled", parked="", due_at__lte=now() + timedelta(hours=1))
    return soon[: MOST + 1].count()


def _lately() -> dict[str, Any]:
    """What ended in the last day, by state, and the suppressed by reason."""
    ended = Touch.objects.filter(settled_at__gte=now() - timedelta(hours=24))
    counts = list(ended.order_by().values("state", "reason").annotate(count=Count("pk")))
    total = {"delivered": 0, "suppressed": 0, "failed": 0, "unknown": 0, "cancelled": 0}
    for each in counts:
        total[each["state"]] = total.get(each["state"], 0) + each["count"]
    link = reverse("admin:scheduling_touch_changelist")
    reasons = sorted((each for each in counts if each["state"] == "suppressed"), key=lambda each: -each["count"])
    widest = max((each["count"] for each in reasons), default=1)
    return {
        **total,
        "reasons": [
            {
                "words": reason(each["reason"]),
                "count": each["count"],
                "share": round(100 * each["count"] / widest),
                "link": f"{link}?state__exact=suppressed&reason={each['reason']}",
            }
            for each in reasons
        ],
    }


def patiently(count: Callable[[], Any], patience: str = PATIENCE) -> Any:
    """None where the table is too big to be asked in passing: the page must open while everything burns."""
    try:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute(f"SET LOCAL statement_timeout = '{patience}'")
            return count()
    except OperationalError:
        return None
