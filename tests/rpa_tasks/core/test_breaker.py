"""A platform that turns robots away, with several of its shops in flight. See also `test_runner`."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.utils.timezone import now

from rpa_tasks.jobs import circuit_breaker as breaker
from rpa_tasks.jobs.pick import Pick
from rpa_tasks.jobs.settle import RunResult, settle_run
from rpa_tasks.models import Breaker, Job, Lane
from rpa_tasks.outcomes import RunOutcome, Verdict

pytestmark = pytest.mark.django_db(transaction=True)

THRESHOLD = 3  #: of a platform that says nothing else


def turned_away(pick: Pick) -> bool:
    job = Job.objects.select_related("shop__platform", "flow").get(pk=pick.claim.task_id)
    return settle_run(job, pick.claim, RunResult(verdict=Verdict(RunOutcome.PLATFORM, "exit_75"), started_at=now()))


@pytest.fixture
def in_flight(market: Any) -> list[Pick]:
    """A run more than open the breaker, of as many shops."""
    market.flow()
    for number in range(THRESHOLD + 1):
        market.shop(f"s{number}")
        market.publish(f"s{number}")
    picks = [market.pick() for _ in range(THRESHOLD + 1)]
    assert None not in picks
    return picks


def test_who_began_before_the_breaker_opened_ends_after_it(in_flight: list[Pick]) -> None:
    *openers, late = in_flight
    assert [turned_away(pick) for pick in openers] == [True] * THRESHOLD
    opened = Breaker.objects.get()

    assert turned_away(late)
    breaker = Breaker.objects.get()
    assert (breaker.openings, breaker.open_until, breaker.probe) == (1, opened.open_until, None)
    assert not Lane.objects.exclude(task_id=None).exists()
    job = Job.objects.get(pk=late.claim.task_id)
    assert (job.state, job.reason, job.failures) == ("scheduled", "exit_75", 0)  # the platform rests: not its fault


def test_it_does_not_answer_for_the_run_that_tries(market: Any, in_flight: list[Pick]) -> None:
    *openers, late = in_flight
    for pick in openers:
        turned_away(pick)
    Breaker.objects.update(open_until=now())
    Job.objects.filter(state="scheduled").update(due_at=now())
    probe = market.pick()
    assert probe is not None
    assert probe.probes

    assert turned_away(late)
    assert (Breaker.objects.get().openings, Breaker.objects.get().probe) == (1, probe.claim.task_id)
    assert turned_away(probe)
    assert (Breaker.objects.get().openings, Breaker.objects.get().probe) == (2, None)


def test_note_late_success_does_not_close_an_open_breaker(market: Any) -> None:
    """It began before the breaker opened, and says nothing about the platform of now."""
    platform, trial, late = market.platform(), uuid4(), uuid4()
    Breaker.objects.update(open_until=now(), errors=3, openings=2, probe=trial)
    before = Breaker.objects.values().get()
    for outcome in breaker.HEALTHY:
        breaker.record_outcome(platform.pk, outcome, late)
        assert Breaker.objects.values().get() == before

    breaker.record_outcome(platform.pk, "succeeded", trial)
    closed = Breaker.objects.get()
    assert (closed.open_until, closed.errors, closed.openings, closed.probe) == (None, 0, 0, None)
