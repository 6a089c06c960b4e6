"""A replay of the live configuration decides as delivery did."""

from datetime import time, timedelta

import pytest

from scheduling.configuration import snapshot
from scheduling.experiments import drafts, replay
from scheduling.ledger import ends
from scheduling.models import Calendar, ConfigDraft, HarassmentRule, Node
from tests.scheduling.replay.replay_scenarios import (
    ReplayScenario,
    database_now,
    identify,
    read_decisions,
)

pytestmark = pytest.mark.django_db(transaction=True)


def replayed(since, until, config=None):
    within = replay.choose_window(since, until)
    (simulation,) = replay.run_simulations([config or snapshot.current()], within)
    keys = {}
    for touch in sorted(simulation.touches, key=lambda touch: touch.number):
        event, is_simulated = touch.event, touch.event.id.int >> 64 == 1
        name = (event.type, *keys[event.id.int & (1 << 64) - 1]) if is_simulated else identify(event)
        keys[touch.number] = name, touch.node_id
    return {keys[each.number]: (tuple(each.verdicts), each.state, each.reason) for each in simulation.touches}


@pytest.fixture
def live_scenario(matrix, monkeypatch):
    def live_scenario(seed):
        # The test's own transaction stays open.
        monkeypatch.setattr(ends, "read_horizon", lambda lag: ends.Horizon(database_now(), 0, 0))
        scenario = ReplayScenario(matrix, seed)
        scenario.show_calendar_days(monkeypatch)
        scenario.create_configuration()
        scenario.live()
        return scenario

    return live_scenario


#: Worlds in which each decision, rule and end occurs, in each of the weeks. To live through one takes seconds.
SEEDS = [7, 14, 18, 23, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in (10, 11, 16, 22))]


@pytest.mark.parametrize("seed", SEEDS)
def test_replay_of_live_config_and_of_a_draft_decides_as_recorded(live_scenario, seed):
    """The draft is the configuration that was live; the live one has other calendars and windows by then."""
    live_scenario(seed)
    now, really, draft = database_now(), read_decisions(), drafts.export_live_draft()
    assert replayed(now - timedelta(days=60), now) == really
    others = {"closed": ["2026-09-22"], "open": [], "country": "", "timezone": "America/New_York"}
    Calendar.objects.update(**others, send_window=[])
    Node.objects.exclude(send_window=[]).update(send_window=None, at=None, not_before=None)
    HarassmentRule.objects.filter(kind="quiet_hours").update(quiet_from=time(12, 1))

    config = drafts.build_draft_snapshot(ConfigDraft(base=drafts.export_live_draft(), document=draft))

    assert replayed(now - timedelta(days=60), now, config) == really
    assert replayed(now - timedelta(days=60), now) != really
