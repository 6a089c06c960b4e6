"""Lay out the form of a node: the essentials, then sections that are folded while they hold only defaults."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.utils import flatten
from django.utils.translation import gettext_lazy as _

from scheduling.models import Node

SECTIONS: tuple[Any, ...] = (
    (
        _("Essentials"),
        {
            "fields": (
                "name",
                ("stage", "trigger"),
                "delay",
                "move_waiting",
                ("template", "channel"),
                "enabled",
                "change_reason",
            )
        },
    ),
    (
        _("When"),
        {
            "fields": (
                "from_nodes",
                "dynamic",
                "delay_rules",
                ("at", "at_day"),
                ("not_before", "send_window"),
                "expires_after",
                "cancel_on",
            )
        },
    ),
    (_("What"), {"fields": ("priority", "variants", "tags")}),
    (
        _("For whom"),
        {
            "fields": (
                "when",
                "rollout_percent",
                "rollout_communities",
                ("holdout_percent", "guard_holdout"),
            )
        },
    ),
    (_("Canary"), {"fields": ("canary_template", "canary_percent", "canary_communities")}),
    (
        _("Guards"),
        {
            "fields": (
                ("guard_cap", "over_cap"),
                ("guard_dedupe", "guard_conversation"),
                "guard_quiet_hours",
                "on_repeat",
            )
        },
    ),
    (_("Goal"), {"fields": (("goal_event", "goal_within"),)}),
    (_("Life"), {"fields": ("key", "waiting", "version")}),
)


def build_sections(row: Node | None) -> list[Any]:
    """Return the fieldsets of a node; without `move_waiting` for a new one."""
    (name, options), *rest = SECTIONS
    fields = tuple(each for each in options["fields"] if row is not None or each != "move_waiting")
    return [
        (name, {"fields": fields}),
        *(
            (name, each if _has_own_values(row, each["fields"]) else {**each, "classes": ("collapse",)})
            for name, each in rest
        ),
    ]


def unfold_edits(form: Any) -> None:
    """Unfold sections with errors or edits. Django overlooks the errors of fields that share a line."""
    seen = {*form.form.errors, *(form.form.changed_data if form.form.is_bound else ())}
    form.fieldsets = [
        (name, {**options, "classes": ()} if set(flatten(options["fields"])) & seen else options)
        for name, options in form.fieldsets
    ]


def _has_own_values(row: Node | None, names: Any) -> bool:
    """Return whether any of these columns of a stored node differs from the default."""
    columns = {field.name: field for field in Node._meta.concrete_fields if not field.is_relation}
    own = [columns[name] for name in flatten(names) if name in columns and name not in ("key", "version")]
    canary = row is not None and row.canary_template_id is not None and "canary_template" in names
    return canary or (row is not None and any(getattr(row, each.name) != each.get_default() for each in own))
