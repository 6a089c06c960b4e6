"""Pages for schedules of shops, such as "sync the orders of all shops every ten minutes".

A schedule is a row of django-celery-beat with the task `rpa_tasks.publish_for_shops`. The form writes its JSON
arguments and changes no other rows.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
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
from rpa_tasks.jobs.schedules import ALL_SHOPS, MAX_SPREAD, PRIORITIES, parse_arguments
from rpa_tasks.models import Flow, Platform
from scheduling.admin.form_fields import NamesField
from scheduling.admin.labels import translate_error
from scheduling.admin.shown_values import format_instant
from scheduling.errors import InvalidInput
from scheduling.models import Priority
from scheduling.monitoring.duration_text import describe_duration
from scheduling.operations.periodic_rows import find_problem

TASK = "rpa_tasks.publish_for_shops"
MINUTES = {"minutes": 1, "hours": 60, "days": 1440}


class ScheduleForm(forms.Form):
    flow = forms.ModelChoiceField(
        Flow.objects.filter(retired_at=None, platform__retired_at=None).select_related("platform"),
        label=gettext_lazy("Platform and task type"), widget=UnfoldAdminSelectWidget,
    )  # fmt: skip
    every = forms.IntegerField(
        label=gettext_lazy("Interval in minutes"), min_value=1, max_value=10_080, initial=10,
        widget=UnfoldAdminIntegerFieldWidget,
    )  # fmt: skip
    spread = forms.IntegerField(
        label=gettext_lazy("Spread in minutes"), min_value=0, max_value=MAX_SPREAD // 60, initial=10,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text=gettext_lazy("Each shop starts at its own time within this span. Usually the same as the interval; "
                               "0: all at once."),
    )  # fmt: skip
    due = forms.IntegerField(
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
    )  # fmt: skip
    enabled = forms.BooleanField(
        label=gettext_lazy("Switched on"), required=False, initial=True, widget=UnfoldBooleanSwitchWidget
    )

    def __init__(self, *args: Any, row: PeriodicTask | None = None, **kwargs: Any) -> None:
        self.row = row
        super().__init__(*args, **kwargs)
        self.fields["flow"].label_from_instance = lambda flow: f"{flow.platform} · {flow.task_type}"  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        given = super().clean() or self.cleaned_data
        if self.errors:
            return given
        try:
            parse_arguments(self.order())
        except InvalidInput as error:
            for each in error.errors:
                place = each.field.partition(".")[0]
                self.add_error(place if place in self.fields else None, translate_error(each.message))
            return given
        given["name"] = given["name"] or self._usual_name()
        if PeriodicTask.objects.filter(name=given["name"]).exclude(pk=self.row.pk if self.row else None).exists():
            self.add_error("name", _("There is a schedule of this name already."))
        return given

    def order(self) -> dict[str, Any]:
        """Return the arguments of the periodic task."""
        given = self.cleaned_data
        return {
            "platform": given["flow"].platform.key, "task_type": given["flow"].task_type,
            "shops": given["shops"] or ALL_SHOPS, "priority": given["priority"], "payload": given["payload"],
            "spread_seconds": given["spread"] * 60,
        } | ({"due_seconds": given["due"] * 60} if given["due"] else {})  # fmt: skip

    def _usual_name(self) -> str:
        given = self.cleaned_data
        words = (
            _("%(flow)s: %(count)s shops, every %(minutes)s min")
            if given["shops"]
            else (_("%(flow)s: all shops, every %(minutes)s min"))
        )
        return words % {"flow": given["flow"].name, "count": len(given["shops"]), "minutes": given["every"]}

    def store(self) -> PeriodicTask:
        given = self.cleaned_data
        interval, _made = IntervalSchedule.objects.get_or_create(every=given["every"], period=IntervalSchedule.MINUTES)
        row = self.row or PeriodicTask(task=TASK)
        row.interval, row.crontab, row.clocked, row.solar = interval, None, None, None
        row.name, row.enabled = given["name"], given["enabled"]
        row.args, row.kwargs = "[]", json.dumps(self.order(), ensure_ascii=False)
        row.save()
        return row


def may_edit_schedules(request: HttpRequest) -> bool:
    """Return whether the user may edit schedules, which publish with a payload repeatedly."""
    user = request.user
    return all(user.has_perm(f"rpa_tasks.{name}") for name in ("run_job", "change_job", "change_shop"))


def schedule_list_page(shops_admin: Any, request: HttpRequest) -> HttpResponse:
    if not shops_admin.has_view_permission(request):
        raise PermissionDenied
    rows = PeriodicTask.objects.filter(task=TASK).select_related("interval", "crontab", "solar", "clocked")
    return shops_admin.page(  # type: ignore[no-any-return]
        request, "rpa_tasks/schedules.html", _("Schedules of shops"),
        schedules=[_list_entry(row) for row in rows.order_by("name")], may_edit=may_edit_schedules(request),
        add_link=shops_admin.url("schedule_add"),
    )  # fmt: skip


def _list_entry(row: PeriodicTask) -> dict[str, Any]:
    order = _arguments_of(row)
    shops = order.get("shops", ALL_SHOPS)
    platform = Platform.objects.filter(key=order.get("platform")).first()
    minutes = _interval_minutes(row)
    every = describe_duration(timedelta(minutes=minutes)) if minutes else str(row.scheduler)
    return {
        "row": row,
        "platform": platform or order.get("platform", "?"),
        "task_type": order.get("task_type", "?"),
        "shops": _("all") if shops == ALL_SHOPS else len(shops),
        "every": every,
        "spread": describe_duration(timedelta(seconds=float(order.get("spread_seconds") or 0))),
        "last": format_instant(row.last_run_at),
        "link": reverse("admin:rpa_tasks_shop_schedule", args=[row.pk]),
        "problem": _schedule_problem(order) or translate_error(find_problem(row)),
    }


def _arguments_of(row: PeriodicTask) -> dict[str, Any]:
    try:
        order = json.loads(row.kwargs or "{}")
    except ValueError:
        return {}
    return order if isinstance(order, dict) else {}


def _schedule_problem(order: dict[str, Any]) -> str:
    """Return why it publishes nothing at present, or ""."""
    try:
        parse_arguments(order)
    except InvalidInput as error:
        return "; ".join(f"{each.field}: {translate_error(each.message)}" for each in error.errors)
    return ""


def _interval_minutes(row: PeriodicTask) -> int | None:
    """Return the interval in minutes; None for other intervals."""
    return (
        row.interval.every * MINUTES[row.interval.period] if row.interval and row.interval.period in MINUTES else None
    )


def schedule_edit_page(shops_admin: Any, request: HttpRequest, pk: int | None = None) -> HttpResponse:
    """Edit or create a schedule. One without an interval in minutes is edited with the other periodic tasks."""
    if not may_edit_schedules(request):
        raise PermissionDenied
    row = PeriodicTask.objects.filter(pk=pk, task=TASK).select_related("interval").first() if pk else None
    if pk and row is None:
        raise Http404
    if row and _interval_minutes(row) is None:
        return redirect("admin:django_celery_beat_periodictask_change", row.pk)
    back = reverse("admin:rpa_tasks_shop_schedules")
    if row and request.method == "POST" and "delete" in request.POST:
        row.delete()
        messages.success(request, _("The schedule was deleted."))
        return redirect(back)
    form = ScheduleForm(request.POST or None, row=row, initial=_initial_values(row) if row else None)
    if request.method == "POST" and form.is_valid():
        form.store()
        messages.success(request, _("The schedule was saved."))
        return redirect(back)
    title = _("Schedule of shops") if row else _("A new schedule of shops")
    return shops_admin.page(  # type: ignore[no-any-return]
        request, "rpa_tasks/schedule_form.html", title, form=form, back=back, row=row
    )


def _initial_values(row: PeriodicTask) -> dict[str, Any]:
    order = _arguments_of(row)
    shops = order.get("shops", ALL_SHOPS)
    flow = Flow.objects.filter(platform__key=order.get("platform"), task_type=order.get("task_type")).first()
    return {
        "flow": flow, "every": _interval_minutes(row), "spread": round(float(order.get("spread_seconds") or 0) / 60),
        "shops": [] if shops == ALL_SHOPS else shops, "priority": order.get("priority", "normal"),
        "due": round(float(order.get("due_seconds") or 0) / 60) or None,
        "payload": order.get("payload") or {}, "name": row.name, "enabled": row.enabled,
    }  # fmt: skip
