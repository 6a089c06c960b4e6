"""What random worlds (`test_replay`) rarely show of a configuration in simulated time."""

from scheduling.configuration.snapshot import Snapshot
from scheduling.experiments.replay import SimulatedCustomer, Simulation
from scheduling.ids import new_id
from scheduling.policy.guards import CapSlot
from scheduling.policy.matrix import SOURCE
from scheduling.policy.node_conditions import compile_condition
from scheduling.policy.send_times import CalendarsSpec
from tests.scheduling.core.sample_data import (
    ARTICLE,
    CAP,
    CONVERSATION,
    DAY,
    DEDUPE,
    HOUR,
    NOON,
    ann,
    event,
    node,
)


def simulate(*nodes, rules=(CAP, CONVERSATION)):
    config = Snapshot(
        version=(), nodes={each.id: each for each in nodes}, templates={}, channels={}, delay_rules=ARTICLE,
        rules=rules, paused=frozenset(), activity_types={}, calendars=CalendarsSpec(), webhooks={},
    )  # fmt: skip
    made = Simulation(config, NOON - HOUR, prepare=lambda *_: "")
    made.customers["ann"] = SimulatedCustomer(ann())
    return made


def outcomes(made, until):
    made.advance(until)
    return made.count_outcomes()


def outcome(made, until):
    """Those of the only node."""
    (counts,) = outcomes(made, until).values()
    return counts


def test_simulation_cap_suppresses_or_defers():
    nodes = [node("a", id=1), node("b", id=2, trigger="order.paid", over_cap="defer")]
    made = simulate(*nodes)
    for number in range(4):
        made.receive([event(id=new_id())], NOON + number * HOUR)
    made.receive([event("order.paid", id=new_id(), occurred_at=NOON + 5 * HOUR)], NOON + 5 * HOUR)
    assert outcomes(made, NOON + 10 * HOUR) == {
        "a": {"planned": 4, "delivered": 3, "suppressed:cap": 1}, "b": {"planned": 1, "held": 1, "waiting": 1},
    }  # fmt: skip
    assert outcomes(made, NOON + 2 * DAY)["b"] == {"planned": 1, "held": 1, "delivered": 1}


def test_simulation_counts_earlier_deliveries():
    made = simulate(node(), rules=(DEDUPE,))
    before = CapSlot(new_id(), NOON - 2 * DAY, "guide", counts=True, settled=True)
    made.customers["ann"].slots.append(before)
    made.receive([event()], NOON)
    assert outcome(made, NOON + HOUR) == {"planned": 1, "suppressed:dedupe": 1}


def test_simulation_opt_out_applies_from_its_time():
    made = simulate(node())
    made.customers["ann"].opted_out_at = NOON + HOUR
    made.receive([event()], NOON)
    made.receive([event(id=new_id(), occurred_at=NOON + HOUR)], NOON + HOUR)
    assert outcome(made, NOON + DAY) == {"planned": 2, "delivered": 1, "suppressed:opted_out": 1}


def test_simulation_follows_delivered_touch():
    """Two days after the first message the second one, unless an event cancels it or the depth is too great."""
    first = node("a", id=1, guard_dedupe="ignore")
    second = node("b", id=2, trigger="touch.delivered", from_nodes=frozenset({"a"}), delay=2 * DAY, most_depth=2,
                  cancel_on=frozenset({"order.paid"}))  # fmt: skip
    third = node("c", id=3, trigger="touch.delivered", from_nodes=frozenset({"b"}), delay=DAY, most_depth=2)
    fourth = node("d", id=4, trigger="touch.delivered", from_nodes=frozenset({"c"}), delay=DAY, most_depth=2)
    made = simulate(first, second, third, fourth, rules=())
    made.receive([event()], NOON)
    counts = outcomes(made, NOON + 10 * DAY)
    assert {key: counts[key].get("delivered", 0) for key in "abcd"} == {"a": 1, "b": 1, "c": 1, "d": 0}
    assert counts["d"] == {"planned": 1, "suppressed:depth": 1}

    made = simulate(first, second, third, fourth, rules=())
    made.receive([event()], NOON)
    made.receive([event("order.paid", id=new_id(), occurred_at=NOON + DAY)], NOON + DAY)
    assert outcomes(made, NOON + 10 * DAY)["b"] == {"planned": 1, "cancelled:event:order.paid": 1}


def test_simulated_end_has_the_source_of_a_recorded_one():
    """A condition on the source held for recorded ends only: the replay planned no follow-up."""
    when = compile_condition({"all": [{"field": "event.source", "op": "eq", "value": SOURCE}]})
    first = node("a", id=1)
    second = node("b", id=2, trigger="touch.delivered", from_nodes=frozenset({"a"}), most_depth=1, condition=when)
    made = simulate(first, second, rules=())
    made.receive([event()], NOON)
    assert outcomes(made, NOON + DAY)["b"] == {"planned": 1, "delivered": 1}
