"""Periodic tasks of django-celery-beat, in the look of the house."""

from __future__ import annotations

from django.contrib import admin
from django.utils.translation import gettext_lazy as _
from django_celery_beat import admin as beat
from django_celery_beat.models import (
    ClockedSchedule,
    CrontabSchedule,
    IntervalSchedule,
    PeriodicTask,
    SolarSchedule,
)
from unfold.admin import ModelAdmin
from unfold.decorators import display
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

for model in (ClockedSchedule, CrontabSchedule, IntervalSchedule, PeriodicTask, SolarSchedule):
    admin.site.unregister(model)


class TaskSelect(UnfoldAdminSelectWidget, beat.TaskSelectWidget):  # type: ignore[misc]
    """The registered tasks, dressed like the other selects."""


class PeriodicTaskForm(beat.PeriodicTaskForm):  # type: ignore[misc]
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.fields["task"].widget = UnfoldAdminTextInputWidget()
        self.fields["regtask"].widget = TaskSelect()


@admin.register(PeriodicTask)
class PeriodicTaskAdmin(beat.PeriodicTaskAdmin, ModelAdmin):  # type: ignore[misc]
    form = PeriodicTaskForm

    @display(description=_("in words"))  # type: ignore[untyped-decorator]
    def crontab_translation(self, row: PeriodicTask) -> str:
        return str(row.crontab.human_readable) if row.crontab else "–"


@admin.register(IntervalSchedule)
class IntervalScheduleAdmin(beat.IntervalScheduleAdmin, ModelAdmin):  # type: ignore[misc]
    pass


@admin.register(CrontabSchedule)
class CrontabScheduleAdmin(beat.CrontabScheduleAdmin, ModelAdmin):  # type: ignore[misc]
    list_display = ("__str__", "in_words")
    fields = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week", "timezone", "in_words")
    readonly_fields = ("in_words",)

    @display(description=_("in words"))  # type: ignore[untyped-decorator]
    def in_words(self, row: CrontabSchedule) -> str:
        return str(row.human_readable) if row.pk else "–"


@admin.register(ClockedSchedule)
class ClockedScheduleAdmin(beat.ClockedScheduleAdmin, ModelAdmin):  # type: ignore[misc]
    pass


@admin.register(SolarSchedule)
class SolarScheduleAdmin(beat.SolarScheduleAdmin, ModelAdmin):  # type: ignore[misc]
    pass
