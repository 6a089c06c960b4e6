"""Store the automatic roll-outs of canaries."""

from __future__ import annotations

from django.db import models
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.models.node import Node, Template


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
