"""Store automatic roll-outs of canaries and each of their moves."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.models.node import Node, Template


class AutomaticRollout(models.Model):
    """One roll-out of a node's canary. A writer locks this row first, then the node.

    running ⇄ paused; both → finished | stopped. A node has at most one that is running or paused.
    """

    class State(models.TextChoices):
        RUNNING = "running", _("Running")
        PAUSED = "paused", _("Paused")  #: by its statistics, an edit or a person: see `reason`
        FINISHED = "finished", _("Finished")  #: the last step succeeded
        STOPPED = "stopped", _("Stopped")  #: by a person

    node = models.ForeignKey(
        Node, on_delete=models.CASCADE, related_name="automatic_rollouts", verbose_name=_("service node")
    )
    # The compared versions. Another text of either must not be counted as the same version.
    stable = models.ForeignKey(Template, on_delete=models.PROTECT, related_name="+", verbose_name=_("stable template"))
    stable_version = models.PositiveIntegerField(_("version of the stable template"))
    canary = models.ForeignKey(Template, on_delete=models.PROTECT, related_name="+", verbose_name=_("canary template"))
    canary_version = models.PositiveIntegerField(_("version of the canary template"))
    #: In the format of `scheduling.policy.rollout.read_plan`.
    plan = models.JSONField(_("plan"))
    #: Communities that get the canary at any percentage, while the roll-out is not paused.
    communities = models.JSONField(_("canary, always these communities"), default=list)
    state = models.CharField(_("state"), max_length=10, choices=State, default=State.RUNNING)
    step = models.PositiveSmallIntegerField(_("step"), default=0)  #: index of the plan's steps
    #: Why it is paused, or what it waits for (see `scheduling.policy.rollout.Judgement`).
    reason = models.CharField(_("reason"), max_length=64, blank=True)
    #: Statistics of both versions at the last judgement: {"canary": {…}, "stable": {…}}.
    figures = models.JSONField(_("figures"), default=dict)
    #: Touches already included in `figures`; written and read by `scheduling.experiments.rollout_stats`.
    counted = models.JSONField(null=True, editable=False)
    started_at = models.DateTimeField(_("started at"), default=now)
    step_at = models.DateTimeField(_("step since"), default=now)  #: only touches decided since then are counted
    judged_at = models.DateTimeField(_("judged at"), null=True)
    ended_at = models.DateTimeField(_("ended at"), null=True)

    class Meta:
        verbose_name = _("automatic roll-out")
        verbose_name_plural = _("automatic roll-outs")
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["node"], name="one_automatic_rollout", condition=Q(state__in=("running", "paused"))
            )
        ]

    def __str__(self) -> str:
        return f"#{self.pk}"

    @property
    def is_open(self) -> bool:
        return self.state in (self.State.RUNNING, self.State.PAUSED)

    @property
    def percent(self) -> float:
        """Return the percentage of the current step."""
        return float(self.plan["steps"][self.step])


class RolloutMove(models.Model):
    """One move of a roll-out: its time, its cause and its actor. Append-only."""

    class Verb(models.TextChoices):
        STARTED = "started", _("Started")
        GREW = "grew", _("Grew")
        PAUSED = "paused", _("Paused")
        RESUMED = "resumed", _("Resumed")
        STOPPED = "stopped", _("Stopped")
        FINISHED = "finished", _("Finished")

    rollout = models.ForeignKey(
        AutomaticRollout, on_delete=models.CASCADE, related_name="moves", verbose_name=_("automatic roll-out")
    )
    at = models.DateTimeField(_("at"))
    verb = models.CharField(_("move"), max_length=10, choices=Verb)
    reason = models.CharField(_("reason"), max_length=64, blank=True)
    percent = models.FloatField(_("canary, percent of communities"))  #: of the node, after the move
    node_version = models.PositiveIntegerField(_("node version"))  #: after the move
    figures = models.JSONField(_("figures"), default=dict)
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+", verbose_name=_("who")
    )
    actor_name = models.CharField(_("who"), max_length=150, blank=True)  #: empty: the roll-out itself

    class Meta:
        verbose_name = _("move of an automatic roll-out")
        verbose_name_plural = _("moves of automatic roll-outs")
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.verb} {self.reason}".strip()
