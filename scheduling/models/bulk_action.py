from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.ids import new_id


class BulkAction(models.Model):
    """One deed to all rows that match a filter. The row is the job: whoever does a batch holds its lock, and what the
    batch did and how far it came are stored together.

    running → done | cancelled | failed
    """

    class State(models.TextChoices):
        RUNNING = "running", _("Under way")
        DONE = "done", _("Done")
        CANCELLED = "cancelled", _("Cancelled")  #: what was done by then stays done
        FAILED = "failed", _("Failed")  #: its workers were lost at the same batch, again and again

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    #: A name of `scheduling.operations.deeds`.
    action = models.CharField(_("action"), max_length=20)
    #: The parameters of the list's address; see `scheduling.operations.filters`.
    filter = models.JSONField(_("filter"), default=dict)
    #: Rows made later are left alone.
    as_of = models.DateTimeField(_("rows from before"), default=now)
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+", verbose_name=_("who")
    )
    actor_name = models.CharField(_("who"), max_length=150)
    reason = models.CharField(_("reason"), max_length=500, blank=True)
    per_second = models.FloatField(_("pace, a second"))
    state = models.CharField(_("state"), max_length=10, choices=State, default=State.RUNNING)
    begun_at = models.DateTimeField(_("begun at"), default=now)
    ended_at = models.DateTimeField(_("ended at"), null=True)
    ended_by = models.CharField(_("cancelled by"), max_length=150, blank=True)
    #: As counted at the beginning; null where that took too long.
    total = models.PositiveIntegerField(_("rows"), null=True)
    done = models.PositiveIntegerField(_("done"), default=0)
    skipped = models.PositiveIntegerField(_("passed over"), default=0)
    failed = models.PositiveIntegerField(_("could not be done"), default=0)
    #: The key of the last row that was looked at; rows are taken in the order of their keys.
    position = models.UUIDField(null=True)
    #: No batch before this instant, by the database's clock.
    next_at = models.DateTimeField(default=now)
    #: How often the present batch was begun.
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
