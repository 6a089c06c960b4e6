"""Labels for the codes of runs, jobs and checks, and admin pages of the demo tables."""

from __future__ import annotations

from django.contrib import admin
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy, gettext_noop
from django.utils.translation import gettext_lazy as _

from rpa_tasks.models import DemoOrder, DemoWatermark
from scheduling.admin.base import ReadOnlyAdmin
from scheduling.admin.labels import register_labels

STATE_TONES = {
    "scheduled": "default", "queued": "default", "running": "info", "succeeded": "success", "cancelled": "warning",
    "failed": "danger", "unknown": "danger",
}  # fmt: skip

#: Reasons why a job waits or ended, and outcomes of runs.
REASONS: dict[str, str | Promise] = {
    "browser_wait": gettext_lazy("No browser was free in time"),
    "browser_failed": gettext_lazy("Browser did not start"),
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
    "command_missing": gettext_lazy("Command was not found on the node"),
    "command_not_executable": gettext_lazy("Command is not executable"),
    "arguments_too_long": gettext_lazy("Payload is too long for a command line"),
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
    (r"must not have a placeholder in a word that .*",
     gettext_noop("must not have a placeholder in a word that a shell or an interpreter runs as code")),
    (r"must not have \{param\} in a word with .*",
     gettext_noop("must not have {param} in a word with spaces, quotes or other special characters")),
    (r"\{debug_port\} is empty without a browser; .*",
     gettext_noop("{debug_port} is empty without a browser; set needs_browser")),
    (r"must not name more than (?P<most>\d+) folders", gettext_noop("must not name more than %(most)s folders")),
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
)  # fmt: skip

register_labels(REASONS, PREFIXES, ERROR_PATTERNS)


MENU: list[tuple[str | Promise, list[tuple[str | Promise, str, str, str]]]] = [
    (
        _("RPA"),
        [
            (_("Shops"), "storefront", "rpa_tasks_shop_changelist", "rpa_tasks.view_shop"),
            (_("Jobs"), "smart_toy", "rpa_tasks_job_changelist", "rpa_tasks.view_job"),
            (_("Schedules of shops"), "event_repeat", "rpa_tasks_shop_schedules", "rpa_tasks.view_shop"),
            (_("Platforms"), "store", "rpa_tasks_platform_changelist", "rpa_tasks.view_platform"),
            (_("Flows"), "terminal", "rpa_tasks_flow_changelist", "rpa_tasks.view_flow"),
            (_("Execution nodes"), "dns", "rpa_tasks_executionnode_changelist", "rpa_tasks.view_executionnode"),
            (_("Demo orders"), "receipt_long", "rpa_tasks_demoorder_changelist", "rpa_tasks.view_demoorder"),
        ],
    ),
]  # fmt: skip


@admin.register(DemoOrder)
class DemoOrderAdmin(ReadOnlyAdmin):
    list_display = ("order_no", "shop_id", "status", "buyer", "amount", "version", "writes")
    search_fields = ("=order_no", "=shop_id")


@admin.register(DemoWatermark)
class DemoWatermarkAdmin(ReadOnlyAdmin):
    list_display = ("shop_id", "position", "lease_no")
