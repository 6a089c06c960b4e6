"""Store failed tasks."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.ids import new_id


class FailedTask(models.Model):
    """Work that needs a person: the original, the failure and the action taken.

    open → retried | resolved_delivered | resolved_not_delivered | ignored | archived; ignored → retried | archived;
    retried → open, by an undo
    """

    class Origin(models.TextChoices):
        TOUCH = "touch", _("Touch")
        RPA_JOB = "rpa_job", _("RPA job")
        MESSAGE = "message", _("Broker message")  #: it cannot be read or run

    class State(models.TextChoices):
        OPEN = "open", _("Open")  #: no person has acted on it
        RETRIED = "retried", _("Published again")
        RESOLVED_DELIVERED = "resolved_delivered", _("Resolved: delivered")
        RESOLVED_NOT_DELIVERED = "resolved_not_delivered", _("Resolved: not delivered")
        IGNORED = "ignored", _("Ignored")
        ARCHIVED = "archived", _("Archived")

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    origin = models.CharField(_("origin"), max_length=10, choices=Origin)
    task_id = models.UUIDField(_("task id"), null=True, unique=True)
    root_id = models.UUIDField(_("delivery key"), null=True)
    #: "failed" (certainly no effect), "unknown" (possibly an effect) or "unreadable".
    failure = models.CharField(_("class"), max_length=12)
    reason = models.CharField(_("reason"), max_length=64)
    detail = models.TextField(_("detail"), blank=True)
    #: The work as it was when it failed; never changed.
    payload = models.JSONField(_("original"), default=dict)
    attempts = models.JSONField(_("attempts"), default=list)
    channel = models.CharField(_("channel"), max_length=64, blank=True)
    #: Equal for failures with the same cause.
    fingerprint = models.CharField(_("fingerprint"), max_length=32, db_index=True)
    state = models.CharField(_("state"), max_length=24, choices=State, default=State.OPEN)
    failed_at = models.DateTimeField(_("failed at"), default=now)
    acted_at = models.DateTimeField(_("acted at"), null=True)
    actor = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, verbose_name=_("actor"))
    actor_name = models.CharField(_("actor"), max_length=150, blank=True)
    action_reason = models.CharField(_("reason of the action"), max_length=500, blank=True)
    retried_as = models.UUIDField(_("published again as"), null=True)
    #: Of an edited retry: `{"before": payload, "after": payload}`. Empty again after the erasure of its customer.
    difference = models.JSONField(_("difference"), null=True)
    assignee = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        on_delete=models.SET_NULL,
        related_name="assigned_failed_tasks",
        verbose_name=_("assignee"),
    )

    class Meta:
        verbose_name = _("failed task")
        verbose_name_plural = _("failed tasks")
        ordering = ["-failed_at"]
        indexes = [
            models.Index(fields=["-failed_at"], name="failed_open", condition=Q(state="open")),
            # Read by workers for the text of an edited touch.
            models.Index(fields=["retried_as"], name="failed_edited", condition=Q(difference__isnull=False)),
        ]
        permissions = [("act_on_failedtask", _("Can retry, resolve, ignore and archive failed tasks"))]

    def __str__(self) -> str:
        return f"…{str(self.task_id or self.id)[-8:]}"

    def get_state_display(self) -> str:  # type: ignore[no-redef]
        """Return the label for the origin: a job is not delivered to a receiver."""
        words = RESOLVED_JOBS.get(self.state) if self.origin == self.Origin.RPA_JOB else None
        return str(words or self.State(self.state).label)


class FailedTaskComment(models.Model):
    """A note of a user or client about a failed task. Deleted with the task, and by the erasure of its customer."""

    failed_task = models.ForeignKey(FailedTask, on_delete=models.CASCADE, related_name="comments")
    author = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+")
    author_name = models.CharField(_("author"), max_length=150)
    text = models.TextField(_("comment"), max_length=2_000)
    commented_at = models.DateTimeField(_("commented at"), default=now)

    class Meta:
        default_permissions = ()  # the page of the failed task shows them
        ordering = ["pk"]

    def __str__(self) -> str:
        return f"{self.author_name}: {self.text[:50]}"


RESOLVED_JOBS = {
    FailedTask.State.RESOLVED_DELIVERED.value: _("Resolved: succeeded"),
    FailedTask.State.RESOLVED_NOT_DELIVERED.value: _("Resolved: no effect"),
}
