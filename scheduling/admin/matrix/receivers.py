"""Show the receivers of all channels: what waits for each, how fast it takes touches, why it rests, and until when."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.timezone import localdate, localtime
from django.utils.translation import gettext as _

from scheduling.admin.count_time_limits import count_within
from scheduling.admin.matrix.channel import KIND_LABELS
from scheduling.admin.shown_values import format_instant, insert_values
from scheduling.models import Community
from scheduling.monitoring.receivers import ReceiverStatus, list_receivers

PER_PAGE = 25


def receivers_page(channels_admin: Any, request: HttpRequest) -> HttpResponse:
    if not (channels_admin.has_view_or_change_permission(request) and request.user.has_perm("scheduling.view_touch")):
        raise PermissionDenied
    given = request.GET.get("page", "")
    number = int(given) if given.isdecimal() and 0 < int(given) < 1_000 else 1
    found = count_within(lambda: list_receivers((number - 1) * PER_PAGE, PER_PAGE), settings.TIMEOUTS.receivers)
    names = _read_community_names([row.chat_id for row in found.rows]) if found else {}
    return channels_admin.page(  # type: ignore[no-any-return]
        request,
        "ops/receivers.html",
        _("Receivers"),
        receivers=None if found is None else [_describe_receiver(row, names) for row in found.rows],
        incomplete=found is not None and found.incomplete,
        previous=number - 1,
        next=number + 1 if found and found.more else 0,
        zone=settings.TIME_ZONE,
    )


def _read_community_names(chat_ids: list[str]) -> dict[str, str]:
    wanted = [chat_id for chat_id in chat_ids if chat_id]
    return dict(Community.objects.filter(chat_id__in=wanted).values_list("chat_id", "name"))


def _describe_receiver(row: ReceiverStatus, names: dict[str, str]) -> dict[str, Any]:
    return {
        "channel": row.channel.key,
        "link": reverse("admin:scheduling_channelconfig_change", args=[row.channel.id]),
        "kind": KIND_LABELS.get(row.channel.kind, row.channel.kind),
        "community": names.get(row.chat_id) or row.chat_id,
        "waiting": f"{row.waiting:,}" if row.counted_all else f"{row.waiting:,}+",
        "in_flight": row.in_flight,
        "rate": format_rate(row.rate),
        "rest": describe_rest(row),
        "tone": "danger" if row.resting_reason == "target_down" else "warning",
        "end": _describe_end(row),
        "used": [_describe_usage(*each) for each in row.used],
    }


def format_rate(rate: float | None) -> str:
    """Format touches per second: by the minute if they are few."""
    if not rate:
        return "–"
    if rate < 1:
        return _("%(count)s a minute") % {"count": f"{60 * rate:.3g}"}
    return _("%(count)s a second") % {"count": f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"}


def describe_rest(row: ReceiverStatus) -> str:
    """Return why a receiver gets nothing now and until when; empty if it does not rest."""
    words = {
        "": "",
        "paused": _("Paused by an operator"),
        "throttled": _("Throttled by the vendor until %(at)s"),
        "target_down": _("Does not answer, rests until %(at)s"),
        "day": _("Limit of the day used up until %(at)s"),
        "month": _("Limit of the month used up until %(at)s"),
    }
    text = words[row.resting_reason]
    return insert_values(text, at=format_moment(row.resting_until)) if row.resting_until else text


def _describe_end(row: ReceiverStatus) -> str:
    if row.ends_at is None:
        return "–"
    words = _("done at %(at)s") if row.counted_all else _("not before %(at)s")
    return insert_values(words, at=format_moment(row.ends_at))


def _describe_usage(period: str, used: int, limit: int) -> str:
    words = _("%(used)s of %(limit)s today") if period == "day" else _("%(used)s of %(limit)s this month")
    return words % {"used": f"{used:,}", "limit": f"{limit:,}"}


def format_moment(at: datetime) -> str:
    """Format an instant of today as `11:40`, another with its date, in the server's time zone."""
    local = localtime(at)
    return format_instant(at, "H:i" if local.date() == localdate() else "Y-m-d H:i")
