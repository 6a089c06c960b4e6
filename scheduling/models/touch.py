"""Store touches with their verdicts and attempts, failed tasks, and the columns that all rows of work share.

Only `scheduling.ledger` and `rpa_tasks.jobs` write them. A claim increments `lease_no`, and no row leaves an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _
from django.utils.translation import override, pgettext_lazy

from scheduling.error_text import ErrorText
from scheduling.ids import new_id


def name_in_error(label: Any) -> ErrorText:
    """Return a lazy label as the value of an error: English, and translated on a page."""
    with override("en"):
        return ErrorText(str(label))


class Priority(models.IntegerChoices):
    HIGH = 0, _("High")
    NORMAL = 1, _("Normal")
    LOW = 2, _("Low")


WAITING = ("scheduled", "queued")  #: not started: a cancellation or an edit may still change it
LEASED = ("queued", "running")  #: states of touches: dispatched or claimed until `lease_until`
RARE = ("failed", "unknown", "cancelled")  #: ends that may be few among millions of rows


class LedgerRow(models.Model):
    """One piece of work. The row is authoritative; a message about it is only a wake-up."""

    task_id = models.UUIDField(_("task id"), primary_key=True, default=new_id, editable=False)
    #: The first task of a chain of retries. Receivers see it as the idempotency key.
    root_id = models.UUIDField(_("delivery key"), default=new_id, editable=False)
    #: The task that this one publishes again.
    retry_of = models.UUIDField(_("retry of"), null=True, editable=False)
    state = models.CharField(_("state"), max_length=10, default="scheduled")
    priority = models.SmallIntegerField(_("priority"), choices=Priority, default=Priority.NORMAL)
    #: The earliest start, by the database's clock.
    due_at = models.DateTimeField(_("due at"))
    #: The first `due_at`, from which lateness is measured.
    planned_at = models.DateTimeField(_("planned at"))
    #: How many times the receiver was called or the flow was run.
    attempt = models.SmallIntegerField(_("attempts"), default=0)
    #: The fence: every claim increments it, every later write of the claimant names it.
    lease_no = models.IntegerField(_("lease number"), default=0)
    lease_until = models.DateTimeField(_("lease until"), null=True)
    #: From now on the receiver may have seen it. An end without a response is `unknown`.
    sending_at = models.DateTimeField(_("sending at"), null=True)
    settled_at = models.DateTimeField(_("settled at"), null=True)
    #: A short code: why it waits, or why it ended.
    reason = models.CharField(_("reason"), max_length=64, default="", blank=True)
    created_at = models.DateTimeField(_("created at"), default=now, editable=False)

    class Meta:
        abstract = True

    @staticmethod
    def indexes_for(table: str, leased: Sequence[str]) -> list[models.Index]:
        """Return the partial indexes that both ledgers need. Their statements repeat the state as a literal.

        Rows have a lease in the states `leased`.
        """
        return [
            # Read by the rescues.
            models.Index(fields=["lease_until"], name=f"{table}_leased", condition=Q(state__in=leased)),
            # Read by lists of these states, newest first. A row with a usual end has no entry.
            models.Index(fields=["task_id", "state"], name=f"{table}_rare", condition=Q(state__in=RARE)),
        ]

    @staticmethod
    def lease_constraint(table: str, states: Sequence[str]) -> models.CheckConstraint:
        """Return the constraint that a row has a lease exactly while it is in one of these states."""
        leased = Q(state__in=states)
        return models.CheckConstraint(
            name=f"{table}_leased_iff_lease",
            condition=(leased & Q(lease_until__isnull=False)) | (~leased & Q(lease_until__isnull=True)),
        )


# --- verdicts and attempts --------------------------------------------------------------------------------------------
#
# Both lists of a touch grow only. An entry is a JSON array of its values, without the last ones that equal their
# defaults, because most verdicts are `send` without a rule. Instants are microseconds since 1970.


#: Kept of one touch: the first and the latest. The first `send` decides which version of a roll-out counts it.
MOST_VERDICTS = 50
EPOCH, MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)


class GuardDecision(models.TextChoices):
    SEND = "send", _("Send")
    HOLD = "hold", _("Defer")
    SUPPRESS = "suppress", _("Suppress")


class AttemptOutcome(models.TextChoices):
    DELIVERED = "delivered", _("Delivered")
    TRANSIENT = "transient", _("Failed, may succeed later")
    PERMANENT = "permanent", _("Failed for good")
    UNKNOWN = "unknown", _("Unknown")


class Verdict(NamedTuple):
    """A decision of the guards about a touch, with its rule."""

    at: datetime
    decision: str  #: of `GuardDecision`
    rule: str = ""
    rule_version: int | None = None
    observed: str = ""
    limit: str = ""
    next_eligible_at: datetime | None = None


class Attempt(NamedTuple):
    """One call of a channel for a touch."""

    number: int
    lease_no: int
    started_at: datetime
    ended_at: datetime | None = None
    outcome: str = AttemptOutcome.DELIVERED.value  #: of `AttemptOutcome`
    reason: str = ""
    detail: str = ""
    status: int | None = None
    subject: str = ""  #: complete: a retry sends it again
    body: str = ""


def encode_instant(at: datetime) -> int:
    """Return microseconds since 1970."""
    return (at - EPOCH) // MICROSECOND


def encode_entry(entry: Verdict | Attempt) -> list[Any]:
    """Return the stored form of a verdict or an attempt."""
    values = [encode_instant(each) if isinstance(each, datetime) else each for each in entry]
    for name in reversed(entry._fields):
        if name not in entry._field_defaults or values[-1] != entry._field_defaults[name]:
            break
        values.pop()
    return values


class LogField(models.JSONField):
    """A list of verdicts or attempts. NULL is the empty list: a new touch has neither."""

    def __init__(self, *args: Any, entry: type[Verdict] | type[Attempt], **kwargs: Any) -> None:
        """Set the class of the entries."""
        self.entry = entry
        self._instants = [number for number, name in enumerate(entry._fields) if name.endswith("at")]
        super().__init__(*args, **{"null": True, "default": list, "editable": False, **kwargs})

    def deconstruct(self) -> Any:
        name, path, args, kwargs = super().deconstruct()
        return name, path, args, {**kwargs, "entry": self.entry}

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> list[Any]:
        return [self._decode(each) for each in super().from_db_value(value, expression, connection) or ()]

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = [encode_entry(self.entry._make(each)) for each in value]
        if not value:
            return None  # Django would write the JSON value null, to which an entry cannot be added
        return super().get_db_prep_value(value, connection, prepared)

    def _decode(self, values: list[Any]) -> Any:
        for number in self._instants:
            if number < len(values) and values[number] is not None:
                values[number] = EPOCH + values[number] * MICROSECOND
        return self.entry(*values)


# --- touches ----------------------------------------------------------------------------------------------------------


class TouchState(models.TextChoices):
    SCHEDULED = "scheduled", _("Scheduled")  #: waits for its due time
    QUEUED = "queued", _("Dispatched")  #: a wake-up was dispatched to a worker
    RUNNING = "running", pgettext_lazy("touch", "Running")  #: claimed by a worker until `lease_until`
    DELIVERED = "delivered", _("Delivered")  #: the receiver confirmed it
    SUPPRESSED = "suppressed", _("Suppressed")  #: a guard stopped it; the verdict has the reason
    CANCELLED = "cancelled", _("Cancelled")  #: an event or a person cancelled it before it was sent
    FAILED = "failed", _("Failed")  #: certainly not delivered; a failed task waits for a person
    UNKNOWN = "unknown", _("Unknown")  #: it may have been delivered; a failed task waits for a person


class Touch(LedgerRow):
    """One message to one customer, for one event at one node.

    Triggers hold the references to event and node instead of foreign key constraints, whose check for each inserted row
    cost a third of PostgreSQL's work. A trigger refuses to delete a row that others refer to. A writer locks what its
    rows will refer to: the customer, and the nodes with `locks.lock_nodes`. The customer is the event's.

    The table has two parts (migration 0001): `scheduling_touch_live` holds the rows that have not ended, and
    `scheduling_touch_ended` holds the ended ones, partitioned by `settled_at`. The ledger writes the live part. A row
    moves when it ends. Readers query the whole table and need not know.
    """

    state = models.CharField(
        _("state"), max_length=10, choices=TouchState, default=TouchState.SCHEDULED, editable=False
    )
    #: Wake-ups published for the current `due_at`; each doubles the wait for the next.
    wakeups = models.SmallIntegerField(_("wake-ups"), default=0)
    queued_at = models.DateTimeField(_("dispatched at"), null=True)
    #: The pause that keeps this touch from dispatch ("" for none): "all", "channel:hook" or "node:x".
    paused_by = models.CharField(_("paused by"), max_length=120, default="", blank=True)
    # The keys below have no index if no frequent query needs one: each index costs every update a write. Queries for
    # all touches of a customer go through its events.
    event = models.ForeignKey(
        "scheduling.Event",
        on_delete=models.PROTECT,
        related_name="touches",
        verbose_name=_("event"),
        db_index=False,
        db_constraint=False,
    )
    node = models.ForeignKey(
        "scheduling.Node",
        on_delete=models.PROTECT,
        related_name="touches",
        verbose_name=_("node"),
        db_index=False,
        db_constraint=False,
    )
    node_version = models.PositiveIntegerField(_("node version when planned"))
    customer = models.ForeignKey(
        "scheduling.Customer",
        on_delete=models.PROTECT,
        related_name="touches",
        verbose_name=_("customer"),
        db_index=False,
        db_constraint=False,
    )
    chat_id = models.CharField(_("chat id"), max_length=200, blank=True)
    expires_at = models.DateTimeField(_("expires at"))
    # Decided at fire time; kept over retries. A trigger protects the template (see migration 0001). The check of a
    # foreign key constraint cost a seventh of PostgreSQL's work for a delivery.
    template = models.ForeignKey(
        "scheduling.Template",
        null=True,
        on_delete=models.PROTECT,
        related_name="touches",
        verbose_name=_("template"),
        db_index=False,
        db_constraint=False,
    )
    template_version = models.PositiveIntegerField(_("template version"), null=True)
    content_type = models.CharField(_("content type"), max_length=64, default="", blank=True)
    #: When a guard reserved a cap slot; empty again if it certainly was not delivered.
    reserved_at = models.DateTimeField(_("cap slot reserved at"), null=True)
    counts_toward_cap = models.BooleanField(_("counts toward the cap"), default=True)
    #: The first and the latest ones, at most `MOST_VERDICTS`, in order of time.
    verdicts: Any = LogField(_("verdicts"), entry=Verdict)
    attempts: Any = LogField(_("attempts"), entry=Attempt)  #: all, in order of time

    class Meta:
        verbose_name = _("touch")
        verbose_name_plural = _("touches")
        indexes = [
            *LedgerRow.indexes_for("touch", LEASED),
            # Read by the dispatch.
            models.Index(fields=["priority", "due_at"], name="touch_due", condition=Q(state="scheduled", paused_by="")),
            # Read by the end of a pause.
            models.Index(fields=["paused_by"], name="touch_paused_by", condition=~Q(paused_by="")),
            # Read by the guard (a customer's history) and by the page of a customer.
            models.Index(
                fields=["customer", "reserved_at"], name="touch_history", condition=Q(reserved_at__isnull=False)
            ),
            models.Index(
                fields=["chat_id", "reserved_at"],
                name="touch_chat_history",
                condition=Q(reserved_at__isnull=False) & ~Q(chat_id=""),
            ),
            # Read by cancel_on, on_repeat and slot_hold. Only the live part has it.
            models.Index(fields=["customer", "node"], name="touch_waiting"),
            # Read by the overview and by lists of a time span. Written once per touch, at its end.
            models.Index(fields=["settled_at"], name="touch_ended", condition=Q(settled_at__isnull=False)),
            # Read by the list of paused touches, newest first.
            models.Index(fields=["task_id"], name="touch_paused", condition=~Q(paused_by="")),
            # Read by the page of receivers: the touches that their receivers have no room for.
            models.Index(
                fields=["node", "chat_id", "due_at"],
                name="touch_deferred",
                condition=Q(state__in=WAITING, reason__in=["quota", "target_busy", "target_down"]),
            ),
        ]
        constraints = [
            LedgerRow.lease_constraint("touch", LEASED),
            # Read by queries for the touches of an event.
            models.UniqueConstraint(
                fields=["event", "node", "retry_of"], name="touch_once_an_event", nulls_distinct=False
            ),
            # A double click publishes once.
            models.UniqueConstraint(
                fields=["retry_of"], name="touch_retried_once", condition=Q(retry_of__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return f"…{str(self.task_id)[-8:]}"


class EndMark(models.Model):
    """How far one reader of ended touches has read (see `scheduling.ledger.ends`)."""

    reader = models.CharField(max_length=64, primary_key=True)
    settled_at = models.DateTimeField()
    task_id = models.UUIDField()
    #: Ends up to this instant may be read after all transactions before `ceiling_xid` have ended. Earlier ones are then
    #: committed or will never exist.
    ceiling = models.DateTimeField()
    ceiling_xid = models.BigIntegerField(default=0)

    class Meta:
        default_permissions = ()  # no page shows these rows

    def __str__(self) -> str:
        return f"{self.reader}: {self.settled_at}"


class FailedTask(models.Model):
    """Work that needs a person: the original, the failure and the action taken.

    open → retried | resolved_delivered | resolved_not_delivered | ignored | archived; ignored → retried | archived;
    retried → open, by an undo
    """

    class Origin(models.TextChoices):
        TOUCH = "touch", _("Touch")
        RPA_JOB = "rpa_job", _("RPA job")
        MESSAGE = "message", _("Broker message")  #: it cannot be read or run

    class State(models.TextChoices):
        OPEN = "open", _("Open")  #: no person has acted on it
        RETRIED = "retried", _("Published again")
        RESOLVED_DELIVERED = "resolved_delivered", _("Resolved: delivered")
        RESOLVED_NOT_DELIVERED = "resolved_not_delivered", _("Resolved: not delivered")
        IGNORED = "ignored", _("Ignored")
        ARCHIVED = "archived", _("Archived")

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    origin = models.CharField(_("origin"), max_length=10, choices=Origin)
    task_id = models.UUIDField(_("task id"), null=True, unique=True)
    root_id = models.UUIDField(_("delivery key"), null=True)
    #: "failed" (certainly no effect), "unknown" (possibly an effect) or "unreadable".
    failure = models.CharField(_("class"), max_length=12)
    reason = models.CharField(_("reason"), max_length=64)
    detail = models.TextField(_("detail"), blank=True)
    #: The work as it was when it failed; never changed.
    payload = models.JSONField(_("original"), default=dict)
    attempts = models.JSONField(_("attempts"), default=list)
    channel = models.CharField(_("channel"), max_length=64, blank=True)
    #: Equal for failures with the same cause.
    fingerprint = models.CharField(_("fingerprint"), max_length=32, db_index=True)
    state = models.CharField(_("state"), max_length=24, choices=State, default=State.OPEN)
    failed_at = models.DateTimeField(_("failed at"), default=now)
    acted_at = models.DateTimeField(_("acted at"), null=True)
    actor = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, verbose_name=_("actor"))
    actor_name = models.CharField(_("actor"), max_length=150, blank=True)
    action_reason = models.CharField(_("reason of the action"), max_length=500, blank=True)
    retried_as = models.UUIDField(_("published again as"), null=True)
    #: Of an edited retry: `{"before": payload, "after": payload}`. Empty again after the erasure of its customer.
    difference = models.JSONField(_("difference"), null=True)
    assignee = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        on_delete=models.SET_NULL,
        related_name="assigned_failed_tasks",
        verbose_name=_("assignee"),
    )

    class Meta:
        verbose_name = _("failed task")
        verbose_name_plural = _("failed tasks")
        ordering = ["-failed_at"]
        indexes = [
            models.Index(fields=["-failed_at"], name="failed_open", condition=Q(state="open")),
            # Read by workers for the text of an edited touch.
            models.Index(fields=["retried_as"], name="failed_edited", condition=Q(difference__isnull=False)),
        ]
        permissions = [("act_on_failedtask", _("Can retry, resolve, ignore and archive failed tasks"))]

    def __str__(self) -> str:
        return f"…{str(self.task_id or self.id)[-8:]}"

    def get_state_display(self) -> str:  # type: ignore[no-redef]
        """Return the label for the origin: a job is not delivered to a receiver."""
        words = RESOLVED_JOBS.get(self.state) if self.origin == self.Origin.RPA_JOB else None
        return str(words or self.State(self.state).label)


class FailedTaskComment(models.Model):
    """A note of a user or client about a failed task. Deleted with the task, and by the erasure of its customer."""

    failed_task = models.ForeignKey(FailedTask, on_delete=models.CASCADE, related_name="comments")
    author = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+")
    author_name = models.CharField(_("author"), max_length=150)
    text = models.TextField(_("comment"), max_length=2_000)
    commented_at = models.DateTimeField(_("commented at"), default=now)

    class Meta:
        default_permissions = ()  # the page of the failed task shows them
        ordering = ["pk"]

    def __str__(self) -> str:
        return f"{self.author_name}: {self.text[:50]}"


RESOLVED_JOBS = {
    FailedTask.State.RESOLVED_DELIVERED.value: _("Resolved: succeeded"),
    FailedTask.State.RESOLVED_NOT_DELIVERED.value: _("Resolved: no effect"),
}
