"""Define silence policies in the form that the store's scripts use. No I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property

DEFAULT_TAG = "default"


@dataclass(frozen=True)
class Policy:
    """Thresholds of a tag and its number of guide messages."""

    threshold: timedelta = timedelta(seconds=60)
    jitter: timedelta = timedelta(0)
    grace: timedelta = timedelta(0)
    max_nudges: int = 1
    growth: float = 2.0


@dataclass(frozen=True)
class Override:
    """A campaign: one threshold for all tags while it is active."""

    starts_at: datetime
    ends_at: datetime
    threshold: timedelta


class PoliciesUnknown(Exception):
    """The policy tables cannot be read."""


SHIPPED_DEFAULT = Policy(jitter=timedelta(seconds=5))


@dataclass(frozen=True)
class PolicySet:
    """All policies at one time.

    The version is a hash of the content. It distinguishes a flushed or older set without a counter, which could be
    reset.
    """

    tags: Mapping[str, Policy]
    campaigns: Sequence[Override] = field(default_factory=tuple)

    @cached_property
    def body(self) -> str:
        tags = {DEFAULT_TAG: SHIPPED_DEFAULT, **self.tags}
        campaigns = sorted(
            (_timestamp_ms(each.starts_at), _timestamp_ms(each.ends_at), _span_ms(each.threshold))
            for each in self.campaigns
        )
        words = {tag: _policy_numbers(policy) for tag, policy in sorted(tags.items())}
        return json.dumps({"tags": words, "campaigns": campaigns}, ensure_ascii=False, separators=(",", ":"))

    @cached_property
    def version(self) -> str:
        return hashlib.sha256(self.body.encode()).hexdigest()[:16]


def _policy_numbers(policy: Policy) -> list[float]:
    spans = (policy.threshold, policy.jitter, policy.grace)
    return [*map(_span_ms, spans), policy.max_nudges, policy.growth]


def _span_ms(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)


def _timestamp_ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)
