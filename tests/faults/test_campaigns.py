"""The long campaigns: the same blows at twenty random points of one load, and then in any order."""

import os

import pytest

from tests.faults.fault_injection import FAULTS
from tests.faults.fault_stack import FaultStack

pytestmark = pytest.mark.campaign

POINTS = int(os.environ.get("FAULTS_POINTS", "20"))


@pytest.mark.parametrize("blow", FAULTS)
def test_same_fault_at_random_points_loses_nothing(fault_stack, under_load, blow):
    with under_load(fault_stack, f"campaign: {blow}") as run:
        for _ in range(POINTS):
            run.await_random_point()
            FAULTS[blow](run)
        run.send_load(20)


def test_random_faults_lose_nothing(fault_stack, under_load):
    with under_load(fault_stack, "campaign: anything") as run:
        for _ in range(POINTS):
            run.await_random_point()
            FAULTS[run.chance.choice(list(FAULTS))](run)
        run.send_load(20)


def test_worker_kill_with_full_leases_loses_nothing(fault_stack, under_load, monkeypatch):
    """Everywhere else the leases of the dead are ended early to save 45 s."""
    monkeypatch.setattr(FaultStack, "expire_leases", lambda *_: {})
    with under_load(fault_stack, "campaign: kill -9 worker, leases waited for") as run:
        run.await_random_point()
        FAULTS["kill -9 worker"](run)
        run.send_load(20)
