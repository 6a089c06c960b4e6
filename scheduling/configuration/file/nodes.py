"""Read and write sections `stages` and `nodes`: the matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.conf import settings

from scheduling.configuration import validation
from scheduling.configuration.condition_fields import FieldCatalogue, conditions_in
from scheduling.configuration.file.calendars import SEND_WINDOWS, check_window_calendars
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.guard_rules import Group, OwnDelayRules
from scheduling.configuration.file.rows import RowSection
from scheduling.configuration.file.schema import (
    DURATION,
    FLAG,
    KEY,
    NUMBER,
    Anything,
    Choice,
    Clock,
    Field,
    ListOf,
    Named,
    Seconds,
    Text,
    Whole,
)
from scheduling.error_text import ErrorText as _
from scheduling.models import AtDay, CapSwitch, EventType, Node, OnRepeat, OverCap, Priority, Stage, Switch
from scheduling.policy.journeys import find_follow_problem
from scheduling.policy.node_conditions import JOINS
from scheduling.policy.profile import MAX_TAG
from scheduling.policy.rollout import PLAN_DEFAULTS, RATES
from scheduling.policy.window_forms import list_calendars


class Stages(RowSection):
    """Stages in the order of the file. `position` is written only if it differs from the place in the list."""

    name = "stages"
    noun = "stage"
    tables = (Stage,)
    model = Stage
    fields = (
        Field("key", KEY),
        Field("name", Text(100, empty=True), default=""),
        Field("position", Whole(), default=0),
    )

    def defaults(self, values: Mapping[str, Any], position: int) -> dict[str, Any]:
        return {"position": position}

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_stage(values)

    def order(self, row: Any) -> Any:
        return (row.position, row.key)


class CanaryGuard(Group):
    """The plan of a roll-out. Every key has a default, so `{}` is the default plan."""

    otherwise = _("must be a mapping")
    fields = (
        Field("steps", ListOf(NUMBER), default=PLAN_DEFAULTS["steps"]),
        Field("time", Seconds(), default=PLAN_DEFAULTS["time"]),
        Field("touches", Whole(), default=PLAN_DEFAULTS["touches"]),
        *(Field(rate, NUMBER, default=PLAN_DEFAULTS[rate]) for rate in RATES),
    )


class ConditionTree(Anything):
    """A condition in the form of `policy.node_conditions`."""

    def write(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._write_part(stored[key]) for key in ("field", "op", "value", *JOINS) if key in stored}

    def _write_part(self, part: Any) -> Any:
        return (
            [self.write(each) if isinstance(each, dict) else each for each in part] if isinstance(part, list) else part
        )


class VariantList(Anything):
    """Content variants, each with `key`, `when` and `template`."""

    def write(self, stored: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"key": each["key"], "when": ConditionTree().write(each["when"]), "template": each["template"]}
            for each in stored
        ]


EVENT = Text(120)
CHATS = ListOf(Text(200))
OWN_DELAY_RULES = OwnDelayRules()


class Nodes(RowSection):
    name = "nodes"
    noun = "node"
    tables = (Node,)
    model = Node
    fields = (
        Field("key", KEY),
        Field("name", Text(100, empty=True), default=""),
        Field("stage", KEY, refers="stages"),
        Field("trigger", EVENT),
        Field("from_nodes", ListOf(KEY), default=[]),
        Field("delay", DURATION, default=timedelta(0)),
        Field("dynamic", FLAG, default=False),
        Field("delay_rules", OWN_DELAY_RULES, default=None),
        Field("template", KEY, refers="templates"),
        Field("channel", KEY, refers="channels"),
        Field("priority", Named({each.name.lower(): each.value for each in Priority}), default=Priority.NORMAL.value),
        Field("enabled", FLAG, default=True),
        Field("rollout.percent", NUMBER, column="rollout_percent", default=100.0),
        Field("rollout.communities", CHATS, column="rollout_communities", default=[]),
        Field("over_cap", Choice(OverCap.values), default=OverCap.SUPPRESS.value),
        Field("expires_after", DURATION, default=timedelta(days=3)),
        Field("canary.template", KEY, column="canary_template", default=None, refers="templates"),
        Field("canary.percent", NUMBER, column="canary_percent", default=0.0),
        Field("canary.communities", CHATS, column="canary_communities", default=[]),
        Field("canary.guard", CanaryGuard(), column="canary_guard", default=None),
        Field("cancel_on", ListOf(EVENT), default=[]),
        Field("on_repeat", Choice(OnRepeat.values), default=OnRepeat.EACH.value),
        Field("goal.event", EVENT, column="goal_event", default=""),
        Field("goal.within", DURATION, column="goal_within", default=None),
        Field("holdout", NUMBER, column="holdout_percent", default=0.0),
        Field("guards.cap", Choice(CapSwitch.values), column="guard_cap", default=CapSwitch.APPLY.value),
        Field("guards.dedupe", Choice(Switch.values), column="guard_dedupe", default=Switch.APPLY.value),
        Field("guards.conversation", Choice(Switch.values), column="guard_conversation", default=Switch.APPLY.value),
        Field("guards.quiet_hours", Choice(Switch.values), column="guard_quiet_hours", default=Switch.APPLY.value),
        Field("guards.holdout", Choice(Switch.values), column="guard_holdout", default=Switch.APPLY.value),
        Field("tags", ListOf(Text(MAX_TAG)), default=[]),
        Field("when", ConditionTree(), default=None),
        Field("variants", VariantList(), default=[]),
        Field("at", Clock(), default=None),
        Field("at_day", Choice(AtDay.values), default=AtDay.ANY.value),
        Field("not_before", Clock(), default=None),
        Field("send_window", SEND_WINDOWS, default=None),
    )

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_node(values)

    def read_entry(self, entry: dict[str, Any], position: int, path: str, draft: Draft) -> dict[str, Any]:
        values = super().read_entry(entry, position, path, draft)
        self._check_followed_nodes(values, path, draft)
        self._check_conditions(values, path, draft)
        check_window_calendars(values.get("send_window"), f"{path}.send_window", draft)
        known = draft.once("event types", lambda: set(EventType.objects.values_list("key", flat=True)))
        for column, events in (
            ("trigger", [values.get("trigger")]),
            ("cancel_on", values.get("cancel_on", [])),
            ("goal_event", [values.get("goal_event")]),
        ):
            for event in events:
                if event and event not in known:
                    draft.note(f"{path}.{self.path_of(column)}: no event of type “{event}” is known yet")
        return values

    def list_references(self, draft: Draft) -> Iterator[tuple[str, str, str]]:
        yield from super().list_references(draft)
        for row in draft.rows(self.name):
            if row.retired_at is None:
                yield from ((str(row), "templates", each["template"]) for each in row.variants)
                yield from ((str(row), "calendars", key) for _place, key in list_calendars(row.send_window))

    def _check_followed_nodes(self, values: Mapping[str, Any], path: str, draft: Draft) -> None:
        """Check that the followed nodes are listed, and that no journey returns to a node or is too long."""
        if "key" not in values or draft.has_problem(f"{path}.from_nodes"):
            return
        place = f"{path}.from_nodes"
        for key in values["from_nodes"]:
            if key not in draft.keys("nodes"):
                draft.problem(place, _("there is no node “%(name)s”", name=key))
        followed = draft.once("followed nodes", lambda: self._read_followed(draft))
        if problem := find_follow_problem(
            values["key"], values["from_nodes"], followed, settings.AFTERTOUCH_JOURNEY_DEPTH
        ):
            draft.problem(place, problem)

    def _read_followed(self, draft: Draft) -> dict[str, list[str]]:
        """Return what each node follows after the file is applied, by key. Retired nodes count: one may be restored."""
        followed = {row.key: row.from_nodes for row in draft.rows("nodes")}
        for entry in draft.document["nodes"]:
            if isinstance(entry, dict) and isinstance(entry.get("key"), str):
                given = entry.get("from_nodes")
                followed[entry["key"]] = [str(each) for each in given] if isinstance(given, list) else []
        return followed

    def _check_conditions(self, values: Mapping[str, Any], path: str, draft: Draft) -> None:
        """Check the templates of variants, and fields that the stored node does not use already."""
        if draft.has_problem(f"{path}.when") or draft.has_problem(f"{path}.variants") or "key" not in values:
            return
        for place, variant in enumerate(values.get("variants") or ()):
            if variant["template"] not in draft.keys("templates"):
                draft.problem(
                    f"{path}.variants[{place}].template", _("there is no template “%(name)s”", name=variant["template"])
                )
        conditions = conditions_in(values)
        if not conditions:
            return
        catalogue = draft.once("condition fields", FieldCatalogue)
        row = self.row_of((values["key"],), draft)
        used = conditions_in({"when": row.when, "variants": row.variants}) if row else {}
        for place, problem in catalogue.find_unknown(conditions, str(values.get("trigger", "")), used):
            draft.problem(f"{path}.{place}", problem)

    def values_of(self, row: Any) -> dict[str, Any]:
        own, guard = row.delay_rules, row.canary_guard
        return super().values_of(row) | {
            "delay_rules": OWN_DELAY_RULES.whole(own) if own else None,
            "canary_guard": CanaryGuard().whole(guard) if guard is not None else None,
        }

    def order(self, row: Any) -> Any:
        return (row.stage.position, row.stage.key, row.trigger, row.key)
