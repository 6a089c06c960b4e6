"""Pages of django-celery-beat's periodic tasks in Unfold's style, with stricter validation."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from celery import current_app
from cron_descriptor import (  # type: ignore[import-untyped]
    ExpressionDescriptor,
    FormatException,
    MissingFieldException,
    Options,
    WrongArgumentException,
)
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.dates import MONTHS, WEEKDAYS
from django.utils.translation import get_language, gettext, ngettext, override
from django.utils.translation import gettext_lazy as _
from django_celery_beat import admin as beat
from django_celery_beat.models import (
    ClockedSchedule,
    CrontabSchedule,
    IntervalSchedule,
    PeriodicTask,
    PeriodicTasks,
    SolarSchedule,
    cronexp,
)
from kombu.exceptions import OperationalError
from unfold.admin import ModelAdmin, TabularInline
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from scheduling import sql
from scheduling.admin.base import OpsPages, ops_display
from scheduling.admin.labels import translate_error, translate_errors
from scheduling.admin.row_edits import OptimisticLockForm
from scheduling.app_integrations import scheduled_rounds
from scheduling.audit import record_action
from scheduling.errors import AftertouchError, InvalidInput
from scheduling.models.versioned import lock_for_write
from scheduling.operations.periodic_rows import UnusableRow, find_problem, read_call
from scheduling.strict_text import InvalidText, read_json

LOCALES = {"zh-hans": "zh_CN"}


def describe_crontab(row: CrontabSchedule) -> str:
    """Describe a crontab in the active language.

    `*/5 9-18 * * 1-5` → every five minutes between nine and seven, Monday to Friday, and the time zone.
    """
    parts = (row.minute, row.hour, row.day_of_month, row.month_of_year, row.day_of_week)
    line = " ".join(cronexp(each) for each in parts)
    options = Options()
    options.locale_code = LOCALES.get(get_language() or "", "en_US")
    options.use_24hour_time_format = True
    try:
        text = ExpressionDescriptor(line, options).get_description()
    except (FormatException, MissingFieldException, WrongArgumentException):
        text = line
    return f"{_translate_day_names(text)} ({row.timezone})"


def _translate_day_names(text: str) -> str:
    """Translate day and month names and commas.

    The library takes names from the system's language, and commas from English.
    """
    names = [*WEEKDAYS.values(), *MONTHS.values()]
    with override("en"):
        english = [str(name) for name in names]
    for before, name in zip(english, names, strict=True):
        text = text.replace(before, str(name))
    return text.replace(", ", "，").replace(" 到 ", "到") if get_language() in LOCALES else text


for model in (ClockedSchedule, CrontabSchedule, IntervalSchedule, PeriodicTask, SolarSchedule):
    admin.site.unregister(model)  # solar schedules stay out: beat does not support them


class TaskSelect(UnfoldAdminSelectWidget, beat.TaskSelectWidget):  # type: ignore[misc]
    """The registered tasks as a select in Unfold's style."""


class PeriodicTaskForm(OptimisticLockForm, beat.PeriodicTaskForm):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["task"].widget = UnfoldAdminTextInputWidget()
        self.fields["regtask"].widget = TaskSelect()
        self.fields["task"].label = _("task")

    def _clean_json(self, field: str) -> str:
        """Validate JSON. Beat's own check fails with error 500 for deep nesting, and accepts NaN."""
        text: str = self.cleaned_data[field]
        try:
            read_json(text)
        except InvalidText as error:
            raise ValidationError(_("This is not JSON: %(error)s") % {"error": translate_error(str(error))}) from None
        return text

    def clean(self) -> dict[str, Any]:
        """Refuse arguments that the task would refuse at each run."""
        self.cleaned_data.setdefault("task", self["task"].data)  # beat's check reads also a wrong name
        data: dict[str, Any] = super().clean()
        rounds = scheduled_rounds().get(data.get("task") or "")
        if rounds and not self.errors:
            try:
                rounds.check(read_json(data.get("args") or "[]"), read_json(data.get("kwargs") or "{}"))
            except InvalidInput as error:
                for each in error.errors:
                    self.add_error("args" if each.field == "args" else "kwargs", translate_error(str(each)))
        return data

    def _post_clean(self) -> None:
        """Refuse a row that beat would skip."""
        if any(self.cleaned_data.get(kind) for kind in ("interval", "crontab", "clocked")):
            self.instance.solar = None  # is not offered any more
        super()._post_clean()
        if not self.errors and (problem := find_problem(self.instance)):
            self.add_error(None, translate_error(problem))


class TaskFilter(admin.AllValuesFieldListFilter):
    """Translate the title, which beat has in English only."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.title = _("task")


def _record_switch(act: Callable[..., None]) -> Callable[..., None]:
    """Return an action that switches rows and records those that changed: beat's own leaves no trace."""

    @wraps(act)  # keeps the description
    def switch(self: Any, request: HttpRequest, queryset: QuerySet[PeriodicTask]) -> None:
        with transaction.atomic():
            former = {row.pk: row for row in lock_for_write(queryset.order_by("pk"))}
            rows = PeriodicTask.objects.filter(pk__in=former)  # a list of disabled rows has them no more afterwards
            act(self, request, rows)
            restart_from_now(rows)
            for row in rows:
                if row.enabled != (before := former[row.pk].enabled):
                    changes = [("enabled", before, row.enabled)]
                    actor = request.user.get_username()
                    record_action("changed", row, actor=actor, label=row.name, changes=changes)

    return switch


@admin.register(PeriodicTask)
class PeriodicTaskAdmin(OpsPages, beat.PeriodicTaskAdmin, ModelAdmin):  # type: ignore[misc]
    form = PeriodicTaskForm
    #: Beat's template contains an inline script, which the CSP blocks. `crontab_translation` shows the same text.
    change_form_template = None
    list_filter = ("enabled", "one_off", ("task", TaskFilter), "start_time", "last_run_at")
    list_display = ("name", "enabled", "plan", "start_time", "last_run_at", "one_off", "problem")
    fieldsets = [
        (title, {**options, "fields": [name for name in options["fields"] if name != "solar"]})
        for title, options in beat.PeriodicTaskAdmin.fieldsets
    ]

    def get_actions(self, request: HttpRequest) -> Any:
        """Offer no actions without the right to change: beat's own actions check no right."""
        return super().get_actions(request) if self.has_change_permission(request) else {}

    @ops_display(description=_("problem"))
    def problem(self, row: PeriodicTask) -> str:
        """Return why beat skips it."""
        return translate_error(find_problem(row))

    enable_tasks = _record_switch(beat.PeriodicTaskAdmin.enable_tasks)
    disable_tasks = _record_switch(beat.PeriodicTaskAdmin.disable_tasks)
    toggle_tasks = _record_switch(beat.PeriodicTaskAdmin.toggle_tasks)

    def run_tasks(self, request: HttpRequest, queryset: QuerySet[PeriodicTask]) -> None:
        """Run the selected schedules now. One that cannot run stops no other.

        Publish a round of tasks in `scheduled_rounds`, as beat does. Send the others as messages.
        """
        current_app.loader.import_default_modules()
        rounds, published, broker_responds = scheduled_rounds(), 0, True
        for row in queryset:
            try:
                args, kwargs = read_call(row, current_app)
                if row.task in rounds:
                    rounds[row.task].publish(row.pk, sql.now(), args, kwargs)
                elif broker_responds:
                    headers = {"periodic_task_name": row.name}
                    task = current_app.tasks[row.task]
                    task.apply_async(args=args, kwargs=kwargs, queue=row.queue or None, headers=headers)
                else:
                    raise OperationalError  # each try would wait for seconds
            except (AftertouchError, UnusableRow) as error:
                problem = "; ".join(translate_errors(error))
            except (OperationalError, OSError, TimeoutError):
                problem = gettext("The broker does not respond.")
                broker_responds = broker_responds and row.task in rounds
            else:
                published += 1
                self.log_change(request, row, gettext("Run now."))
                continue
            self.message_user(request, f"{row.name}: {problem}", messages.ERROR)
        if published:
            words = ngettext("%(count)d schedule was run.", "%(count)d schedules were run.", published)
            self.message_user(request, words % {"count": published}, messages.SUCCESS)

    run_tasks.short_description = beat.PeriodicTaskAdmin.run_tasks.short_description  # type: ignore[attr-defined]

    @ops_display(description=_("Schedule"))
    def plan(self, row: PeriodicTask) -> str:
        return describe_crontab(row.crontab) if row.crontab else str(row.scheduler or "–")

    @ops_display(description=_("in words"))
    def crontab_translation(self, row: PeriodicTask) -> str:
        return describe_crontab(row.crontab) if row.crontab else "–"


def restart_from_now(rows: QuerySet[PeriodicTask]) -> None:
    """Date rows, so that beat publishes no round from before this change."""
    rows.update(date_changed=Now(), last_run_at=None)
    PeriodicTasks.update_changed()


class RestartsTasks:
    """A schedule whose change makes its tasks wait for the next round."""

    form = OptimisticLockForm

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)  # type: ignore[misc]
        restart_from_now(obj.periodictask_set.all())


class TasksInline(beat.PeriodicTaskInline, TabularInline):  # type: ignore[misc]
    fields = ("name", "program", "args", "kwargs")
    readonly_fields = fields

    @ops_display(description=_("task"))
    def program(self, row: PeriodicTask) -> str:
        return str(row.task)


@admin.register(IntervalSchedule)
class IntervalScheduleAdmin(RestartsTasks, OpsPages, beat.IntervalScheduleAdmin, ModelAdmin):  # type: ignore[misc]
    inlines = (TasksInline,)


@admin.register(CrontabSchedule)
class CrontabScheduleAdmin(RestartsTasks, OpsPages, beat.CrontabScheduleAdmin, ModelAdmin):  # type: ignore[misc]
    inlines = (TasksInline,)
    list_display = ("__str__", "in_words")
    fields = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week", "timezone", "in_words")
    readonly_fields = ("in_words",)

    @ops_display(description=_("in words"))
    def in_words(self, row: CrontabSchedule) -> str:
        return describe_crontab(row) if row.pk else "–"


@admin.register(ClockedSchedule)
class ClockedScheduleAdmin(RestartsTasks, OpsPages, beat.ClockedScheduleAdmin, ModelAdmin):  # type: ignore[misc]
    inlines = (TasksInline,)
