"""A canary that grows by steps while its figures allow it, and each move it made."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.models.node import Node, Template


class GuardedRollout(models.Model):
    """One canary of one node. Whoever moves it holds the lock of this row, then that of the node.

    running ⇄ paused; both → finished | stopped. A node has at most one that is not over.
    """

    class State(models.TextChoices):
        RUNNING = "running", _("Running")
        PAUSED = "paused", _("Paused")  #: by its figures, by an edit, or by a person: `reason` says which
        FINISHED = "finished", _("Finished")  #: the last step held
        STOPPED = "stopped", _("Stopped")  #: by a person

    node = models.ForeignKey(
        Node, on_delete=models.CASCADE, related_name="guarded_rollouts", verbose_name=_("service node")
    )
    # What is compared. Another text of either would be counted as if it were the same.
    stable = models.ForeignKey(Template, on_delete=models.PROTECT, related_name="+", verbose_name=_("stable template"))
    stable_version = models.PositiveIntegerField(_("version of the stable template"))
    canary = models.ForeignKey(Template, on_delete=models.PROTECT, related_name="+", verbose_name=_("canary template"))
    canary_version = models.PositiveIntegerField(_("version of the canary template"))
    #: As `scheduling.policy.rollout.read_plan` reads it.
    plan = models.JSONField(_("plan"))
    #: The communities that get the canary whatever the percentage, while it is not paused.
    communities = models.JSONField(_("canary, always these communities"), default=list)
    state = models.CharField(_("state"), max_length=10, choices=State, default=State.RUNNING)
    step = models.PositiveSmallIntegerField(_("step"), default=0)  #: an index of the plan's steps
    #: Why it is paused, or what it waits for (see `scheduling.policy.rollout.Judgement`).
    reason = models.CharField(_("reason"), max_length=64, blank=True)
    #: Of both versions, when it was judged last: {"canary": {…}, "stable": {…}}.
    figures = models.JSONField(_("figures"), default=dict)
    #: The touches that `figures` need not look at again; written and read by `scheduling.experiments.rollout_stats`.
    counted = models.JSONField(null=True, editable=False)
    started_at = models.DateTimeField(_("started at"), default=now)
    step_at = models.DateTimeField(_("step since"), default=now)  #: what is counted was decided since then
    judged_at = models.DateTimeField(_("judged at"), null=True)
    ended_at = models.DateTimeField(_("ended at"), null=True)

    class Meta:
        verbose_name = _("guarded roll-out")
        verbose_name_plural = _("guarded roll-outs")
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["node"], name="one_guarded_rollout", condition=Q(state__in=("running", "paused"))
            )
        ]

    def __str__(self) -> str:
        return f"#{self.pk}"

    @property
    def is_open(self) -> bool:
        return self.state in (self.State.RUNNING, self.State.PAUSED)

    @property
    def percent(self) -> float:
        """Of the step that it is at."""
        return float(self.plan["steps"][self.step])


class RolloutMove(models.Model):
    """What a guarded roll-out did, when, by which figures or by whose word. Append-only."""

    class Verb(models.TextChoices):
        STARTED = "started", _("Started")
        GREW = "grew", _("Grew")
        PAUSED = "paused", _("Paused")
        RESUMED = "resumed", _("Resumed")
        STOPPED = "stopped", _("Stopped")
        FINISHED = "finished", _("Finished")

    rollout = models.ForeignKey(
        GuardedRollout, on_delete=models.CASCADE, related_name="moves", verbose_name=_("guarded roll-out")
    )
    at = models.DateTimeField(_("at"))
    verb = models.CharField(_("move"), max_length=10, choices=Verb)
    reason = models.CharField(_("reason"), max_length=64, blank=True)
    percent = models.FloatField(_("canary, percent of communities"))  #: of the node, afterwards
    node_version = models.PositiveIntegerField(_("node version"))  #: afterwards
    figures = models.JSONField(_("figures"), default=dict)
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+", verbose_name=_("who")
    )
    actor_name = models.CharField(_("who"), max_length=150, blank=True)  #: empty: the roll-out itself

    class Meta:
        verbose_name = _("move of a guarded roll-out")
        verbose_name_plural = _("moves of guarded roll-outs")
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.verb} {self.reason}".strip()
