"""Models of platforms, flows and shops."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models, transaction
from django.db.models import Q
from django.db.models.fields.json import KT
from django.utils.translation import gettext_lazy as _
from simple_history.models import HistoricalRecords

from rpa_tasks.outcomes import DEFAULT_DELAYS
from scheduling.ids import reveal_odd_characters
from scheduling.models.encrypted import NodeSecretField
from scheduling.models.node import key_validator
from scheduling.models.versioned import Versioned


def usual_retry_delays() -> list[float]:
    return list(DEFAULT_DELAYS)


class WithBrowser(models.Model):
    """Browser settings: see `rpa_tasks.configuration.browser_settings`. Those of a shop precede its platform's."""

    #: By name; absent names are not set.
    browser = models.JSONField(_("browser"), default=dict, db_default={}, blank=True)
    #: {"username", "password"} of the proxy.
    proxy_secret = NodeSecretField(_("password of the proxy"), default=dict, blank=True)

    class Meta:
        abstract = True


class Platform(WithBrowser, Versioned):
    """A marketplace. Its circuit breaker stops all its shops while it rejects robots."""

    key = models.CharField(_("key"), max_length=64, unique=True, validators=[key_validator])
    name = models.CharField(_("name"), max_length=100, blank=True)
    #: Its jobs use the queues `p.<key>.<tier>` instead of the shared ones.
    dedicated_queue = models.BooleanField(_("queues of its own"), default=False)
    paused = models.BooleanField(_("paused"), default=False)
    #: Limit of its waiting jobs.
    backlog_limit = models.PositiveIntegerField(_("most jobs waiting"), default=10_000)
    #: Consecutive runs with a platform error that open the breaker.
    breaker_threshold = models.PositiveSmallIntegerField(
        _("errors that open the breaker"), default=3, validators=[MinValueValidator(1), MaxValueValidator(100)]
    )
    #: Jobs with a browser wait for the node that has the shop's profile, unless it has not reported for
    #: `AFTERTOUCH_RPA_HOME_LEASE`. Otherwise the first node with a free slot takes them, with a new profile.
    waits_for_home = models.BooleanField(_("wait for the preferred node"), default=True, db_default=True)
    #: Task type of the flow that checks a login (`rpa_tasks.jobs.gates.login_checks`). Empty: operators are believed.
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
    task_type = models.CharField(_("task type"), max_length=64, validators=[key_validator])
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
    timeout = models.DurationField(_("timeout"), default=timedelta(seconds=600))
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
    retry_delays = models.JSONField(_("retry delays"), default=usual_retry_delays, blank=True)
    dedupe_by = models.CharField(
        _("merge waiting jobs of"),
        max_length=10,
        choices=DedupeBy,
        default=DedupeBy.PAYLOAD,
        db_default=DedupeBy.PAYLOAD,
    )
    #: How long after its start the same shop and key run no second time; empty: only while a job waits.
    dedupe_window = models.DurationField(_("runs once within"), null=True, blank=True)
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
    environment = models.JSONField(_("environment variables"), default=list, blank=True)
    #: Absolute directories that precede the command's PATH.
    path = models.JSONField(_("program folders"), default=list, db_default=[], blank=True)
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
    backlog_limit = models.PositiveIntegerField(_("most jobs waiting"), default=100)
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
