"""Store bulk actions and their progress."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.ids import new_id


class BulkAction(models.Model):
    """One action on all rows that match a filter, applied in batches.

    The row is the job. A worker holds its lock during a batch. The effect of a batch and the progress are stored
    together.

    running → done | cancelled | failed
    """

    class State(models.TextChoices):
        RUNNING = "running", _("Under way")
        DONE = "done", _("Done")
        CANCELLED = "cancelled", _("Cancelled")  #: finished batches stay done
        FAILED = "failed", _("Failed")  #: repeatedly lost its workers at the same batch

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    #: A name of `scheduling.operations.row_actions`.
    action = models.CharField(_("action"), max_length=20)
    #: The query parameters of the list; see `scheduling.operations.filters`.
    filter = models.JSONField(_("filter"), default=dict)
    #: Rows created later stay unchanged.
    as_of = models.DateTimeField(_("rows from before"), default=now)
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+", verbose_name=_("who")
    )
    actor_name = models.CharField(_("who"), max_length=150)
    reason = models.CharField(_("reason"), max_length=500, blank=True)
    per_second = models.FloatField(_("rate per second"))
    state = models.CharField(_("state"), max_length=10, choices=State, default=State.RUNNING)
    begun_at = models.DateTimeField(_("started at"), default=now)
    ended_at = models.DateTimeField(_("ended at"), null=True)
    ended_by = models.CharField(_("cancelled by"), max_length=150, blank=True)
    #: As counted at the start; null if the count took too long.
    total = models.PositiveIntegerField(_("rows"), null=True)
    done = models.PositiveIntegerField(_("done"), default=0)
    skipped = models.PositiveIntegerField(_("skipped"), default=0)
    failed = models.PositiveIntegerField(_("could not be done"), default=0)
    #: The key of the last row that was processed; rows are processed in the order of their keys.
    position = models.UUIDField(null=True)
    #: The earliest start of the next batch, by the database's clock.
    next_at = models.DateTimeField(default=now)
    #: How often the current batch was started.
    tries = models.PositiveSmallIntegerField(default=0)
    note = models.TextField(_("note"), blank=True)

    class Meta:
        verbose_name = _("bulk action")
        verbose_name_plural = _("bulk actions")
        ordering = ["-id"]
        default_permissions = ("view",)
        indexes = [models.Index(fields=["next_at"], name="bulk_due", condition=Q(state="running"))]

    def __str__(self) -> str:
        return f"…{str(self.pk)[-8:]}"

    @property
    def looked_at(self) -> int:
        return self.done + self.skipped + self.failed
