"""Store what runs on behalf of operators: bulk actions, undoable acts, drafts, automatic roll-outs and alerts."""

from __future__ import annotations

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.ids import new_id
from scheduling.models.batch_job import BatchJob
from scheduling.models.node import Node, Template


class BulkAction(BatchJob):
    """One action on all rows that matched a filter when it started, applied in batches.

    running → done | cancelled | failed
    """

    class State(models.TextChoices):
        RUNNING = "running", _("Under way")
        DONE = "done", _("Done")
        CANCELLED = "cancelled", _("Cancelled")  #: finished batches stay done
        FAILED = "failed", _("Failed")  #: the same batch failed repeatedly

    #: A name of `scheduling.operations.bulk_actions.row_actions`.
    action = models.CharField(_("action"), max_length=20)
    #: What the user chose, to be shown: the parameters of the list or of the request.
    filter = models.JSONField(_("filter"), default=dict)
    #: Parameters of the action.
    given = models.JSONField(_("parameters"), default=dict)
    #: The rows, in the order of their keys. The next one is that of the index `processed`.
    keys = ArrayField(models.UUIDField(), default=list)
    #: A row in another state at its turn is skipped.
    states = ArrayField(models.CharField(max_length=20), default=list)
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+", verbose_name=_("who")
    )
    reason = models.CharField(_("reason"), max_length=500, blank=True)
    per_second = models.FloatField(_("rate per second"))
    state = models.CharField(_("state"), max_length=10, choices=State, default=State.RUNNING)
    begun_at = models.DateTimeField(_("started at"), default=now)
    total = models.PositiveIntegerField(_("rows"), default=0)
    done = models.PositiveIntegerField(_("done"), default=0)
    skipped = models.PositiveIntegerField(_("skipped"), default=0)
    failed = models.PositiveIntegerField(_("could not be done"), default=0)
    #: The earliest start of the next batch, by the database's clock.
    next_at = models.DateTimeField(default=now)
    note = models.TextField(_("note"), blank=True)

    class WithoutKeys(models.Manager["BulkAction"]):
        """Leave the keys, some megabytes of a large action, in the database."""

        def get_queryset(self) -> models.QuerySet[BulkAction]:
            return super().get_queryset().defer("keys")

    objects = WithoutKeys()

    class Meta:
        verbose_name = _("bulk action")
        verbose_name_plural = _("bulk actions")
        ordering = ["-id"]
        default_permissions = ("view",)
        indexes = [models.Index(fields=["next_at"], name="bulk_due", condition=Q(state="running"))]

    def __str__(self) -> str:
        return f"…{str(self.pk)[-8:]}"

    @property
    def processed(self) -> int:
        return self.done + self.skipped + self.failed

    @property
    def place(self) -> int:
        return self.processed


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

    user = models.OneToOneField(settings.AUTH_USER_MODEL, primary_key=True, on_delete=models.CASCADE, related_name="+")

    class Meta:
        verbose_name = _("dismissed checklist")
        verbose_name_plural = _("dismissed checklists")
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.user_id)


class ConfigDraft(models.Model):
    """The open draft of a user: edits of the live configuration, and what they would have done to past events.

    Both texts are YAML in the format of a configuration file. `base` is the live configuration that `document` started
    from. It separates the edits of the draft from those that other users made since. A new `document` clears the
    replay: a result always belongs to the text beside it.
    """

    class State(models.TextChoices):
        OPEN = "open", _("Not replayed yet")
        WAITING = "waiting", _("Waiting for a worker")
        RUNNING = "running", _("Running")
        DONE = "done", _("Replayed")
        FAILED = "failed", _("Failed")

    owner = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="config_draft", verbose_name=_("who")
    )
    base = models.TextField(_("live configuration"))
    document = models.TextField(_("draft"))
    started_at = models.DateTimeField(_("started at"), db_default=Now(), editable=False)
    state = models.CharField(_("state"), max_length=10, choices=State, default=State.OPEN, editable=False)
    #: By PostgreSQL's clock. For a running replay it names the worker's claim.
    state_at = models.DateTimeField(_("since"), db_default=Now(), editable=False)
    result = models.JSONField(_("result"), null=True)
    #: Why the replay failed, as `ErrorText.dump` writes texts.
    problems = models.JSONField(_("problem"), default=list)

    class Meta:
        verbose_name = _("draft")
        verbose_name_plural = _("drafts")
        ordering = ["-id"]
        default_permissions = ("add", "delete", "view")  # deletion: with the user
        permissions = [("publish_configdraft", _("Can publish a draft that was replayed"))]

    def __str__(self) -> str:
        return str(self.owner)


class AutomaticRollout(models.Model):
    """The last automatic roll-out of a node's canary. A writer locks this row first, then the node.

    running → finished | withdrawn | stopped. The history of the node has its moves.
    """

    class State(models.TextChoices):
        RUNNING = "running", _("Running")
        FINISHED = "finished", _("Finished")  #: the last step succeeded
        WITHDRAWN = "withdrawn", _("Withdrawn")  #: the canary is at 0 %: see `reason`
        STOPPED = "stopped", _("Stopped")  #: by a person, or by another edit of the node

    node = models.OneToOneField(
        Node,
        primary_key=True,
        on_delete=models.CASCADE,
        related_name="automatic_rollout",
        verbose_name=_("service node"),
    )
    # The judged text. Another one must not be counted as the same.
    canary = models.ForeignKey(Template, on_delete=models.PROTECT, related_name="+", verbose_name=_("canary template"))
    canary_version = models.PositiveIntegerField(_("version of the canary template"))
    #: In the format of `scheduling.policy.rollout.read_plan`.
    plan = models.JSONField(_("plan"))
    state = models.CharField(_("state"), max_length=10, choices=State, default=State.RUNNING)
    step = models.PositiveSmallIntegerField(_("step"), default=0)  #: index of the plan's steps
    #: A rate, or what the canary waits for (`scheduling.policy.rollout.Judgement`); `unseen`, `edited`, `content`.
    reason = models.CharField(_("reason"), max_length=20, blank=True)
    # Touches of this step that ended before `counted_until`.
    ended = models.PositiveIntegerField(_("ended"), default=0)
    failed = models.PositiveIntegerField(_("failed"), default=0)
    complained = models.PositiveIntegerField(_("complained"), default=0)
    counted_until = models.DateTimeField(default=now)
    step_at = models.DateTimeField(_("step since"), default=now)
    judged_at = models.DateTimeField(_("judged at"), null=True)

    class Meta:
        verbose_name = _("automatic roll-out")
        verbose_name_plural = _("automatic roll-outs")
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.node)

    @property
    def percent(self) -> float:
        """Return the percentage of the current step."""
        return float(self.plan["steps"][self.step])


class AlertReceiver(models.Model):
    """Where alerts are sent. There is at most one row."""

    channel = models.ForeignKey(
        "scheduling.ChannelConfig", on_delete=models.PROTECT, related_name="+", verbose_name=_("channel")
    )
    community = models.ForeignKey(
        "scheduling.Community", null=True, blank=True, on_delete=models.PROTECT, related_name="+",
        verbose_name=_("community"),
    )  # fmt: skip
    address = models.CharField(_("mail address"), max_length=254, blank=True)
    enabled = models.BooleanField(_("enabled"), default=True)
    #: Why the last message failed; "" after a delivered one.
    problem = models.CharField(_("problem"), max_length=500, blank=True, editable=False)
    notified_at = models.DateTimeField(_("last notified at"), null=True, editable=False)

    class Meta:
        verbose_name = _("alert receiver")
        verbose_name_plural = _("alert receivers")

    def __str__(self) -> str:
        return str(self.channel)


class Alert(models.Model):
    """A condition that holds for a subject. Deleted after the message about its end."""

    condition = models.CharField(_("condition"), max_length=40)
    subject = models.CharField(_("about"), max_length=200, blank=True)
    since = models.DateTimeField(_("since"))
    value = models.FloatField(_("value"))
    ended_at = models.DateTimeField(_("resolved at"), null=True)
    #: A message was under way, so the receiver may know of the alert.
    tried = models.BooleanField(default=False)
    notified_at = models.DateTimeField(_("notified at"), null=True)
    #: When the next message is due: about the start, a reminder or the end.
    message_at = models.DateTimeField()

    class Meta:
        verbose_name = _("alert")
        verbose_name_plural = _("alerts")
        ordering = ["since", "id"]
        constraints = [models.UniqueConstraint(fields=["condition", "subject"], name="one_alert_a_subject")]

    def __str__(self) -> str:
        return f"{self.condition} {self.subject}".strip()
