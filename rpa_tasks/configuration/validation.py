"""Validate platforms, flows and shops for admin forms and configuration files.

Values have the names of the model's fields; absent ones are skipped. One `InvalidInput` contains all errors. `platform`
is always the platform's key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any
from zoneinfo import available_timezones

import jsonschema_rs

from rpa_tasks.configuration.browser_settings import check_browser_settings
from rpa_tasks.jobs.payloads import unstorable_reason
from rpa_tasks.jobs.pick import TIERS
from rpa_tasks.models import DedupeBy, DedupePeriod, Flow, Platform, Shop
from rpa_tasks.supervisor.command import MOST_FOLDERS, check_program, check_words
from rpa_tasks.supervisor.runs import MARKERS
from scheduling.configuration.validation import check_retry_delays
from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector
from scheduling.models.checked import rules_of
from scheduling.strict_text import find_unstorable_text

MIN_TIMEOUT, MAX_TIMEOUT = timedelta(seconds=1), timedelta(hours=24)
MAX_WINDOW = timedelta(days=31)
MAX_BACKLOG = 1_000_000
MAX_SCHEMA = 65_536  #: characters
EXIT_CLASSES = ("transient", "business", "session", "platform")
MAX_VARIABLES = 50
MAX_VALUE = 4_000  #: characters of a variable's value
MAX_FOLDER = 1_000  #: characters
#: Variables that the runner sets; the flow's value would be replaced.
OWN_VARIABLES = {"PATH", "HOME", "LANG", "TZ", "TMPDIR", *MARKERS}
#: With these a command could sign in as any user and read the secrets of every channel.
FORBIDDEN_VARIABLES = {
    "DJANGO_SECRET_KEY", "AFTERTOUCH_SECRETS_KEYS", "AFTERTOUCH_RPA_SECRETS_KEYS", "REDIS_URL", "CELERY_BROKER_URL",
    "AFTERTOUCH_GATEWAY_REDIS_URL", "AFTERTOUCH_SESSIONS_REDIS_URL", "AFTERTOUCH_SENTINEL_URL_OPTIONS",
    "AFTERTOUCH_EMAIL_URL", "AFTERTOUCH_FLOWER_AUTH", "FLOWER_BASIC_AUTH", "AFTERTOUCH_OIDC_CLIENT_SECRET",
    "AFTERTOUCH_HTTP_PROXY", "AFTERTOUCH_CHATWOOT_SECRET", "AFTERTOUCH_ROCKETCHAT_TOKEN",
}  # fmt: skip
#: Its directories are mounted for a command that runs in isolation; only the node may name them.
MOUNTED_VARIABLE = "AFTERTOUCH_RPA_FLOWS"
#: Prefixes of variables that the dynamic linker reads. The program that isolates a command would obey them first.
LOADER_VARIABLES = ("LD_", "GLIBC_TUNABLES", "GCONV_PATH")

#: It is part of the names of a directory and a queue.
_SHOP_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PROFILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,139}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


def check_platform(
    values: Mapping[str, Any],
    task_types: Collection[str] = (),
    stored: Platform | None = None,
    shops: Iterable[Shop] = (),
) -> None:
    """Check a platform. `task_types` are those of its flows in use. If it exists, `stored` is its row, and `shops` are
    all shops, for the browsers elsewhere.
    """
    found = ErrorCollector()
    found.key(values)
    check = values.get("check_task_type", "")
    if check and check not in task_types:
        found.add(
            "check_task_type",
            _("%(platform)s has no task type “%(name)s”", platform=values.get("key") or "it", name=check),
        )
    _check_name(values, found, longest=100)
    found.number(values, "backlog_limit", 1, MAX_BACKLOG)
    found.number(values, "breaker_threshold", 1, 100)
    check_browser_settings(values, found, is_platform=True, stored=stored, shops=shops)
    found.raise_if_any()


@rules_of(Flow)
def check_flow(values: Mapping[str, Any]) -> None:
    """Check a flow, without the program on this machine: see `missing_program`."""
    found = ErrorCollector()
    found.key(values, "task_type")
    if "command" in values:
        for problem in check_words(values["command"]):
            found.add("command", problem)
        if values.get("needs_browser") is False and any("{debug_port}" in word for word in map(str, values["command"])):
            found.add("command", _("{debug_port} is empty without a browser; set needs_browser"))
    _check_path(values, found)
    if values.get("dedupe_by", DedupeBy.PAYLOAD) not in DedupeBy.values:
        found.add("dedupe_by", _("must be one of %(known)s", known=", ".join(DedupeBy.values)))
    found.span(values, "timeout", least=MIN_TIMEOUT, most=MAX_TIMEOUT)
    found.span(values, "dedupe_window", least=MIN_TIMEOUT, most=MAX_WINDOW)
    _check_period(values, found)
    _check_exit_codes(values.get("exit_codes", {}), found)
    _check_schema(values.get("payload_schema", {}), found)
    check_retry_delays(values, found)
    _check_environment(values, found)
    _check_fixed_variables(values, found)
    cwd = values.get("cwd", "")
    if cwd and (not isinstance(cwd, str) or not cwd.startswith("/") or len(cwd) > MAX_FOLDER or "\0" in cwd):
        found.add("cwd", _("must be an absolute folder of at most %(most)s characters", most=MAX_FOLDER))
    found.raise_if_any()


def _check_period(values: Mapping[str, Any], found: ErrorCollector) -> None:
    period, timezone = values.get("dedupe_period", ""), values.get("dedupe_timezone", "")
    if period and period not in DedupePeriod.values:
        found.add("dedupe_period", _("must be one of %(known)s", known=", ".join(DedupePeriod.values)))
    if period and values.get("dedupe_window"):
        found.add("dedupe_period", _("has no effect beside a time span; remove one of the two"))
    if timezone and timezone not in available_timezones():
        found.add("dedupe_timezone", _("must be a time zone like Asia/Shanghai"))
    elif timezone and not period:
        found.add("dedupe_timezone", _("has no effect without a period; remove it or set the period"))


def missing_program(values: Mapping[str, Any]) -> str:
    """Return why the command of a valid flow cannot be started on this machine, or "". It may be no execution node."""
    return check_program(values["command"][0], values.get("path", []), values.get("cwd", ""))


def _check_path(values: Mapping[str, Any], found: ErrorCollector) -> None:
    found.texts(values, "path", longest=MAX_FOLDER)
    folders = values.get("path", [])
    if not isinstance(folders, list):
        return
    if len(folders) > MOST_FOLDERS:
        found.add("path", _("must not name more than %(most)s folders", most=MOST_FOLDERS))
    for folder in folders:
        if not isinstance(folder, str) or not folder.startswith("/") or ":" in folder or "\0" in folder:
            found.add("path", _("“%(name)s” is not an absolute folder without “:”", name=folder))


def check_shop(
    values: Mapping[str, Any],
    taken: Mapping[str, str] | None = None,
    browsers: Mapping[str, str] | None = None,
    inherited: str = "",
) -> None:
    """Check a shop. `taken` maps the browser profiles of all other shops, retired ones included, to their shops;
    `browsers` maps the addresses of their browsers that run elsewhere. `inherited` is the address from its platform.

    A profile has the cookies of its shop, so another shop may never get it.
    """
    found = ErrorCollector()
    if "shop_id" in values and not _SHOP_ID.fullmatch(str(values["shop_id"])):
        found.add(
            "shop_id",
            _("must start with a letter or digit and have only letters, digits, “-”, “_” and “.”, at most 64"),
        )
    if values.get("dedicated_queue") and values.get("shop_id") in TIERS.values():
        # On RabbitMQ its routing key would be one of the shared queue.
        found.add(
            "shop_id",
            _("“%(name)s” is a queue of all shops; this shop can have no queue of its own", name=values["shop_id"]),
        )
    _check_name(values, found, longest=200)
    profile = values.get("profile_id", "")
    if profile and not _PROFILE.fullmatch(profile):
        found.add(
            "profile_id", _("names a directory: only letters, digits, “-”, “_” and “.”, at most 140, no “.” in front")
        )
    elif (name := profile_of(values)) in (taken or {}):
        found.add(
            "profile_id",
            _("browser profile “%(name)s” belongs to %(shop)s; set another one", name=name, shop=(taken or {})[name]),
        )
    found.number(values, "backlog_limit", 1, MAX_BACKLOG)
    check_browser_settings(values, found, taken=browsers, inherited=inherited)
    found.raise_if_any()


def profile_of(values: Mapping[str, Any]) -> str:
    """Return the value of `Shop.profile` for these values, or "" if they are incomplete."""
    if values.get("profile_id"):
        return str(values["profile_id"])
    known = values.get("platform") and values.get("shop_id")
    return f"{values['platform']}-{values['shop_id']}" if known else ""


def map_profiles_to_shops(shops: Iterable[Shop]) -> dict[str, str]:
    """Map each browser profile to its shop. The shops come with their platforms."""
    return {shop.profile: f"{shop.platform.key}/{shop.shop_id}" for shop in shops}


def _check_name(values: Mapping[str, Any], found: ErrorCollector, *, longest: int) -> None:
    if len(values.get("name", "")) > longest:
        found.add("name", _("must not be longer than %(most)s characters", most=longest))


def _check_exit_codes(table: Any, found: ErrorCollector) -> None:
    if not isinstance(table, dict):
        found.add(
            "exit_codes",
            _("must be a mapping of %(classes)s to lists of exit codes", classes=", ".join(EXIT_CLASSES)),
        )
        return
    owner: dict[int, str] = {}
    for name, codes in table.items():
        field = f"exit_codes.{name}"
        if name not in EXIT_CLASSES:
            found.add(field, _("is not known here; known are %(known)s", known=", ".join(EXIT_CLASSES)))
        elif not isinstance(codes, list) or not all(_is_exit_code(code) for code in codes):
            found.add(field, _("must be a list of whole numbers from 1 to 255"))
        else:
            for code in codes:
                if code in owner:
                    found.add(field, _("%(code)s is listed already, as %(name)s", code=code, name=owner[code]))
                owner.setdefault(code, name)


def _is_exit_code(code: Any) -> bool:
    return isinstance(code, int) and not isinstance(code, bool) and 1 <= code <= 255


def _check_schema(schema: Any, found: ErrorCollector) -> None:
    if not isinstance(schema, dict):
        found.add("payload_schema", _("must be a mapping: a JSON schema"))
        return
    if problem := unstorable_reason(schema):
        found.add("payload_schema", problem[:200])
        return
    if len(repr(schema)) > MAX_SCHEMA:
        found.add("payload_schema", _("must not be longer than %(most)s characters", most=MAX_SCHEMA))
        return
    try:
        # A remote reference would let the author of a schema make our servers call any address.
        jsonschema_rs.validator_for(schema, offline=True)
    except jsonschema_rs.ValidationError as error:
        where = ".".join(["payload_schema", *map(str, error.instance_path)])
        found.add(where, error.message.splitlines()[0][:200])
    except ValueError as error:  # nested too deeply
        found.add("payload_schema", str(error)[:200])


def _check_environment(values: Mapping[str, Any], found: ErrorCollector) -> None:
    found.texts(values, "environment", longest=100)
    names = values.get("environment", [])
    if not isinstance(names, list):
        return
    if len(names) > MAX_VARIABLES:
        found.add("environment", _("must not name more than %(most)s variables", most=MAX_VARIABLES))
    for name in names:
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            found.add("environment", _("“%(name)s” is not the name of an environment variable", name=name))
        elif name in OWN_VARIABLES:
            found.add("environment", _("%(name)s is set for every run anyway", name=name))
        elif name in FORBIDDEN_VARIABLES:
            found.add("environment", _("%(name)s is never given to a command", name=name))


def _check_fixed_variables(values: Mapping[str, Any], found: ErrorCollector) -> None:
    fixed = values.get("env", {})
    if not isinstance(fixed, dict):
        found.add("env", _("must be a mapping of names to texts"))
        return
    if len(fixed) > MAX_VARIABLES:
        found.add("env", _("must not name more than %(most)s variables", most=MAX_VARIABLES))
    for name, value in fixed.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            found.add("env", _("“%(name)s” is not the name of an environment variable", name=name))
        elif name in OWN_VARIABLES:
            found.add("env", _("%(name)s is set for every run anyway", name=name))
        elif name in FORBIDDEN_VARIABLES or name == MOUNTED_VARIABLE or name.startswith(LOADER_VARIABLES):
            found.add("env", _("%(name)s is never given to a command", name=name))
        elif name in values.get("environment", []):
            found.add("env", _("%(name)s is named in environment already", name=name))
        elif not isinstance(value, str) or len(value) > MAX_VALUE or find_unstorable_text(value):
            found.add(
                "env",
                _("%(name)s must be a text of at most %(most)s characters without NUL", name=name, most=MAX_VALUE),
            )
