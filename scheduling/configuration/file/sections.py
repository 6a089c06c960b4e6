"""List the sections in the order of storage: rows come before the rows that refer to them."""

from __future__ import annotations

from functools import cache

from django.conf import settings
from django.utils.module_loading import import_string

from scheduling.configuration.file.base import Section
from scheduling.configuration.file.calendars import Calendars
from scheduling.configuration.file.channels import Channels
from scheduling.configuration.file.communities import Communities
from scheduling.configuration.file.guard_rules import DelayRulesSection, HarassmentRules, HoldoutSection
from scheduling.configuration.file.nodes import Nodes, Stages
from scheduling.configuration.file.templates import Templates
from scheduling.configuration.file.webhooks import Webhooks

OWN: tuple[type[Section], ...] = (
    Channels, Templates, Communities, Calendars, Stages, Nodes, DelayRulesSection, HarassmentRules,
    HoldoutSection, Webhooks,
)  # fmt: skip
#: Sections of the public format whose app may not be installed.
RESERVED = {"silence_policies": "sessions", "platforms": "rpa_tasks", "flows": "rpa_tasks", "shops": "rpa_tasks"}


@cache
def _load_other_sections(paths: tuple[str, ...]) -> tuple[type[Section], ...]:
    return tuple(import_string(path) for path in paths)


def sections() -> dict[str, Section]:
    """Return the sections by name.

    `settings.CONFIG_SECTIONS` adds those of other apps, as dotted paths of `Section` classes.
    """
    paths = tuple(getattr(settings, "CONFIG_SECTIONS", ()))
    return {section.name: section() for section in (*OWN, *_load_other_sections(paths))}
