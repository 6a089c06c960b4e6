"""Store filters of lists."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _


class SavedFilter(models.Model):
    """The query parameters of a list under a name."""

    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    #: The model of the list: "failedtask", "touch".
    listed = models.CharField(max_length=40)
    name = models.CharField(_("name"), max_length=60)
    query = models.CharField(max_length=2000)
    shared = models.BooleanField(_("for all users"), default=False)
    created_at = models.DateTimeField(default=now)

    class Meta:
        verbose_name = _("saved filter")
        verbose_name_plural = _("saved filters")
        ordering = ["name", "id"]
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["owner", "listed", "name"], name="saved_filter_once")]

    def __str__(self) -> str:
        return self.name
