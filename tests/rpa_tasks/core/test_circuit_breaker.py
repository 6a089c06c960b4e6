"""A platform refuses automation while several of its shops run. See also `test_runner`."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.utils.timezone import now

from rpa_tasks.jobs import breaker
from rpa_tasks.jobs.dispatch import RunResult, settle_run
from rpa_tasks.jobs.ledger import Pick
from rpa_tasks.models import Breaker, Job, Lane
from rpa_tasks.outcomes import RunOutcome, Verdict
from tests.rpa_tasks.core.conftest import Market

pytestmark = pytest.mark.django_db(transaction=True)

THRESHOLD = 3  #: of a platform without a setting of its own


def settle_as_platform_error(pick: Pick) -> bool:
    job = Job.objects.select_related("shop__platform", "flow").get(pk=pick.claim.task_id)
    return settle_run(job, pick.claim, RunResult(verdict=Verdict(RunOutcome.PLATFORM, "exit_75"), started_at=now()))


@pytest.fixture
def running_picks(market: Market) -> list[Pick]:
    """A run more than open the breaker, of as many shops."""
    market.flow()
    for number in range(THRESHOLD + 1):
        market.shop(f"s{number}")
        market.publish(f"s{number}")
    picks = [market.pick() for _ in range(THRESHOLD + 1)]
    assert None not in picks
    return picks


def test_late_platform_error_leaves_open_breaker_unchanged(running_picks: list[Pick]) -> None:
    *openers, late = running_picks
    assert [settle_as_platform_error(pick) for pick in openers] == [True] * THRESHOLD
    opened = Breaker.objects.get()

    assert settle_as_platform_error(late)
    breaker = Breaker.objects.get()
    assert (breaker.openings, breaker.open_until, breaker.probe) == (1, opened.open_until, None)
    assert not Lane.objects.exclude(task_id=None).exists()
    job = Job.objects.get(pk=late.claim.task_id)
    assert (job.state, job.reason, job.failures) == ("scheduled", "exit_75", 0)  # the platform rests: not its fault


def test_late_platform_error_does_not_end_the_probe(market: Market, running_picks: list[Pick]) -> None:
    *openers, late = running_picks
    for pick in openers:
        settle_as_platform_error(pick)
    Breaker.objects.update(open_until=now())
    Job.objects.filter(state="scheduled").update(due_at=now())
    probe = market.pick()
    assert probe is not None
    assert probe.probes

    assert settle_as_platform_error(late)
    assert (Breaker.objects.get().openings, Breaker.objects.get().probe) == (1, probe.claim.task_id)
    assert settle_as_platform_error(probe)
    assert (Breaker.objects.get().openings, Breaker.objects.get().probe) == (2, None)


def test_late_success_keeps_breaker_open(market: Market) -> None:
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
