"""A replay of the live configuration decides as delivery did."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db.models import Q

from scheduling.configuration import snapshot
from scheduling.experiments.replay import history, results
from scheduling.experiments.replay.simulation import SimulatedTouch
from scheduling.models import Touch
from scheduling.policy.guards import GuardVerdict
from scheduling.policy.specs import NodeSpec
from tests.scheduling.replay.replay_scenarios import ReplayScenario, Story, add, database_now, read_decisions

pytestmark = pytest.mark.django_db


class Recorder:
    """An observer that keeps every touch's story."""

    def __init__(self) -> None:
        self.verdicts: dict[tuple[UUID, int], list[tuple[str, str]]] = {}
        self.ends: dict[tuple[UUID, int], tuple[str, str]] = {}

    def planned(self, touch: SimulatedTouch, node: NodeSpec) -> None:
        self.verdicts[touch.event.id, node.id] = []

    def judged(self, touch: SimulatedTouch, node: NodeSpec, verdict: GuardVerdict, at: datetime) -> None:
        add(self.verdicts[touch.event.id, node.id], verdict.decision, verdict.rule)

    def ended(self, touch: SimulatedTouch, node: NodeSpec, state: str, reason: str, at: datetime) -> None:
        self.ends[touch.event.id, node.id] = (state, reason)

    def read_decisions(self) -> dict[tuple[UUID, int], Story]:
        return {key: (tuple(verdicts), *self.ends.get(key, ("waiting", ""))) for key, verdicts in self.verdicts.items()}


def replayed(since: datetime, until: datetime) -> dict[tuple[UUID, int], Story]:
    recorder = Recorder()
    within = history.choose_window(since, until)
    results.run_simulations(
        {"live": (snapshot.current(), recorder)}, within, history.load_touches_at_start(within.since).touches
    )
    return recorder.read_decisions()


@pytest.mark.parametrize("seed", [6, 10, 11, 14, 16])
def test_replay_of_live_config_decides_as_recorded(matrix: Any, seed: int) -> None:
    scenario = ReplayScenario(matrix, seed)
    scenario.create_configuration()
    scenario.live()
    now = database_now()
    really = read_decisions()
    assert replayed(now - timedelta(days=60), now) == really

    middle = now - scenario.shifted / 2 + timedelta(seconds=75)  # off the grid as well
    later = set(Touch.objects.filter(Q(settled_at__gte=middle) | Q(settled_at=None)).values_list("event_id", "node_id"))
    from_the_middle = replayed(middle, now)
    assert from_the_middle.keys() == later
    assert {key: story[1:] for key, story in from_the_middle.items()} == {key: really[key][1:] for key in later}
