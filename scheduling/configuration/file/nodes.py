"""Read and write sections `stages` and `nodes`: the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from scheduling.configuration import validation
from scheduling.configuration.file.canary_limits import CANARY_GUARD
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.guard_rules import OwnDelayRules
from scheduling.configuration.file.rows import RowSection
from scheduling.configuration.file.schema import DURATION, FLAG, KEY, NUMBER, Choice, Field, ListOf, Named, Text, Whole
from scheduling.models import CapSwitch, EventType, Node, OnRepeat, OverCap, Priority, Stage, Switch


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
        Field("stage", KEY, refers="stages"),
        Field("trigger", EVENT),
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
        Field("canary.guard", CANARY_GUARD, column="canary_guard", default=None),
        Field("cancel_on", ListOf(EVENT), default=[]),
        Field("on_repeat", Choice(OnRepeat.values), default=OnRepeat.EACH.value),
        Field("goal.event", EVENT, column="goal_event", default=""),
        Field("goal.within", DURATION, column="goal_within", default=None),
        Field("holdout", NUMBER, column="holdout_percent", default=0.0),
        Field("guards.cap", Choice(CapSwitch.values), column="guard_cap", default=CapSwitch.APPLY.value),
        Field("guards.dedupe", Choice(Switch.values), column="guard_dedupe", default=Switch.APPLY.value),
        Field("guards.conversation", Choice(Switch.values), column="guard_conversation", default=Switch.APPLY.value),
        Field("guards.quiet_hours", Choice(Switch.values), column="guard_quiet_hours", default=Switch.APPLY.value),
    )

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_node(values)

    def read_entry(self, entry: dict[str, Any], position: int, path: str, draft: Draft) -> dict[str, Any]:
        values = super().read_entry(entry, position, path, draft)
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

    def values_of(self, row: Any) -> dict[str, Any]:
        own, guard = row.delay_rules, row.canary_guard
        return super().values_of(row) | {
            "delay_rules": OWN_DELAY_RULES.whole(own) if own else None,
            "canary_guard": CANARY_GUARD.whole(guard) if guard is not None else None,
        }

    def order(self, row: Any) -> Any:
        return (row.stage.position, row.stage.key, row.trigger, row.key)
