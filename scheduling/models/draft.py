"""Store drafts of the configuration, each with the result of its replay."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _


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
        permissions = [("publish_configdraft", "Can publish a draft that was replayed")]

    def __str__(self) -> str:
        return str(self.owner)
