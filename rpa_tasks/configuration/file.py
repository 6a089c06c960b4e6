"""Sections `platforms`, `flows` and `shops` of the configuration file, and the rows of a new deployment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.db import transaction
from django.db.models import Count, Q
from django.utils.timezone import now

from rpa_tasks.configuration import validation
from rpa_tasks.configuration.browser_settings import (
    LISTS,
    SECRETS,
    SETTINGS,
    find_browser_address,
    find_shared_browsers,
    map_browsers_to_shops,
    needs_new_password,
    normalize_address,
)
from rpa_tasks.jobs.wakeups import wake_for_shops
from rpa_tasks.models import DedupePeriod, Flow, Job, Platform, Shop
from scheduling.configuration.file.notation import ANY_MAPPING, SECONDS, WHOLE, choice, list_of, map_of, text
from scheduling.configuration.file.section import Change, Field, Key, Listed, Place, Section, Stamp
from scheduling.error_text import ErrorText as _
from scheduling.models import WAITING

if TYPE_CHECKING:
    from scheduling.configuration.file.apply import Plan


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


BROWSER_FIELDS = (
    *(
        Field(
            f"browser.{path}", "browser", list_of(text(500)) if name in LISTS else text(500, empty=True),
            [] if name in LISTS else "", member=name,
        )
        for name, path in SETTINGS.items()
    ),
    *(
        Field(f"browser.{path}", "proxy_secret", text(255, empty=True), "", member=name)
        for name, path in SECRETS.items()
    ),
)  # fmt: skip
PASSWORD, PROVIDER = f"browser.{SECRETS['password']}", f"browser.{SETTINGS['cdp_url']}"


class Pausable(Section):
    """Section of rows with browser settings and `paused`. An absent `paused` keeps the present one."""

    scope = "rpa.configure"
    left_out = frozenset({"browser", "login_state"})
    further = BROWSER_FIELDS

    def own_defaults(self, values: Mapping[str, Any], position: int, stored: Any = None) -> dict[str, Any]:
        return {"paused": stored is not None and stored.retired_at is None and stored.paused}

    def read_entry(
        self, entry: dict[str, Any], position: int, path: str, earlier: Mapping[Key, Listed], plan: Plan
    ) -> Listed | None:
        one = super().read_entry(entry, position, path, earlier, plan)
        if one is not None and isinstance(address := one.row.browser.get("cdp_url"), str):
            one.row.browser["cdp_url"] = normalize_address(address)
        return one

    def check_among(self, one: Listed, plan: Plan) -> None:
        if one.row.paused and "paused" not in one.entry:
            plan.note(f"{one.path}: is paused and stays so; “paused: false” would end it")

    def find_secrets(self, entry: Mapping[str, Any]) -> Iterable[Place]:
        return [("browser", *path.split(".")) for path in SECRETS.values()]

    def find_forbidden_secret(self, kept: Iterable[Place], stored: Any, row: Any) -> tuple[str, str] | None:
        if needs_new_password(stored, row.browser.get("proxy_url", "")):
            return PASSWORD, _("must be entered with the user name for another proxy")
        return None

    def store(self, change: Change, stamp: Stamp) -> None:
        super().store(change, stamp)
        if change.before is not None and change.before.paused and change.after is not None and not change.after.paused:
            shops = list(self.list_shops(change.after).values_list("pk", flat=True))
            transaction.on_commit(lambda: wake_for_shops(shops), robust=True)

    def list_shops(self, row: Any) -> Any:
        """Return the shops that a pause of this row stops."""
        raise NotImplementedError


def note_waiting_jobs(changes: Sequence[Change], plan: Plan, column: str) -> None:
    """Add a note about jobs of retired rows, which the next pass cancels."""
    retired = {change.before.pk: change for change in changes if change.verb == "retired"}
    jobs = Job.objects.filter(Q((f"{column}__in", list(retired))), state__in=WAITING, paused_by="")
    for pk, waiting in jobs.values_list(column).annotate(Count("pk")).order_by() if retired else ():
        change = retired[pk]
        plan.note(f"{change.section.noun} “{change.label}” is retired: its waiting jobs ({waiting}) are cancelled")


def _map_templates(plan: Plan) -> dict[str, str]:
    """Map platforms to their address of a browser elsewhere as of after the file is applied."""
    found: dict[str, str] = plan.once(
        "browsers of platforms",
        lambda: {key: row.browser.get("cdp_url", "") for (key,), row in plan.in_use(Platform).items()},
    )
    return found


class Platforms(Pausable):
    name = "platforms"
    noun = "platform"
    model = Platform
    paths = {"check_task_type": "check"}

    def check_values(self, values: Mapping[str, Any], one: Listed, plan: Plan) -> None:
        task_types = {task_type for platform, task_type in plan.in_use(Flow) if (platform,) == one.key}
        validation.check_platform(values, task_types, one.stored)

    def check_among(self, one: Listed, plan: Plan) -> None:
        super().check_among(one, plan)
        if "shops" in plan.document:
            return  # their section compares the browsers
        shops = plan.stored(plan.section_of[Shop]).values()
        shared = plan.once("shared browsers", lambda: list(find_shared_browsers(shops, _map_templates(plan))))
        for shop, problem in shared:
            if shop.platform.key == one.row.key:
                plan.problem(f"{one.path}.{PROVIDER}", problem)

    def note_changes(self, changes: Sequence[Change], plan: Plan) -> None:
        note_waiting_jobs(changes, plan, "shop__platform")

    def list_shops(self, row: Any) -> Any:
        return row.shops.filter(retired_at=None)


class Flows(Section):
    name = "flows"
    noun = "flow"
    scope = "rpa.commands"
    model = Flow
    identity = ("platform", "task_type")
    required = frozenset({"idempotent"})
    paths = {"dedupe_by": "dedupe.key", "dedupe_": "dedupe."}
    notations = {
        "command": list_of(text(4_000, empty=True)),
        "exit_codes": map_of(list_of(WHOLE)),
        "payload_schema": ANY_MAPPING,
        "retry_delays": list_of(SECONDS),
        "dedupe_period": choice({"none": "", **{each: each for each in DedupePeriod.values}}),
        "environment": list_of(text(100)),
        "path": list_of(text(1_000)),
        "env": map_of(text(4_000, empty=True)),
    }

    def check_among(self, one: Listed, plan: Plan) -> None:
        row = one.row
        if problem := validation.missing_program({"command": row.command, "path": row.path, "cwd": row.cwd}):
            plan.note(f"flow {self.label(row)}: {problem} on this machine")

    def note_changes(self, changes: Sequence[Change], plan: Plan) -> None:
        note_waiting_jobs(changes, plan, "flow")
        for change in changes if "platforms" not in plan.document else ():
            row = change.before
            if change.verb == "retired" and row.platform.check_task_type == row.task_type:
                plan.note(f"flow “{change.label}” is retired: it no longer checks logins of its platform")


class Shops(Pausable):
    name = "shops"
    noun = "shop"
    model = Shop
    identity = ("platform", "shop_id")

    def check_values(self, values: Mapping[str, Any], one: Listed, plan: Plan) -> None:
        shops = plan.stored(self).values()
        taken = dict(plan.once("browser profiles", lambda: validation.map_profiles_to_shops(shops)))
        # `check_among` compares the addresses that the platforms give, as of after the file is applied.
        browsers = dict(plan.once("browsers elsewhere", lambda: map_browsers_to_shops(shops, {})))
        if one.stored is not None:
            taken.pop(one.stored.profile, None)
            browsers.pop(find_browser_address(one.stored.browser.get("cdp_url", ""), ""), None)
        validation.check_shop(values, taken, browsers)

    def check_among(self, one: Listed, plan: Plan) -> None:
        super().check_among(one, plan)
        profiles = plan.once("profiles of the file", dict)
        first = profiles.setdefault(one.row.profile, one.path)
        if first != one.path:
            problem = _("browser profile “%(profile)s” is used at %(path)s too", profile=one.row.profile, path=first)
            plan.problem(f"{one.path}.profile_id", problem)
        browsers = plan.once("browsers of the file", lambda: self._map_unlisted_browsers(plan))
        own, template = one.row.browser.get("cdp_url", ""), _map_templates(plan).get(one.row.platform.key, "")
        address = find_browser_address(own, template, one.row.shop_id)
        if address and (other := browsers.setdefault(address, one.path)) != one.path:
            plan.problem(f"{one.path}.{PROVIDER}", _("this browser is used at %(path)s too", path=other))

    def _map_unlisted_browsers(self, plan: Plan) -> dict[str, str]:
        absent = (row for key, row in plan.stored(self).items() if key not in plan.listed[self.name])
        return map_browsers_to_shops(absent, _map_templates(plan))

    def note_changes(self, changes: Sequence[Change], plan: Plan) -> None:
        note_waiting_jobs(changes, plan, "shop")

    def list_shops(self, row: Any) -> Any:
        return Shop.objects.filter(pk=row.pk)
