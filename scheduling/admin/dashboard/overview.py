"""Build the overview page with what needs action first, and the context that every page needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.db.models import Count, Max, Model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.html import format_html_join
from django.utils.http import urlencode
from django.utils.text import capfirst
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.http import require_POST

from scheduling.admin.dashboard.charts import (
    PERIODS,
    ActionLine,
    Chart,
    ConfigChange,
    Counts,
    Figure,
    Series,
    Span,
    add_up,
    build_ranked_chart,
    count_by_span,
    format_capped_count,
    link_ended,
    load_app_cards,
    read_requested_days,
    regroup,
    split_period,
)
from scheduling.admin.experiments import list_withdrawn_canaries
from scheduling.admin.labels import translate_reason
from scheduling.admin.lists import build_span_link
from scheduling.admin.navigation import find_menu_place
from scheduling.admin.page_reads import PageTimeLimit, read_for_page
from scheduling.admin.shown_values import format_instant
from scheduling.admin.touches.pause import count_held, list_active_pauses
from scheduling.app_integrations import integrations
from scheduling.models import (
    Alert,
    Calendar,
    ChannelConfig,
    DelayRule,
    DismissedChecklist,
    Event,
    EventType,
    FailedTask,
    HarassmentRule,
    Holdout,
    Invitation,
    Node,
    Template,
    TemplateText,
)
from scheduling.monitoring import statistics
from scheduling.monitoring.alerts import BY_KEY
from scheduling.monitoring.collectors import read_webhook_backlogs
from scheduling.monitoring.duration_text import describe_duration
from scheduling.monitoring.queues import BrokerReading, read_broker
from scheduling.monitoring.statistics import GOAL, MOST, LatenessCounts, Overdue, compute_lateness_quantile
from scheduling.operations.sample_data import HARMLESS_KINDS
from scheduling.queue_names import CORE_QUEUES
from scheduling.redaction import redact_text


@dataclass(frozen=True, slots=True)
class Step:
    words: str | Promise
    link: str
    hint: str | Promise
    done: bool


def build_checklist(request: HttpRequest) -> list[Step]:
    """Return the steps that the user may take; empty if they are done or the user has hidden the list.

    Each step reads one row or stops at the second one.
    """
    user, steps = request.user, list[Step]()
    channels = ChannelConfig.objects.filter(retired_at=None).exclude(kind__in=HARMLESS_KINDS)
    if user.has_perm("scheduling.add_channelconfig"):
        hint = _("The channel of a new installation writes into the log only.")
        steps.append(Step(_("Set a channel"), reverse("admin:scheduling_channelconfig_add"), hint, channels.exists()))
    if user.has_perm("scheduling.change_node"):
        enabled = Node.objects.filter(enabled=True, retired_at=None, channel__in=channels).exists()
        hint = _("Select your channel at a node and enable it.")
        steps.append(Step(_("Enable the first node"), reverse("admin:scheduling_node_matrix"), hint, enabled))
        hint = _("With an API key, or with manage.py sample_data load.")
        steps.append(Step(_("Send a test event"), reverse("api:openapi-view"), hint, Event.objects.exists()))
    if admin.site.get_model_admin(Invitation).has_add_permission(request):
        staff = get_user_model()._default_manager.filter(is_staff=True, is_active=True)
        hint = _("Choose a role and hand over the link, which works once.")
        link = reverse("admin:scheduling_invitation_add")
        steps.append(Step(_("Invite a colleague"), link, hint, len(staff[:2]) > 1))
    if all(step.done for step in steps) or DismissedChecklist.objects.filter(user=user.pk).exists():
        return []
    return steps


@require_POST
def dismiss_checklist(request: HttpRequest) -> HttpResponse:
    """Hide the checklist from this user. Idempotent."""
    DismissedChecklist.objects.get_or_create(pk=request.user.pk)
    return redirect("admin:index")


TOUCH_LIST = "admin:scheduling_touch_changelist"
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
    if user.has_perm("scheduling.view_webhooksubscription") and (
        failing := sum(each.resting for each in read_webhook_backlogs().values())
    ):
        words = _("Webhooks without an answer: %(count)s") % {"count": failing}
        parts.append([ActionLine("webhook", words, reverse("admin:scheduling_webhooksubscription_changelist"))])
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
    lines = []
    for each in pauses:
        scope, detail = each["row"].scope, _("too much to count now")
        if held is not None:
            detail = _("touches held: %(count)s") % {"count": format_capped_count(held[scope], MOST)}
        link = f"{reverse(TOUCH_LIST)}?{urlencode({'paused_by': scope})}"
        lines.append(ActionLine("pause_circle", _("Paused: %(what)s.") % {"what": each["name"]}, link, detail, "wait"))
    return lines


def _list_overdue(late: Overdue | None) -> Lines:
    if late is None or not late.count:
        return None if late is None else []
    words = _("Touches are late: %(count)s") % {"count": format_capped_count(late.count, MOST)}
    detail = _("the oldest for %(span)s") % {"span": describe_duration(late.oldest)} if late.oldest else ""
    return [ActionLine("schedule", words, f"{reverse(TOUCH_LIST)}?status=overdue", detail)]


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


def _list_alerts(user: Any) -> list[ActionLine]:
    lines = []
    for alert in Alert.objects.filter(ended_at=None, condition__in=BY_KEY)[: 2 * WORST]:
        condition = BY_KEY[alert.condition]
        page = condition.page
        if page == "admin:scheduling_touch_workers" and not user.has_perm("scheduling.view_touch"):
            page = "admin:scheduling_alertreceiver_changelist"
        detail = _("for %(span)s") % {"span": describe_duration(now() - alert.since)}
        words = condition.name([alert.subject])
        lines.append(ActionLine("notifications_active", words, reverse(page), f"{detail} · {condition.action}"))
    return lines


def build_page_context(request: HttpRequest) -> dict[str, Any]:
    """Return the active pauses for the banner of every page, and the place of the page in the menu."""
    user = request.user
    if not (user.is_authenticated and user.is_staff):
        return {}
    return {
        "active_pauses": list_active_pauses(), "may_resume": user.has_perm("scheduling.delete_pause"),
        "menu_place": find_menu_place(request),
    }  # fmt: skip


def build_overview_context(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Add the figures, cards and charts that the user may see to the context."""
    return read_for_page(request, lambda: _add_figures(request, context))


def _add_figures(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    time_limit = PageTimeLimit(settings.TIMEOUTS.overview)
    days = read_requested_days(request)
    context["read_at"] = now()
    words = {each: ngettext("%(days)s day", "%(days)s days", each) % {"days": each} for each in PERIODS}
    words[1] = _("24 hours")
    context["periods"] = [(each, words[each], each == days) for each in PERIODS]
    figures, charts = [], []
    columns = split_period(days)
    broker, late = None, None
    if request.user.has_perm("scheduling.view_touch"):
        broker, late = read_broker(), time_limit(statistics.count_overdue)
        figures += _build_backlog_figures(late, time_limit)
        ended = count_by_span(statistics.ended_cache, columns, time_limit)
        states = regroup(ended, lambda key: key[0])  # of state, reason and node
        unsent = _("Why touches were not sent")
        context["charts"] = [
            Chart(
                "ended", _("Outcomes"), STATES, columns, states, lambda key, span: link_ended(span, state__exact=key)
            ),
            _chart_reasons("reasons", unsent, columns, ended, ["suppressed"], state__exact="suppressed"),
        ]
        charts = [_chart_lateness(columns, time_limit)]
        if request.user.has_perm("scheduling.view_event"):
            charts.append(_chart_events(columns, time_limit))
        failed = _("Why touches failed")
        charts.append(_chart_reasons("failures", failed, columns, ended, ["failed", "unknown"], status="bad"))
    if request.user.has_perm("scheduling.view_failedtask"):
        open_tasks = time_limit(lambda: FailedTask.objects.filter(state="open")[: MOST + 1].count())
        link, tone = reverse("admin:scheduling_failedtask_groups"), "bad" if open_tasks else ""
        figures.append(Figure(_("Open failed tasks"), format_capped_count(open_tasks, MOST), link, tone))
    context["actions"], context["actions_complete"] = list_actions(request, time_limit, broker, late)
    context["checklist"] = build_checklist(request)
    context["figures"] = figures
    context["cards"] = list(load_app_cards(request))
    context["more_charts"] = [*charts, *(chart for card in context["cards"] for chart in card.charts)]
    context["changes"] = list_config_changes(request, columns, time_limit)
    for name in ("charts", "more_charts"):
        if name in context:
            context[name] = [replace(each, changes=context["changes"] or ()) for each in context[name]]
    return context


# --- backlog --------------------------------------------------------------------------------------------------------


def _build_backlog_figures(late: Overdue | None, time_limit: PageTimeLimit) -> list[Figure]:
    soon = time_limit(lambda: statistics.count_due_within(timedelta(hours=1)))
    hint = _("the oldest for %(span)s") % {"span": describe_duration(late.oldest)} if late and late.oldest else ""
    within = build_span_link("scheduling_touch", "due_at", None, now() + timedelta(hours=1), status="waiting")
    count = format_capped_count(late.count if late else None, MOST)
    return [
        Figure(_("Due within the hour"), format_capped_count(soon, MOST), within),
        Figure(
            _("Overdue"), count, f"{reverse(TOUCH_LIST)}?status=overdue", "bad" if late and late.count else "", hint
        ),
    ]


# --- charts, and the configuration changes that they mark ---


MODELS: tuple[type[Model], ...] = (
    Node, Template, TemplateText, ChannelConfig, HarassmentRule, DelayRule, Holdout, Calendar,
)  # fmt: skip
MOST_CHANGES = 40  #: latest markers that a chart shows
MOST_READ = 200  #: latest changes of each table


def list_config_changes(
    request: HttpRequest, spans: Sequence[Span], time_limit: PageTimeLimit
) -> list[ConfigChange] | None:
    """Return the latest changes that the user may view, latest first; None if reading exceeded its time limit."""
    latest: dict[tuple[int, str], ConfigChange] = {}  #: by bar and link
    for model in MODELS:
        owner = Template if model is TemplateText else model
        if not request.user.has_perm(f"scheduling.view_{owner._meta.model_name}"):
            continue
        changes = time_limit(lambda model=model: _read_config_changes(model, spans))  # type: ignore[misc]
        if changes is None:
            return None
        for each in changes:
            before = latest.get((each.bar, each.link))
            if before is None or before.changed_at < each.changed_at:
                latest[each.bar, each.link] = each
    return sorted(latest.values(), key=lambda each: each.changed_at, reverse=True)[:MOST_CHANGES]


def _read_config_changes(model: Any, spans: Sequence[Span]) -> list[ConfigChange]:
    found = model.history.filter(history_date__gte=spans[0].since).select_related("history_user")
    rows = list(found.order_by("-history_date")[:MOST_READ])
    ids, names = {row: row.id for row in rows}, {row: getattr(row, "key", "") for row in rows}
    if model is HarassmentRule:
        names = {row: str(row.get_kind_display()) for row in rows}
    if model is TemplateText:
        model, ids = Template, {row: row.template_id for row in rows}
        keys = dict(Template.objects.filter(pk__in=ids.values()).values_list("pk", "key"))
        names = {row: keys.get(row.template_id, "") for row in rows}
    changes = []
    for row in rows:
        what = f"{capfirst(str(model._meta.verbose_name))} {names[row]}".strip()
        who = row.history_user.get_username() if row.history_user else row.history_change_reason or _("the system")
        link = reverse(f"admin:scheduling_{model._meta.model_name}_history", args=[ids[row]])
        bar = next((number for number, span in enumerate(spans) if row.history_date < span.until), len(spans) - 1)
        changes.append(ConfigChange(row.history_date, bar, f"{what} · {who}", link))
    return changes


STATES = (
    Series("delivered", gettext_lazy("Delivered"), "good"),
    Series("suppressed", gettext_lazy("Suppressed"), "wait"),
    Series("cancelled", gettext_lazy("Cancelled"), "quiet"),
    Series("failed", gettext_lazy("Failed"), "bad"),
    Series("unknown", gettext_lazy("Unknown"), "doubt"),
)


def _chart_reasons(
    key: str, title: str, spans: Sequence[Span], ended: Counts, states: Collection[str], **filters: str
) -> Chart:
    """Chart the most frequent reasons of touches that ended in one of `states`, the rows of a list with `filters`."""

    def link(code: str, span: Span) -> str:
        return link_ended(span, **filters, **({"reason": code} if code else {}))

    counts = regroup(ended, lambda key: key[1] if key[0] in states else None)
    return build_ranked_chart(key, title, spans, counts, words=translate_reason, others=_("Other reasons"), link=link)


TYPES = 1000  #: event types whose names are looked up
QUANTILES = ((0.5, Series("p50", gettext_lazy("Median"), "hue1")), (0.99, Series("p99", gettext_lazy("P99"), "hue0")))


def _chart_lateness(spans: Sequence[Span], time_limit: PageTimeLimit) -> Chart:
    """Chart the lateness of delivered touches, from due to sent."""
    found = count_by_span(statistics.lateness_cache, spans, time_limit)
    whole = add_up(found)
    sums = {key: _format_ms(ms) for key, ms in _compute_quantiles_ms(whole or Counter()).items()}
    return Chart(
        "lateness", _("Lateness, from due to sent, in ms"), [each for _part, each in QUANTILES], spans,
        [None if late is None else _compute_quantiles_ms(late) for late in found],
        lambda key, span: link_ended(span, state__exact="delivered"),
        dict.fromkeys(sums, "?") if whole is None else sums,
        is_stacked=False, words=_format_ms, goal=round(GOAL.total_seconds() * 1000),
        note=_("Goal: P99 within %(span)s.") % {"span": describe_duration(GOAL)},
    )  # fmt: skip


def _compute_quantiles_ms(late: LatenessCounts) -> dict[str, int]:
    """Return the quantiles in milliseconds, at least 1, so that a bar is visible; 0 without deliveries."""
    spans = {each.key: compute_lateness_quantile(late, part) for part, each in QUANTILES}
    return {key: max(1, round(span.total_seconds() * 1000)) if span else 0 for key, span in spans.items()}


def _format_ms(ms: int) -> str:
    if not ms:
        return "–"
    return _("%(ms)s ms") % {"ms": ms} if ms < 1000 else _("%(s)s s") % {"s": f"{ms / 1000:.1f}"}


def _chart_events(spans: Sequence[Span], time_limit: PageTimeLimit) -> Chart:
    """Chart received events by type."""

    def link(kind: str, span: Span) -> str:
        chosen = {"type": kind} if kind else {}
        return build_span_link("scheduling_event", "received_at", span.since, span.until, **chosen)

    counts = count_by_span(statistics.event_cache, spans, time_limit)
    names = dict(EventType.objects.exclude(name="").values_list("key", "name")[:TYPES])
    return build_ranked_chart(
        "events", _("Events received"), spans, counts,
        words=lambda kind: names.get(kind, kind), others=_("Other types"), link=link,
    )  # fmt: skip
