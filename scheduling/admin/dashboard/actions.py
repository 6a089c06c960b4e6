"""List what needs action first on the overview."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from django.db.models import Count, Max
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html_join
from django.utils.http import urlencode
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from scheduling.admin.count_time_limits import PageTimeLimit
from scheduling.admin.dashboard.cards import ActionLine, format_capped_count
from scheduling.admin.experiments.rollout import list_withdrawn_canaries
from scheduling.admin.labels import translate_reason
from scheduling.admin.shown_values import format_instant
from scheduling.admin.sidebar import may_see_workers
from scheduling.admin.touches.pause import count_held, list_active_pauses
from scheduling.app_integrations import integrations
from scheduling.models import Alert, FailedTask
from scheduling.monitoring.alerts import BY_KEY
from scheduling.monitoring.collectors import count_failing_webhooks
from scheduling.monitoring.duration_text import describe_duration
from scheduling.monitoring.statistics import MOST, Overdue
from scheduling.monitoring.wanted_numbers import BrokerReading
from scheduling.queue_names import CORE_QUEUES
from scheduling.redaction import redact_text

WORST = 5
LONGEST_WAIT = 120  #: seconds that a message may wait for a worker of touches
Lines = list[ActionLine] | None  #: None if counting exceeded its time limit


def list_actions(
    request: HttpRequest, time_limit: PageTimeLimit, broker: BrokerReading | None, late: Overdue | None
) -> tuple[list[ActionLine], bool]:
    """Return the lines that the user may see, and whether all were counted."""
    user, parts = request.user, list[Lines]()
    if user.has_perm("scheduling.view_failedtask"):
        parts.append(_list_failure_causes(time_limit))
    listers = [lister for app in integrations() for lister in app.overview_actions]
    parts += [time_limit(lambda lister=lister: list(lister(request))) for lister in listers]  # type: ignore[misc]
    if user.has_perm("scheduling.view_pause"):
        parts.append(_list_pauses(time_limit))
    if user.has_perm("scheduling.view_touch"):
        parts += [_list_overdue(late), _list_late_queues(broker)]
    if user.has_perm("scheduling.view_node"):
        parts.append(list_withdrawn_canaries())
    if user.has_perm("scheduling.view_webhooksubscription"):
        parts.append(_list_failing_webhooks())
    if user.has_perm("scheduling.view_alertreceiver"):
        parts.append(time_limit(lambda: _list_alerts(user)))
    return [line for part in parts if part for line in part], None not in parts


def _list_failure_causes(time_limit: PageTimeLimit) -> Lines:
    """Return the most frequent causes of open failed tasks."""

    def read() -> list[dict[str, Any]]:
        groups = FailedTask.objects.filter(state="open").values("fingerprint").order_by()
        annotated = groups.annotate(
            count=Count("pk"), last_at=Max("failed_at"), reason=Max("reason"), channel=Max("channel"),
            detail=Max("detail"),
        )  # fmt: skip
        return [dict(each) for each in annotated.order_by("-count")[: WORST + 1]]

    found = time_limit(read)
    if found is None:
        return None
    lines = [_describe_cause(each) for each in found[:WORST]]
    if len(found) > WORST:
        lines.append(
            ActionLine("error", _("More causes of failed tasks"), reverse("admin:scheduling_failedtask_groups"))
        )
    return lines


def _describe_cause(cause: dict[str, Any]) -> ActionLine:
    count = cause["count"]
    words = ngettext("%(count)s open failed task: %(reason)s", "%(count)s open failed tasks: %(reason)s", count) % {
        "count": count, "reason": translate_reason(cause["reason"]),
    }  # fmt: skip
    detail = [cause["channel"], redact_text(cause["detail"])[:80], format_instant(cause["last_at"])]
    query = urlencode({"state": "open", "fingerprint": cause["fingerprint"]})
    link = f"{reverse('admin:scheduling_failedtask_changelist')}?{query}"
    return ActionLine("error", words, link, format_html_join(" · ", "{}", ((each,) for each in detail if each)))


def _list_pauses(time_limit: PageTimeLimit) -> Lines:
    pauses = list_active_pauses()
    held: Counter[str] | None = time_limit(count_held) if pauses else Counter()
    return [
        ActionLine(
            "pause_circle", _("Paused: %(what)s.") % {"what": each["name"]},
            f"{reverse('admin:scheduling_touch_changelist')}?{urlencode({'paused_by': each['row'].scope})}",
            _describe_held(held, each["row"].scope), "wait",
        )
        for each in pauses
    ]  # fmt: skip


def _describe_held(held: Counter[str] | None, scope: str) -> str:
    if held is None:
        return _("too much to count now")
    return _("touches held: %(count)s") % {"count": format_capped_count(held[scope], MOST)}


def _list_overdue(late: Overdue | None) -> Lines:
    if late is None or not late.count:
        return None if late is None else []
    words = _("Touches are late: %(count)s") % {"count": format_capped_count(late.count, MOST)}
    detail = _("the oldest for %(span)s") % {"span": describe_duration(late.oldest)} if late.oldest else ""
    return [ActionLine("schedule", words, f"{reverse('admin:scheduling_touch_changelist')}?status=overdue", detail)]


def _list_late_queues(broker: BrokerReading | None) -> Lines:
    link = reverse("admin:scheduling_touch_workers")
    if broker is None:
        return [ActionLine("lan", _("The broker does not respond."), link)]
    lines = []
    if broker.accepts_messages is False:
        lines.append(ActionLine("lan", _("The broker takes no messages"), link))
    for each in broker.queues:
        if each.name in CORE_QUEUES and each.length and (each.oldest_age or 0) > LONGEST_WAIT:
            words = _("Messages wait too long in %(what)s") % {"what": each.name}
            span = describe_duration(timedelta(seconds=round(each.oldest_age or 0)))
            lines.append(
                ActionLine("lan", words, link, f"{each.length} · " + _("the oldest for %(span)s") % {"span": span})
            )
    return lines


def _list_failing_webhooks() -> Lines:
    count = count_failing_webhooks()
    words = _("Webhooks without an answer: %(count)s") % {"count": count}
    return [ActionLine("webhook", words, reverse("admin:scheduling_webhooksubscription_changelist"))] if count else []


def _list_alerts(user: Any) -> list[ActionLine]:
    lines = []
    for alert in Alert.objects.filter(ended_at=None, condition__in=BY_KEY)[: 2 * WORST]:
        condition = BY_KEY[alert.condition]
        page = condition.page
        if page == "admin:scheduling_touch_workers" and not may_see_workers(user):
            page = "admin:scheduling_alertreceiver_changelist"
        detail = _("for %(span)s") % {"span": describe_duration(now() - alert.since)}
        words = condition.name([alert.subject])
        lines.append(ActionLine("notifications_active", words, reverse(page), f"{detail} · {condition.action}"))
    return lines
