"""Store the outbox of outgoing webhooks."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.fields.json import KT
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from scheduling.ids import new_id
from scheduling.models.webhooks.subscription import WebhookEvent, WebhookSubscription


class WebhookFact(models.Model):
    """An event that no subscription has a message for yet.

    The transaction of the change writes it; triggers do so for failed tasks, pauses, shops and jobs (migration 0001).
    Collecting deletes it. Facts of one object have ascending ids, because their writers lock the same row.
    """

    type = models.CharField(max_length=40, choices=WebhookEvent)
    object_key = models.CharField(max_length=200)
    at = models.DateTimeField()
    data = models.JSONField()

    class Meta:
        default_permissions = ()  # no page shows these rows

    def __str__(self) -> str:
        return f"{self.type} {self.object_key}"


class WebhookMessage(models.Model):
    """One event for one subscription, sent until the receiver confirms it.

    waiting → delivered | given_up; a replay returns both to waiting. A claim is a lease: it moves `due_at` and
    increments `attempt`, which fences the result. Of one object only the waiting message with the lowest id is sent.
    """

    class State(models.TextChoices):
        WAITING = "waiting", _("Waiting")
        DELIVERED = "delivered", _("Delivered")
        GIVEN_UP = "given_up", _("Given up")

    subscription = models.ForeignKey(
        WebhookSubscription, on_delete=models.CASCADE, related_name="messages", verbose_name=_("webhook"),
        db_index=False, db_constraint=False,
    )  # fmt: skip
    #: `webhook-id`: constant over attempts and replays.
    message_id = models.UUIDField(_("message id"), default=new_id, editable=False)
    type = models.CharField(_("event"), max_length=40)
    object_key = models.CharField(_("object"), max_length=200)
    occurred_at = models.DateTimeField(_("occurred at"))
    data = models.JSONField(_("data"))
    state = models.CharField(_("state"), max_length=10, choices=State, default=State.WAITING)
    #: The next attempt; while a sender has it, the end of its lease.
    due_at = models.DateTimeField(_("next attempt at"), default=now)
    attempt = models.PositiveIntegerField(_("attempts"), default=0)
    #: Attempts end a day later.
    first_tried_at = models.DateTimeField(_("first attempt at"), null=True)
    ended_at = models.DateTimeField(_("ended at"), null=True)
    status = models.PositiveSmallIntegerField(_("status"), null=True)
    problem = models.CharField(_("last error"), max_length=300, blank=True)

    class Meta:
        verbose_name = _("webhook message")
        verbose_name_plural = _("webhook messages")
        indexes = [
            # Read by the claim.
            models.Index(fields=["subscription", "due_at", "id"], name="webhook_due", condition=Q(state="waiting")),
            models.Index(
                fields=["subscription", "object_key", "id"], name="webhook_order", condition=Q(state="waiting")
            ),
            # Read by lists, replays and retention.
            models.Index(fields=["subscription", "occurred_at"], name="webhook_occurred"),
            # Read by the erasure and the export of a customer.
            models.Index(
                KT("data__user_id"), name="webhook_user", condition=~Q(state="waiting") & Q(data__has_key="user_id")
            ),
        ]

    def __str__(self) -> str:
        return f"{self.type} …{str(self.message_id)[-8:]}"
