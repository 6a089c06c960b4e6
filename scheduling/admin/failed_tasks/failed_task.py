"""Pages of failed tasks: list, groups by cause, details with actions and comments, and the edit of a payload."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Max, Model, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.defaultfilters import linebreaksbr
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils.dateparse import parse_datetime
from django.utils.html import Urlizer, format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.timezone import localtime
from django.utils.translation import gettext, gettext_lazy
from django.utils.translation import gettext_lazy as _
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget

from scheduling import sql
from scheduling.admin.base import (
    CappedPaginator,
    Confirmation,
    ReadOnlyAdmin,
    RowPage,
    build_user_actor,
    ops_display,
    row_action,
    table_page,
)
from scheduling.admin.failed_tasks.bulk_action import (
    MatchingRowsMixin,
    ReasonForm,
    make_list_action,
    offer_retry_undo,
)
from scheduling.admin.form_fields import DataField
from scheduling.admin.labels import translate_error, translate_reason
from scheduling.admin.lists import ChoicesFilter, ColumnFilter, ListExportMixin, ReasonFilter, SpanFilter
from scheduling.admin.page_reads import count_within
from scheduling.admin.shown_values import describe_instant, find_address, format_instant
from scheduling.error_text import find_error_line, has_more_lines
from scheduling.errors import AftertouchError, InvalidInput
from scheduling.ids import first_id_at, reveal_odd_characters
from scheduling.models import ChannelConfig, FailedTask
from scheduling.operations import failed_tasks
from scheduling.operations.bulk_actions import FAILED_TASK_ACTIONS, HANDLE
from scheduling.operations.failed_tasks import MAX_SUBJECT, find_origin
from scheduling.operations.queries import filter_failed_by_term
from scheduling.operations.undo import UNDO_WINDOW
from scheduling.redaction import redact, redact_json, redact_text
from scheduling.strict_text import is_same_json

MOST_SHOWN = 50  #: changed values


def list_changed_values(difference: Any) -> list[dict[str, Any]]:
    """Return the edited values of a stored difference, masked by name and content, at most `MOST_SHOWN`.

    Each has its path, and the texts before and after; an absent value is None.
    """
    sides = [(difference or {}).get(side) or {} for side in ("before", "after")]
    before, after = (dict(_iterate_values(side)) for side in sides)
    shown_before, shown_after = (
        {
            path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for path, value in _iterate_values(redact(side))
        }
        for side in sides
    )
    kept = {path for path in before.keys() & after.keys() if is_same_json(before[path], after[path])}
    paths = [path for path in {**before, **after} if path not in kept]
    return [
        {"path": path, "before": shown_before.get(path), "after": shown_after.get(path)} for path in paths[:MOST_SHOWN]
    ]


def render_difference(row: FailedTask | None) -> SafeString:
    """Return the HTML of the difference with its author; empty if the task was not edited."""
    values = list_changed_values(row.difference) if row else []
    return render_to_string("ops/difference.html", {"row": row, "values": values}) if values else SafeString("")


def _iterate_values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values below an object by path. A list counts as one value."""
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _iterate_values(below, f"{path}.{name}" if path else str(name))
    elif path:
        yield path, value


HOURS = 24
STEP, HEIGHT = 4, 20  #: of the drawing; the base line below the bars adds 1


def draw_trends(fingerprints: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the failures of each cause by hour, as bars and as a sentence. Empty if counting exceeds its time limit.

    Ids grow with time, so older tasks are not read.
    """
    since = localtime().replace(minute=0, second=0, microsecond=0) - timedelta(hours=HOURS - 1)
    given = {"since": since, "first": first_id_at(since - timedelta(minutes=1)), "causes": list(fingerprints)}
    rows = count_within(lambda: sql.rows(_BY_HOUR, given))
    if rows is None:
        return {}
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for fingerprint, hour, count in rows:
        counts[fingerprint][int(hour)] = count
    return {each: _draw(counts[each], since) for each in fingerprints}


def _draw(counts: dict[int, int], since: datetime) -> dict[str, Any]:
    most = max(counts.values(), default=0)
    bars = []  # x, y and height
    for hour, count in sorted(counts.items()):
        if 0 <= hour < HOURS:
            height = max(round(HEIGHT * count / most, 1), 1.5)
            bars.append((hour * STEP, round(HEIGHT - height, 1), height))
    words = gettext("none in the last 24 hours")
    if most:
        peak = since + timedelta(hours=min(hour for hour, count in counts.items() if count == most))
        words = gettext("%(total)s in the last 24 hours, most at %(hour)s: %(most)s") % {
            "total": sum(counts.values()), "hour": describe_instant(peak), "most": most,
        }  # fmt: skip
    return {"bars": bars, "words": words, "width": HOURS * STEP, "bar_width": STEP - 1}


_BY_HOUR = """
SELECT fingerprint, floor(extract(epoch FROM failed_at - %(since)s::timestamptz) / 3600), count(*)
FROM scheduling_failedtask
WHERE id >= %(first)s AND fingerprint = ANY(%(causes)s) AND failed_at >= %(since)s
GROUP BY 1, 2
"""


class AssigneeFilter(admin.SimpleListFilter):
    title = _("assignee")
    parameter_name = "assignee"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("me", _("Assigned to me")), ("none", _("Not assigned"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[FailedTask]) -> QuerySet[FailedTask]:
        value = self.value()
        if value in ("me", "none"):
            return queryset.filter(assignee=request.user.pk if value == "me" else None)
        return queryset.none() if value else queryset


def _list_assignees() -> list[tuple[str, Any]]:
    users = failed_tasks.list_assignable_users()
    return [("", _("Not assigned")), *((each.username, format_user(each)) for each in users)]


class AssignForm(forms.Form):
    user = forms.ChoiceField(
        label=_("Assignee"), required=False, choices=_list_assignees, widget=UnfoldAdminSelectWidget
    )


class CommentForm(forms.Form):
    text = forms.CharField(
        label=_("Comment"), max_length=failed_tasks.MAX_COMMENT, widget=UnfoldAdminTextareaWidget(attrs={"rows": 3})
    )


class CommentUrlizer(Urlizer):
    """Turn addresses into links that open in a new tab without a reference to this page."""

    url_template = '<a class="at-link" href="{href}" target="_blank" rel="noopener noreferrer nofollow">{url}</a>'


def format_user(user: User | None) -> str:
    """Return the full name of a user with the user name; "–" for None."""
    if user is None:
        return "–"
    name = user.get_full_name()
    return f"{name} ({user.username})" if name else user.username


def format_comment(text: str) -> SafeString:
    """Return a comment as HTML: masked, escaped, with links and line breaks."""
    escaped = CommentUrlizer()(redact_text(text), autoescape=True)
    return linebreaksbr(escaped, autoescape=False)


def build_notes(request: HttpRequest, row: FailedTask, links: Mapping[str, str]) -> dict[str, Any]:
    """Return the template context of assignee and comments; the forms only for users who may act."""
    comments = [
        {"author": each.author_name, "at": each.commented_at, "html": format_comment(each.text)}
        for each in row.comments.all()
    ]
    context: dict[str, Any] = {"comments": comments, "assignee": format_user(row.assignee)}
    if "assign" in links:
        mine = row.assignee_id == request.user.pk
        context |= {
            "assign_form": AssignForm(initial={"user": row.assignee.username if row.assignee else ""}),
            "comment_form": CommentForm(),
            "assign_link": links["assign"],
            "comment_link": links["comment"],
            "me": "" if mine else request.user.get_username(),
        }
    return context


CODE = {"rows": 14, "class": "at-mono", "spellcheck": "false"}


class TouchTextForm(ReasonForm):
    """Subject and body of the message."""

    field_order = ["subject", "body", "reason"]
    subject = forms.CharField(
        label=gettext_lazy("Subject"), max_length=MAX_SUBJECT, required=False, widget=UnfoldAdminTextInputWidget
    )
    body = forms.CharField(
        label=gettext_lazy("Message text"), strip=False, widget=UnfoldAdminTextareaWidget(attrs={"rows": 10}),
        help_text=gettext_lazy("Sent as written: variables of the template are not replaced."),
    )  # fmt: skip

    def read_payload(self) -> dict[str, Any]:
        # Browsers send line ends as CRLF; the template has LF.
        body = self.cleaned_data["body"].replace("\r\n", "\n")
        return {"subject": self.cleaned_data["subject"], "body": body}


class PayloadForm(ReasonForm):
    """Payload of the job, as JSON."""

    field_order = ["payload", "reason"]
    payload = DataField(label=gettext_lazy("Payload (JSON)"), widget=UnfoldAdminTextareaWidget(attrs=CODE))

    def read_payload(self) -> dict[str, Any]:
        return dict(self.cleaned_data["payload"])


def may_edit(request: HttpRequest, row: FailedTask) -> bool:
    """Return whether the user may edit this failed task, which needs the right to see and change its payload."""
    republisher = failed_tasks.find_republisher(row.origin)
    return (
        republisher is not None
        and row.state in failed_tasks.RETRYABLE
        and request.user.has_perm(republisher.edit_permission)
    )


def _retry_edited(request: HttpRequest, row: FailedTask, form: Any, *, as_new: bool) -> None:
    actor = build_user_actor(request, form.cleaned_data["reason"])
    try:
        new_id = failed_tasks.retry_failed_task(
            row.pk, actor, as_new=as_new, payload=form.read_payload(), due_at=sql.now() + UNDO_WINDOW
        )
    except InvalidInput as error:
        for each in error.errors:
            name = each.field.removeprefix("payload.")
            if name in form.fields:
                form.add_error(name, translate_error(each.message))
            else:
                form.add_error("payload" if "payload" in form.fields else None, translate_error(str(each)))
    except AftertouchError as error:
        messages.error(request, translate_error(str(error)))
    else:
        action = FAILED_TASK_ACTIONS["again" if as_new else "retry"]
        link = offer_retry_undo(request, action, {row.pk: new_id}, label=gettext("Edit and retry"))
        messages.success(request, gettext("The edited task was published again."), extra_tags=link)


#: A run may have done half of its work before it failed.
CLASSES_OF_JOBS = {"failed": _("The run failed"), "unknown": _("May have had its effect")}
CLASSES = {
    "failed": _("Certainly not delivered"), "unknown": _("May have been delivered"), "unreadable": _("Unreadable"),
}  # fmt: skip


def translate_failure_class(origin: str, failure: str) -> str:
    """Return the label of a failure class; jobs have their own labels."""
    words = CLASSES_OF_JOBS.get(failure) if origin == FailedTask.Origin.RPA_JOB else None
    return str(words or CLASSES.get(failure) or failure)


class OpenFilter(admin.SimpleListFilter):
    """Show open tasks by default: they wait for an operator."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [*FailedTask.State.choices, ("all", _("All"))]

    def choices(self, changelist: Any) -> Any:
        _all, *others = super().choices(changelist)
        if self.value() is None:
            others[0] = {**others[0], "selected": True}
        return others

    def queryset(self, request: HttpRequest, queryset: QuerySet[FailedTask]) -> QuerySet[FailedTask]:
        state = self.value() or OPEN
        return queryset if state == "all" else queryset.filter(state=state)


class ClassFilter(ColumnFilter):
    title = _("class")
    parameter_name = "failure"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return list(CLASSES.items())


class ChannelFilter(ColumnFilter):
    title = _("channel")
    parameter_name = "channel"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(key, key) for key in ChannelConfig.objects.values_list("key", flat=True)]


class CauseFilter(ReasonFilter):
    """Offer the reasons of the latest open tasks."""

    def list_latest_rows(self, model: type[Model]) -> QuerySet[Any]:
        return super().list_latest_rows(model).filter(state="open").order_by("-failed_at")


OPEN = FailedTask.State.OPEN
GROUPED = 20_000  #: failed tasks that are grouped by cause

TONES = {
    "open": "danger", "retried": "info", "resolved_delivered": "success", "resolved_not_delivered": "warning",
    "ignored": "default", "archived": "default",
}  # fmt: skip


def _describe_stored_attempt(stored: dict[str, Any]) -> dict[str, Any]:
    """Add labels to a stored attempt, and mask its values."""
    shown = redact(stored)
    return {
        **shown,
        **_split_detail(str(shown.get("detail", ""))),
        "at": format_instant(parse_datetime(str(stored.get("started_at", "")))),
        "words": translate_reason(str(stored.get("reason", ""))),
    }


def _split_detail(detail: str) -> dict[str, Any]:
    """Return the error line, and the whole detail for the fold below it."""
    return {"detail": detail, "error_line": find_error_line(detail), "has_more": has_more_lines(detail)}


def find_task_with_link(origin: str, task_id: Any) -> dict[str, Any] | None:
    """Return a task from its app's ledger and the address of its page; None if it does not exist."""
    known = find_origin(origin)
    task = known.ledger._default_manager.filter(pk=task_id).first() if known and task_id else None
    return {"task": task, "link": find_address(task)} if task else None


@admin.register(FailedTask)
class FailedTaskAdmin(RowPage, MatchingRowsMixin, ListExportMixin, ReadOnlyAdmin):
    list_display = (
        "failed", "state_label", "class_label", "why", "channel", "node_key", "user_key", "assigned_to", "origin",
    )  # fmt: skip
    list_select_related = ("assignee",)
    list_filter = (
        OpenFilter, ("origin", ChoicesFilter), CauseFilter, ChannelFilter, ClassFilter,
        AssigneeFilter, ("failed_at", SpanFilter),
    )  # fmt: skip
    linked_lookups = ("fingerprint",)
    ordering = ("-pk",)  # ids grow with time, so the newest come first by the primary key
    show_full_result_count = False
    paginator = CappedPaginator
    search_fields = ("task_id",)
    search_help_text = _("Task, event, trace, user, shop or chat id in full, or words of the detail")
    actions = ()
    actions_detail = ("edit", "assign", "comment")
    matching_actions = FAILED_TASK_ACTIONS
    matching_time = "failed_at"
    export_columns = (
        (_("task id"), lambda row: row.task_id), (_("origin"), lambda row: row.get_origin_display()),
        (_("state"), lambda row: row.get_state_display()),
        (_("class"), lambda row: translate_failure_class(row.origin, row.failure)),
        (_("reason"), lambda row: translate_reason(row.reason)), (_("detail"), lambda row: redact_text(row.detail)),
        (_("channel"), lambda row: row.channel), (_("node"), lambda row: row.payload.get("node")),
        (_("task type"), lambda row: row.payload.get("task_type")),
        (_("user id"), lambda row: row.payload.get("user_id")),
        (_("shop"), lambda row: row.payload.get("shop_id")), (_("failed at"), lambda row: row.failed_at),
        (_("acted at"), lambda row: row.acted_at), (_("actor"), lambda row: row.actor_name),
        (_("assignee"), lambda row: format_user(row.assignee)),
        (_("reason of the action"), lambda row: row.action_reason),
        (_("published again as"), lambda row: row.retried_as), (_("delivery key"), lambda row: row.root_id),
        (_("fingerprint"), lambda row: row.fingerprint),
    )  # fmt: skip

    def has_export_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(HANDLE)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[FailedTask], search_term: str
    ) -> tuple[QuerySet[FailedTask], bool]:
        return queryset.filter(filter_failed_by_term(search_term, for_users=True)), False

    def get_actions(self, request: HttpRequest) -> Any:
        if not request.user.has_perm(HANDLE):
            return {}
        return {
            f"bulk_{name}": (make_list_action(name), f"bulk_{name}", action.title)
            for name, action in FAILED_TASK_ACTIONS.items()
        }

    @table_page("<uuid:pk>/act/<str:name>/", HANDLE)
    def act(self, request: HttpRequest, pk: Any, name: str) -> HttpResponse:
        """Confirm an action on one failed task and apply it."""
        row = self.get_row_or_404(request, pk)
        if name not in FAILED_TASK_ACTIONS:
            raise Http404
        action = FAILED_TASK_ACTIONS[name].for_origins(row.origin)
        form = ReasonForm(request.POST or None)

        def act() -> None:
            actor = build_user_actor(request, form.cleaned_data["reason"])
            new_id = action.act(row.pk, actor, sql.now() + UNDO_WINDOW)
            link = offer_retry_undo(request, action, {row.pk: new_id}, label=str(action.title))
            messages.success(request, gettext("Done: %(what)s.") % {"what": action.title}, extra_tags=link)

        asked = Confirmation(
            title=str(action.title), text=str(action.explains), form=form, danger=action.danger, act=act,
            refused=gettext("Nothing was changed: another user acted first, or the state does not allow the action."),
        )  # fmt: skip
        return self.confirm(request, asked, row)

    @row_action(permission=HANDLE)
    def edit(self, request: HttpRequest, row: FailedTask) -> Confirmation:
        """Edit the payload, check it and publish the task again."""
        republisher = failed_tasks.find_republisher(row.origin)
        if republisher is None:
            raise Http404
        if not request.user.has_perm(republisher.edit_permission):
            raise PermissionDenied
        payload = republisher.read_payload(row)
        asked = Confirmation(title=gettext("Edit and retry"), act=lambda: None)
        if payload is None:
            return replace(asked, problem=gettext("The original has been deleted."))
        if request.method != "POST" and row.state not in failed_tasks.RETRYABLE:
            # A submitted form gets the conflict as its answer instead.
            return replace(asked, problem=gettext("It is %(state)s already.") % {"state": row.get_state_display()})
        form: TouchTextForm | PayloadForm
        if row.origin == FailedTask.Origin.TOUCH:
            form = TouchTextForm(request.POST or None, initial=dict(payload))
            text = gettext(
                "Publishes the touch again with this text and a new delivery key. The guards are checked again. "
                "The address is read when it is sent: correct it at the customer or the community."
            )
        else:
            shown = json.dumps(payload, ensure_ascii=False, indent=2)
            form = PayloadForm(request.POST or None, initial={"payload": shown})
            text = gettext(
                "Publishes a new job with this payload and a new delivery key. The payload is checked against the "
                "flow. The difference stays at this failed task."
            )
        unknown = row.failure == "unknown"
        warning = gettext("The first one may have had its effect. This one has it a second time.") if unknown else ""
        return replace(
            asked, form=form, text=text, danger=unknown, warning=warning,
            act=lambda: _retry_edited(request, row, form, as_new=unknown),
        )  # fmt: skip

    @row_action(permission=HANDLE, methods=["POST"])
    def assign(self, request: HttpRequest, row: FailedTask) -> HttpResponse:
        """Assign the failed task to the chosen user, or to none."""
        try:
            failed_tasks.assign_failed_task(row.pk, request.POST.get("user") or None, build_user_actor(request))
            messages.success(request, gettext("The assignee was changed."))
        except InvalidInput as error:
            messages.error(request, translate_error(error.errors[0].message))
        return redirect(self.url("change", row.pk))

    @row_action(permission=HANDLE, methods=["POST"])
    def comment(self, request: HttpRequest, row: FailedTask) -> HttpResponse:
        form = CommentForm(request.POST)
        try:
            if form.is_valid():
                failed_tasks.add_comment(row.pk, form.cleaned_data["text"], build_user_actor(request))
                messages.success(request, gettext("The comment was added."))
            else:
                messages.error(request, " ".join(map(str, form.errors["text"])))
        except InvalidInput as error:
            messages.error(request, translate_error(error.errors[0].message))
        return redirect(f"{self.url('change', row.pk)}#comments")

    @ops_display(description=_("failed at"), ordering="failed_at")
    def failed(self, row: FailedTask) -> str:
        return format_instant(row.failed_at)

    @ops_display(description=_("state"), label=TONES)
    def state_label(self, row: FailedTask) -> tuple[str, str]:
        return row.state, row.get_state_display()

    @ops_display(description=_("class"))
    def class_label(self, row: FailedTask) -> str:
        return translate_failure_class(row.origin, row.failure)

    @ops_display(description=_("reason"), ordering="reason")
    def why(self, row: FailedTask) -> str:
        detail = Truncator(find_error_line(redact_text(row.detail))).chars(81)
        return format_html('{}<br><span class="at-quiet">{}</span>', translate_reason(row.reason), detail)

    @ops_display(description=_("node or task type"))
    def node_key(self, row: FailedTask) -> str:
        return str(row.payload.get("node") or row.payload.get("task_type") or "–")

    @ops_display(description=_("customer or shop"))
    def user_key(self, row: FailedTask) -> str:
        return reveal_odd_characters(str(row.payload.get("user_id") or row.payload.get("shop_id") or "–"))

    @ops_display(description=_("assignee"))
    def assigned_to(self, row: FailedTask) -> str:
        return format_user(row.assignee)

    @table_page("groups/", "view")
    def groups(self, request: HttpRequest) -> HttpResponse:
        """Group the latest failed tasks by cause, so that one fix leads to one action.

        Reads `GROUPED` tasks: a cause that is not among them hardly occurs any more.
        """
        state = request.GET.get("state") or OPEN
        latest = FailedTask.objects.filter(state=state).order_by("-failed_at" if state == OPEN else "-pk").values("pk")
        # The causes of these failed tasks, the most frequent first.
        facts = {name: Max(name) for name in ("reason", "channel", "detail", "failure", "origin")}
        rows = FailedTask.objects.filter(pk__in=latest[:GROUPED]).values("fingerprint")
        counted = rows.annotate(count=Count("pk"), last_at=Max("failed_at"), **facts)
        found: list[Mapping[str, Any]] = list(counted.order_by("-count")[:100])
        trends = draw_trends([group["fingerprint"] for group in found])
        listed = [
            {
                **group,
                "words": translate_reason(group["reason"]),
                "detail": find_error_line(redact_text(group["detail"])),
                "trend": trends.get(group["fingerprint"]),
                "class": translate_failure_class(group["origin"], group["failure"]),
                "link": f"{self.url('changelist')}?{urlencode({'state': state, 'fingerprint': group['fingerprint']})}",
            }
            for group in found
        ]
        return self.page(
            request,
            "ops/failed_groups.html",
            gettext("Failed tasks by cause"),
            groups=listed,
            most=GROUPED if latest[GROUPED : GROUPED + 1].exists() else 0,
            states=[(value, label, value == state) for value, label in FailedTask.State.choices],
            back=self.url("changelist"),
        )

    def show_row(self, request: HttpRequest, row: FailedTask) -> HttpResponse:
        links, origin = self.action_links(request, row), find_origin(row.origin)
        offered = [
            {
                "action": action.for_origins(row.origin),
                "link": reverse("admin:scheduling_failedtask_act", args=[row.pk, name]),
            }
            for name, action in FAILED_TASK_ACTIONS.items()
            if request.user.has_perm(HANDLE) and action.applies_to(row)
        ]
        return self.page(
            request,
            "ops/failed_task.html",
            translate_reason(row.reason) or gettext("Failed task"),
            original=row,
            row=row,
            tone=TONES[row.state],
            words=translate_reason(row.reason),
            **_split_detail(redact_text(row.detail)),
            class_label=translate_failure_class(row.origin, row.failure),
            offered=offered,
            edit_link=links.get("edit", "") if may_edit(request, row) else "",
            difference=render_difference(row),
            **build_notes(request, row, links),
            attempts=[_describe_stored_attempt(each) for each in row.attempts],
            payload=redact_json(row.payload),
            task=find_task_with_link(row.origin, row.task_id),
            again=find_task_with_link(row.origin, row.retried_as),
            panel=origin.panel(request, row) if origin and origin.panel else "",
            same=FailedTask.objects.filter(fingerprint=row.fingerprint, state="open").exclude(pk=row.pk)[:101].count(),
            same_link=f"{self.url('changelist')}?{urlencode({'fingerprint': row.fingerprint})}",
        )
