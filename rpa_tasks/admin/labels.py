"""Labels for the codes of runs, jobs and checks, and admin pages of the demo tables."""

from __future__ import annotations

from django.contrib import admin
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy, gettext_noop
from django.utils.translation import gettext_lazy as _

from rpa_tasks.models import DemoOrder, DemoWatermark, LoginState, Shop
from scheduling.admin.base import ReadOnlyAdmin
from scheduling.admin.labels import register_labels
from scheduling.admin.sidebar import MOST_COUNTED, Entry, Group, Tab

STATE_TONES = {
    "scheduled": "default", "queued": "default", "running": "info", "succeeded": "success", "cancelled": "warning",
    "failed": "danger", "unknown": "danger",
}  # fmt: skip

#: Reasons why a job waits or ended, and outcomes of runs.
REASONS: dict[str, str | Promise] = {
    "browser_wait": gettext_lazy("No browser was free in time"),
    "browser_failed": gettext_lazy("Browser did not start"),
    "proxy_failed": gettext_lazy("Shop's proxy does not work, or is not used"),
    "profile_busy": gettext_lazy("Shop's browser profile is in use"),
    "not_isolated": gettext_lazy("Command cannot be isolated on this node"),
    "disk_full": gettext_lazy("Disk of the node is full"),
    "processes_left": gettext_lazy("Processes of an earlier run are still there"),
    "survivors": gettext_lazy("some of its processes could not be ended"),
    "node_stopping": gettext_lazy("Node was stopping"),
    "runner_lost": gettext_lazy("Worker lost during the run"),
    "lease_lost": gettext_lazy("Worker did not renew its lease"),
    "supervisor_lost": gettext_lazy("Supervisor process of the run was killed"),
    "not_started": gettext_lazy("Command could not be started"),
    "directory_missing": gettext_lazy("Working directory is missing on the node, or isolation hides it"),
    "command_missing": gettext_lazy("Command was not found on the node"),
    "command_not_executable": gettext_lazy("Command is not executable"),
    "arguments_too_long": gettext_lazy("Payload is too long for a command line"),
    "payload_reserved": gettext_lazy("Payload has members that the run sets"),
    "no_result": gettext_lazy("Ended without its result line"),
    "login_needed": gettext_lazy("Shop needs a login"),
    "cancelled": gettext_lazy("Cancelled"),
    "retired": gettext_lazy("Shop, flow or platform was retired"),
    "rpa_refused": gettext_lazy("RPA job was refused"),
    "rpa_backlog": gettext_lazy("Too many RPA jobs wait already"),
    "database_unavailable": gettext_lazy("Database did not answer"),
}
PREFIXES = {
    "exit_": gettext_noop("Ended with exit code %s"),
    "signal_": gettext_noop("Killed by signal %s"),
}
#: Error messages of `rpa_tasks.configuration.validation`, `command`, `schedules` and `publishing`, as patterns.
ERROR_PATTERNS = (
    (r"there is no (?P<what>shop|platform) “(?P<name>.*)”", gettext_noop("there is no “%(name)s”")),
    (r"(?P<platform>\S+) has no task type “(?P<name>.*)”", gettext_noop("%(platform)s has no task type “%(name)s”")),
    (r"must start with a letter or digit and have only .*",
     gettext_noop("must start with a letter or digit and have only letters, digits, “-”, “_” and “.”, at most 64")),
    (r"names a directory: .*",
     gettext_noop("names a directory: only letters, digits, “-”, “_” and “.”, at most 140, no “.” in front")),
    (r"browser profile “(?P<name>.*)” belongs to (?P<shop>.*); set another one",
     gettext_noop("browser profile “%(name)s” belongs to %(shop)s; set another one")),
    (r"(?P<code>\d+) is listed already, as (?P<name>.*)", gettext_noop("%(code)s is listed already, as %(name)s")),
    (r"must be a list of whole numbers from 1 to 255", gettext_noop("must be whole numbers from 1 to 255")),
    (r"is a member that the run itself sets; .*",
     gettext_noop("is a member that the run itself sets; rename it, or nest the payload in the flow's parameter")),
    (r"must be a mapping: a JSON schema", gettext_noop("must be a JSON schema")),
    (r"“(?P<name>.*)” is not the name of an environment variable",
     gettext_noop("“%(name)s” is not the name of an environment variable")),
    (r"(?P<name>\S+) is set for every run anyway", gettext_noop("%(name)s is set for every run anyway")),
    (r"(?P<name>\S+) is never given to a command", gettext_noop("%(name)s is never given to a command")),
    (r"must not name more than (?P<most>\d+) variables", gettext_noop("must not name more than %(most)s variables")),
    (r"must not be longer than (?P<most>\d+) characters",
     gettext_noop("must not be longer than %(most)s characters")),
    (r"must start with a program", gettext_noop("must start with a program")),
    (r"\{(?P<name>.*)\} is not a placeholder; available: (?P<known>.*)",
     gettext_noop("{%(name)s} is not a placeholder; available: %(known)s")),
    (r"must contain \{param\}.*",
     gettext_noop("must contain {param} or {param_file}; otherwise the command gets no parameters")),
    (r"must have each placeholder as a word of its own",
     gettext_noop("must have each placeholder as a word of its own")),
    (r"\{debug_port\} is empty without a browser; .*",
     gettext_noop("{debug_port} is empty without a browser; set needs_browser")),
    (r"must not name more than (?P<most>\d+) folders", gettext_noop("must not name more than %(most)s folders")),
    (r"must be an absolute folder of at most (?P<most>\d+) characters",
     gettext_noop("must be an absolute folder of at most %(most)s characters")),
    (r"(?P<name>\S+) is named in environment already", gettext_noop("%(name)s is passed from the node already")),
    (r"(?P<name>\S+) must be a text of at most (?P<most>\d+) characters without NUL",
     gettext_noop("%(name)s must be a text of at most %(most)s characters without NUL")),
    (r"“(?P<name>.*)” is not an absolute folder without “:”",
     gettext_noop("“%(name)s” is not an absolute folder without “:”")),
    (r"makes a (?P<what>word|command) of (?P<size>[\d,]+) bytes; .* at most (?P<most>[\d,]+)",
     gettext_noop("makes the command too long: %(size)s bytes, at most %(most)s")),
    (r"(?P<program>.*) is not executable", gettext_noop("%(program)s is not executable")),
    (r"(?P<program>.*) was not found", gettext_noop("%(program)s was not found")),
    (r"at most (?P<most>\d+) characters", gettext_noop("at most %(most)s characters")),
    (r"is (?P<size>\d+) bytes of JSON; at most (?P<most>\d+)",
     gettext_noop("is %(size)s bytes of JSON; at most %(most)s")),
    (r"has a character that cannot be stored", gettext_noop("has a character that cannot be stored")),
    (r"must be a language like .*", gettext_noop("must be a language like zh-CN or pt")),
    (r"must be a time zone like .*", gettext_noop("must be a time zone like Asia/Shanghai")),
    (r"must be a size like .*", gettext_noop("must be a size like 1366x768, from 100 to 9999")),
    (r"must be a folder name of .*", gettext_noop(
        "must be a folder name of letters, digits, “-” and “_”, at most 64, not tmp")),
    (r"must be a list of at most (?P<most>\d+) flags", gettext_noop("must be at most %(most)s flags")),
    (r"“(?P<name>.*)” is not one of (?P<known>--.*)", gettext_noop("“%(name)s” is not one of %(known)s")),
    (r"must be an address like (?P<known>http:.*)", gettext_noop("must be an address like %(known)s")),
    (r"“(?P<name>.*)” is a queue of all shops; .*",
     gettext_noop("“%(name)s” is a queue of all shops; this shop can have no queue of its own")),
    (r"must contain \{shop_id\}: .*", gettext_noop("must contain {shop_id}: each shop has a browser of its own")),
    (r"would give the browser of (?P<other>.*) to (?P<shop>.*) too; set another one",
     gettext_noop("would give the browser of %(other)s to %(shop)s too; set another one")),
    (r"this browser belongs to (?P<shop>.*); set another one",
     gettext_noop("this browser belongs to %(shop)s; set another one")),
    (r"would get the own passwords of (?P<shops>.+); .*",
     gettext_noop("would get the own passwords of %(shops)s; remove them from these shops first")),
    (r"has no effect on a browser that runs elsewhere; .*",
     gettext_noop("has no effect on a browser that runs elsewhere; remove one of the two")),
    (r"has no effect beside a time span; .*", gettext_noop("has no effect beside a time span; remove one of the two")),
    (r"has no effect without a period; .*",
     gettext_noop("has no effect without a period; remove it or set the period")),
    (r"at most (?P<most>\d+) characters in a flow with a period",
     gettext_noop("at most %(most)s characters in a flow with a period")),
    (r"must be a list of at most (?P<most>\d+) extensions", gettext_noop("must be at most %(most)s extensions")),
    (r"“(?P<name>.*)” is not the name of a folder of .*", gettext_noop(
        "“%(name)s” is not the name of a folder of letters, digits, “-” and “_”, at most 64")),
    (r"must not have a password; .*", gettext_noop("must not have a password; it has fields of its own")),
    (r"must have at most (?P<most>\d+) bytes, .*",
     gettext_noop("must have at most %(most)s bytes, without control characters")),
    (r"must not contain “:”", gettext_noop("must not contain “:”")),
    (r"is missing: the password belongs to .*", gettext_noop("is missing: the password belongs to a user name")),
)  # fmt: skip

register_labels(REASONS, PREFIXES, ERROR_PATTERNS)


def count_needed_logins() -> int:
    """Count the shops that wait for a login, as far as a badge shows."""
    return Shop.objects.filter(login_state=LoginState.NEEDED, retired_at=None).order_by()[: MOST_COUNTED + 1].count()


MENU: tuple[Group, ...] = (
    (
        _("RPA"),
        (
            Entry(
                "storefront",
                (
                    Tab(_("Shops"), "rpa_tasks_shop_changelist", "rpa_tasks.view_shop"),
                    Tab(_("Schedules of shops"), "rpa_tasks_shop_schedules", "rpa_tasks.view_shop"),
                    Tab(_("Take-overs"), "rpa_tasks_takeover_changelist", "rpa_tasks.view_takeover"),
                    Tab(_("Platforms"), "rpa_tasks_platform_changelist", "rpa_tasks.view_platform"),
                ),
                count=count_needed_logins, counted=_("Login needed"),
            ),
            Entry("smart_toy", (Tab(_("Jobs"), "rpa_tasks_job_changelist", "rpa_tasks.view_job"),)),
            Entry(
                "terminal",
                (
                    Tab(_("Flows"), "rpa_tasks_flow_changelist", "rpa_tasks.view_flow"),
                    Tab(_("Execution nodes"), "rpa_tasks_executionnode_changelist", "rpa_tasks.view_executionnode"),
                    Tab(_("Demo orders"), "rpa_tasks_demoorder_changelist", "rpa_tasks.view_demoorder"),
                ),
            ),
        ),
    ),
)  # fmt: skip


@admin.register(DemoOrder)
class DemoOrderAdmin(ReadOnlyAdmin):
    list_display = ("order_no", "shop_id", "status", "buyer", "amount", "version", "writes")
    search_fields = ("=order_no", "=shop_id")


@admin.register(DemoWatermark)
class DemoWatermarkAdmin(ReadOnlyAdmin):
    list_display = ("shop_id", "position", "lease_no")
