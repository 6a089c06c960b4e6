"""`silence_policies` and `campaigns`, applied and exported through the commands."""

from datetime import timedelta

import pytest

from sessions.models import Campaign, SilencePolicy
from tests.support.config_files import apply as apply
from tests.support.config_files import export as export
from tests.support.config_files import refusal_of as refusal_of

pytestmark = pytest.mark.django_db

SECOND = timedelta(seconds=1)
POLICIES = """silence_policies:
  - key: default
    threshold: 1m
    jitter: 5s
  - key: new
    threshold: 30s
    max_nudges: 3
    growth: 1.5
  - key: vip
    threshold: 3m
    grace: 15s
campaigns:
  - key: double-eleven
    threshold: 1m30s
    starts_at: '2026-11-10T16:00:00+00:00'
    ends_at: '2026-11-11T16:00:00+00:00'
"""


@pytest.fixture(autouse=True)
def default():
    SilencePolicy.objects.all().delete()
    SilencePolicy.objects.create(key="default", threshold=60 * SECOND, jitter=5 * SECOND)


def test_apply_policies_stores_and_exports_them(apply, export):
    assert apply(POLICIES) == (
        "silence_policies\n  + new\n  + vip\ncampaigns\n  + double-eleven\napplied\n"
    )  # fmt: skip
    vip = SilencePolicy.objects.get(key="vip")
    assert (vip.threshold, vip.jitter, vip.grace, vip.max_nudges) == (180 * SECOND, 0 * SECOND, 15 * SECOND, 1)
    assert POLICIES in export()
    assert apply(POLICIES) == "no changes\n"


def test_apply_tags_hours_and_after_round_trips(apply, export):
    text = """silence_policies:
  - key: default
    threshold: 1m
  - key: north
    tags:
      - new
      - vip
    after: customer
    threshold: 2m
    hours:
      days:
        - working
      from: 09:00
      to: '18:00'
    grace: 20s
    grace_for: typing
    max_nudges: 3
    growth: 1
"""
    apply(text)
    assert text in export()
    # The short form: a tag is its key.
    assert apply("silence_policies: [{tag: default, threshold: 1m}, {tag: vip, threshold: 1m}]").endswith("applied\n")
    assert SilencePolicy.objects.get(key="vip").tags == ["vip"]


def test_apply_empty_sections_retire_all_but_default(apply):
    apply(POLICIES)
    assert apply("silence_policies: []\ncampaigns: []\n") == (
        "silence_policies\n  - new (retired)\n  - vip (retired)\ncampaigns\n  - double-eleven (retired)\napplied\n"
    )
    assert list(SilencePolicy.objects.filter(retired_at=None).values_list("key", flat=True)) == ["default"]
    assert Campaign.objects.get().history.count() == 2


BAD_ROWS = [
    ("silence_policies: [{tag: vip}]", "silence_policies[0].threshold: is missing"),
    (
        "silence_policies: [{key: a, tags: [x, y], threshold: 1m}, {key: b, tags: [y, x], threshold: 2m}]",
        "silence_policies[1].tags: are those of silence_policies[0]",
    ),
    (
        "silence_policies: [{key: default, tags: [x], threshold: 1m}]",
        "silence_policies[0].tags: must be empty: the default policy applies to sessions without another one",
    ),
    (
        "silence_policies: [{key: a, threshold: 1m, hours: [noon]}]",
        "silence_policies[0].hours[0]: must be a mapping with days, from, to, calendar, timezone",
    ),
    (
        "silence_policies: [{key: a, threshold: 1m, after: bot}]",
        "silence_policies[0].after: must be one of any, agent, customer",
    ),
    (
        'campaigns: [{key: a, threshold: 1m, starts_at: "2026-11-11T00:00:00Z", ends_at: "2026-11-11T00:00:00Z"}]',
        "campaigns[0].ends_at: must be later than starts_at",
    ),
]


def test_apply_invalid_policy_or_campaign_names_problem(refusal_of):
    refusals = {text: refusal_of(text)[0] for text, _ in BAD_ROWS}
    assert refusals == dict(BAD_ROWS)
