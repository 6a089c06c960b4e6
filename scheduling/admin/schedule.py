"""Periodic tasks of django-celery-beat, in the look of the house."""

from __future__ import annotations

import json
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.utils.module_loading import import_string
from django.utils.translation import gettext_lazy as _
from django_celery_beat import admin as beat
from django_celery_beat.models import (
    ClockedSchedule,
    CrontabSchedule,
    IntervalSchedule,
    PeriodicTask,
    SolarSchedule,
)
from unfold.admin import ModelAdmin, TabularInline
from unfold.decorators import display
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from scheduling.admin.crontab import in_words
from scheduling.errors import InvalidInput

for model in (ClockedSchedule, CrontabSchedule, IntervalSchedule, PeriodicTask, SolarSchedule):
    admin.site.unregister(model)


class TaskSelect(UnfoldAdminSelectWidget, beat.TaskSelectWidget):  # type: ignore[misc]
    """The registered tasks, dressed like the other selects."""


class PeriodicTaskForm(beat.PeriodicTaskForm):  # type: ignore[misc]
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.fields["task"].widget = UnfoldAdminTextInputWidget()
        self.fields["regtask"].widget = TaskSelect()
        self.fields["task"].label = _("task")

    def clean(self) -> dict[str, Any]:
        """Arguments that a task would refuse each time are refused once, here."""
        data: dict[str, Any] = super().clean()
        path = settings.PERIODIC_TASK_CHECKS.get(data.get("task") or "")
        if path and not self.errors:
            try:
                import_string(path)(json.loads(data.get("args") or "[]"), json.loads(data.get("kwargs") or "{}"))
            except InvalidInput as error:
                for each in error.errors:
                    self.add_error("args" if each.field == "args" else "kwargs", f"{each.field}: {each.message}")
        return data


class TaskFilter(admin.AllValuesFieldListFilter):
    """Beat's own name of the column is English in every language."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.title = _("task")


@admin.register(PeriodicTask)
class PeriodicTaskAdmin(beat.PeriodicTaskAdmin, ModelAdmin):  # type: ignore[misc]
    form = PeriodicTaskForm
    #: Beat's own writes a script into the page, which may not run here; `crontab_translation` says the same.
    change_form_template = None
    list_filter = ("enabled", "one_off", ("task", TaskFilter), "start_time", "last_run_at")
    list_display = ("name", "enabled", "plan", "start_time", "last_run_at", "one_off")

    @display(description=_("Schedule"))  # type: ignore[untyped-decorator]
    def plan(self, row: PeriodicTask) -> str:
        return in_words(row.crontab) if row.crontab else str(row.scheduler)

    @display(description=_("in words"))  # type: ignore[untyped-decorator]
    def crontab_translation(self, row: PeriodicTask) -> str:
        return in_words(row.crontab) if row.crontab else "–"


class TasksInline(beat.PeriodicTaskInline, TabularInline):  # type: ignore[misc]
    fields = ("name", "program", "args", "kwargs")
    readonly_fields = fields

    @display(description=_("task"))  # type: ignore[untyped-decorator]
    def program(self, row: PeriodicTask) -> str:
        return str(row.task)


@admin.register(IntervalSchedule)
class IntervalScheduleAdmin(beat.IntervalScheduleAdmin, ModelAdmin):  # type: ignore[misc]
    inlines = (TasksInline,)


@admin.register(CrontabSchedule)
class CrontabScheduleAdmin(beat.CrontabScheduleAdmin, ModelAdmin):  # type: ignore[misc]
    inlines = (TasksInline,)
    list_display = ("__str__", "in_words")
    fields = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week", "timezone", "in_words")
    readonly_fields = ("in_words",)

    @display(description=_("in words"))  # type: ignore[untyped-decorator]
    def in_words(self, row: CrontabSchedule) -> str:
        return in_words(row) if row.pk else "–"


@admin.register(ClockedSchedule)
class ClockedScheduleAdmin(beat.ClockedScheduleAdmin, ModelAdmin):  # type: ignore[misc]
    inlines = (TasksInline,)


@admin.register(SolarSchedule)
class SolarScheduleAdmin(beat.SolarScheduleAdmin, ModelAdmin):  # type: ignore[misc]
    inlines = (TasksInline,)
