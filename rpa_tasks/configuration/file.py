"""Sections `platforms`, `flows` and `shops` of the configuration file.

Operators pause platforms and shops at any time. The file may set `paused`; without it a pause stays, so that applying a
file never resumes what an operator has paused. The login of a shop is not configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from django.db import transaction

from rpa_tasks.configuration import validation
from rpa_tasks.configuration.browser_section import BROWSER_FIELDS, PROVIDER, BrowserSection
from rpa_tasks.configuration.browser_settings import find_browser_address, find_shared_browsers, map_browsers_to_shops
from rpa_tasks.jobs.wakeups import wake_for_shops
from rpa_tasks.models import DedupeBy, DedupePeriod, Flow, Job, ParamStyle, Platform, Rerun, Shop
from rpa_tasks.outcomes import DEFAULT_DELAYS
from scheduling.configuration.file.base import Change, Stamp
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.rows import RowSection, Wanted
from scheduling.configuration.file.schema import (
    DURATION,
    FLAG,
    KEY,
    Anything,
    Choice,
    Field,
    ListOf,
    MapOf,
    Named,
    Seconds,
    Text,
    Whole,
)
from scheduling.error_text import ErrorText as _
from scheduling.models import WAITING

PERIOD = Named({"none": "", **{each: each for each in DedupePeriod.values}})


class Pausable(BrowserSection):
    """Section of rows with `paused`. An absent value keeps the present one."""

    def read_entry(self, entry: dict[str, Any], position: int, path: str, draft: Draft) -> dict[str, Any]:
        values = super().read_entry(entry, position, path, draft)
        if "paused" not in entry and all(column in values for column in self.identity):
            row = self.row_of(tuple(values[column] for column in self.identity), draft)
            values["paused"] = row is not None and row.retired_at is None and row.paused
            if values["paused"]:
                draft.note(f"{path}: is paused and stays so; “paused: false” would end it")
        return values

    def store(self, change: Change, stamp: Stamp) -> None:
        super().store(change, stamp)
        if change.before.get("paused") and not change.values.get("paused", True):
            shops = list(self.shops_of(change.row).values_list("pk", flat=True))
            transaction.on_commit(lambda: wake_for_shops(shops), robust=True)

    def shops_of(self, row: Any) -> Any:
        """Return the shops that a pause of this row stops."""
        raise NotImplementedError


def note_waiting_jobs(changes: list[Change], draft: Draft, column: str) -> None:
    """Add a note about jobs of retired rows, which the next pass cancels."""
    for change in changes:
        if change.verb == "retired":
            waiting = Job.objects.filter(state__in=WAITING, paused_by="", **{column: change.row}).count()
            if waiting:
                draft.note(
                    f"{change.section.noun} “{change.label}” is retired: its waiting jobs ({waiting}) are cancelled"
                )


class Platforms(Pausable):
    name = "platforms"
    noun = "platform"
    scope = "rpa.configure"
    tables = (Platform,)
    model = Platform
    fields = (
        Field("key", KEY),
        Field("name", Text(100, empty=True), default=""),
        Field("dedicated_queue", FLAG, default=False),
        Field("paused", FLAG, default=False),
        Field("backlog_limit", Whole(), default=10_000),
        Field("breaker_threshold", Whole(), default=3),
        Field("waits_for_home", FLAG, default=True),
        Field("check", Text(64, empty=True), column="check_task_type", default=""),
        *BROWSER_FIELDS,
    )

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        found = draft.once("task types", lambda: set(_list_task_types(draft)))
        key = values.get("key")
        task_types = {task_type for platform, task_type in found if platform == key}
        validation.check_platform(values, task_types, self.row_of((key,), draft))

    def read(self, given: Any, draft: Draft) -> list[Wanted]:
        wanted = super().read(given, draft)
        if "shops" in draft.document:
            return wanted  # the section of the shops compares their browsers
        places = {each.values.get("key"): each.path for each in wanted}
        for shop, problem in find_shared_browsers(draft.rows("shops"), _map_templates(draft)):
            if place := places.get(shop.platform.key):
                draft.problem(f"{place}.{PROVIDER}", problem)
        return wanted

    def changes(self, given: Any, draft: Draft) -> list[Change]:
        found = super().changes(given, draft)
        note_waiting_jobs(found, draft, "shop__platform")
        return found

    def shops_of(self, row: Any) -> Any:
        return row.shops.filter(retired_at=None)


def _map_templates(draft: Draft) -> dict[str, str]:
    """Map platforms to their address of a browser elsewhere as of after the file is applied."""
    if "platforms" not in draft.document:
        return {row.key: row.browser.get("cdp_url", "") for row in draft.rows("platforms")}
    found: dict[str, str] = {}
    entries = draft.document["platforms"] if isinstance(draft.document["platforms"], list) else []
    for entry in entries:
        value: Any = entry
        for name in PROVIDER.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(entry, dict) and isinstance(value, str):
            found[str(entry.get("key"))] = value
    return found


def _list_task_types(draft: Draft) -> Iterator[tuple[str, str]]:
    """Yield platform and task type of each flow in use as of after the file is applied."""
    if "flows" in draft.document:
        entries = draft.document["flows"] if isinstance(draft.document["flows"], list) else []
        for entry in entries:
            if isinstance(entry, dict):
                yield str(entry.get("platform")), str(entry.get("task_type"))
        return
    for row in draft.rows("flows"):
        if row.retired_at is None:
            yield row.platform.key, row.task_type


class Flows(RowSection):
    name = "flows"
    noun = "flow"
    scope = "rpa.commands"
    tables = (Flow,)
    model = Flow
    identity = ("platform", "task_type")
    fields = (
        Field("platform", KEY, refers="platforms"),
        Field("task_type", KEY),
        Field("command", ListOf(Text(4_000, empty=True))),
        Field("param_style", Choice(ParamStyle.values), default=ParamStyle.FLAT.value),
        Field("timeout", DURATION, default=timedelta(seconds=600)),
        Field("needs_browser", FLAG, default=True),
        Field("idempotent", FLAG),
        Field("exit_codes", MapOf(ListOf(Whole())), default={}),
        Field("payload_schema", Anything(), default={}),
        Field("needs_result", FLAG, default=False),
        Field("retry_delays", ListOf(Seconds()), default=list(DEFAULT_DELAYS)),
        Field("clear_cookies", FLAG, default=False),
        Field("dedupe.key", Choice(DedupeBy.values), column="dedupe_by", default=DedupeBy.PAYLOAD.value),
        Field("dedupe.window", DURATION, column="dedupe_window", default=None),
        Field("dedupe.period", PERIOD, column="dedupe_period", default=""),
        Field("dedupe.timezone", Text(64, empty=True), column="dedupe_timezone", default=""),
        Field("dedupe.rerun", Choice(Rerun.values), column="dedupe_rerun", default=Rerun.AFTER_FAILURE.value),
        Field("environment", ListOf(Text(100)), default=[]),
        Field("env", MapOf(Text(4_000, empty=True)), default={}),
        Field("path", ListOf(Text(1_000)), default=[]),
        Field("cwd", Text(1_000, empty=True), default=""),
    )

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_flow(values)
        if "command" in values and (problem := validation.missing_program(values)):
            draft.note(f"flow {values.get('platform')}/{values.get('task_type')}: {problem} on this machine")

    def changes(self, given: Any, draft: Draft) -> list[Change]:
        found = super().changes(given, draft)
        note_waiting_jobs(found, draft, "flow")
        if "platforms" not in draft.document:
            for change in found:
                if change.verb == "retired" and change.row.platform.check_task_type == change.row.task_type:
                    draft.note(f"flow “{change.label}” is retired: it no longer checks logins of its platform")
        return found


class Shops(Pausable):
    name = "shops"
    noun = "shop"
    scope = "rpa.configure"
    tables = (Shop,)
    model = Shop
    identity = ("platform", "shop_id")
    fields = (
        Field("platform", KEY, refers="platforms"),
        Field("shop_id", Text(64)),
        Field("name", Text(200, empty=True), default=""),
        Field("dedicated_queue", FLAG, default=False),
        Field("paused", FLAG, default=False),
        Field("profile_id", Text(140, empty=True), default=""),
        Field("backlog_limit", Whole(), default=100),
        *BROWSER_FIELDS,
    )

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        taken = dict(draft.once("browser profiles", lambda: validation.map_profiles_to_shops(draft.rows(self.name))))
        # `read` compares the addresses that the platforms give, as of after the file is applied.
        browsers = dict(draft.once("browsers elsewhere", lambda: map_browsers_to_shops(draft.rows(self.name), {})))
        own = self.row_of((values.get("platform"), values.get("shop_id")), draft)
        if own is not None:
            taken.pop(own.profile, None)
            browsers.pop(find_browser_address(own.browser.get("cdp_url", ""), ""), None)
        validation.check_shop(values, taken, browsers)

    def read(self, given: Any, draft: Draft) -> list[Wanted]:
        wanted = super().read(given, draft)
        paths: dict[str, str] = {}
        for each in wanted:
            profile = validation.profile_of(each.values)
            if profile in paths:
                draft.problem(
                    f"{each.path}.profile_id",
                    _("browser profile “%(profile)s” is used at %(path)s too", profile=profile, path=paths[profile]),
                )
            paths.setdefault(profile, each.path)
        templates, given_keys = _map_templates(draft), {each.key for each in wanted}
        absent = (row for row in draft.rows(self.name) if (row.platform.key, row.shop_id) not in given_keys)
        places = map_browsers_to_shops(absent, templates)
        for each in wanted:
            platform, shop_id = each.key
            address = find_browser_address(each.values.get(PROVIDER, ""), templates.get(platform, ""), shop_id)
            place = f"{each.path}.{PROVIDER}"
            if address and places.setdefault(address, each.path) != each.path and not draft.has_problem(place):
                draft.problem(place, _("this browser is used at %(path)s too", path=places[address]))
        return wanted

    def changes(self, given: Any, draft: Draft) -> list[Change]:
        found = super().changes(given, draft)
        note_waiting_jobs(found, draft, "shop")
        return found

    def shops_of(self, row: Any) -> Any:
        return Shop.objects.filter(pk=row.pk)
