"""A platform refuses automation while several of its shops run."""

from datetime import timedelta
from uuid import uuid4

import pytest
from django.utils.timezone import now

from rpa_tasks.jobs import breaker
from rpa_tasks.models import Breaker, Job, Lane

pytestmark = pytest.mark.django_db

THRESHOLD = 3  #: of a platform without a setting of its own


def end_rest():
    Breaker.objects.update(open_until=now())
    Job.objects.filter(state="scheduled").update(due_at=now())


@pytest.fixture
def running_picks(market):
    """A run more than open the breaker, of as many shops."""
    market.flow()
    for number in range(THRESHOLD + 1):
        market.shop(f"s{number}")
        market.publish(f"s{number}")
    picks = [market.pick() for _ in range(THRESHOLD + 1)]
    assert None not in picks
    return picks


def test_platform_errors_open_breaker_until_a_probe_succeeds(market, running_picks):
    for pick in running_picks[:THRESHOLD]:
        market.settle(pick, "platform", "exit_75")
    market.settle(running_picks[-1], "business", "exit_65")
    breaker = Breaker.objects.get()
    assert breaker.errors == THRESHOLD
    assert timedelta(minutes=4) < breaker.open_until - now() < timedelta(minutes=6)
    assert market.pick() is None

    end_rest()
    market.settle(market.pick(), "platform", "exit_75")
    breaker.refresh_from_db()
    assert breaker.openings == 2
    assert breaker.open_until - now() > timedelta(minutes=9), "each failed probe makes the rest longer"

    end_rest()
    market.settle(market.pick())
    breaker.refresh_from_db()
    assert (breaker.open_until, breaker.errors, breaker.probe) == (None, 0, None)
    assert market.pick() is not None
    assert market.pick() is not None


def test_late_platform_error_leaves_open_breaker_unchanged(market, running_picks):
    *openers, late = running_picks
    assert [market.settle(pick, "platform", "exit_75") for pick in openers] == [True] * THRESHOLD
    opened = Breaker.objects.get()

    assert market.settle(late, "platform", "exit_75")
    breaker = Breaker.objects.get()
    assert (breaker.openings, breaker.open_until, breaker.probe) == (1, opened.open_until, None)
    assert not Lane.objects.exclude(task_id=None).exists()
    job = Job.objects.get(pk=late.claim.task_id)
    assert (job.state, job.reason, job.failures) == ("scheduled", "exit_75", 0)  # the platform rests: not its fault


def test_late_platform_error_does_not_end_the_probe(market, running_picks):
    *openers, late = running_picks
    for pick in openers:
        market.settle(pick, "platform", "exit_75")
    end_rest()
    probe = market.pick()
    assert probe is not None

    assert market.settle(late, "platform", "exit_75")
    assert (Breaker.objects.get().openings, Breaker.objects.get().probe) == (1, probe.claim.task_id)
    assert market.settle(probe, "platform", "exit_75")
    assert (Breaker.objects.get().openings, Breaker.objects.get().probe) == (2, None)


def test_late_success_keeps_breaker_open(market):
    """It started before the breaker opened, so it is no evidence about the platform now."""
    platform, trial, late = market.platform(), uuid4(), uuid4()
    Breaker.objects.update(open_until=now(), errors=3, openings=2, probe=trial)
    before = Breaker.objects.values().get()
    for outcome in breaker.HEALTHY:
        breaker.record_outcome(platform.pk, outcome, late)
        assert Breaker.objects.values().get() == before

    breaker.record_outcome(platform.pk, "succeeded", trial)
    closed = Breaker.objects.get()
    assert (closed.open_until, closed.errors, closed.openings, closed.probe) == (None, 0, 0, None)
