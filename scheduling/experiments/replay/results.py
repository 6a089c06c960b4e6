"""Run the same events through several configurations at once, in one stream, and return their figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django.conf import settings

from scheduling.configuration.snapshot import Snapshot
from scheduling.delivery.routing import NoTarget, channel_of, load_community_targets, target_for
from scheduling.experiments.replay import history
from scheduling.experiments.replay.figures import ReplayCounter
from scheduling.experiments.replay.history import TouchAtStart, Window
from scheduling.experiments.replay.simulation import SimulatedCustomer, Simulation, SimulationObserver
from scheduling.models.encrypted import Unreadable
from scheduling.planning.disabled_targets import TargetLookup
from scheduling.planning.earlier_events import CountedEvent, count_before
from scheduling.planning.ingest import ACTIVITY_GRAIN
from scheduling.policy.specs import CustomerSpec, EventSpec, NodeSpec, TemplateSpec
from scheduling.templating.library import CannotRender
from scheduling.templating.rendering import render_message

Progress = Callable[[int], None]


def _ignore_progress(done: int) -> None:
    pass


def replay_events(
    configs: Mapping[str, Snapshot], within: Window, progress: Progress = _ignore_progress
) -> dict[str, Any]:
    """Return the figures of each configuration for the window's events and the touches that wait at its start.

    Reads only.
    """
    figures = {name: ReplayCounter(ZoneInfo(settings.TIME_ZONE)) for name in configs}
    waiting = history.load_touches_at_start(within.since)
    simulations = run_simulations(
        {name: (config, figures[name]) for name, config in configs.items()}, within, waiting.touches, progress
    )
    summaries = {name: figures[name].summarize(simulation) for name, simulation in simulations.items()}
    return summaries | {"waiting_incomplete": waiting.incomplete}


def run_simulations(
    configs: Mapping[str, tuple[Snapshot, SimulationObserver]], within: Window, waiting: Sequence[TouchAtStart],
    progress: Progress = _ignore_progress,
) -> dict[str, Simulation]:  # fmt: skip
    """Return the simulations at the end of the window.

    `progress` gets the number of processed events, repeatedly while much is loaded. Its exception ends the replay.
    """
    done = 0

    def alive() -> None:
        progress(done)

    targets: dict[str, Mapping[str, Any]] = {}
    simulations = {
        name: _build_simulation(config, observer, within, targets) for name, (config, observer) in configs.items()
    }
    loader = _CustomerLoader(
        list(simulations.values()), [config for config, _ in configs.values()], within, targets, alive
    )
    alive()
    loader.load_for_events([each.event for each in waiting])
    _add_waiting(simulations.values(), [config for config, _ in configs.values()], waiting)
    for batches in history.iterate_batches(within):
        loader.load_for_events([event for _, events in batches for event in events])
        for simulation in simulations.values():
            for at, events in batches:
                simulation.receive(events, at)
        done += sum(len(events) for _, events in batches)
        alive()
    for simulation in simulations.values():
        simulation.advance(within.until)
        alive()
    return simulations


def _add_waiting(
    simulations: Collection[Simulation], configs: Collection[Snapshot], waiting: Sequence[TouchAtStart]
) -> None:
    """Add the touches that wait at the start, with the number of events before theirs where a condition counts them."""
    counted = _list_counted(configs)
    events = {each.event.id for each in waiting} if counted else set()
    earlier = count_before(CountedEvent(key, key, counted) for key in events)
    for simulation in simulations:
        for each in waiting:
            simulation.add_waiting_touch(
                each.node_id, each.event, each.due_at, each.expires_at, earlier.get(each.event.id, {})
            )


def _list_counted(configs: Collection[Snapshot]) -> set[str]:
    """Return the event types whose earlier events a condition counts."""
    return {kind for config in configs for types in config.counting_earlier.values() for kind in types}


def _build_simulation(
    config: Snapshot, observer: SimulationObserver, within: Window, targets: Mapping[str, Mapping[str, Any]]
) -> Simulation:
    return Simulation(
        config,
        observer,
        now=within.since,
        slot_hold=settings.AFTERTOUCH_SLOT_HOLD,
        activity_grain=ACTIVITY_GRAIN,
        time_scale=settings.AFTERTOUCH_TIME_SCALE,
        prepare=_SendPreparation(config, targets),
    )


@dataclass
class _CustomerLoader:
    """Load customers and communities into the simulations before their first event, as of the start of the replay."""

    simulations: list[Simulation]
    configs: list[Snapshot]
    within: Window
    targets: dict[str, Mapping[str, Any]]
    report_progress: Callable[[], None]  #: called after each chunk
    known: set[str] = field(default_factory=set)
    chats: set[str] = field(default_factory=set)

    def load_for_events(self, events: Iterable[EventSpec]) -> None:
        users, chats = {event.user_id for event in events}, {event.chat_id for event in events if event.chat_id}
        for some in _split_into_chunks(sorted(users - self.known)):
            self._load_customers(some)
            self.report_progress()
        for some in _split_into_chunks(sorted(chats - self.chats)):
            self._load_communities(some)
            self.report_progress()
        self.known |= users
        self.chats |= chats

    def _load_customers(self, user_ids: list[str]) -> None:
        people = history.load_customers(user_ids, self.within.since, self._memory, _list_counted(self.configs))
        for user_id, person in people.items():
            for simulation in self.simulations:
                copy = SimulatedCustomer(
                    person.spec, person.opted_out_at, {kind: list(times) for kind, times in person.times.items()},
                    dict(person.latest_events), deque(person.slots),
                )  # fmt: skip
                simulation.customers[user_id] = copy

    def _load_communities(self, chat_ids: list[str]) -> None:
        self.targets.update(load_community_targets(chat_ids))
        if any(config.counts_communities for config in self.configs):
            for chat_id, slots in history.load_community_slots(chat_ids, self.within.since, self._memory).items():
                for simulation in self.simulations:
                    simulation.communities[chat_id].extend(slots)

    @property
    def _memory(self) -> timedelta:
        return max(config.window for config in self.configs)


def _split_into_chunks(keys: list[str]) -> Iterable[list[str]]:
    return (keys[start : start + history.CHUNK] for start in range(0, len(keys), history.CHUNK))


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
