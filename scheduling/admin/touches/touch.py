"""Pages of events and touches."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import mark_safe
from django.utils.timezone import now
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter

from scheduling import sql
from scheduling.admin.base import (
    BigTable,
    Confirmation,
    ReadOnlyAdmin,
    RowPage,
    ops_action,
    ops_display,
    row_action,
    table_page,
)
from scheduling.admin.failed_tasks.bulk_action import MatchingRowsMixin, read_page_time
from scheduling.admin.failed_tasks.failed_task import render_difference
from scheduling.admin.labels import translate_reason
from scheduling.admin.lists import ChoicesFilter, ColumnFilter, ListExportMixin, ReasonFilter, RelatedFilter, SpanFilter
from scheduling.admin.matrix.preview import preview_page
from scheduling.admin.shown_values import find_address, format_instant, render_link
from scheduling.admin.system.workers import workers_page
from scheduling.admin.touches.timeline import build_timeline, format_receipt_kinds, receipt_kinds_subquery
from scheduling.admin.undo import create_undo_link
from scheduling.errors import AftertouchError
from scheduling.ids import first_id_at, parse_uuid
from scheduling.models import WAITING, Customer, Event, EventType, FailedTask, Touch
from scheduling.monitoring.duration_text import describe_duration
from scheduling.operations import commands, queries
from scheduling.operations.bulk_actions import TOUCH_ACTIONS
from scheduling.redaction import redact_json, split_by_shown_term

FOUND = 500  #: matches of an id that is not unique, or of words
LOOKED_AT = 50_000  #: latest touches that a search reads


class EffectiveStateFilter(DropdownFilter):  # type: ignore[misc]
    """Combine states into filters that operators need."""

    title = _("current status")
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [
            ("waiting", _("Not yet due")), ("overdue", _("Overdue")), ("paused", _("Paused")),
            ("bad", _("Failed or unknown")),
        ]  # fmt: skip

    def queryset(self, request: HttpRequest, queryset: QuerySet[Touch]) -> QuerySet[Touch]:
        status = self.value()
        at = read_page_time(request) if status else now()
        return queryset.filter(queries.filter_effective_state(status or "", at))


def search_touches(touches: QuerySet[Touch], term: str) -> QuerySet[Touch]:
    """Search by full id or by words of a text. Matches are looked up by their ids, whatever else filters the list."""
    if not term:
        return touches
    customer = Customer.objects.filter(user_id=term).values("pk")
    # Of a chat: the touches sent to it, and those of the latest that wait or were not sent.
    sent = Touch.objects.filter(chat_id=term, reserved_at__isnull=False).exclude(chat_id="").order_by("-reserved_at")
    found = {
        *_list_latest_ids(Touch.objects.filter(event__customer__in=customer)),
        *_list_latest_ids(Touch.objects.filter(event_id__in=queries.find_events_by_term(term))),
        *sent.values_list("pk", flat=True)[:FOUND],
        *_list_latest_ids(_list_latest(Touch).filter(chat_id=term, reserved_at__isnull=True)),
    }
    if uuid := parse_uuid(term):
        return touches.filter(task_id__in={*found, *queries.iterate_retries(uuid)})
    if not found:  # words among the texts of the latest touches, as they are shown
        parameters = {"term": term, "searched": LOOKED_AT, "found": FOUND}
        found = set(split_by_shown_term(term, sql.rows(_TOUCHES_WITH_TEXT, parameters))[0])
    return touches.filter(task_id__in=found)


_TOUCHES_WITH_TEXT = """
SELECT task_id, a.body
FROM (SELECT task_id, attempts FROM scheduling_touch ORDER BY task_id DESC LIMIT %(searched)s) AS latest
CROSS JOIN LATERAL touch_attempts(attempts) AS a
WHERE attempts IS NOT NULL AND position(lower(%(term)s) IN lower(a.body)) > 0
ORDER BY task_id DESC LIMIT %(found)s
"""


def _list_latest(model: type[Touch | Event]) -> QuerySet[Any]:
    """Return the latest `LOOKED_AT` rows, for searches that no index covers."""
    rows = model._default_manager.all()
    first = rows.order_by("-pk").values_list("pk", flat=True)[LOOKED_AT : LOOKED_AT + 1].first()
    return rows.filter(pk__gt=first) if first else rows


def _list_latest_ids(rows: QuerySet[Any]) -> QuerySet[Any]:
    return rows.order_by("-pk").values_list("pk", flat=True)[:FOUND]


STATE_TONES = {
    "scheduled": "info", "queued": "info", "running": "info", "delivered": "success", "suppressed": "warning",
    "cancelled": "default", "failed": "danger", "unknown": "danger",
}  # fmt: skip


@admin.register(Touch)
class TouchAdmin(RowPage, MatchingRowsMixin, ListExportMixin, BigTable, ReadOnlyAdmin):
    list_display = ("due", "state_label", "why", "node", "who", "chat_id", "event_type", "short_id")
    list_display_links = ("due", "short_id")
    list_filter = (
        EffectiveStateFilter, ("state", ChoicesFilter), ReasonFilter, ("node", RelatedFilter),
        ("node__channel", RelatedFilter), ("priority", ChoicesFilter), ("due_at", SpanFilter),
        ("settled_at", SpanFilter),
    )  # fmt: skip
    linked_lookups = ("paused_by",)
    list_select_related = ("node", "customer", "event")
    ordering = ("-task_id",)  # ids grow with time, so the newest come first by the primary key
    search_fields = ("task_id",)
    search_help_text = _("Full task, user, event or chat id, or words of a recently sent text")
    actions = ("cancel_selected",)
    actions_detail = ("cancel",)
    matching_actions = TOUCH_ACTIONS
    workers = table_page("workers/", "scheduling.view_touch")(workers_page)
    export_related = ("node__channel", "customer", "event", "template")
    export_columns = (
        (_("task id"), lambda row: row.pk), (_("state"), lambda row: row.get_state_display()),
        (_("reason"), lambda row: translate_reason(row.reason)), (_("due at"), lambda row: row.due_at),
        (_("settled at"), lambda row: row.settled_at), (_("node"), lambda row: row.node.key),
        (_("channel"), lambda row: row.node.channel.key), (_("user id"), lambda row: row.customer.user_id),
        (_("customer"), lambda row: row.customer.name), (_("chat id"), lambda row: row.chat_id),
        (_("event type"), lambda row: row.event.type), (_("source"), lambda row: row.event.source),
        (_("event id"), lambda row: row.event.event_id), (_("attempts"), lambda row: row.attempt),
        (_("template"), lambda row: row.template.key if row.template else ""),
        (_("template version"), lambda row: row.template_version), (_("delivery key"), lambda row: row.root_id),
        (_("receipts"), format_receipt_kinds),
    )  # fmt: skip

    def annotate_export(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        return rows.annotate(receipt_kinds=receipt_kinds_subquery())  # type: ignore[no-any-return]

    def has_export_permission(self, request: HttpRequest) -> bool:
        return self.has_change_permission(request)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow cancellation. No other change is possible."""
        return bool(request.user.has_perm("scheduling.change_touch"))

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Touch], search_term: str
    ) -> tuple[QuerySet[Touch], bool]:
        term = search_term.strip()
        if term and getattr(request, "acts_on_matches", False):
            return queryset.filter(queries.filter_touches_by_id(term)), False
        return search_touches(queryset, term), False

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        """Order by an index where the filter has one: waiting touches by due time, ended ones by their end."""
        if request.GET.get("status") in ("waiting", "overdue"):
            return ("due_at",)
        if request.GET.get("settled_at_from_0") or request.GET.get("settled_at_to_0"):
            return ("-settled_at",)
        return tuple(super().get_ordering(request))

    @ops_display(description=_("due at"), ordering="due_at")
    def due(self, row: Touch) -> str:
        return format_html('<span class="at-nowrap">{}</span>', format_instant(row.due_at))

    @ops_display(description=_("state"), label=STATE_TONES)
    def state_label(self, row: Touch) -> tuple[str, str]:
        return row.state, row.get_state_display()

    @ops_display(description=_("reason"))
    def why(self, row: Touch) -> str:
        if row.paused_by:
            return translate_reason("paused")
        if row.state == "scheduled" and not row.reason:
            wait = row.due_at - now()
            return gettext("in %(span)s") % {"span": describe_duration(wait)} if wait > timedelta(0) else gettext("due")
        return translate_reason(row.reason)

    @ops_display(description=_("customer"))
    def who(self, row: Touch) -> str:
        return render_link(find_address(row.customer), row.customer)

    @ops_display(description=_("event"))
    def event_type(self, row: Touch) -> str:
        return row.event.type

    @ops_display(description=_("task id"))
    def short_id(self, row: Touch) -> str:
        return format_html('<span class="at-nowrap at-mono" title="{}">…{}</span>', row.pk, str(row.pk)[-8:])

    @ops_action(description=_("Cancel waiting touches"), permissions=["change"])
    def cancel_selected(self, request: HttpRequest, queryset: QuerySet[Touch]) -> None:
        cancelled = []
        waiting = list(queryset.filter(state__in=WAITING).values_list("pk", flat=True))
        chosen = queryset.count()  # now: a list of waiting touches no longer has those that are cancelled
        for task_id in waiting:
            with suppress(AftertouchError):
                commands.cancel_one_touch(task_id, actor=request.user.get_username())
                cancelled.append(task_id)
        words = ngettext("%(count)s touch was cancelled.", "%(count)s touches were cancelled.", len(cancelled))
        link = create_undo_link(request, "touch.cancel", cancelled)
        messages.success(request, words % {"count": len(cancelled)}, extra_tags=link)
        if left := chosen - len(cancelled):
            messages.info(
                request,
                gettext("Not cancelled because they were already running or had ended: %(count)s.") % {"count": left},
            )

    @row_action(
        permission="change",
        allowed=lambda row: row.state in WAITING or (row.state == "running" and row.sending_at is None),
    )  # fmt: skip
    def cancel(self, request: HttpRequest, row: Touch) -> Confirmation:
        def act() -> None:
            commands.cancel_one_touch(row.pk, actor=request.user.get_username())
            link = create_undo_link(request, "touch.cancel", [row.pk], label=gettext("touch %(id)s") % {"id": row})
            messages.success(request, gettext("The touch was cancelled."), extra_tags=link)

        return Confirmation(
            title=gettext("Cancel this touch?"), button=gettext("Cancel the touch"), danger=True,
            text=gettext("The touch will not be sent. You can undo this for ten seconds."),
            act=act, refused=gettext("The touch is already running or has ended."),
        )  # fmt: skip

    def show_row(self, request: HttpRequest, row: Touch) -> HttpResponse:
        failed = FailedTask.objects.filter(task_id=row.pk).first()
        edited_from = FailedTask.objects.filter(task_id=row.retry_of).first() if row.retry_of else None
        return self.page(
            request,
            "ops/touch.html",
            f"{row.node} → {row.customer}",
            original=row,
            touch=row,
            moments=build_timeline(row),
            tone=STATE_TONES[row.state],
            channel=row.node.channel,
            failed=failed,
            difference=render_difference(edited_from) + render_difference(failed),
            links=self.action_links(request, row),
        )


class ReceivedFilter(SpanFilter):
    """Filter by time of receipt through ids, which grow with time. No index covers that time."""

    def filter_ends(self, ends: dict[str, datetime]) -> dict[str, Any]:
        return {f"pk__{end}": first_id_at(at) for end, at in ends.items()}


class TypeFilter(ColumnFilter):
    title = _("type")
    parameter_name = "type"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(row.key, str(row)) for row in EventType.objects.all()[:200]]


@admin.register(Event)
class EventAdmin(BigTable, ReadOnlyAdmin):
    list_display = ("occurred_at", "type", "who", "chat_id", "source", "event_id")
    list_before_template = "ops/events_above.html"
    list_filter = (TypeFilter, ("occurred_at", SpanFilter), ("received_at", ReceivedFilter))
    list_select_related = ("customer",)
    ordering = ("-pk",)
    search_fields = ("event_id",)
    search_help_text = _("Event id, user id or chat id (of the latest events), in full")
    fields = readonly_fields = (
        "type", "who", "chat_id", "occurred_at", "received_at", "source", "event_id", "shown_data", "touches_of",
    )  # fmt: skip
    preview = table_page("preview/", "view", "scheduling.view_node")(preview_page)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Event], search_term: str
    ) -> tuple[QuerySet[Event], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        customer = Customer.objects.filter(user_id=term).values("pk")
        found = {
            *queries.find_events_by_term(term),
            *_list_latest_ids(Event.objects.filter(customer__in=customer)),
            *_list_latest_ids(_list_latest(Event).filter(chat_id=term)),
        }
        return queryset.filter(pk__in=found), False

    @ops_display(description=_("customer"))
    def who(self, row: Event) -> str:
        return render_link(find_address(row.customer), row.customer)

    @ops_display(description=_("data"))
    def shown_data(self, row: Event) -> str:
        return format_html('<pre class="at-code">{}</pre>', redact_json(row.data))

    @ops_display(description=_("touches"))
    def touches_of(self, row: Event) -> str:
        lines = [
            (find_address(touch), touch.node.key, touch.get_state_display(), translate_reason(touch.reason))
            for touch in row.touches.select_related("node").order_by("due_at")
        ]
        html = '<div><a class="at-link" href="{}">{}</a> · {} <span class="at-quiet">{}</span></div>'
        return format_html_join("", html, lines) or mark_safe("–")
