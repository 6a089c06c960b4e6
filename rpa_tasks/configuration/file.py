"""Sections `platforms`, `flows` and `shops` of the configuration file.

Operators pause platforms and shops at any time. The file may set `paused`; without it a pause stays, so that applying a
file never resumes what an operator has paused. The login of a shop is not configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.db import transaction

from rpa_tasks.configuration import validation
from rpa_tasks.jobs.wakeups import wake_for_shops
from rpa_tasks.models import DedupeBy, Flow, Job, Platform, Shop
from rpa_tasks.outcomes import DEFAULT_DELAYS
from scheduling.configuration.file.base import Change, Stamp
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.rows import RowSection, Wanted
from scheduling.configuration.file.schema import (
    DURATION,
    FLAG,
    KEY,
    Anything,
    Field,
    ListOf,
    MapOf,
    Seconds,
    Text,
    Whole,
)
from scheduling.models import WAITING


class Pausable(RowSection):
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
            waiting = Job.objects.filter(state__in=WAITING, **{column: change.row}).count()
            if waiting:
                draft.note(
                    f"{change.section.noun} “{change.label}” is retired: its waiting jobs ({waiting}) are cancelled"
                )


class Platforms(Pausable):
    name = "platforms"
    noun = "platform"
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
    )

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_platform(values)

    def changes(self, given: Any, draft: Draft) -> list[Change]:
        found = super().changes(given, draft)
        note_waiting_jobs(found, draft, "shop__platform")
        return found

    def shops_of(self, row: Any) -> Any:
        return row.shops.filter(retired_at=None)


class Flows(RowSection):
    name = "flows"
    noun = "flow"
    tables = (Flow,)
    model = Flow
    identity = ("platform", "task_type")
    fields = (
        Field("platform", KEY, refers="platforms"),
        Field("task_type", KEY),
        Field("command", ListOf(Text(4_000, empty=True))),
        Field("timeout", DURATION, default=timedelta(seconds=600)),
        Field("needs_browser", FLAG, default=True),
        Field("idempotent", FLAG, default=False),
        Field("exit_codes", MapOf(ListOf(Whole())), default={}),
        Field("payload_schema", Anything(), default={}),
        Field("needs_result", FLAG, default=False),
        Field("retry_delays", ListOf(Seconds()), default=list(DEFAULT_DELAYS)),
        Field("clear_cookies", FLAG, default=False),
        Field("dedupe_by", Text(10), default=DedupeBy.PAYLOAD.value),
        Field("environment", ListOf(Text(100)), default=[]),
        Field("path", ListOf(Text(1_000)), default=[]),
    )

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_flow(values)
        if "command" in values and (problem := validation.missing_program(values)):
            draft.note(f"flow {values.get('platform')}/{values.get('task_type')}: {problem} on this machine")

    def changes(self, given: Any, draft: Draft) -> list[Change]:
        found = super().changes(given, draft)
        note_waiting_jobs(found, draft, "flow")
        return found


class Shops(Pausable):
    name = "shops"
    noun = "shop"
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
    )

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        taken = dict(draft.once("browser profiles", lambda: validation.map_profiles_to_shops(draft.rows(self.name))))
        own = self.row_of((values.get("platform"), values.get("shop_id")), draft)
        if own is not None:
            taken.pop(own.profile, None)
        validation.check_shop(values, taken)

    def read(self, given: Any, draft: Draft) -> list[Wanted]:
        wanted = super().read(given, draft)
        paths: dict[str, str] = {}
        for each in wanted:
            profile = validation.profile_of(each.values)
            if profile in paths:
                draft.problem(f"{each.path}.profile_id", f"browser profile “{profile}” is used at {paths[profile]} too")
            paths.setdefault(profile, each.path)
        return wanted

    def changes(self, given: Any, draft: Draft) -> list[Change]:
        found = super().changes(given, draft)
        note_waiting_jobs(found, draft, "shop")
        return found

    def shops_of(self, row: Any) -> Any:
        return Shop.objects.filter(pk=row.pk)
