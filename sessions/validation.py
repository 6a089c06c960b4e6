"""Validate silence policies and campaigns for admin forms and configuration files.

Values are keyed by field name; absent ones are not checked. One `InvalidInput` lists all errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector
from scheduling.models.versioned import rules_of
from scheduling.policy.send_times import check_windows
from sessions.frames import MOST_TAGS, TAG_LENGTH, has_control_characters
from sessions.models import Campaign, SilencePolicy
from sessions.policy import AFTER, ALL, ANY, DEFAULT_KEY, GRACE_FOR

#: The watcher checks at least once a second, so it cannot miss a timer longer than that.
MIN_THRESHOLD, MAX_THRESHOLD = timedelta(seconds=2), timedelta(hours=12)
MAX_JITTER = timedelta(hours=1)
MAX_GRACE = timedelta(minutes=10)


@rules_of(SilencePolicy)
def check_policy(values: Mapping[str, Any]) -> None:
    found = ErrorCollector()
    found.key(values)
    check_tags(values, found)
    found.span(values, "threshold", least=MIN_THRESHOLD, most=MAX_THRESHOLD)
    found.span(values, "jitter", most=MAX_JITTER)
    found.span(values, "grace", most=MAX_GRACE)
    found.number(values, "max_nudges", 1, 10)
    found.number(values, "growth", 1, 10)
    if values.get("after", ANY) not in AFTER:
        found.add("after", _("must be one of %(known)s", known=", ".join(AFTER)))
    if values.get("grace_for", ALL) not in GRACE_FOR:
        found.add("grace_for", _("must be one of %(known)s", known=", ".join(GRACE_FOR)))
    check_windows(values.get("hours") or [], found, "hours")
    found.raise_if_any()


def check_tags(values: Mapping[str, Any], found: ErrorCollector) -> None:
    found.texts(values, "tags", longest=TAG_LENGTH)
    tags = values.get("tags") or []
    if len(tags) > MOST_TAGS:
        found.add("tags", _("must be at most %(most)s tags", most=MOST_TAGS))
    if any(has_control_characters(str(tag)) for tag in tags):
        found.add("tags", _("must not have control characters"))
    if values.get("key") == DEFAULT_KEY and tags:
        found.add("tags", _("must be empty: the default policy applies to sessions without another one"))


@rules_of(Campaign)
def check_campaign(values: Mapping[str, Any]) -> None:
    found = ErrorCollector()
    found.key(values)
    found.span(values, "threshold", least=MIN_THRESHOLD, most=MAX_THRESHOLD)
    starts_at, ends_at = values.get("starts_at"), values.get("ends_at")
    if starts_at and ends_at and ends_at <= starts_at:
        found.add("ends_at", _("must be later than starts_at"))
    found.raise_if_any()
