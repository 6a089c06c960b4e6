from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.timezone import now

from scheduling.ids import new_id


class ScheduledPublication(models.Model):
    """One execution of a periodic task that publishes jobs, stored before any message about it exists."""

    class State(models.TextChoices):
        WAITING = "waiting"
        DONE = "done"
        FAILED = "failed"

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    schedule_id = models.BigIntegerField()
    schedule = models.CharField(max_length=200)  #: its name at that time
    due_at = models.DateTimeField()
    args = models.JSONField(default=list)
    kwargs = models.JSONField(default=dict)
    state = models.CharField(max_length=10, choices=State, default=State.WAITING)
    position = models.BigIntegerField(default=0)  #: the last shop whose job is stored; a repeat continues after it
    lease_no = models.IntegerField(default=0)
    #: claims since `position` last advanced, without those that ended with an infrastructure error
    tries = models.IntegerField(default=0, db_default=0)
    next_at = models.DateTimeField(default=now)  #: when a worker may claim it
    published = models.IntegerField(default=0)
    waiting = models.IntegerField(default=0)
    refused = models.IntegerField(default=0)
    created_at = models.DateTimeField(default=now)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        default_permissions = ()  # no page shows these rows
        constraints = [models.UniqueConstraint(fields=["schedule_id", "due_at"], name="publication_once")]
        indexes = [models.Index(fields=["next_at"], name="publication_waiting", condition=Q(state="waiting"))]

    def __str__(self) -> str:
        return f"{self.schedule} {self.due_at:%Y-%m-%d %H:%M:%S}"
