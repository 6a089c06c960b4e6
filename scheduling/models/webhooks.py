"""Store the subscriptions of outgoing webhooks, the state of their endpoints, and the outbox of their messages."""

from __future__ import annotations

from typing import Any

from django.db import models, transaction
from django.db.models import Q
from django.db.models.fields.json import KT
from django.db.models.functions import Now
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _
from simple_history.models import HistoricalRecords

from scheduling.ids import new_id
from scheduling.models.encrypted import EncryptedJSONField
from scheduling.models.versioned import KEY, Versioned


class WebhookEvent(models.TextChoices):
    """What happened, as the `type` of a message."""

    TOUCH_ENDED = "touch.ended", _("A touch ended")
    TOUCH_RECEIPT = "touch.receipt", _("A receipt of a sent message")
    JOB_ENDED = "job.ended", _("An RPA job ended")
    FAILED_TASK_OPENED = "failed_task.opened", _("A failed task was opened")
    FAILED_TASK_SETTLED = "failed_task.settled", _("A failed task was handled")
    LOGIN_NEEDED = "shop.login_needed", _("A shop needs a login")
    LOGGED_IN = "shop.logged_in", _("A shop was logged in again")
    SESSION_SILENT = "session.silent", _("A live chat fell silent")
    PAUSE_CHANGED = "pause.changed", _("A pause started or ended")


class WebhookSubscription(Versioned):
    """Sends messages about events to one address."""

    key = models.CharField(_("key"), max_length=64, unique=True, validators=[KEY])
    #: {"url", "secret"}: `whsec_…`, several in a list or separated by spaces during rotation.
    config = EncryptedJSONField(_("settings"), default=dict, blank=True)
    events = models.JSONField(_("events"), default=list)
    #: {"node" | "platform" | "shop": [..]}; a shop is `platform/shop_id`. A message without the field passes.
    filter = models.JSONField(_("filter"), default=dict, blank=True)
    enabled = models.BooleanField(_("enabled"), default=True)
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)
    history = HistoricalRecords(excluded_fields=["config"])

    class Meta:
        verbose_name = _("webhook")
        verbose_name_plural = _("webhooks")
        ordering = ["key"]

    def __str__(self) -> str:
        return self.key

    def save(self, *args: Any, **kwargs: Any) -> None:
        with transaction.atomic():
            former = WebhookSubscription.objects.filter(pk=self.pk).first()
            super().save(*args, **kwargs)
            WebhookEndpoint.objects.get_or_create(subscription=self)
            if former and self.retired_at is None and former.config != self.config:
                if former.retired_at:
                    # Start as a new subscription: what waited for the former receiver must not reach another one.
                    self.messages.filter(state="waiting").update(state="given_up", ended_at=Now())
                    fresh = {
                        field.attname: field.get_default()
                        for field in WebhookEndpoint._meta.fields
                        if not field.primary_key
                    }
                    WebhookEndpoint.objects.filter(pk=self.pk).update(**fresh)
                else:  # a rest concerns the former address or secret
                    rested = WebhookEndpoint.objects.filter(pk=self.pk)
                    rested.update(rest_until=None, failures=0, failing_since=None)


class WebhookEndpoint(models.Model):
    """The state of a subscription's receiver.

    A table of its own: senders write it, and a write to the subscription makes every process reload its snapshot.
    """

    subscription = models.OneToOneField(
        WebhookSubscription, primary_key=True, on_delete=models.CASCADE, related_name="endpoint",
        verbose_name=_("webhook"),
    )  # fmt: skip
    #: Failed attempts since the last success.
    failures = models.PositiveIntegerField(_("failures in a row"), default=0)
    failing_since = models.DateTimeField(_("failing since"), null=True)
    #: No attempt before this instant.
    rest_until = models.DateTimeField(_("rests until"), null=True)
    #: An operator paused it: messages are collected and wait.
    paused_at = models.DateTimeField(_("paused at"), null=True)
    #: The receiver answered 410. Nothing is sent until an operator enables it again.
    disabled_at = models.DateTimeField(_("disabled at"), null=True)
    problem = models.CharField(_("last error"), max_length=300, blank=True)
    problem_at = models.DateTimeField(_("last error at"), null=True)
    delivered_at = models.DateTimeField(_("last success at"), null=True)

    class Meta:
        verbose_name = _("webhook endpoint")
        verbose_name_plural = _("webhook endpoints")
        default_permissions = ()  # the page of the subscription shows it

    def __str__(self) -> str:
        return str(self.subscription_id)

    @property
    def state(self) -> str:
        """Return `disabled`, `paused`, `resting` or `ok`."""
        if self.disabled_at:
            return "disabled"
        if self.paused_at:
            return "paused"
        return "resting" if self.rest_until and self.rest_until > now() else "ok"


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
