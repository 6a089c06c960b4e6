"""The channel kinds, by dotted path from `settings.CHANNELS`, so that other apps can add theirs."""

from __future__ import annotations

from functools import cache

from django.conf import settings
from django.utils.module_loading import import_string

from scheduling.channels.base import Channel


@cache
def channel_kinds() -> dict[str, type[Channel]]:
    return {kind: import_string(path) for kind, path in settings.CHANNELS.items()}
