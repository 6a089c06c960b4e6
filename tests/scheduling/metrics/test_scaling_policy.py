"""How many processes a load needs: bounds, monotony, hysteresis, and whole days of load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduling.policy.scaling import (
    DueWork as Due,
)
from scheduling.policy.scaling import (
    Limits,
    Memory,
    Need,
    NodeDemand,
    WatcherDemand,
    WorkerDemand,
    compute_needed_nodes,
    compute_needed_watchers,
    compute_needed_workers,
    settle_wanted,
)

HOLD = 300.0
LIMITS = Limits(minimum=2, maximum=10, hold=HOLD)
QUIET = WorkerDemand(running=2, busy=0.1, settled=100.0, due=(Due(), Due(), Due()))

counts = st.integers(0, 60)
dues = st.tuples(*[st.builds(Due, st.integers(0, 50_000), st.floats(0, 600))] * 3)
workers = st.builds(WorkerDemand, st.integers(0, 20), st.floats(0, 1), st.floats(0, 20_000), dues)
nodes = st.builds(
    NodeDemand, st.integers(0, 20), st.sampled_from([1.0, 4.5, 5.0]), st.integers(0, 100), st.floats(1, 900), dues
)
watchers = st.builds(
    WatcherDemand, st.integers(0, 5), st.just(5000.0), st.floats(0, 20_000), counts, st.floats(0, 60), st.booleans()
)


def need(count: int) -> Need:
    return Need(count, "backlog", "")


# --- bounds and hysteresis ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 400), counts, counts), min_size=1, max_size=40))
def test_wanted_number_stays_within_limits_and_covers_each_recent_need(steps: list[tuple[float, int, int]]) -> None:
    memory: Memory = ()
    now, seen = 0.0, list[tuple[float, int]]()
    for pause, count, running in steps:
        now += pause
        answer, memory = settle_wanted(need(count), running, memory, LIMITS, now)
        seen.append((now, min(max(count, 2), 10)))
        recent = max(was for at, was in seen if now - at < HOLD)
        assert answer.wanted is not None
        assert recent <= answer.wanted <= 10
        assert [was for _, was in memory] == sorted({was for _, was in memory}, reverse=True)


@given(st.lists(st.tuples(st.floats(0, 400), counts), min_size=1, max_size=20), st.integers(0, 19))
def test_wanted_number_rises_with_any_need(steps: list[tuple[float, int]], place: int) -> None:
    """Never a lower answer for a higher need, at that time or later."""

    def answers(extra: int) -> list[int]:
        memory: Memory = ()
        now, found = 0.0, []
        for number, (pause, count) in enumerate(steps):
            now += pause
            answer, memory = settle_wanted(need(count + extra * (number == place)), 2, memory, LIMITS, now)
            found.append(answer.wanted or 0)
        return found

    assert all(more >= less for less, more in zip(answers(0), answers(5), strict=True))


def test_need_rises_at_once_and_falls_after_the_hold() -> None:
    answer, memory = settle_wanted(need(2), 2, (), LIMITS, 0)
    answer, memory = settle_wanted(need(7), 2, memory, LIMITS, 5)
    assert (answer.wanted, answer.code) == (7, "backlog")
    answer, memory = settle_wanted(need(3), 7, memory, LIMITS, 5 + HOLD - 1)
    assert (answer.wanted, answer.code) == (7, "held")
    answer, memory = settle_wanted(need(3), 7, memory, LIMITS, 5 + HOLD)
    assert (answer.wanted, answer.code) == (3, "backlog")


def test_lost_memory_keeps_what_runs_for_the_hold() -> None:
    answer, memory = settle_wanted(need(2), 6, (), LIMITS, 1000)
    assert (answer.wanted, answer.code) == (6, "held")
    answer, _ = settle_wanted(need(2), 6, memory, LIMITS, 1000 + HOLD)
    assert answer.wanted == 2


@pytest.mark.parametrize(("count", "wanted", "code"), [(0, 2, "minimum"), (2, 2, "backlog"), (11, 10, "maximum")])
def test_need_beyond_a_limit_names_it(count: int, wanted: int, code: str) -> None:
    answer, _ = settle_wanted(need(count), 2, (), LIMITS, 0)
    assert (answer.wanted, answer.code) == (wanted, code)


def test_lower_maximum_applies_to_the_memory() -> None:
    _, memory = settle_wanted(need(9), 2, (), LIMITS, 0)
    answer, _ = settle_wanted(need(2), 9, memory, replace(LIMITS, maximum=4), 1)
    assert answer.wanted == 4


def test_clock_that_steps_back_holds_no_longer_than_the_span() -> None:
    _, memory = settle_wanted(need(9), 2, (), LIMITS, 10_000)
    _, memory = settle_wanted(need(2), 9, memory, LIMITS, 0)
    answer, _ = settle_wanted(need(2), 9, memory, LIMITS, HOLD)
    assert answer.wanted == 2


# --- needs --------------------------------------------------------------------------------------------------------


def more_due(due: Sequence[Due], place: int, count: int) -> tuple[Due, ...]:
    return tuple(replace(each, count=each.count + count * (number == place)) for number, each in enumerate(due))


@given(workers, st.integers(0, 2), counts)
@example(WorkerDemand(2, 1.0, 5e-324, (Due(1), Due(), Due())), 0, 1)
def test_worker_need_rises_with_the_backlog(seen: WorkerDemand, place: int, count: int) -> None:
    more = replace(seen, due=more_due(seen.due, place, count))
    assert compute_needed_workers(more).count >= compute_needed_workers(seen).count >= 0


@given(nodes, st.integers(0, 2), counts)
def test_node_need_rises_with_the_backlog(seen: NodeDemand, place: int, count: int) -> None:
    more = replace(seen, startable=more_due(seen.startable, place, count))
    assert compute_needed_nodes(more).count >= compute_needed_nodes(seen).count >= 0


@given(watchers, counts)
def test_watcher_need_rises_with_chats_and_silences(seen: WatcherDemand, count: int) -> None:
    more = replace(seen, live=seen.live + count, silences=seen.silences + count)
    assert compute_needed_watchers(more).count >= compute_needed_watchers(seen).count >= 0


@pytest.mark.parametrize(
    ("seen", "count", "code"),
    [
        (QUIET, 1, "busy"),
        (replace(QUIET, busy=0.7), 2, "busy"),
        (replace(QUIET, busy=1.0, settled=2000), 3, "busy"),
        (replace(QUIET, busy=1.0, settled=1000, due=(Due(), Due(90_000, 2.0), Due())), 6, "backlog"),
        (replace(QUIET, busy=1.0, settled=1000, due=(Due(), Due(), Due(90_000, 2.0))), 3, "busy"),
        (replace(QUIET, busy=1.0, settled=2000, due=(Due(), Due(9, 3.5), Due())), 4, "late"),
        (replace(QUIET, busy=1.0, settled=2000, due=(Due(), Due(), Due(9, 3.5))), 3, "busy"),
        (replace(QUIET, busy=0.2, due=(Due(), Due(90_000, 60.0), Due())), 2, "backlog"),
        (replace(QUIET, running=0, busy=0.0, settled=0, due=(Due(), Due(45_000, 9.0), Due())), 3, "backlog"),
    ],
    ids=[
        "idle", "as busy as it may be", "all busy", "long backlog", "long backlog that may wait", "a touch is late",
        "a low touch may wait", "backlog beside idle workers", "no worker reports",
    ],
)  # fmt: skip
def test_worker_need_has_its_reason(seen: WorkerDemand, count: int, code: str) -> None:
    found = compute_needed_workers(seen)
    assert (found.count, found.code) == (count, code)


SHOPS = NodeDemand(running=1, slots=5.0, busy=0, run_seconds=60.0, startable=(Due(), Due(), Due()))


@pytest.mark.parametrize(
    ("seen", "count", "code"),
    [
        (SHOPS, 0, "busy"),
        (replace(SHOPS, busy=3), 1, "busy"),
        (replace(SHOPS, busy=5), 2, "busy"),
        (replace(SHOPS, busy=5, startable=(Due(), Due(100, 20.0), Due())), 5, "backlog"),
        (replace(SHOPS, busy=5, startable=(Due(), Due(3, 20.0), Due()), run_seconds=900), 2, "busy"),
        (replace(SHOPS, busy=10, running=2, run_seconds=20.0, startable=(Due(6, 11.0), Due(), Due())), 4, "late"),
        (replace(SHOPS, busy=1, startable=(Due(), Due(100, 20.0), Due())), 1, "busy"),
        (replace(SHOPS, running=0, startable=(Due(), Due(4, 20.0), Due())), 1, "backlog"),
    ],
    ids=[
        "nothing to do", "room left", "all slots busy", "many free shops wait", "never more slots than shops",
        "an urgent job is late", "shops wait beside free slots", "no node runs",
    ],
)  # fmt: skip
def test_node_need_has_its_reason(seen: NodeDemand, count: int, code: str) -> None:
    found = compute_needed_nodes(seen)
    assert (found.count, found.code) == (count, code)


CHATS = WatcherDemand(running=1, limit=5000.0, silences=100.0, live=6000, lag=0.3, holds_back=False)


@pytest.mark.parametrize(
    ("seen", "count", "code"),
    [
        (CHATS, 1, "busy"),
        (replace(CHATS, silences=7000.0), 2, "busy"),
        (replace(CHATS, live=400_000), 2, "live"),
        (replace(CHATS, lag=2.5), 2, "late"),
        (replace(CHATS, lag=2.5, holds_back=True), 1, "busy"),
    ],
)
def test_watcher_need_has_its_reason(seen: WatcherDemand, count: int, code: str) -> None:
    found = compute_needed_watchers(seen)
    assert (found.count, found.code) == (count, code)


# --- days of load -------------------------------------------------------------------------------------------------

STEP = 15.0  #: seconds between two questions, as KEDA asks
START = 45.0  #: seconds until a new process works
SPEED = 1000.0  #: touches a second of one worker
Curve = Callable[[float], float]  #: touches that fall due, a second, by the hour of the day


def by_day(hour: float) -> float:
    """A working day without a herd: 60 at night, 1,500 in the afternoon."""
    return 60 + 1440 * max(0.0, math.sin((hour - 7) / 14 * math.pi)) * (7 <= hour <= 21)


def herd_at_nine(hour: float) -> float:
    """300,000 touches in the minute at nine, on a usual day."""
    return by_day(hour) + (5000 if 9 <= hour < 9 + 1 / 60 else 0)


def flat_night(hour: float) -> float:
    return 60.0


def sawtooth(hour: float) -> float:
    """Each quarter of an hour from 8 to 20 a campaign starts at 4,000 a second and fades."""
    return 60 + (4000 * (1 - hour * 4 % 1) if 8 <= hour < 20 else 0)


def quick_sawtooth(hour: float) -> float:
    """The load swings between 1,000 and 5,000 each two minutes."""
    return 3000 + 2000 * math.sin(hour * 30 * 2 * math.pi) if 8 <= hour < 20 else 60


def lunch_spike(hour: float) -> float:
    return by_day(hour) + (3500 if 12 <= hour < 13 else 0)


def simulate_workers(curve: Curve, hours: float = 30.0) -> tuple[list[int], float]:
    """Return the wanted numbers of a day and a morning, and the longest lateness in seconds."""
    limits = Limits(1, 10, HOLD)
    running, backlog, memory = 1, 0.0, Memory()
    starting: list[tuple[float, int]] = []
    wanted, worst, now = list[int](), 0.0, 0.0
    while now < hours * 3600:
        arrived = curve(now / 3600 % 24) * STEP
        room = running * SPEED * STEP
        done = min(backlog + arrived, room)
        backlog += arrived - done
        lateness = backlog / (running * SPEED)
        worst = max(worst, lateness)
        seen = WorkerDemand(
            running, done / room, done / STEP, (Due(), Due(int(min(backlog, 100_000)), lateness), Due())
        )
        now += STEP
        answer, memory = settle_wanted(compute_needed_workers(seen), running, memory, limits, now)
        wanted.append(answer.wanted or 0)
        total = running + sum(count for _, count in starting)
        if wanted[-1] > total:
            starting.append((now + START, wanted[-1] - total))
        elif wanted[-1] < running:
            running, starting = wanted[-1], []
        running += sum(count for at, count in starting if at <= now)
        starting = [(at, count) for at, count in starting if at > now]
    return wanted, worst


def count_turns(numbers: Sequence[int]) -> int:
    """How often the numbers change their direction."""
    moves = [after > before for before, after in pairwise(numbers) if after != before]
    return sum(one != other for one, other in pairwise(moves))


def hours_of(wanted: Sequence[int], first: float, last: float) -> Sequence[int]:
    return wanted[int(first * 3600 / STEP) : int(last * 3600 / STEP)]


@pytest.mark.parametrize(
    ("curve", "ramps", "peak"),
    [(flat_night, 0, 1), (by_day, 1, 3), (herd_at_nine, 2, 10), (lunch_spike, 2, 10), (quick_sawtooth, 1, 10)],
)
def test_simulated_day_does_not_flap_and_returns_to_the_minimum(curve: Curve, ramps: int, peak: int) -> None:
    wanted, worst = simulate_workers(curve)
    assert max(wanted) <= peak
    assert (max(wanted) > 1) == (ramps > 0)
    assert count_turns(wanted[: int(24 * 3600 / STEP)]) <= 2 * ramps
    for night in (hours_of(wanted, 0, 6), hours_of(wanted, 22, 30)):
        assert set(night) == {1}
    assert worst < 300


def test_campaign_each_quarter_costs_one_rise_and_one_fall() -> None:
    """The load falls for longer than the hold, so each campaign is a ramp of its own."""
    wanted, _ = simulate_workers(sawtooth)
    assert count_turns(wanted) <= 2 * 12 * 4
    for quarter in range(8 * 4, 20 * 4):
        assert count_turns(hours_of(wanted, quarter / 4, (quarter + 1) / 4)) <= 2
    assert set(hours_of(wanted, 21, 30)) == {1}


def test_herd_gets_workers_within_two_questions_and_keeps_them_while_it_drains() -> None:
    wanted, _ = simulate_workers(herd_at_nine)
    nine = int(9 * 3600 / STEP)
    assert wanted[nine + 2] > wanted[nine - 1]
    assert min(wanted[nine + 2 : nine + int(HOLD / STEP)]) >= wanted[nine + 2]


def simulate_nodes(jobs_of: Callable[[float], int]) -> list[int]:
    """500 shops whose jobs take 60 s; `jobs_of` gives the due jobs of a step, by the hour."""
    limits, running, waiting, memory, now = Limits(1, 20, HOLD), 1, 0, Memory(), 0.0
    runs: list[float] = []
    wanted, oldest = list[int](), 0.0
    while now < 30 * 3600:
        now += STEP
        runs = [end for end in runs if end > now]
        waiting = min(waiting + jobs_of(now / 3600 % 24), 500 - len(runs))
        begun = max(0, min(waiting, running * 5 - len(runs)))
        runs += [now + 60.0] * begun
        waiting -= begun
        oldest = oldest + STEP if waiting else 0.0
        seen = NodeDemand(running, 5.0, len(runs), 60.0, (Due(), Due(waiting, oldest), Due()))
        answer, memory = settle_wanted(compute_needed_nodes(seen), running, memory, limits, now)
        running = answer.wanted or 0
        wanted.append(running)
    return wanted


def test_simulated_round_of_all_shops_at_nine_does_not_flap() -> None:
    wanted = simulate_nodes(lambda hour: 400 if 9 <= hour < 9 + STEP / 3600 else 1)
    assert 5 < max(wanted) <= 20
    assert count_turns(wanted[: int(24 * 3600 / STEP)]) <= 2
    assert set(hours_of(wanted, 10, 30)) == set(hours_of(wanted, 1, 8))


def test_simulated_day_of_chats_does_not_flap() -> None:
    memory: Memory = ()
    limits, running, wanted = Limits(1, 4, HOLD), 1, []
    for step in range(int(30 * 3600 / STEP)):
        live = int(by_day(step * STEP / 3600 % 24) * 400)  # 24,000 to 600,000
        noise: Any = 1 + 0.1 * math.sin(step)
        seen = WatcherDemand(running, 5000.0, live / 60 * noise, int(live * noise), 0.5, False)
        answer, memory = settle_wanted(compute_needed_watchers(seen), running, memory, limits, step * STEP)
        running = answer.wanted or 0
        wanted.append(running)
    assert max(wanted) == 4
    assert count_turns(wanted[: int(24 * 3600 / STEP)]) <= 2
    assert set(hours_of(wanted, 22, 30)) == {1}
