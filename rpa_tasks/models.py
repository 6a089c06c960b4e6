"""Models of platforms, flows, shops, jobs, execution nodes and take-overs, and the tables of the demo flow."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import models, transaction
from django.db.models import Q
from django.db.models.fields.json import KT
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy
from simple_history.models import HistoricalRecords

from rpa_tasks.outcomes import DEFAULT_DELAYS, RunOutcome
from scheduling.errors import check_number, check_retry_delays, check_span, check_texts
from scheduling.ids import reveal_odd_characters
from scheduling.models import WAITING, LedgerRow
from scheduling.models.encrypted import NodeSecretField
from scheduling.models.versioned import KEY, Bound, Versioned

#: Permissions, as users have them: to start work of shops, to end it, to choose payloads, to operate browsers.
RUN_JOBS, CANCEL_JOBS = "rpa_tasks.run_job", "rpa_tasks.cancel_job"
EDIT_PAYLOADS, TAKE_OVER_SHOPS = "rpa_tasks.change_job", "rpa_tasks.take_over_shop"


def usual_retry_delays() -> list[float]:
    return list(DEFAULT_DELAYS)


class WithBrowser(models.Model):
    """Browser settings: see `rpa_tasks.browser_settings`. Those of a shop precede its platform's."""

    #: By name; absent names are not set.
    browser = models.JSONField(_("browser"), default=dict, db_default={}, blank=True)
    #: {"username", "password"} of the proxy.
    proxy_secret = NodeSecretField(_("password of the proxy"), default=dict, blank=True)

    class Meta:
        abstract = True


BACKLOG = Bound(check_number, least=1, most=1_000_000)


class Platform(WithBrowser, Versioned):
    """A marketplace. Its circuit breaker stops all its shops while it rejects robots."""

    key = models.CharField(_("key"), max_length=64, unique=True, validators=[KEY])
    name = models.CharField(_("name"), max_length=100, blank=True)
    #: Its jobs use the queues `p.<key>.<tier>` instead of the shared ones.
    dedicated_queue = models.BooleanField(_("queues of its own"), default=False)
    paused = models.BooleanField(_("paused"), default=False)
    #: Limit of its waiting jobs.
    backlog_limit = models.PositiveIntegerField(_("most jobs waiting"), default=10_000, validators=[BACKLOG])
    #: Consecutive runs with a platform error that open the breaker.
    breaker_threshold = models.PositiveSmallIntegerField(
        _("errors that open the breaker"), default=3, validators=[Bound(check_number, least=1, most=100)]
    )
    #: Jobs with a browser wait for the node that has the shop's profile, unless it has not reported for
    #: `AFTERTOUCH_RPA_HOME_LEASE`. Otherwise the first node with a free slot takes them, with a new profile.
    waits_for_home = models.BooleanField(_("wait for the preferred node"), default=True, db_default=True)
    #: Task type of the flow that checks a login (`rpa_tasks.jobs.shops`). Empty: operators are believed.
    check_task_type = models.CharField(_("login check"), max_length=64, blank=True, db_default="")
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)
    history = HistoricalRecords(excluded_fields=["proxy_secret"])

    class Meta:
        verbose_name = _("platform")
        verbose_name_plural = _("platforms")
        ordering = ["key"]

    def __str__(self) -> str:
        return self.name or self.key

    def save(self, *args: Any, **kwargs: Any) -> None:
        with transaction.atomic():
            super().save(*args, **kwargs)
            Breaker.objects.get_or_create(platform=self)


class Breaker(models.Model):
    """Circuit breaker of a platform: closed, open until an instant, then half open for one trial run."""

    platform = models.OneToOneField(Platform, primary_key=True, on_delete=models.CASCADE, verbose_name=_("platform"))
    #: Platform errors since the last success.
    errors = models.PositiveIntegerField(_("errors in a row"), default=0)
    #: No run starts before this instant; empty while closed.
    open_until = models.DateTimeField(_("open until"), null=True, blank=True)
    opened_at = models.DateTimeField(_("opened at"), null=True, blank=True)
    #: Openings since it was last closed; each doubles the open time.
    openings = models.PositiveSmallIntegerField(_("openings"), default=0)
    #: The half-open trial.
    probe = models.UUIDField(_("probing job"), null=True, blank=True)

    class Meta:
        verbose_name = _("circuit breaker")
        verbose_name_plural = _("circuit breakers")

    def __str__(self) -> str:
        return str(self.platform_id)


class DedupeBy(models.TextChoices):
    """Which jobs without a `dedupe_key` merge into a waiting one, within shop and flow."""

    PAYLOAD = "payload", _("same payload")
    TASK_TYPE = "task_type", _("same task type, whatever the payload")
    NONE = "none", _("never")


class Rerun(models.TextChoices):
    """When the same work may run again within the window of a flow."""

    REFUSE = "refuse", _("never")
    AFTER_FAILURE = "after_failure", _("after a failure")
    ALWAYS = "always", _("after any end")


class DedupePeriod(models.TextChoices):
    """A period of the clock in which the same work runs once."""

    HOUR = "hour", _("hour")
    DAY = "day", _("calendar day")
    WEEK = "week", _("week from Monday")
    MONTH = "month", _("calendar month")


class ParamStyle(models.TextChoices):
    """Where the payload is in the JSON parameter of a command."""

    FLAT = "flat", _("its members at the top level")
    NESTED = "nested", _("in the member “payload”")


class Flow(Versioned):
    """What a task type does on a platform: its command and the meaning of its exit status."""

    platform = models.ForeignKey(Platform, on_delete=models.PROTECT, related_name="flows", verbose_name=_("platform"))
    task_type = models.CharField(_("task type"), max_length=64, validators=[KEY])
    #: A list of words, never a shell line. `rpa_tasks.supervisor.command.PLACEHOLDERS` are filled in.
    command = models.JSONField(_("command"), default=list)
    param_style = models.CharField(
        _("payload in the parameter"),
        max_length=10,
        choices=ParamStyle,
        default=ParamStyle.FLAT,
        db_default=ParamStyle.FLAT,
    )
    #: Until SIGTERM; 50 s later the run is killed.
    timeout = models.DurationField(
        _("timeout"),
        default=timedelta(seconds=600),
        validators=[Bound(check_span, least=timedelta(seconds=1), most=timedelta(hours=24))],
    )
    needs_browser = models.BooleanField(_("needs a browser"), default=True)
    #: A repeat with the same task has no second effect.
    idempotent = models.BooleanField(_("idempotent"), default=False)
    #: {"transient": [..], "business": [..], "session": [..], "platform": [..]}, added to `DEFAULT_EXIT_CODES`
    exit_codes = models.JSONField(_("exit codes"), default=dict, blank=True)
    #: A JSON schema of the payload; empty: any payload.
    payload_schema = models.JSONField(_("schema of the payload"), default=dict, blank=True)
    #: Exit status 0 without a `{"result": …}` line is a failure.
    needs_result = models.BooleanField(_("must print a result"), default=False)
    #: Seconds until the first, second, … retry of a transient failure; empty: none.
    retry_delays = models.JSONField(
        _("retry delays"), default=usual_retry_delays, blank=True, validators=[Bound(check_retry_delays)]
    )
    dedupe_by = models.CharField(
        _("merge waiting jobs of"),
        max_length=10,
        choices=DedupeBy,
        default=DedupeBy.PAYLOAD,
        db_default=DedupeBy.PAYLOAD,
    )
    #: How long after its start the same shop and key run no second time; empty: only while a job waits.
    dedupe_window = models.DurationField(
        _("runs once within"),
        null=True,
        blank=True,
        validators=[Bound(check_span, least=timedelta(seconds=1), most=timedelta(days=31))],
    )
    #: Instead of the time span: a period of the clock of `dedupe_timezone`.
    dedupe_period = models.CharField(
        _("runs once a"), max_length=5, choices=DedupePeriod, blank=True, default="", db_default=""
    )
    #: Empty: the time zone of the product.
    dedupe_timezone = models.CharField(_("time zone"), max_length=64, blank=True, default="", db_default="")
    dedupe_rerun = models.CharField(
        _("run again within that time"),
        max_length=15,
        choices=Rerun,
        default=Rerun.AFTER_FAILURE,
        db_default=Rerun.AFTER_FAILURE,
    )
    clear_cookies = models.BooleanField(_("clear cookies first"), default=False)
    #: Names of environment variables that the command may see, beyond the minimal environment.
    environment = models.JSONField(
        _("environment variables"), default=list, blank=True, validators=[Bound(check_texts, longest=100)]
    )
    #: Absolute directories that precede the command's PATH.
    path = models.JSONField(
        _("program folders"), default=list, db_default=[], blank=True, validators=[Bound(check_texts, longest=1_000)]
    )
    #: Values of further variables by name.
    env = models.JSONField(_("fixed variables"), default=dict, db_default={}, blank=True)
    #: Absolute working directory; empty: a new one for each run.
    cwd = models.CharField(_("working directory"), max_length=1_000, blank=True, db_default="")
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)
    history = HistoricalRecords()

    class Meta:
        verbose_name = _("flow")
        verbose_name_plural = _("flows")
        ordering = ["platform", "task_type"]
        #: Commands run on execution nodes. This is a stronger permission than editing messages to customers.
        permissions = [("define_command", _("Can define commands of flows"))]
        constraints = [models.UniqueConstraint(fields=["platform", "task_type"], name="one_flow_a_task_type")]

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Return the name that the command receives: `<platform>_<task type>`."""
        return f"{self.platform.key}_{self.task_type}"

    @property
    def has_window(self) -> bool:
        """Return whether the same work runs once in a time, also after it has ended."""
        return self.dedupe_window is not None or bool(self.dedupe_period)


class LoginState(models.TextChoices):
    OK = "ok", _("Logged in")
    NEEDED = "needed", _("Login needed")  #: a run found the shop logged out; jobs wait for a login by an operator


class Shop(WithBrowser, Versioned):
    """One shop of a platform, with its own browser profile."""

    platform = models.ForeignKey(Platform, on_delete=models.PROTECT, related_name="shops", verbose_name=_("platform"))
    shop_id = models.CharField(_("shop id"), max_length=64)
    name = models.CharField(_("name"), max_length=200, blank=True)
    #: Its jobs use the queue `s.<platform>.<shop>` instead of the shared ones.
    dedicated_queue = models.BooleanField(_("a queue of its own"), default=False)
    paused = models.BooleanField(_("paused"), default=False)
    login_state = models.CharField(_("login"), max_length=10, choices=LoginState, default=LoginState.OK)
    login_lost_at = models.DateTimeField(_("login lost at"), null=True, blank=True, editable=False)
    #: Directory of the browser profile; empty: `<platform>-<shop id>`. Never shared.
    profile_id = models.CharField(_("browser profile"), max_length=140, blank=True)
    backlog_limit = models.PositiveIntegerField(_("most jobs waiting"), default=100, validators=[BACKLOG])
    retired_at = models.DateTimeField(_("retired at"), null=True, blank=True, editable=False)
    history = HistoricalRecords(excluded_fields=["login_lost_at", "proxy_secret"])

    class Meta:
        verbose_name = _("shop")
        verbose_name_plural = _("shops")
        ordering = ["platform", "shop_id"]
        #: The operator acts in the shop's account. This is a stronger permission than running its jobs.
        permissions = [("take_over_shop", _("Can take over browsers of shops"))]
        constraints = [
            models.UniqueConstraint(fields=["platform", "shop_id"], name="one_shop_an_id"),
            models.UniqueConstraint(fields=["profile_id"], name="one_shop_a_profile", condition=~Q(profile_id="")),
            # With the shop's lane it gives the browser to one run at a time, whatever node it is on.
            models.UniqueConstraint(
                KT("browser__cdp_url"), name="one_shop_a_browser", condition=~Q(browser__cdp_url="own")
            ),
        ]

    def __str__(self) -> str:
        return self.name or reveal_odd_characters(f"{self.platform.key}/{self.shop_id}")

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save without the login fields: a run may have changed them since the form was loaded."""
        if not self._state.adding:
            edited = {field.name for field in self._meta.concrete_fields if not field.primary_key}
            kwargs.setdefault("update_fields", edited - {"login_state", "login_lost_at"})
        with transaction.atomic():
            super().save(*args, **kwargs)
            Lane.objects.get_or_create(shop=self)

    @property
    def profile(self) -> str:
        """Return the name of its browser profile."""
        return self.profile_id or f"{self.platform.key}-{self.shop_id}"


class Lane(models.Model):
    """The lane of a shop, which allows one run at a time. Its number fences all writes of the run."""

    shop = models.OneToOneField(Shop, primary_key=True, on_delete=models.CASCADE, verbose_name=_("shop"))
    #: The running job; empty while free.
    task_id = models.UUIDField(_("running job"), null=True)
    #: Increased by each run of this shop, whatever the job. Job, browser and command line carry it.
    lease_no = models.IntegerField(_("lease number"), default=0)
    #: The preferred node: its disk has the shop's browser profile.
    home = models.CharField(_("node of the profile"), max_length=100, blank=True)
    #: Until then an operator holds the shop, and no job starts: see `rpa_tasks.takeover.leases`.
    held_until = models.DateTimeField(_("held until"), null=True)
    #: The job that checks the login of a shop that needs one. It counts only until that job has ended.
    check_id = models.UUIDField(_("login check"), null=True)
    #: Why the last check found no login; empty after a login.
    check_reason = models.CharField(_("result of the login check"), max_length=64, blank=True, db_default="")
    last_served_at = models.DateTimeField(_("last served at"), null=True)
    last_success_at = models.DateTimeField(_("last success at"), null=True)

    class Meta:
        verbose_name = _("lane")
        verbose_name_plural = _("lanes")

    def __str__(self) -> str:
        return str(self.shop_id)


class JobState(models.TextChoices):
    SCHEDULED = "scheduled", _("Scheduled")  #: waits for its time or its lane
    QUEUED = "queued", _("Dispatched")  #: a wake-up message for it has been published
    RUNNING = "running", pgettext_lazy("RPA job", "Running")  #: a node has it until `lease_until`
    SUCCEEDED = "succeeded", _("Succeeded")
    CANCELLED = "cancelled", _("Cancelled")
    FAILED = "failed", _("Failed")  #: has a failed task that needs a decision
    UNKNOWN = "unknown", _("Unknown")  #: it may have had its effect; has a failed task that needs a decision


class Job(LedgerRow):
    """One request to run a flow for a shop, with its retries."""

    state = models.CharField(_("state"), max_length=10, choices=JobState, default=JobState.SCHEDULED, editable=False)
    shop = models.ForeignKey(Shop, on_delete=models.PROTECT, related_name="jobs", verbose_name=_("shop"))
    flow = models.ForeignKey(
        Flow, on_delete=models.PROTECT, related_name="jobs", verbose_name=_("flow"), db_index=False
    )
    payload = models.JSONField(_("payload"), default=dict, blank=True)
    #: The business key within shop and flow: while a job of it waits, other requests merge into that job.
    dedupe_key = models.CharField(_("dedupe key"), max_length=200, blank=True)
    #: Not claimed since it was published. A retry or a deferred job is exempt from the rule of one waiting job.
    fresh = models.BooleanField(default=True)
    #: Number of requests that it covers.
    requests = models.PositiveIntegerField(_("requests"), default=1)
    #: Failures that count against `retry_delays`.
    failures = models.PositiveSmallIntegerField(_("failures"), default=0)
    #: The touch that it delivers: published once, however often the touch is sent.
    touch_key = models.UUIDField(_("touch"), null=True, unique=True)
    #: When it is to be done; later it counts as late. It changes no order.
    deadline = models.DateTimeField(_("to be done by"), null=True)
    source = models.CharField(_("published by"), max_length=100, blank=True)
    node = models.CharField(_("node"), max_length=100, blank=True)
    progress = models.FloatField(_("progress"), null=True)
    progress_message = models.CharField(_("progress message"), max_length=200, blank=True)
    result = models.JSONField(_("result"), null=True)
    cancel_requested_at = models.DateTimeField(_("cancel requested at"), null=True)

    class Meta:
        verbose_name = _("RPA job")
        verbose_name_plural = _("RPA jobs")
        ordering = ["-created_at"]
        permissions = [("run_job", _("Can publish jobs")), ("cancel_job", _("Can cancel jobs"))]
        indexes = [
            *LedgerRow.indexes_for("rpa_job", ("running",)),
            # For the dispatch, and the metrics of jobs that are due first.
            models.Index(fields=["state", "due_at"], name="rpa_job_due", condition=Q(state__in=WAITING)),
            # For the pick: the first job of a shop in each tier.
            models.Index(
                fields=["shop", "priority", "due_at"],
                name="rpa_job_heads",
                condition=Q(state__in=WAITING),
            ),
            # For the job that waits with a key, and those of a retired flow.
            models.Index(
                fields=["flow", "shop", "dedupe_key"],
                name="rpa_job_keys",
                condition=Q(state__in=WAITING),
            ),
            # For the jobs that are late.
            models.Index(
                fields=["deadline"],
                name="rpa_job_deadline",
                condition=Q(state__in=(*WAITING, "running"), deadline__isnull=False),
            ),
            # For the list of jobs.
            models.Index(fields=["-created_at"], name="rpa_job_latest"),
        ]
        constraints = [
            # A wake-up of a job has no lease: it names no job, and the next pass repeats a lost one.
            LedgerRow.lease_constraint("rpa_job", ("running",)),
            # Enforces the lane in PostgreSQL, whatever the code does.
            models.UniqueConstraint(fields=["shop"], name="rpa_one_run_a_shop", condition=Q(state="running")),
            models.UniqueConstraint(
                fields=["shop", "flow", "dedupe_key"],
                name="rpa_one_waits",
                condition=Q(state__in=WAITING, fresh=True),
            ),
            # A double click publishes once.
            models.UniqueConstraint(fields=["retry_of"], name="rpa_retried_once", condition=Q(retry_of__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"…{str(self.task_id)[-8:]}"


class DedupeWindow(models.Model):
    """The job that holds the window of a shop, flow and key: see `rpa_tasks.jobs.payloads`."""

    #: Its job, stored in the same transaction.
    task_id = models.UUIDField(primary_key=True, editable=False)
    shop = models.ForeignKey(Shop, on_delete=models.CASCADE, related_name="+", db_index=False)
    flow = models.ForeignKey(Flow, on_delete=models.CASCADE, related_name="+", db_index=False)
    key = models.CharField(max_length=200)
    ends_at = models.DateTimeField()

    class Meta:
        default_permissions = ()  # no page shows these rows
        constraints = [models.UniqueConstraint(fields=["shop", "flow", "key"], name="rpa_one_window_a_key")]

    def __str__(self) -> str:
        return str(self.task_id)


class Run(models.Model):
    """One attempt of a job on a node, and its outcome. Append-only, except for deferrals: a repeated one
    rewrites the row of its reason."""

    OUTCOMES = {
        RunOutcome.SUCCEEDED.value: _("Succeeded"),
        RunOutcome.TRANSIENT.value: _("Failed, may succeed later"),
        RunOutcome.BUSINESS.value: _("Failed for good"),
        RunOutcome.SESSION.value: _("Login needed"),
        RunOutcome.PLATFORM.value: _("Blocked by the platform"),
        RunOutcome.DEFERRED.value: _("Did not start"),
        RunOutcome.CANCELLED.value: _("Cancelled"),
        RunOutcome.UNKNOWN.value: _("Unknown"),
    }

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="runs", verbose_name=_("job"))
    number = models.IntegerField(_("number"))
    lease_no = models.IntegerField(_("lease number"))
    node = models.CharField(_("node"), max_length=100, blank=True)
    started_at = models.DateTimeField(_("started at"))
    ended_at = models.DateTimeField(_("ended at"), null=True)
    #: Wait for a browser.
    pool_wait = models.DurationField(_("wait for a browser"), null=True)
    #: Whether its browser was already running; empty: it got none.
    warm = models.BooleanField(_("warm browser"), null=True)
    outcome = models.CharField(_("outcome"), max_length=10, choices=OUTCOMES)
    reason = models.CharField(_("reason"), max_length=64, blank=True)
    exit_code = models.IntegerField(_("exit code"), null=True)
    #: End of the command's output, at most 10,000 characters, secrets masked.
    detail = models.TextField(_("detail"), blank=True)

    class Meta:
        verbose_name = _("run")
        verbose_name_plural = _("runs")
        ordering = ["id"]
        indexes = [
            # For the overview. A deferral, which is overwritten repeatedly, has no entry.
            models.Index(fields=["ended_at"], name="rpa_run_ended", condition=~Q(outcome="held"))
        ]

    def __str__(self) -> str:
        return f"{self.number}: {self.outcome} {self.reason}".strip()


class Evidence(models.Model):
    """Evidence of a failed run: screenshot, HTML and log.

    Stored in PostgreSQL, so that every web process can show it, whatever node it comes from.
    """

    class Kind(models.TextChoices):
        SCREENSHOT = "screenshot", _("Screenshot")
        HTML = "html", _("Page HTML")
        LOG = "log", _("Log")

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="evidence", verbose_name=_("run"))
    kind = models.CharField(_("kind"), max_length=10, choices=Kind)
    #: Texts are zlib-compressed.
    content = models.BinaryField(_("content"))
    created_at = models.DateTimeField(_("created at"), default=now, db_index=True, editable=False)

    class Meta:
        verbose_name = _("evidence")
        verbose_name_plural = _("evidence")
        constraints = [models.UniqueConstraint(fields=["run", "kind"], name="one_evidence_a_kind")]

    def __str__(self) -> str:
        return f"{self.run_id}/{self.kind}"


class ExecutionNode(models.Model):
    """A machine that runs jobs, as of its last report."""

    name = models.CharField(_("name"), max_length=100, primary_key=True)
    #: Of the state directory whose workers renew this row: see `rpa_tasks.worker.node`.
    state_id = models.CharField(max_length=36, blank=True, db_default="", editable=False)
    seen_at = models.DateTimeField(_("seen at"))
    started_at = models.DateTimeField(_("started at"))
    slots = models.PositiveSmallIntegerField(_("slots"))
    #: Queues that its workers consume, including those of shops that prefer this node (`n.…`).
    queues = models.JSONField(_("queues"), default=list)
    #: One entry per browser slot: {"slot", "state", "shop", "profile", "port", "uses", "started_at", "last_used_at",
    #: "rss_mb", "reason"}.
    browsers = models.JSONField(_("browsers"), default=list)
    #: Since then it starts nothing new: see `rpa_tasks.jobs.nodes`. Its own reports do not change it.
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


class TakeOverEnd(models.TextChoices):
    ENDED = "ended", _("Ended by the operator")
    CONTINUED = "continued", _("Logged in, the jobs continue")
    IDLE = "idle", _("No input for too long")
    DISCONNECTED = "disconnected", _("The operator's connection was lost")
    RUN_ENDED = "run_ended", _("The run ended")
    NO_BROWSER = "no_browser", _("No browser was available")
    BROWSER_LOST = "browser_lost", _("The browser ended")
    NODE_STOPPING = "node_stopping", _("The node was stopping")
    NODE_LOST = "node_lost", _("The node did not answer")


class TakeOver(models.Model):
    """One operator's control of a shop's browser, and its audit record. What is typed is never stored.

    Its primary key fences the input. Without a job it holds the lane of the shop; with one it shares the run's browser.
    """

    shop = models.ForeignKey(Shop, on_delete=models.PROTECT, related_name="take_overs", verbose_name=_("shop"))
    #: The run whose browser it shares; empty: it holds the shop.
    task_id = models.UUIDField(_("shared run"), null=True)
    #: Of the lane while it lasts; the record of the browser has it too.
    lease_no = models.IntegerField(_("lease number"))
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, related_name="+", verbose_name=_("user")
    )
    username = models.CharField(_("taken over by"), max_length=150)
    address = models.GenericIPAddressField(_("address"), null=True)
    node = models.CharField(_("node"), max_length=100)
    #: Encrypts its messages in Redis; deleted at its end.
    key = models.BinaryField(null=True)
    started_at = models.DateTimeField(_("started at"), default=now)
    lease_until = models.DateTimeField()
    #: The end that the operator asked for; the node carries it out.
    wanted_end = models.CharField(max_length=15, choices=TakeOverEnd, blank=True)
    ended_at = models.DateTimeField(_("ended at"), null=True)
    end = models.CharField(_("why it ended"), max_length=15, choices=TakeOverEnd, blank=True)

    class Meta:
        verbose_name = _("take-over")
        verbose_name_plural = _("take-overs")
        ordering = ["-pk"]
        constraints = [models.UniqueConstraint(fields=["shop"], name="rpa_one_takeover", condition=Q(ended_at=None))]

    def __str__(self) -> str:
        return f"{self.shop} · {self.username}"


# Tables of the flow `demo_sync_order`.
#
# Your flow has its own tables with the same two columns, which make a late or repeated run harmless: the version of the
# order and the lease number of the writer.


class DemoOrder(models.Model):
    shop_id = models.CharField(_("shop id"), max_length=64)
    order_no = models.CharField(_("order number"), max_length=64)
    version = models.IntegerField(_("version"))
    status = models.CharField(_("status"), max_length=40)
    buyer = models.CharField(_("buyer"), max_length=100)
    amount = models.DecimalField(_("amount"), max_digits=12, decimal_places=2)
    #: Number of writes of this row: an effect counter.
    writes = models.IntegerField(_("writes"), default=1)

    class Meta:
        verbose_name = _("demo order")
        verbose_name_plural = _("demo orders")
        ordering = ["shop_id", "order_no"]
        constraints = [models.UniqueConstraint(fields=["shop_id", "order_no"], name="one_demo_order_a_number")]

    def __str__(self) -> str:
        return self.order_no


class DemoWatermark(models.Model):
    shop_id = models.CharField(_("shop id"), max_length=64, primary_key=True)
    #: The latest change that was read.
    position = models.BigIntegerField(pgettext_lazy("demo shop", "position"), default=0)
    #: The highest lease number that has written; lower ones are refused.
    lease_no = models.IntegerField(_("lease number"), default=0)

    class Meta:
        verbose_name = _("demo watermark")
        verbose_name_plural = _("demo watermarks")

    def __str__(self) -> str:
        return self.shop_id
