"""The long campaigns: the same blows at twenty random points of one load, and then in any order."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.faults.fault_injection import FAULTS
from tests.faults.fault_stack import FaultStack, Run

pytestmark = pytest.mark.campaign

POINTS = int(os.environ.get("FAULTS_POINTS", "20"))

UnderLoad = Callable[..., AbstractContextManager[Run]]


@pytest.mark.parametrize("blow", FAULTS)
def test_same_fault_at_random_points_loses_nothing(fault_stack: FaultStack, under_load: UnderLoad, blow: str) -> None:
    with under_load(fault_stack, f"campaign: {blow}") as run:
        for _ in range(POINTS):
            run.await_random_point()
            FAULTS[blow](run)
        run.send_load(20)


def test_random_faults_lose_nothing(fault_stack: FaultStack, under_load: UnderLoad) -> None:
    with under_load(fault_stack, "campaign: anything") as run:
        for _ in range(POINTS):
            run.await_random_point()
            FAULTS[run.chance.choice(list(FAULTS))](run)
        run.send_load(20)


def test_worker_kill_with_full_leases_loses_nothing(
    fault_stack: FaultStack, under_load: UnderLoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everywhere else the leases of the dead are ended early to save 45 s."""
    monkeypatch.setattr(FaultStack, "expire_leases", lambda *_: {})
    with under_load(fault_stack, "campaign: kill -9 worker, leases waited for") as run:
        run.await_random_point()
        FAULTS["kill -9 worker"](run)
        run.send_load(20)
