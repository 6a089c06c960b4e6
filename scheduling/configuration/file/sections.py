"""The sections of the core, in the order of storage: rows come before the rows that refer to them.

Other apps add theirs with `settings.CONFIG_SECTIONS`.
"""

from __future__ import annotations

from functools import cache

from django.conf import settings
from django.utils.module_loading import import_string

from scheduling.configuration.file.contents import Channels, Communities, Templates, Webhooks
from scheduling.configuration.file.matrix import (
    Calendars,
    DelayRules,
    GlobalHoldout,
    HarassmentRules,
    Nodes,
    Stages,
)
from scheduling.configuration.file.section import Section

OWN: tuple[type[Section], ...] = (
    Channels, Templates, Communities, Calendars, Stages, Nodes, DelayRules, HarassmentRules, GlobalHoldout, Webhooks,
)  # fmt: skip
#: Sections of the public format whose app may not be installed.
RESERVED = {"silence_policies": "sessions", "platforms": "rpa_tasks", "flows": "rpa_tasks", "shops": "rpa_tasks"}


@cache
def _load_sections(paths: tuple[str, ...]) -> dict[str, Section]:
    return {section.name: section() for section in (*OWN, *map(import_string, paths))}


def sections() -> dict[str, Section]:
    """Return the sections by name."""
    return _load_sections(tuple(getattr(settings, "CONFIG_SECTIONS", ())))
