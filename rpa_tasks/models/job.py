from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from rpa_tasks.models.platform import Flow, Shop
from scheduling.models import WAITING, LedgerRow


class JobState(models.TextChoices):
    SCHEDULED = "scheduled", _("Scheduled")  #: waits for its time or its lane
    QUEUED = "queued", _("Dispatched")  #: a wake-up message for it has been published
    RUNNING = "running", pgettext_lazy("RPA job", "Running")  #: a node has it until `lease_until`
    SUCCEEDED = "succeeded", _("Succeeded")
    CANCELLED = "cancelled", _("Cancelled")
    FAILED = "failed", _("Failed")  #: has a failed task that needs a decision
    UNKNOWN = "unknown", _("Unknown")  #: it may have had its effect; has a failed task that needs a decision


class Job(LedgerRow):
    """One request to run a flow for a shop, with its retries."""

    state = models.CharField(_("state"), max_length=10, choices=JobState, default=JobState.SCHEDULED, editable=False)
    shop = models.ForeignKey(Shop, on_delete=models.PROTECT, related_name="jobs", verbose_name=_("shop"))
    flow = models.ForeignKey(
        Flow, on_delete=models.PROTECT, related_name="jobs", verbose_name=_("flow"), db_index=False
    )
    payload = models.JSONField(_("payload"), default=dict, blank=True)
    #: The business key within shop and flow: while a job of it waits, other requests merge into that job.
    dedupe_key = models.CharField(_("dedupe key"), max_length=200, blank=True)
    #: Not claimed since it was published. A retry or a deferred job is exempt from the rule of one waiting job.
    fresh = models.BooleanField(default=True)
    #: Number of requests that it covers.
    requests = models.PositiveIntegerField(_("requests"), default=1)
    #: Failures that count against `retry_delays`.
    failures = models.PositiveSmallIntegerField(_("failures"), default=0)
    #: The touch that it delivers: published once, however often the touch is sent.
    touch_key = models.UUIDField(_("touch"), null=True, unique=True)
    #: When it is to be done; later it counts as late. It changes no order.
    deadline = models.DateTimeField(_("to be done by"), null=True)
    source = models.CharField(_("published by"), max_length=100, blank=True)
    node = models.CharField(_("node"), max_length=100, blank=True)
    progress = models.FloatField(_("progress"), null=True)
    progress_message = models.CharField(_("progress message"), max_length=200, blank=True)
    result = models.JSONField(_("result"), null=True)
    cancel_requested_at = models.DateTimeField(_("cancel requested at"), null=True)

    class Meta:
        verbose_name = _("RPA job")
        verbose_name_plural = _("RPA jobs")
        ordering = ["-created_at"]
        permissions = [("run_job", _("Can publish jobs")), ("cancel_job", _("Can cancel jobs"))]
        indexes = [
            *LedgerRow.indexes_for("rpa_job"),
            # For the pick: the first job of a shop in each tier.
            models.Index(
                fields=["shop", "priority", "due_at"],
                name="rpa_job_heads",
                condition=Q(state__in=WAITING, paused_by=""),
            ),
            # For the jobs that are late.
            models.Index(
                fields=["deadline"],
                name="rpa_job_deadline",
                condition=Q(state__in=(*WAITING, "running"), deadline__isnull=False),
            ),
            # For the list of jobs.
            models.Index(fields=["-created_at"], name="rpa_job_latest"),
        ]
        constraints = [
            *LedgerRow.constraints_for("rpa_job"),
            # Enforces the lane in PostgreSQL, whatever the code does.
            models.UniqueConstraint(fields=["shop"], name="rpa_one_run_a_shop", condition=Q(state="running")),
            models.UniqueConstraint(
                fields=["shop", "flow", "dedupe_key"],
                name="rpa_one_waits",
                condition=Q(state__in=WAITING, fresh=True),
            ),
            # A double click publishes once.
            models.UniqueConstraint(fields=["retry_of"], name="rpa_retried_once", condition=Q(retry_of__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"…{str(self.task_id)[-8:]}"


class DedupeWindow(models.Model):
    """The job that holds the window of a shop, flow and key: see `rpa_tasks.jobs.dedupe_windows`."""

    #: Its job, stored in the same transaction.
    task_id = models.UUIDField(primary_key=True, editable=False)
    shop = models.ForeignKey(Shop, on_delete=models.CASCADE, related_name="+", db_index=False)
    flow = models.ForeignKey(Flow, on_delete=models.CASCADE, related_name="+", db_index=False)
    key = models.CharField(max_length=200)
    ends_at = models.DateTimeField()

    class Meta:
        default_permissions = ()  # no page shows these rows
        constraints = [models.UniqueConstraint(fields=["shop", "flow", "key"], name="rpa_one_window_a_key")]

    def __str__(self) -> str:
        return str(self.task_id)


class Run(models.Model):
    """One attempt of a job on a node, and its outcome. Append-only, except for repeated deferrals."""

    class Outcome(models.TextChoices):
        SUCCEEDED = "succeeded", _("Succeeded")
        TRANSIENT = "transient", _("Failed, may succeed later")
        BUSINESS = "business", _("Failed for good")
        SESSION = "session", _("Login needed")
        PLATFORM = "platform", _("Blocked by the platform")
        DEFERRED = "held", _("Did not start")  #: no browser in time, or the node was stopping
        CANCELLED = "cancelled", _("Cancelled")
        UNKNOWN = "unknown", _("Unknown")

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="runs", verbose_name=_("job"))
    number = models.IntegerField(_("number"))
    lease_no = models.IntegerField(_("lease number"))
    node = models.CharField(_("node"), max_length=100, blank=True)
    started_at = models.DateTimeField(_("started at"))
    ended_at = models.DateTimeField(_("ended at"), null=True)
    #: Wait for a browser.
    pool_wait = models.DurationField(_("wait for a browser"), null=True)
    #: Whether its browser was already running; empty: it got none.
    warm = models.BooleanField(_("warm browser"), null=True)
    outcome = models.CharField(_("outcome"), max_length=10, choices=Outcome)
    reason = models.CharField(_("reason"), max_length=64, blank=True)
    exit_code = models.IntegerField(_("exit code"), null=True)
    #: End of the command's output, at most 10,000 characters, secrets masked.
    detail = models.TextField(_("detail"), blank=True)

    class Meta:
        verbose_name = _("run")
        verbose_name_plural = _("runs")
        ordering = ["id"]
        indexes = [
            # For the overview. A deferral, which is overwritten repeatedly, has no entry.
            models.Index(fields=["ended_at"], name="rpa_run_ended", condition=~Q(outcome="held"))
        ]

    def __str__(self) -> str:
        return f"{self.number}: {self.outcome} {self.reason}".strip()


class Evidence(models.Model):
    """Evidence of a failed run: screenshot, HTML and log.

    Stored in PostgreSQL, so that every web process can show it, whatever node it comes from.
    """

    class Kind(models.TextChoices):
        SCREENSHOT = "screenshot", _("Screenshot")
        HTML = "html", _("Page HTML")
        LOG = "log", _("Log")

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="evidence", verbose_name=_("run"))
    kind = models.CharField(_("kind"), max_length=10, choices=Kind)
    #: Texts are zlib-compressed.
    content = models.BinaryField(_("content"))
    created_at = models.DateTimeField(_("created at"), default=now, db_index=True, editable=False)

    class Meta:
        verbose_name = _("evidence")
        verbose_name_plural = _("evidence")
        constraints = [models.UniqueConstraint(fields=["run", "kind"], name="one_evidence_a_kind")]

    def __str__(self) -> str:
        return f"{self.run_id}/{self.kind}"
