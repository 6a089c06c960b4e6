"""Define silence policies in the form that the store's scripts use. No I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

DEFAULT_KEY = "default"
LONGEST_WAIT = timedelta(hours=13)  #: open time of a timer at most, `LONGEST` in `lua/prelude.lua`

#: Whose message starts the timer. `any`: every frame renews it. `agent`: an agent wrote last, and the customer is
#: silent. `customer`: the customer wrote, and no agent answers. The first two are guide policies, the last is an answer
#: policy. A session may have one of each. The guide policy's timer then runs after a message of the agent only.
ANY, AGENT, CUSTOMER = "any", "agent", "customer"
#: Who gets the grace: every session, or users who typed and did not send.
ALL, TYPING = "all", "typing"


@dataclass(frozen=True)
class Policy:
    """Thresholds of sessions with these tags, and their number of guide messages."""

    threshold: timedelta = timedelta(seconds=60)
    jitter: timedelta = timedelta(0)
    grace: timedelta = timedelta(0)
    max_nudges: int = 1
    growth: float = 2.0
    after: str = ANY
    tags: Sequence[str] | None = None  #: a session must have all of them; None: the policy's key
    grace_for: str = ALL
    version: int = 1
    hours: Sequence[tuple[datetime, datetime]] = ()  #: only this time counts; none: all time


@dataclass(frozen=True)
class Override:
    """A campaign: one threshold for all sessions while it is active."""

    starts_at: datetime
    ends_at: datetime
    threshold: timedelta


SHIPPED_DEFAULT = Policy(jitter=timedelta(seconds=5))


@dataclass(frozen=True)
class PolicySet:
    """All policies at one time.

    The version is a hash of the content. It distinguishes a flushed or older set without a counter, which could be
    reset.
    """

    policies: Mapping[str, Policy]  #: by key
    campaigns: Sequence[Override] = field(default_factory=tuple)

    @cached_property
    def body(self) -> str:
        policies = {DEFAULT_KEY: SHIPPED_DEFAULT, **self.policies}
        campaigns = sorted(
            (_timestamp_ms(each.starts_at), _timestamp_ms(each.ends_at), _span_ms(each.threshold))
            for each in self.campaigns
        )
        words = [_policy_words(key, policy) for key, policy in policies.items()]
        words.sort(key=lambda each: (-len(each["tags"]), each["threshold"], each["key"]))
        return json.dumps({"policies": words, "campaigns": campaigns}, ensure_ascii=False, separators=(",", ":"))

    @cached_property
    def version(self) -> str:
        return hashlib.sha256(self.body.encode()).hexdigest()[:16]


def own_tags(key: str, tags: Sequence[str] | None) -> list[str]:
    """Return the tags of a policy: its key if none are given. The default policy has none."""
    if key == DEFAULT_KEY:
        return []
    return sorted(set(tags or (key,)))


def select_policies(
    policies: Sequence[Mapping[str, Any]], tags: Collection[str]
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return the guide and the answer policy of a session with these tags from a `PolicySet.body`, as the scripts."""
    fitting = [each for each in policies if set(each["tags"]) <= set(tags)]
    guides = (each for each in fitting if each["after"] != CUSTOMER)
    answers = (each for each in fitting if each["after"] == CUSTOMER)
    return next(guides, None), next(answers, None)


def _policy_words(key: str, policy: Policy) -> dict[str, Any]:
    return {
        "key": key,
        "version": policy.version,
        "tags": own_tags(key, policy.tags),
        "threshold": _span_ms(policy.threshold),
        "jitter": _span_ms(policy.jitter),
        "grace": _span_ms(policy.grace),
        "grace_for": policy.grace_for,
        "most": policy.max_nudges,
        "growth": policy.growth,
        "after": policy.after,
        "hours": [_timestamp_ms(at) for span in policy.hours for at in span],
    }


def _span_ms(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)


def _timestamp_ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)
