"""A whole stack with a counting receiver, and one run of faults under load against it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import psutil
import psycopg

from config.local.processes import is_alive, wait_until
from scheduling.delivery.outgoing import LEASE
from tests.faults.load import SLOW_RECEIVERS, Load
from tests.faults.receiver import Call, EffectReceiver
from tests.support.small_matrix import small_matrix
from tests.support.stack import StackUnderTest, cloud_event, read_seed, run_stack
from tests.support.waiting import WAIT_LIMIT

# A machine that stalls for more than 20 s makes the calls in flight fail. Then the circuit breaker rests 30 s, 60 s …
SETTLED_WITHIN = 1.5 * WAIT_LIMIT
LATE = 1.0  #: seconds past due from which a touch counts as held up by the fault
RATE = 12.0  #: events a second, each of four touches that nothing bundles
ENDS = ("delivered", "suppressed", "cancelled", "failed", "unknown")
MOST_DUE = 2_000  #: touches
BATCH = 100  #: events of one request
DAILY_LIMIT = 60  #: messages a day to the receiver of `load.limited`
PROGRAMS = ("web", "core", "ticks", "long", "beat")


def configuration(receiver: EffectReceiver) -> dict[str, Any]:
    """Four nodes on one event, between 0 and 4 seconds, one of them on a channel that must never repeat a call."""
    retry = ["1s", "1s", "2s", "2s", "4s", "4s", "8s", "8s", "8s", "8s"]
    hook = receiver.channel(key="once", retry=retry)
    return small_matrix(
        hook,
        {"key": "step-now", "trigger": "load.step"},
        {"key": "step-soon", "trigger": "load.step", "delay": "1s", "priority": "high"},
        {"key": "step-plain", "trigger": "load.step", "delay": "2s", "channel": "plain"},
        {"key": "step-late", "trigger": "load.step", "delay": "4s", "priority": "low", "cancel_on": ["load.stop"]},
        {"key": "step-week", "trigger": "load.week", "delay": "7d"},
        {"key": "step-first", "trigger": "load.journey"},
        {"key": "step-next", "trigger": "touch.delivered", "from_nodes": ["step-first"]},
        {"key": "step-limited", "trigger": "load.limited", "delay": "7d", "channel": "limited"},
        channels=[
            hook,
            {**hook, "key": "plain", "url": receiver.url("plain"), "idempotent": False},
            {**hook, "key": "limited", "url": receiver.url("limited"), "daily_limit": DAILY_LIMIT},
        ],
        templates=[{"key": "hi", "content_type": "hi", "category": "marketing", "body": "hi {{ user.id }}"}],
    )


@dataclass
class FaultStack(StackUnderTest):
    receiver: EffectReceiver

    wait_limit = WAIT_LIMIT

    def now(self) -> Any:
        return self.sql("SELECT clock_timestamp()")[0][0]

    def is_behind(self) -> bool:
        """Return whether more touches are due than a fault holds up. False while PostgreSQL is down."""
        try:
            return bool(self.sql(_DUE, outage_limit=0)[0][0] > MOST_DUE)
        except psycopg.OperationalError:
            return False

    def family(self, program: str) -> list[psutil.Process]:
        """A program's main process and its children. An earlier fault may have ended it a moment ago."""
        self.await_running(program)
        main = psutil.Process(self.stack.pids[program])
        return [main, *main.children(recursive=True)]

    def await_running(self, program: str, *, instead_of: int = 0) -> None:
        self.wait(lambda: self.stack.pids.get(program, instead_of) != instead_of, f"{program} runs again")

    def await_gone(self, processes: Sequence[psutil.Process]) -> None:
        self.wait(lambda: not any(is_alive(process) for process in processes), "the killed are gone")

    def expire_leases(self, claimed_before: Any) -> dict[Any, int]:
        """Let the leases of dead or stopped holders be over now: their 45 s are the one wait that tests shorten.
        The lease numbers by touch."""
        return dict(
            self.sql(
                "UPDATE scheduling_touch SET lease_until = clock_timestamp() - interval '1 ms'"
                " WHERE state IN ('queued', 'running') AND state = 'running' AND lease_until - %s < %s"
                " RETURNING task_id, lease_no",
                [LEASE, claimed_before],
            )
        )

    def make_herd(self, prefix: str, count: int) -> None:
        """Plan touches of `count` customers, and make all of them due in three seconds."""
        self.plan_herd(f"{prefix}herd-", count)
        assert self.make_due(f"{prefix}herd-") == count

    def plan_herd(self, prefix: str, count: int, kind: str = "load.week") -> None:
        """Plan touches of `count` customers, due in a week."""
        events = [cloud_event(f"{prefix}{number}", kind, f"{prefix}{number}") for number in range(count)]
        for first in range(0, count, BATCH):
            self.post_events(*events[first : first + BATCH])

    def make_due(self, prefix: str) -> int:
        """Make the touches of these events due in three seconds. Return their number."""
        moved: int = self.sql(
            "UPDATE scheduling_touch AS t SET due_at = clock_timestamp() + interval '3 s',"
            " planned_at = clock_timestamp() + interval '3 s' FROM scheduling_event AS e"
            " WHERE e.id = t.event_id AND e.event_id LIKE %s",
            [f"{prefix}%"],
        )
        return moved


@contextmanager
def run_fault_stack(folder: Path, env: Mapping[str, str] | None = None) -> Iterator[FaultStack]:
    with EffectReceiver() as receiver:
        ours = {
            "AFTERTOUCH_ALLOWED_PRIVATE_HOSTS": receiver.address,
            "AFTERTOUCH_DISPATCH_WINDOW": "100",
        }
        with run_stack(folder, PROGRAMS, {**ours, **(env or {})}) as stack:
            made = FaultStack(stack, receiver)
            made.create_api_key("events")
            made.apply_config(configuration(receiver))
            made.sql(
                "INSERT INTO scheduling_customer"
                " (user_id, name, level, locale, timezone, addresses, opted_out, created_at)"
                " SELECT 'deaf-' || n, '', '', '', '', '{}', true, now() FROM generate_series(0, %s) AS n"
                " ON CONFLICT DO NOTHING",
                [SLOW_RECEIVERS - 1],
            )
            yield made


@dataclass
class Run:
    """One load with faults in it."""

    target: FaultStack
    name: str
    seed: int
    chance: random.Random
    load: Load
    struck_at: list[Any] = field(default_factory=list)  #: by the database's clock
    recovery: float = 0.0
    longest_answer: float = 0.0
    states: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def send_load(self, events: int, timeout: float = WAIT_LIMIT) -> None:
        """Until so many more events have been accepted."""
        aim = len(self.load.accepted) + events
        self.target.wait(lambda: len(self.load.accepted) >= aim, f"{events} more events are accepted", timeout)

    def measure_answers(self, first: int) -> tuple[float, float]:
        """Return the median and the longest time of the events accepted from number `first` on.

        Only the median shows what requests wait for: on a machine that stalls any single one may take a minute.
        """
        took = sorted(each.took for each in self.load.accepted[first:])
        return median(took), took[-1]

    def await_random_point(self) -> None:
        self.send_load(self.chance.randint(15, 45))
        time.sleep(self.chance.random() * 0.25)

    def inject_fault(self) -> Any:
        """Note the time: call it right before the fault."""
        self.struck_at.append(self.target.now())
        return self.struck_at[-1]

    # --- after it -------------------------------------------------------------------------------------------------

    def touches(self) -> list[dict[str, Any]]:
        names = (
            "task_id", "key", "state", "reason", "event", "type", "user", "node", "channel", "attempt", "lease_no",
            "planned_at", "settled_at", "late", "failed_tasks",
        )  # fmt: skip
        return [dict(zip(names, row, strict=True)) for row in self.target.sql(_TOUCHES, [self.load.prefix + "%"])]

    def delivered(self, event_type: str) -> int:
        return int(self.target.sql(_DELIVERED, [self.load.prefix + "%", event_type])[0][0])

    def unsettled(self) -> int:
        return int(self.target.sql(_UNSETTLED, [self.load.prefix + "%"])[0][0])

    def await_completion(self, timeout: float = SETTLED_WITHIN) -> None:
        """Wait until every touch is settled; the later check names those that are not."""
        wait_until(lambda: self.unsettled() == 0, timeout, pause=0.3)

    def problems(self) -> list[str]:
        touches, calls = self.touches(), self.target.receiver.calls_of(self.load.prefix)
        found = self._list_lost(touches)
        by_key = {str(row["key"]): row for row in touches}
        found += [f"a call for no touch: {each[0]}" for key, each in calls.items() if key not in by_key]
        for key, row in by_key.items():
            found += [
                f"{problem}: {_short(row)} {calls.get(key)}" for problem in find_contradictions(row, calls.get(key, []))
            ]
        effects: Counter[tuple[str, str]] = Counter()
        for each in calls.values():
            if any(call.status < 300 for call in each):
                effects[each[0].event, each[0].node] += 1
        found += [f"{count} effects for {touch}" for touch, count in effects.items() if count > 1]
        if self.target.receiver.forged:
            found.append(f"{self.target.receiver.forged} calls with a wrong signature")
        self.states = Counter(row["state"] for row in touches)
        self.recovery = self._recovery(touches)
        self.longest_answer = max((each.took for each in self.load.accepted), default=0.0)
        return found

    def _list_lost(self, touches: list[dict[str, Any]]) -> list[str]:
        planned = Counter(row["event"] for row in touches)
        expected = {"load.step": 4, "load.stop": 0}
        found = [f"refused: {each}" for each in self.load.refusals]
        found += [f"never accepted: {each}" for each in self.load.given_up]
        stored = {row[0] for row in self.target.sql(_EVENTS, [self.load.prefix + "%"])}
        for each in self.load.accepted:
            if each.event_id not in stored:
                found.append(f"accepted and lost: {each}")
            elif planned[each.event_id] != expected[each.type]:
                found.append(f"{planned[each.event_id]} touches instead of {expected[each.type]}: {each}")
        return found

    def _recovery(self, touches: list[dict[str, Any]]) -> float:
        """From each fault to the end of the last touch that it held up, the longest of them."""
        longest, strikes = 0.0, [*self.struck_at, None]
        for struck, following in pairwise(strikes):
            held_up = [
                row["settled_at"] - struck
                for row in touches
                if str(row["user"]).startswith("ann-") and row["settled_at"] and row["late"].total_seconds() > LATE
                and row["settled_at"] > struck and (following is None or row["planned_at"] < following)
            ]  # fmt: skip
            longest = max([longest, *(each.total_seconds() for each in held_up)])
        return longest

    def line(self) -> str:
        calls = self.target.receiver.calls_of(self.load.prefix)
        repeats = sum(len(each) - 1 for key, each in calls.items() if not each[0].event.startswith("shaky"))
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.states.items()))
        points = f" · {len(self.struck_at)} points" if len(self.struck_at) > 1 else ""
        text = (
            f"{self.name} · seed {self.seed}{points} · recovered in {self.recovery:.1f} s · "
            f"{len(self.load.accepted)} events, {states}, {repeats} repeated calls · "
            f"slowest 202 in {self.longest_answer:.2f} s"
        )
        return " · ".join([text, *self.notes])


def find_contradictions(row: dict[str, Any], calls: list[Call]) -> Iterator[str]:
    """What a touch and its calls must not be together."""
    state, effects = row["state"], sum(call.status < 300 for call in calls)
    if state not in ENDS:
        yield "not ended"
    if row["failed_tasks"] != (state in ("failed", "unknown")):
        yield f"{row['failed_tasks']} failed tasks"
    if row["channel"] == "plain" and len(calls) > 1:
        yield "a channel that is not idempotent was called twice"
    if state == "delivered" and not effects:
        yield "delivered without effect"
    if state in ("suppressed", "cancelled") and calls and not row["attempt"]:
        yield "called though it was never sent"
    if state == "failed" and effects:
        yield "failed with effect"
    if str(row["user"]).startswith("deaf-") and calls:
        yield "called though the customer opted out"
    if any(call.at < row["planned_at"].timestamp() for call in calls):
        yield "early"


def _short(row: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in row.items())


@contextmanager
def faults(target: FaultStack, name: str, rate: float = RATE) -> Iterator[Run]:
    """Load for the length of the block, then the end of everything accepted, then the count."""
    seed = read_seed()
    chance = random.Random(seed)
    load = Load(target.stack.base_url, target.api_key, f"{uuid4().hex[:8]}-", rate, chance, target.is_behind)
    run = Run(target, name, seed, chance, load)
    try:
        with load:
            yield run
        run.await_completion()
    except BaseException:
        print(f"{name}: seed {seed}\n{target.logs()}")
        raise
    problems = run.problems()
    print(run.line())
    if problems:
        raise AssertionError(
            f"{name}, seed {seed} (FAULTS_SEED={seed} repeats it): {len(problems)} problems\n  "
            + "\n  ".join(problems[:30])
            + f"\n{run.line()}\n{target.logs()}"
        )


_TOUCHES = """
SELECT t.task_id, t.root_id, t.state, t.reason, e.event_id, e.type, e.user_id, n.key, c.key, t.attempt, t.lease_no,
       t.planned_at, t.settled_at, t.settled_at - t.planned_at,
       (SELECT count(*) FROM scheduling_failedtask AS f WHERE f.task_id = t.task_id)
FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id JOIN scheduling_node AS n ON n.id = t.node_id
JOIN scheduling_channelconfig AS c ON c.id = n.channel_id
WHERE e.event_id LIKE %s
"""
_DUE = """
SELECT count(*) FROM scheduling_touch_live
WHERE state IN ('queued', 'running') OR (state = 'scheduled' AND due_at < clock_timestamp())
"""
_UNSETTLED = """
SELECT count(*) FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id
WHERE e.event_id LIKE %s AND t.state IN ('scheduled', 'queued', 'running')
"""
_DELIVERED = """
SELECT count(*) FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id
WHERE e.event_id LIKE %s AND e.type = %s AND t.state = 'delivered'
"""
_EVENTS = "SELECT event_id FROM scheduling_event WHERE event_id LIKE %s"
