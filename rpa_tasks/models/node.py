from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _


class ExecutionNode(models.Model):
    """A machine that runs jobs, as of its last report."""

    name = models.CharField(_("name"), max_length=100, primary_key=True)
    #: Of the state directory whose workers renew this row: see `rpa_tasks.worker.node_name`.
    state_id = models.CharField(max_length=36, blank=True, db_default="", editable=False)
    seen_at = models.DateTimeField(_("seen at"))
    started_at = models.DateTimeField(_("started at"))
    slots = models.PositiveSmallIntegerField(_("slots"))
    #: Queues that its workers consume, including those of shops that prefer this node (`n.…`).
    queues = models.JSONField(_("queues"), default=list)
    #: One entry per browser slot: {"slot", "state", "shop", "profile", "port", "uses", "started_at", "last_used_at",
    #: "rss_mb", "reason"}.
    browsers = models.JSONField(_("browsers"), default=list)
    #: Since then it starts nothing new: see `rpa_tasks.jobs.gates.node_drains`. Its own reports do not change it.
    draining_at = models.DateTimeField(_("drained since"), null=True, editable=False)
    drained_by = models.CharField(_("drained by"), max_length=150, blank=True, db_default="", editable=False)

    class Meta:
        verbose_name = _("execution node")
        verbose_name_plural = _("execution nodes")
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def serves(self) -> list[str]:
        """Return the queues that its workers are configured to consume."""
        return [name for name in self.queues if not name.startswith("n.")]
