"""Run the same events through several configurations at once, in one stream, and count what becomes of the touches."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings

from scheduling.configuration.snapshot import Snapshot
from scheduling.delivery.routing import NoTarget, channel_of, load_community_targets, target_for
from scheduling.experiments.replay import history
from scheduling.experiments.replay.history import TouchAtStart, Window
from scheduling.experiments.replay.simulation import Simulation
from scheduling.models.encrypted import Unreadable
from scheduling.planning.disabled_targets import TargetLookup
from scheduling.planning.earlier_events import CountedEvent, count_before
from scheduling.planning.ingest import ACTIVITY_GRAIN
from scheduling.policy.specs import CustomerSpec, EventSpec, NodeSpec, TemplateSpec
from scheduling.templating.library import CannotRender
from scheduling.templating.rendering import render_message


def replay_events(configs: Mapping[str, Snapshot], within: Window) -> dict[str, Any]:
    """Return the outcomes of each configuration for the window's events and the touches that wait at its start.

    Reads only. The values fit into JSON.
    """
    waiting = history.load_touches_at_start(within.since)
    simulations = run_simulations(list(configs.values()), within, waiting.touches)
    counts = {name: simulation.count_outcomes() for name, simulation in zip(configs, simulations, strict=True)}
    return counts | {
        "since": within.since.isoformat(), "until": within.until.isoformat(), "events": len(within.arrivals),
        "shortened": within.shortened, "carried": len(waiting.touches), "waiting_incomplete": waiting.incomplete,
    }  # fmt: skip


def run_simulations(
    configs: Sequence[Snapshot], within: Window, waiting: Sequence[TouchAtStart]
) -> Sequence[Simulation]:
    """Return the simulations at the end of the window, in the order of `configs`."""
    targets: dict[str, Mapping[str, Any]] = {}
    simulations = [
        Simulation(
            config, within.since, slot_hold=settings.AFTERTOUCH_SLOT_HOLD, activity_grain=ACTIVITY_GRAIN,
            time_scale=settings.AFTERTOUCH_TIME_SCALE, prepare=_SendPreparation(config, targets),
        )
        for config in configs
    ]  # fmt: skip
    counted = {kind for config in configs for types in config.counting_earlier.values() for kind in types}
    memory = max(config.window for config in configs)
    counts_chats = any(config.counts_communities for config in configs)

    def load_for(events: Collection[EventSpec]) -> None:
        """Load customers and communities before their first event, as of the start of the replay."""
        users, chats = {event.user_id for event in events}, {event.chat_id for event in events if event.chat_id}
        for some in _split_into_chunks(users - simulations[0].customers.keys()):
            people = history.load_customers(some, within.since, memory, counted)
            for simulation in simulations:
                simulation.customers.update({key: person.copy() for key, person in people.items()})
        for some in _split_into_chunks(chats - simulations[0].communities.keys()):
            targets.update(load_community_targets(some))
            slots = history.load_community_slots(some if counts_chats else (), within.since, memory)
            for simulation in simulations:
                simulation.communities.update({chat_id: deque(slots.get(chat_id, ())) for chat_id in some})

    load_for([each.event for each in waiting])
    ids = {each.event.id for each in waiting} if counted else set()
    earlier = count_before(CountedEvent(key, key, counted) for key in ids)
    for simulation in simulations:
        for each in waiting:
            counts = earlier.get(each.event.id, {})
            simulation.add_waiting_touch(each.node_id, each.event, each.due_at, each.expires_at, counts)
    for batches in history.iterate_batches(within):
        load_for([event for _, events in batches for event in events])
        for simulation in simulations:
            for at, events in batches:
                simulation.receive(events, at)
    for simulation in simulations:
        simulation.advance(within.until)
    return simulations


def _split_into_chunks(keys: Iterable[str]) -> Iterable[list[str]]:
    ordered = sorted(keys)
    return [ordered[start : start + history.CHUNK] for start in range(0, len(ordered), history.CHUNK)]


@dataclass
class _SendPreparation:
    """Check that the text renders and a target exists, with the current addresses and targets."""

    config: Snapshot
    targets: Mapping[str, Mapping[str, Any]]
    disabled: TargetLookup = field(default_factory=TargetLookup)

    def __call__(self, node: NodeSpec, template: TemplateSpec, customer: CustomerSpec, event: EventSpec) -> str:
        try:
            channel = channel_of(node.channel)
            target_for(node.channel, channel, customer, event.chat_id, self.targets, self.disabled)
            render_message(template, customer, event)
        except NoTarget as error:
            return error.reason
        except CannotRender:
            return "template_data_missing"
        except Unreadable:
            pass  # only on this node; a node with the key would send it
        return ""
