"""Pages that run a task type now, again, or regularly, for one or many shops."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.db import transaction
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django_celery_beat.models import IntervalSchedule, PeriodicTask
from unfold.widgets import (
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from rpa_tasks.admin.flow import JsonField
from rpa_tasks.jobs.dead_letters import read_job_payload
from rpa_tasks.jobs.payloads import unstorable_reason
from rpa_tasks.jobs.publish import BacklogFull, PublishRequest, Receipt, publish_job, publish_many
from rpa_tasks.jobs.queries import repeat_request
from rpa_tasks.jobs.schedules import ALL_SHOPS, MAX_SPREAD, PRIORITIES, check_arguments
from rpa_tasks.models import EDIT_PAYLOADS, RUN_JOBS, Flow, Job, JobState, Platform, Shop
from scheduling.admin.base import Confirmation, OpsAdmin, build_user_actor, table_page
from scheduling.admin.form_fields import NamesField, NumberField
from scheduling.admin.labels import translate_error, translate_errors
from scheduling.admin.row_edits import OptimisticLockForm
from scheduling.admin.shown_values import describe_instant, format_instant
from scheduling.audit import record_action
from scheduling.errors import InvalidInput
from scheduling.ids import parse_number, reveal_odd_characters
from scheduling.models import FailedTask, Priority
from scheduling.monitoring.duration_text import describe_duration
from scheduling.operations.failed_tasks import retry_failed_task
from scheduling.operations.periodic_rows import find_problem
from scheduling.redaction import redact


class PublishForm(forms.Form):
    """Priority and payload. Only users who may edit payloads get the payload field."""

    priority = forms.TypedChoiceField(
        label=gettext_lazy("Priority"), choices=Priority.choices, coerce=int, initial=Priority.NORMAL,
        widget=UnfoldAdminSelectWidget,
    )  # fmt: skip
    payload = JsonField(
        label=gettext_lazy("Payload (JSON)"), help_text=gettext_lazy("Parameters passed to the flow. Empty: none.")
    )

    def __init__(self, *args: Any, edits_payload: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not edits_payload:
            del self.fields["payload"]


def may_edit_payload(request: HttpRequest) -> bool:
    return bool(request.user.has_perm(EDIT_PAYLOADS))


def source_of(request: HttpRequest) -> str:
    return f"admin: {request.user.get_username()}"


def confirm_run_again(jobs_admin: Any, request: HttpRequest, row: Job) -> Confirmation:
    """Publish a job again. If its failed task is open, the retry of that settles it, with the edited payload."""
    initial = {"priority": row.priority, "payload": row.payload}
    form = PublishForm(request.POST or None, initial=initial, edits_payload=may_edit_payload(request))
    failed = FailedTask.objects.filter(task_id=row.pk, state=FailedTask.State.OPEN).first()
    settles = failed is not None and request.user.has_perm("scheduling.act_on_failedtask")

    def act() -> HttpResponse:
        if failed and settles:
            task_id = _retry_failed_job(request, failed, form.cleaned_data)
        else:
            again = repeat_request(
                row,
                source_of(request),
                payload=form.cleaned_data.get("payload", row.payload),
                priority=form.cleaned_data["priority"],
                keeps_payload="payload" not in form.cleaned_data,
            )
            receipt = publish_job(again)
            show_receipt(request, receipt)
            task_id = receipt.task_id
        return redirect(jobs_admin.url("change", task_id))

    text = _("A new job for the same shop and task type. While one of its kind waits already, it merges into that one.")
    if settles:
        text = _("A new job for the same shop and task type, in place of the failed one. It settles the failed task.")
    shown = [] if "payload" in form.fields else [json.dumps(redact(row.payload), ensure_ascii=False)]
    facts = [f"{row.shop} · {row.flow.task_type}", *shown]
    warning = ""
    if failed is not None and not settles:
        warning = _(
            "Its failed task stays open: “Retry” there runs it again as well and settles it, with the same key."
        )
    elif not row.flow.idempotent:
        warning = _("This flow is not marked as idempotent: what the first run did may be done a second time.")
    return Confirmation(title=_("Run again"), form=form, text=text, act=act, facts=facts, warning=warning)


def _retry_failed_job(request: HttpRequest, failed: FailedTask, given: dict[str, Any]) -> UUID:
    """Publish the job of a failed task again.

    An edited payload has a new delivery key. After an unknown outcome the page has warned that the effect may happen
    twice.
    """
    actor = build_user_actor(request, _("Run again"))
    payload = given.get("payload")
    edited = payload is not None and payload != read_job_payload(failed)
    task_id = retry_failed_task(
        failed.pk, actor, as_new=edited and failed.failure == "unknown", payload=payload, priority=given["priority"]
    )
    messages.success(request, _("The job was published. Its failed task is settled."))
    return task_id


def show_receipt(request: HttpRequest, receipt: Receipt) -> None:
    if receipt.because in ("running", "window") and receipt.window_ends_at:
        messages.warning(request, describe_window(receipt))
    elif receipt.duplicate:
        messages.info(request, _("The request was merged into a waiting job of the same kind."))
    else:
        messages.success(request, _("The job was published."))


def describe_window(receipt: Receipt) -> str:
    words = _("No new job: one of its kind (%(state)s) has the time window until %(end)s.")
    state = JobState(receipt.state).label if receipt.state else "–"
    return words % {"state": state, "end": describe_instant(receipt.window_ends_at) if receipt.window_ends_at else "–"}


MOST_AT_ONCE = 500  #: shops; a request must end
LISTED = 200
#: The permissions to edit schedules, which publish with a payload repeatedly.
EDIT_SCHEDULES = (RUN_JOBS, EDIT_PAYLOADS, "rpa_tasks.change_shop")


class RunForm(PublishForm):
    task_type = forms.ChoiceField(label=gettext_lazy("Task type"), widget=UnfoldAdminSelectWidget)
    field_order = ("task_type", "priority", "payload")

    def __init__(self, *args: Any, task_types: Iterable[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["task_type"].choices = [(each, each) for each in task_types]  # type: ignore[attr-defined]


@dataclass(slots=True)
class PublishResults:
    """Result of the request for each shop."""

    published: list[tuple[Shop, Receipt]] = field(default_factory=list)
    merged: list[tuple[Shop, Receipt]] = field(default_factory=list)
    refused: list[tuple[Shop, str]] = field(default_factory=list)


def selected_shops(request: HttpRequest) -> list[Shop]:
    """Return the active shops in the URL."""
    pks = list(filter(None, map(parse_number, request.GET.get("shops", "").split(","))))[: MOST_AT_ONCE + 1]
    living = Shop.objects.filter(pk__in=pks, retired_at=None, platform__retired_at=None)
    return list(living.select_related("platform"))


def common_task_types(shops: Iterable[Shop]) -> list[str]:
    """Return the task types that every platform of these shops has."""
    platforms = {shop.platform_id for shop in shops}
    flows = Flow.objects.filter(platform__in=platforms, retired_at=None).order_by("task_type").values("task_type")
    common = flows.annotate(platforms=Count("pk")).filter(platforms=len(platforms))
    return list(common.values_list("task_type", flat=True))


def publish_for_each(shops: Sequence[Shop], wanted: dict[str, Any], source: str) -> PublishResults:
    """Publish for each shop on its own: a refusal, or a row that another transaction holds, stops no other."""
    outcome = PublishResults()
    edits = "payload" in wanted  # a user who may not choose a payload means any waiting job
    requests = [
        PublishRequest(
            platform=shop.platform.key, shop_id=shop.shop_id, task_type=wanted["task_type"],
            payload=wanted.get("payload", {}), priority=wanted["priority"], source=source,
            keeps_payload=not edits, merges_into_any=not edits,
        )
        for shop in shops
    ]  # fmt: skip
    for shop, result in zip(shops, publish_many(requests), strict=True):
        if isinstance(result, Receipt) and not result.window_ends_at:
            (outcome.merged if result.duplicate else outcome.published).append((shop, result))
        elif isinstance(result, Receipt):
            outcome.refused.append((shop, describe_window(result)))
        elif isinstance(result, InvalidInput | BacklogFull):
            outcome.refused.append((shop, "; ".join(translate_errors(result))))
        else:
            outcome.refused.append((shop, _("The database is busy. Run it again for this shop.")))
    return outcome


# Pages for schedules of shops, such as "sync the orders of all shops every ten minutes".
#
# A schedule is a row of django-celery-beat with the task `rpa_tasks.publish_for_shops`. The form writes its JSON
# arguments and changes no other rows.


TASK = "rpa_tasks.publish_for_shops"
MINUTES = {"minutes": 1, "hours": 60, "days": 1440}


class ScheduleForm(OptimisticLockForm):
    written_columns = ("interval", "args", "kwargs")
    args = "[]"

    flow = forms.ModelChoiceField(
        Flow.objects.filter(retired_at=None, platform__retired_at=None).select_related("platform"),
        label=gettext_lazy("Platform and task type"), widget=UnfoldAdminSelectWidget,
    )  # fmt: skip
    every = forms.IntegerField(
        label=gettext_lazy("Interval in minutes"), min_value=1, max_value=10_080, initial=10,
        widget=UnfoldAdminIntegerFieldWidget,
    )  # fmt: skip
    spread = NumberField(
        label=gettext_lazy("Spread in minutes"), min_value=0, max_value=MAX_SPREAD // 60, initial=10,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text=gettext_lazy("Each shop starts at its own time within this span. Usually the same as the interval; "
                               "0: all at once."),
    )  # fmt: skip
    due = NumberField(
        label=gettext_lazy("Done within minutes"), required=False, min_value=1, max_value=MAX_SPREAD // 60,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text=gettext_lazy("Later the jobs count as late and raise an alert. They run all the same. "
                               "Empty: no limit."),
    )  # fmt: skip
    shops = NamesField(
        label=gettext_lazy("Shops"),
        help_text=gettext_lazy("Shop ids, one a line or separated by commas. Empty: all of the platform, also those "
                               "that are added later."),
    )  # fmt: skip
    priority = forms.ChoiceField(
        label=gettext_lazy("Priority"), initial="normal", widget=UnfoldAdminSelectWidget,
        choices=[(name, Priority(value).label) for name, value in PRIORITIES.items()],
    )  # fmt: skip
    payload = JsonField(label=gettext_lazy("Payload (JSON)"), help_text=gettext_lazy("The same for every shop."))
    name = forms.CharField(
        label=gettext_lazy("Name"), required=False, max_length=200, widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("Empty: made from the above."),
        error_messages={"unique": gettext_lazy("There is a schedule of this name already.")},
    )  # fmt: skip
    enabled = forms.BooleanField(
        label=gettext_lazy("Switched on"), required=False, initial=True, widget=UnfoldBooleanSwitchWidget
    )

    class Meta:
        model = PeriodicTask
        fields = ("name", "enabled")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["flow"].label_from_instance = lambda flow: f"{flow.platform} · {flow.task_type}"  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        given = super().clean()
        if self.errors:
            return given
        try:
            check_arguments([], self.order())
        except InvalidInput as error:
            for each in error.errors:
                place = each.field.partition(".")[0]
                self.add_error(place if place in self.fields else None, translate_error(each.message))
            return given
        if not given["name"]:
            words = (
                _("%(flow)s: %(count)s shops, every %(minutes)s min")
                if given["shops"]
                else _("%(flow)s: all shops, every %(minutes)s min")
            )
            count = len(given["shops"])
            given["name"] = words % {"flow": given["flow"].name, "count": count, "minutes": given["every"]}
        self.kwargs = json.dumps(self.order(), ensure_ascii=False)
        # Nothing keeps intervals unique: two pages may add one at once. Of equal intervals a schedule keeps its own.
        every = {"every": given["every"], "period": IntervalSchedule.MINUTES}
        equal = IntervalSchedule.objects.filter(**every).order_by("pk")
        self.interval = (
            equal.filter(pk=self.instance.interval_id).first()
            or equal.first()
            or IntervalSchedule.objects.create(**every)
        )
        return given

    def validate_unique(self) -> None:
        if not self.errors:  # beat's own check fails without an interval
            super().validate_unique()

    def order(self) -> dict[str, Any]:
        """Return the arguments of the periodic task."""
        given = self.cleaned_data
        return {
            "platform": given["flow"].platform.key, "task_type": given["flow"].task_type,
            "shops": given["shops"] or ALL_SHOPS, "priority": given["priority"], "payload": given["payload"],
            "spread_seconds": round(given["spread"] * 60, 3),
        } | ({"due_seconds": round(given["due"] * 60, 3)} if given["due"] else {})  # fmt: skip


def _record_edit(request: HttpRequest, action: str, row: PeriodicTask, before: PeriodicTask | None = None) -> None:
    """Record an edit, which no history keeps, with the values before and after."""
    values = [
        {"name": each.name, "enabled": each.enabled, "interval": str(each.interval), "kwargs": _arguments_of(each)}
        for each in (before, row) if each
    ]  # fmt: skip
    old, new = values if before else ({}, {})
    changes = [(name, old[name], new[name]) for name in new if old[name] != new[name]]
    actor = request.user.get_username()
    record_action(action, row, actor=actor, label=row.name, changes=changes)


def _list_entry(row: PeriodicTask, platforms: Mapping[str, Platform]) -> dict[str, Any]:
    order, problem = _arguments_of(row), ""
    try:
        check_arguments([], order)
    except InvalidInput as error:
        problem = "; ".join(translate_errors(error))
    key = reveal_odd_characters(str(order.get("platform", "?")))
    minutes = _interval_minutes(row)
    every = describe_duration(timedelta(minutes=minutes)) if minutes else str(row.scheduler)
    return {
        "row": row,
        "platform": platforms.get(key, key),
        "task_type": reveal_odd_characters(str(order.get("task_type", "?"))),
        "shops": _("all") if order.get("shops", ALL_SHOPS) == ALL_SHOPS else len(_shops_of(order)),
        "every": every,
        "spread": describe_duration(timedelta(seconds=_seconds_of(order, "spread_seconds"))),
        "last": format_instant(row.last_run_at),
        "link": reverse("admin:rpa_tasks_shop_schedule", args=[row.pk]),
        "problem": problem or translate_error(find_problem(row)),
    }


def _arguments_of(row: PeriodicTask) -> dict[str, Any]:
    try:
        order = json.loads(row.kwargs or "{}")
    except ValueError:
        return {}
    return order if isinstance(order, dict) else {}


def _seconds_of(order: Mapping[str, Any], name: str) -> float:
    """Return a span of a schedule. One that no run accepts counts as none; the list names the problem."""
    value = order.get(name)
    return value if isinstance(value, int | float) and 0 <= value <= MAX_SPREAD else 0


def _shops_of(order: Mapping[str, Any]) -> list[str]:
    """Return the shops that a schedule lists; none for all."""
    shops = order.get("shops")
    return list(map(str, shops)) if isinstance(shops, list) else []


def _interval_minutes(row: PeriodicTask) -> int | None:
    """Return the interval in minutes; None for other intervals."""
    return (
        row.interval.every * MINUTES[row.interval.period] if row.interval and row.interval.period in MINUTES else None
    )


def _initial_values(row: PeriodicTask) -> dict[str, Any]:
    order = _arguments_of(row)
    payload = order.get("payload") or {}
    if unstorable_reason(payload):  # shown escaped
        payload = json.dumps(payload)
    shops = [reveal_odd_characters(each) if unstorable_reason(each) else each for each in _shops_of(order)]
    order = {name: value for name, value in order.items() if not unstorable_reason(value)}
    flow = Flow.objects.filter(platform__key=order.get("platform"), task_type=order.get("task_type")).first()
    return {
        "flow": flow, "every": _interval_minutes(row), "spread": _seconds_of(order, "spread_seconds") / 60,
        "shops": shops, "priority": order.get("priority", "normal"),
        "due": _seconds_of(order, "due_seconds") / 60 or None,
        "payload": payload, "name": row.name, "enabled": row.enabled,
    }  # fmt: skip


class RunPages(OpsAdmin):
    """Pages of shops that run a task type for many of them, now or regularly."""

    @table_page("run-now/", RUN_JOBS)
    def run_now_many(self, request: HttpRequest) -> HttpResponse:
        shops = selected_shops(request)
        back = str(self.url("change", shops[0].pk) if len(shops) == 1 else self.url("changelist"))
        task_types = common_task_types(shops)
        form = RunForm(request.POST or None, task_types=task_types, edits_payload=may_edit_payload(request))

        def act() -> HttpResponse:
            outcome = publish_for_each(shops[:MOST_AT_ONCE], form.cleaned_data, source_of(request))
            return self.page(
                request, "rpa_tasks/run_outcome.html", _("Run now"), outcome=outcome, back=back, listed=LISTED,
                task_type=form.cleaned_data["task_type"], jobs_link=reverse("admin:rpa_tasks_job_changelist"),
            )  # fmt: skip

        problem = warning = ""
        if not shops:
            problem = _("No shop was chosen that is in use.")
        elif not task_types:
            problem = _("These shops have no task type in common: choose shops of one platform.")
        elif len(shops) > MOST_AT_ONCE:
            warning = _("Only the first %(most)s shops are processed.") % {"most": MOST_AT_ONCE}
        names = ", ".join(str(shop) for shop in shops[:8])
        more = len(shops) - 8
        listed = _("%(names)s and %(count)s more") % {"names": names, "count": more} if more > 0 else names
        asked = Confirmation(
            title=_("Run now"), act=act, form=form, facts=[listed], problem=problem, warning=warning, back=back,
            text=_("One job a shop. Where one of its kind waits already, the request merges into it: the latest "
                   "payload and the highest priority count."),
        )  # fmt: skip
        return self.confirm(request, asked)

    @table_page("schedules/", "view")
    def schedules(self, request: HttpRequest) -> HttpResponse:
        rows = PeriodicTask.objects.filter(task=TASK).select_related("interval", "crontab", "solar", "clocked")
        platforms = {row.key: row for row in Platform.objects.all()}
        return self.page(
            request, "rpa_tasks/schedules.html", _("Schedules of shops"),
            schedules=[_list_entry(row, platforms) for row in rows.order_by("name")],
            may_edit=request.user.has_perms(EDIT_SCHEDULES), add_link=self.url("schedule_add"),
        )  # fmt: skip

    @table_page("schedules/add/", *EDIT_SCHEDULES)
    def schedule_add(self, request: HttpRequest) -> HttpResponse:
        return self._edit_schedule(request, None)

    @table_page("schedules/<int:pk>/", *EDIT_SCHEDULES)
    def schedule(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Edit a schedule. One without an interval in minutes is edited with the other periodic tasks."""
        row = get_object_or_404(PeriodicTask.objects.select_related("interval"), pk=pk, task=TASK)
        if _interval_minutes(row) is None:
            return redirect("admin:django_celery_beat_periodictask_change", row.pk)
        if request.method == "POST" and "delete" in request.POST:
            with transaction.atomic():
                _record_edit(request, "deleted", row)
                row.delete()
            messages.success(request, _("The schedule was deleted."))
            return redirect(self.url("schedules"))
        return self._edit_schedule(request, row)

    def _edit_schedule(self, request: HttpRequest, row: PeriodicTask | None) -> HttpResponse:
        form = ScheduleForm(
            request.POST or None, instance=row or PeriodicTask(task=TASK), initial=_initial_values(row) if row else None
        )  # fmt: skip
        with transaction.atomic():  # holds the lock that the form takes
            if request.method == "POST" and form.is_valid():
                before = PeriodicTask.objects.select_related("interval").get(pk=row.pk) if row else None
                _record_edit(request, "changed" if before else "added", form.save(), before)
                messages.success(request, _("The schedule was saved."))
                return redirect(self.url("schedules"))
        title = _("Schedule of shops") if row else _("A new schedule of shops")
        back = self.url("schedules")
        return self.page(request, "rpa_tasks/schedule_form.html", title, form=form, back=back, row=row)
