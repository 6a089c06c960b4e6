"""Validation of platforms, flows and shops, their sections of a configuration file, and rows of a new deployment."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jsonschema_rs
from django.db import transaction
from django.db.models import Count, Q
from django.utils.timezone import now

from rpa_tasks.browser_settings import (
    LISTS,
    SECRETS,
    SETTINGS,
    check_browser_settings,
    find_browser_address,
    find_shared_browsers,
    map_browsers_to_shops,
    needs_new_password,
    normalize_address,
)
from rpa_tasks.jobs.ledger import TIERS
from rpa_tasks.jobs.payloads import unstorable_reason
from rpa_tasks.jobs.wakeups import wake_for_shops
from rpa_tasks.models import DedupePeriod, Flow, Job, Platform, Shop
from rpa_tasks.supervisor.command import MOST_FOLDERS, check_program, check_words
from rpa_tasks.supervisor.runs import MARKERS
from scheduling.configuration.file.notation import ANY_MAPPING, WHOLE, choice, list_of, map_of, text
from scheduling.configuration.file.section import Change, Field, Listed, Place, Plan, Section, Stamp
from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector, InvalidInput
from scheduling.models import WAITING
from scheduling.models.versioned import rules_of
from scheduling.policy.send_times import is_time_zone
from scheduling.strict_text import find_unstorable_text

# Values have the names of the model's fields; absent ones are skipped. `platform` is always the platform's key.


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
    """Check a platform among other rows. `task_types` are those of its flows in use. If it exists, `stored` is its row,
    and `shops` are all shops, for the browsers elsewhere.
    """
    found = ErrorCollector()
    check = values.get("check_task_type", "")
    if check and check not in task_types:
        found.add(
            "check_task_type",
            _("%(platform)s has no task type “%(name)s”", platform=values.get("key") or _("the platform"), name=check),
        )
    check_browser_settings(values, found, is_platform=True, stored=stored, shops=shops)
    found.raise_if_any()


@rules_of(Flow)
def check_flow(values: Mapping[str, Any], found: ErrorCollector) -> None:
    """Check a flow, without the program: this machine may be no execution node."""
    if "command" in values:
        problems = check_words(values["command"])
        if not problems and values.get("needs_browser") is False and "{debug_port}" in values["command"]:
            problems = [_("{debug_port} is empty without a browser; set needs_browser")]
        for problem in problems:
            found.add("command", problem)
    _check_path(values, found)
    _check_period(values, found)
    _check_exit_codes(values.get("exit_codes", {}), found)
    _check_schema(values.get("payload_schema", {}), found)
    _check_environment(values, found)
    _check_fixed_variables(values, found)
    cwd = values.get("cwd", "")
    if cwd and (not isinstance(cwd, str) or not cwd.startswith("/") or len(cwd) > MAX_FOLDER or "\0" in cwd):
        found.add("cwd", _("must be an absolute folder of at most %(most)s characters", most=MAX_FOLDER))


def _check_period(values: Mapping[str, Any], found: ErrorCollector) -> None:
    period, timezone = values.get("dedupe_period", ""), values.get("dedupe_timezone", "")
    if period and values.get("dedupe_window"):
        found.add("dedupe_period", _("has no effect beside a time span; remove one of the two"))
    if timezone and not is_time_zone(timezone):
        found.add("dedupe_timezone", _("must be a time zone like Asia/Shanghai"))
    elif timezone and not period:
        found.add("dedupe_timezone", _("has no effect without a period; remove it or set the period"))


def _check_path(values: Mapping[str, Any], found: ErrorCollector) -> None:
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
    """Check a shop. `taken` maps the browser profiles of all shops, retired ones included, to their shops; `browsers`
    maps the addresses of their browsers that run elsewhere. `inherited` is the address from its platform.

    A profile has the cookies of its shop, so another shop may never get it.
    """
    own = f"{values.get('platform')}/{values.get('shop_id')}"
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
    profile = values.get("profile_id", "")
    if profile and not _PROFILE.fullmatch(profile):
        found.add(
            "profile_id", _("names a directory: only letters, digits, “-”, “_” and “.”, at most 140, no “.” in front")
        )
    elif (other := (taken or {}).get(name := profile_of(values), own)) != own:
        found.add(
            "profile_id",
            _("browser profile “%(name)s” belongs to %(shop)s; set another one", name=name, shop=other),
        )
    check_browser_settings(values, found, taken=browsers, own=own, inherited=inherited)
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
        elif not isinstance(codes, list) or not all(type(code) is int and 1 <= code <= 255 for code in codes):
            found.add(field, _("must be a list of whole numbers from 1 to 255"))
        else:
            for code in codes:
                if code in owner:
                    found.add(field, _("%(code)s is listed already, as %(name)s", code=code, name=owner[code]))
                owner.setdefault(code, name)


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
    names = values.get("environment", [])
    if not isinstance(names, list):
        return
    if len(names) > MAX_VARIABLES:
        found.add("environment", _("must not name more than %(most)s variables", most=MAX_VARIABLES))
    for name in names:
        if problem := _find_name_problem(name):
            found.add("environment", problem)


def _find_name_problem(name: Any) -> str:
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        return _("“%(name)s” is not the name of an environment variable", name=name)
    if name in OWN_VARIABLES:
        return _("%(name)s is set for every run anyway", name=name)
    return _("%(name)s is never given to a command", name=name) if name in FORBIDDEN_VARIABLES else ""


def _check_fixed_variables(values: Mapping[str, Any], found: ErrorCollector) -> None:
    fixed, named = values.get("env", {}), values.get("environment", [])
    if not isinstance(fixed, dict):
        found.add("env", _("must be a mapping of names to texts"))
        return
    if len(fixed) > MAX_VARIABLES:
        found.add("env", _("must not name more than %(most)s variables", most=MAX_VARIABLES))
    for name, value in fixed.items():
        if problem := _find_name_problem(name):
            found.add("env", problem)
        elif name == MOUNTED_VARIABLE or name.startswith(LOADER_VARIABLES):
            found.add("env", _("%(name)s is never given to a command", name=name))
        elif isinstance(named, list) and name in named:
            found.add("env", _("%(name)s is named in environment already", name=name))
        elif not isinstance(value, str) or len(value) > MAX_VALUE or find_unstorable_text(value):
            found.add(
                "env",
                _("%(name)s must be a text of at most %(most)s characters without NUL", name=name, most=MAX_VALUE),
            )


PLATFORMS = {"pdd": "拼多多", "temu": "Temu", "tiktok": "TikTok Shop"}
#: Whether a repeat has no second effect.
TASK_TYPES = {"sync_order": True, "refresh_goods": True, "batch_reply": False}
#: The call of an RPA tool; its program is to be replaced.
COMMAND = ["rpa-cli", "run", "--flow", "{flow}", "--param", "{param}", "--timeout", "{timeout}"]


def ship_platforms() -> str:
    """Create the platforms and flows as retired rows, while there is no platform. Returns a line for the operator."""
    if Platform.objects.exists():
        return ""
    at = now()
    for key, name in PLATFORMS.items():
        platform = Platform.objects.create(key=key, name=name, retired_at=at)
        for task_type, idempotent in TASK_TYPES.items():
            Flow.objects.create(
                platform=platform, task_type=task_type, command=COMMAND, idempotent=idempotent, retired_at=at
            )
    return f"Shipped platforms, not in use: {', '.join(PLATFORMS)}"


# Sections `platforms`, `flows` and `shops` of the configuration file.
#
# Operators pause platforms and shops at any time. The file may set `paused`; without it a pause stays, so that
# applying a file never resumes what an operator has paused. The login of a shop is not configuration.


SETTING = text(500, empty=True)
BROWSER_NOTATIONS = {
    **dict.fromkeys(LISTS, list_of(text(500))),
    "cdp_url": replace(SETTING, read=lambda given: normalize_address(SETTING.read(given))),
}
BROWSER_FIELDS = (
    *(
        Field(
            f"browser.{path}", "browser", BROWSER_NOTATIONS.get(name, SETTING), [] if name in LISTS else "",
            member=name,
        )
        for name, path in SETTINGS.items()
    ),
    *(
        Field(f"browser.{path}", "proxy_secret", text(255, empty=True), "", member=name)
        for name, path in SECRETS.items()
    ),
)  # fmt: skip
PASSWORD, PROVIDER = f"browser.{SECRETS['password']}", f"browser.{SETTINGS['cdp_url']}"


class JobSection(Section):
    """Section of rows that jobs belong to."""

    jobs: ClassVar[str]  #: lookup of the row from a job

    def note_changes(self, changes: Sequence[Change], plan: Plan) -> None:
        """Add a note about jobs of retired rows, which the next pass cancels."""
        retired = {change.before.pk: change for change in changes if change.verb == "retired"}
        jobs = Job.objects.filter(Q((f"{self.jobs}__in", list(retired))), state__in=WAITING)
        for pk, waiting in jobs.values_list(self.jobs).annotate(count=Count("*")).order_by() if retired else ():
            plan.note(f"{self.noun} “{retired[pk].label}” is retired: its waiting jobs ({waiting}) are cancelled")


class Pausable(JobSection):
    """Section of rows with browser settings and `paused`. An absent `paused` keeps the present one."""

    shops: ClassVar[str]  #: lookup of the row from a shop that its pause stops
    scope = "rpa.configure"
    left_out = frozenset({"browser", "login_state"})
    further = BROWSER_FIELDS

    def own_defaults(self, values: Mapping[str, Any], position: int, stored: Any = None) -> dict[str, Any]:
        return {"paused": stored is not None and stored.retired_at is None and stored.paused}

    def check_among(self, rows: Sequence[Listed], plan: Plan) -> None:
        for one in rows:
            if one.row.paused and "paused" not in one.entry:
                plan.note(f"{one.path}: is paused and stays so; “paused: false” would end it")

    def find_secrets(self, entry: Mapping[str, Any]) -> Iterable[Place]:
        return [("browser", *path.split(".")) for path in SECRETS.values()]

    def check_kept_secrets(self, kept: Iterable[Place], stored: Any, row: Any) -> None:
        if needs_new_password(stored, row.browser.get("proxy_url", "")):
            raise InvalidInput.of(PASSWORD, _("must be entered with the user name for another proxy"))

    def store(self, change: Change, stamp: Stamp) -> None:
        super().store(change, stamp)
        if change.before is not None and change.before.paused and change.after is not None and not change.after.paused:
            stopped = Shop.objects.filter(Q((self.shops, change.after.pk)), retired_at=None)
            shops = list(stopped.values_list("pk", flat=True))
            transaction.on_commit(lambda: wake_for_shops(shops), robust=True)


def _map_templates(plan: Plan) -> dict[str, str]:
    """Map platforms to their address of a browser elsewhere as of after the file is applied."""
    return {key: row.browser.get("cdp_url", "") for (key,), row in plan.in_use(Platform).items()}


class Platforms(Pausable):
    name = "platforms"
    noun = "platform"
    model = Platform
    jobs, shops = "shop__platform", "platform"
    paths = {"check_task_type": "check"}

    def check_among(self, rows: Sequence[Listed], plan: Plan) -> None:
        super().check_among(rows, plan)
        task_types: dict[str, list[str]] = {}
        for platform, task_type in plan.in_use(Flow):
            task_types.setdefault(platform, []).append(task_type)
        for one in rows:
            with self.errors_at(one):
                check_platform(self.read_values(one.row), task_types.get(one.row.key, ()), one.stored)
        if "shops" in plan.document:
            return  # their section compares the browsers
        paths = {one.row.key: one.path for one in rows}
        shops = plan.stored(plan.section_of[Shop]).values()
        for shop, problem in find_shared_browsers(shops, _map_templates(plan)):
            if shop.platform.key in paths:
                raise InvalidInput.of(f"{paths[shop.platform.key]}.{PROVIDER}", problem)


class Flows(JobSection):
    name = "flows"
    noun = "flow"
    scope = "rpa.commands"
    model = Flow
    jobs = "flow"
    identity = ("platform", "task_type")
    required = frozenset({"idempotent"})
    paths = {"dedupe_by": "dedupe.key", "dedupe_": "dedupe."}
    notations = {
        "command": list_of(text(4_000, empty=True)),
        "exit_codes": map_of(list_of(WHOLE)),
        "payload_schema": ANY_MAPPING,
        "dedupe_period": choice({"none": "", **{each: each for each in DedupePeriod.values}}),
        "env": map_of(text(4_000, empty=True)),
    }

    def check_among(self, rows: Sequence[Listed], plan: Plan) -> None:
        for row in (one.row for one in rows):
            if problem := check_program(row.command[0], row.path, row.cwd):
                plan.note(f"flow {self.label(row)}: {problem} on this machine")

    def note_changes(self, changes: Sequence[Change], plan: Plan) -> None:
        super().note_changes(changes, plan)
        for change in changes if "platforms" not in plan.document else ():
            row = change.before
            if change.verb == "retired" and row.platform.check_task_type == row.task_type:
                plan.note(f"flow “{change.label}” is retired: it no longer checks logins of its platform")


class Shops(Pausable):
    name = "shops"
    noun = "shop"
    model = Shop
    jobs, shops = "shop", "pk"
    identity = ("platform", "shop_id")

    def check_among(self, rows: Sequence[Listed], plan: Plan) -> None:
        super().check_among(rows, plan)
        stored, templates = plan.stored(self), _map_templates(plan)
        taken = map_profiles_to_shops(stored.values())
        # The addresses that the platforms give are compared below, as of after the file is applied.
        browsers = map_browsers_to_shops(stored.values(), {})
        for one in rows:
            with self.errors_at(one):
                check_shop(self.read_values(one.row), taken, browsers)
        profiles: dict[str, str] = {}
        unlisted = (row for key, row in stored.items() if key not in plan.listed[self.name])
        addresses = map_browsers_to_shops(unlisted, templates)
        for one in rows:
            row, found = one.row, ErrorCollector()
            if (first := profiles.setdefault(row.profile, one.path)) != one.path:
                problem = _("browser profile “%(profile)s” is used at %(path)s too", profile=row.profile, path=first)
                found.add("profile_id", problem)
            template = templates.get(row.platform.key, "")
            address = find_browser_address(row.browser.get("cdp_url", ""), template, row.shop_id)
            if address and (other := addresses.setdefault(address, one.path)) != one.path:
                found.add(PROVIDER, _("this browser is used at %(path)s too", path=other))
            with self.errors_at(one):
                found.raise_if_any()
