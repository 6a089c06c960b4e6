"""Store actions of users: on many rows, those that they may take back, and the filters of lists."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
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
        FAILED = "failed", _("Failed")  #: the same batch failed repeatedly

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    #: A name of `scheduling.operations.row_actions`, or of a list of another app.
    action = models.CharField(_("action"), max_length=20)
    #: The query parameters of the list; see `scheduling.operations.filters`.
    filter = models.JSONField(_("filter"), default=dict)
    #: Parameters of the action.
    given = models.JSONField(_("parameters"), default=dict)
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
    #: How often the current batch failed.
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


class UndoableAct(models.Model):
    """An act that its user may take back within ten seconds (see `scheduling.operations.undo`).

    The undo deletes the row, and retention deletes expired ones.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    #: A name of `Integration.reversals`.
    act = models.CharField(max_length=20)
    label = models.CharField(max_length=200, blank=True)
    #: The ids of the rows, as texts.
    keys = models.JSONField(default=list)
    #: What the reversal needs besides.
    given = models.JSONField(default=dict)
    made_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        verbose_name = _("undoable act")
        verbose_name_plural = _("undoable acts")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.act} {self.label}".strip()


class DismissedChecklist(models.Model):
    """A user who has hidden the checklist of the first hour."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, primary_key=True, on_delete=models.CASCADE, related_name="+"
    )  # fmt: skip

    class Meta:
        verbose_name = _("dismissed checklist")
        verbose_name_plural = _("dismissed checklists")
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.user_id)
