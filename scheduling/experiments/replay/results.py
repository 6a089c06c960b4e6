"""Run the same events through several configurations at once, in one stream, and return their figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django.conf import settings

from scheduling.configuration.snapshot import Snapshot
from scheduling.delivery.routing import NoTarget, channel_of, community_targets, target_for
from scheduling.experiments.replay import history
from scheduling.experiments.replay.figures import Figures
from scheduling.experiments.replay.history import Carried, Window
from scheduling.experiments.replay.simulation import Observer, Person, World
from scheduling.models.encrypted import Unreadable
from scheduling.planning.disabled_targets import Lookup
from scheduling.planning.ingest import ACTIVITY_GRAIN
from scheduling.policy.specs import CustomerSpec, EventSpec, NodeSpec, TemplateSpec
from scheduling.rendering import CannotRender, render

Progress = Callable[[int], None]


def _silently(done: int) -> None:
    pass


def replay(configs: Mapping[str, Snapshot], within: Window, progress: Progress = _silently) -> dict[str, Any]:
    """Return the figures of each configuration for the window's events and the touches that wait at its start.

    Reads only.
    """
    figures = {name: Figures(ZoneInfo(settings.TIME_ZONE)) for name in configs}
    waiting = history.carried(within.since)
    worlds = run({name: (config, figures[name]) for name, config in configs.items()}, within, waiting.touches, progress)
    told = {name: figures[name].close(world) for name, world in worlds.items()}
    return told | {"waiting_incomplete": waiting.incomplete}


def run(
    configs: Mapping[str, tuple[Snapshot, Observer]], within: Window, waiting: Sequence[Carried],
    progress: Progress = _silently,
) -> dict[str, World]:  # fmt: skip
    """Return the simulations at the end of the window.

    `progress` gets the number of processed events, repeatedly while much is loaded. Its exception ends the replay.
    """
    done = 0

    def alive() -> None:
        progress(done)

    targets: dict[str, Mapping[str, Any]] = {}
    worlds = {name: _world(config, observer, within, targets) for name, (config, observer) in configs.items()}
    crowd = _Crowd(list(worlds.values()), [config for config, _ in configs.values()], within, targets, alive)
    alive()
    crowd.admit([each.event for each in waiting])
    for world in worlds.values():
        for each in waiting:
            world.carry(each.node_id, each.event, each.due_at, each.expires_at)
    for batches in history.batches(within):
        crowd.admit([event for _, events in batches for event in events])
        for world in worlds.values():
            for at, events in batches:
                world.receive(events, at)
        done += sum(len(events) for _, events in batches)
        alive()
    for world in worlds.values():
        world.advance(within.until)
        alive()
    return worlds


def _world(config: Snapshot, observer: Observer, within: Window, targets: Mapping[str, Mapping[str, Any]]) -> World:
    return World(
        config,
        observer,
        now=within.since,
        slot_hold=settings.AFTERTOUCH_SLOT_HOLD,
        activity_grain=ACTIVITY_GRAIN,
        time_scale=settings.AFTERTOUCH_TIME_SCALE,
        prepare=_Preparation(config, targets),
    )


@dataclass
class _Crowd:
    """Load customers and communities into the simulations before their first event, as of the start of the replay."""

    worlds: list[World]
    configs: list[Snapshot]
    within: Window
    targets: dict[str, Mapping[str, Any]]
    alive: Callable[[], None]  #: called after each chunk
    known: set[str] = field(default_factory=set)
    chats: set[str] = field(default_factory=set)

    def admit(self, events: Iterable[EventSpec]) -> None:
        users, chats = {event.user_id for event in events}, {event.chat_id for event in events if event.chat_id}
        for some in _chunks(sorted(users - self.known)):
            self._admit_people(some)
            self.alive()
        for some in _chunks(sorted(chats - self.chats)):
            self._admit_communities(some)
            self.alive()
        self.known |= users
        self.chats |= chats

    def _admit_people(self, user_ids: list[str]) -> None:
        for user_id, person in history.people(user_ids, self.within.since, self._memory).items():
            for world in self.worlds:
                copy = Person(person.spec, person.opted_out_at, dict(person.happened), deque(person.slots))
                world.people[user_id] = copy

    def _admit_communities(self, chat_ids: list[str]) -> None:
        self.targets.update(community_targets(chat_ids))
        if any(config.counts_communities for config in self.configs):
            for chat_id, slots in history.community_slots(chat_ids, self.within.since, self._memory).items():
                for world in self.worlds:
                    world.communities[chat_id].extend(slots)

    @property
    def _memory(self) -> timedelta:
        return max(config.window for config in self.configs)


def _chunks(keys: list[str]) -> Iterable[list[str]]:
    return (keys[start : start + history.CHUNK] for start in range(0, len(keys), history.CHUNK))


@dataclass
class _Preparation:
    """Check that the text renders and a target exists, with the current addresses and targets."""

    config: Snapshot
    targets: Mapping[str, Mapping[str, Any]]
    disabled: Lookup = field(default_factory=Lookup)

    def __call__(self, node: NodeSpec, template: TemplateSpec, customer: CustomerSpec, event: EventSpec) -> str:
        try:
            channel = channel_of(node.channel)
            target_for(node.channel, channel, customer, event.chat_id, self.targets, self.disabled)
            render(template, customer, event)
        except NoTarget as error:
            return error.reason
        except CannotRender:
            return "template_data_missing"
        except Unreadable:
            pass  # only on this node; a node with the key would send it
        return ""
