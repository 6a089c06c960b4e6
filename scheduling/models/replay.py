"""Store drafts of the configuration, and replays of past events through them."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models.functions import Now
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _


class ConfigDraft(models.Model):
    """The open draft of a user: edits of the live configuration that wait for a replay.

    Both texts are YAML in the format of a configuration file. `base` is the live configuration that `document` started
    from, so that a merge separates the edits of the draft from later ones of other users.
    """

    owner = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="config_draft", verbose_name=_("who")
    )
    base = models.TextField(_("live configuration"))
    document = models.TextField(_("draft"))
    started_at = models.DateTimeField(_("started at"), db_default=Now(), editable=False)

    class Meta:
        verbose_name = _("draft")
        verbose_name_plural = _("drafts")
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.owner)


class Replay(models.Model):
    """A draft of the configuration, and the result of a replay of past events.

    The row is the job. A worker that takes it increments `tries` and names the number in every later write. A worker
    that was overtaken therefore changes nothing.
    """

    class State(models.TextChoices):
        WAITING = "waiting", _("Waiting for a worker")
        RUNNING = "running", _("Running")
        DONE = "done", _("Replayed")  #: a person decides
        FAILED = "failed", _("Failed")
        PUBLISHED = "published", _("Published")
        DISCARDED = "discarded", _("Discarded")

    state = models.CharField(_("state"), max_length=10, choices=State, default=State.WAITING, editable=False)
    draft = models.TextField(_("draft"))
    days = models.PositiveSmallIntegerField(_("days"))
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+", verbose_name=_("who")
    )
    actor_name = models.CharField(_("who"), max_length=150)
    created_at = models.DateTimeField(_("started at"), default=now, editable=False)
    #: The changes of the draft, for display: [{section, verb, label, differences: [{path, before, after}]}].
    changes = models.JSONField(_("changes"), default=list)
    tries = models.PositiveSmallIntegerField(_("tries"), default=0)
    done = models.PositiveIntegerField(_("events replayed"), default=0)
    total = models.PositiveIntegerField(_("events"), default=0)
    beat_at = models.DateTimeField(_("last heard of at"), null=True)
    ended_at = models.DateTimeField(_("replayed at"), null=True)
    #: SHA-256 of the live configuration during the replay. Later edits were not replayed.
    live_digest = models.CharField(_("live configuration"), max_length=64, blank=True)
    result = models.JSONField(_("result"), null=True)
    problem = models.TextField(_("problem"), blank=True)
    settled_by = models.CharField(_("decided by"), max_length=150, blank=True)
    settled_at = models.DateTimeField(_("decided at"), null=True)

    class Meta:
        verbose_name = _("replay")
        verbose_name_plural = _("replays")
        ordering = ["-id"]
        permissions = [("publish_replay", "Can publish a draft that was replayed")]

    def __str__(self) -> str:
        return f"#{self.pk}"
