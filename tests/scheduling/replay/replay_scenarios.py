"""Small worlds that really happen: random nodes, rules and events, lived through by intake and delivery while time is
moved to each moment at which something is due."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection

from scheduling.delivery.pipeline import deliver_touches
from scheduling.ids import new_id
from scheduling.models import WAITING, Customer, DelayRule, EventType, HarassmentRule, Node, Touch, Verdict
from scheduling.planning.ingest import NewEvent, record_events
from tests.scheduling.core.conftest import pass_time

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
#: How far the spans of delays and of rules lie off the grid on which everything happens.
DELAY, RULE = timedelta(seconds=24), timedelta(seconds=97)
TRIGGERS = ("material.downloaded", "order.paid", "service.completed")
OTHERS = ("conversation.started", "complaint.received", "page.viewed")
USERS = ("ann", "bob", "cat")

#: What became of a touch: each verdict's decision and rule, and the end; by event and node.
Story = tuple[tuple[tuple[str, str], ...], str, str]


@dataclass
class ReplayScenario:
    """One of these worlds, made from a seed."""

    matrix: Any
    seed: int
    moments: int = 24
    dice: random.Random = field(init=False)
    shifted: timedelta = timedelta(0)  #: how far what is stored was moved into the past

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def create_configuration(self) -> None:
        dice = self.dice
        HarassmentRule.objects.filter(kind="cap").update(limit=2, window=24 * HOUR + RULE)
        HarassmentRule.objects.filter(kind="dedupe").update(window=30 * HOUR + RULE)
        if dice.random() < 0.5:
            HarassmentRule.objects.create(kind="cap", scope="community", limit=3, window=20 * HOUR + RULE)
        EventType.objects.create(key="page.viewed", is_activity=False)
        levels = {"vip": 3648, "normal": 7248}
        DelayRule.objects.create(
            pk=1, by_level=levels, default=5 * HOUR + 2 * DELAY, active_within=24 * HOUR + RULE, active_factor=0.5
        )  # fmt: skip
        for user in USERS:
            level, opted_out = dice.choice(["vip", "normal", ""]), dice.random() < 0.1
            Customer.objects.create(user_id=user, level=level, opted_out=opted_out)
        for number in range(5):
            self._node(number)
        if dice.random() < 0.6:  # room is kept for the first, which comes half a minute after the third
            Node.objects.filter(key="n0").update(trigger=TRIGGERS[0], delay=15.5 * MINUTE + DELAY, dynamic=False)
            Node.objects.filter(key="n2").update(trigger=TRIGGERS[0], delay=15 * MINUTE + DELAY, dynamic=False)

    def _node(self, number: int) -> None:
        dice = self.dice
        body = dice.choice(["hi {{ user.name }}"] * 4 + ["{{ event.data.order_no }}"])
        category = dice.choice(["marketing", "service"])
        template = self.matrix.template(f"t{number}", f"type{number % 3}", body, category=category)
        self.matrix.node(
            f"n{number}",
            trigger=dice.choice(TRIGGERS),
            template=template,
            priority=number % 3,
            delay=dice.choice([0 * HOUR, 15 * MINUTE, 2 * HOUR, 26 * HOUR]) + DELAY,
            dynamic=dice.random() < 0.3,
            enabled=dice.random() < 0.9,
            over_cap=dice.choice(["suppress", "defer"]),
            expires_after=dice.choice([5 * HOUR + RULE, 72 * HOUR + RULE]),
            cancel_on=dice.sample(
                ["order.paid", "service.completed", "conversation.started"], dice.choice([0, 0, 1, 2])
            ),
            on_repeat=dice.choice(["each", "keep", "restart"]),
            rollout_percent=dice.choice([100, 100, 100, 50]),
            holdout_percent=dice.choice([0, 0, 0, 40]),
            canary_template=self.matrix.template("canary", "type0"),
            canary_percent=dice.choice([0, 50]),
            guard_cap=dice.choice(["apply", "apply", "count_only", "ignore"]),
            guard_dedupe=dice.choice(["apply", "ignore"]),
            guard_conversation=dice.choice(["apply", "ignore"]),
        )

    def live(self) -> None:
        """Everything happens on a grid of five minutes, and the spans of the rules end between its lines, so that
        nothing depends on how quick this machine is."""
        began_at = database_now()
        passed = timedelta(0)
        for _ in range(self.moments):
            passed += self.dice.randrange(1, 84) * 5 * MINUTE
            self._wait_until(began_at + passed)
            record_events([self._event() for _ in range(self.dice.choice([1, 1, 2, 3]))])
            self._deliver_due()

    def _event(self) -> NewEvent:
        dice = self.dice
        happened_at = database_now() - dice.choice([0, 0, 0, 40, 130]) * MINUTE if dice.random() < 0.5 else None
        kind = dice.choice([*TRIGGERS, *TRIGGERS, *OTHERS[:1], "page.viewed"])
        if dice.random() < 0.03:
            kind = "complaint.received"
        data = {"order_no": "A1"} if dice.random() < 0.6 else {}
        chat_id = dice.choice(["", "c1", "c2"])
        return NewEvent("shop", str(new_id()), kind, dice.choice(USERS), chat_id, happened_at, data)

    def _wait_until(self, instant: datetime) -> None:
        """Let time pass, and each touch be delivered at its moment. `instant` is by a clock that nobody moved."""
        while True:
            span = instant - (database_now() + self.shifted)
            next_due = self._next_due()
            sooner = next_due is not None and next_due < span
            passing = max(next_due if sooner and next_due is not None else span, timedelta(0))
            pass_time(seconds=passing.total_seconds())
            self.shifted += passing
            if not sooner:
                return
            self._deliver_due()

    def _next_due(self) -> timedelta | None:
        waiting = Touch.objects.filter(state__in=WAITING).order_by("due_at").values_list("due_at", flat=True)
        due_at = waiting.first()
        return due_at - database_now() if due_at else None

    def _deliver_due(self) -> None:
        """Together, but not two of one customer that are equal in rank and time: which of them comes first nobody
        promises, and a replay takes them as they were planned."""
        due = Touch.objects.filter(state__in=WAITING, due_at__lte=database_now())
        batch: list[UUID] = []
        equals: set[Any] = set()
        for touch in due.order_by("priority", "due_at", "task_id"):
            rank = (touch.customer_id, touch.priority, touch.due_at)
            if rank in equals:
                deliver_touches(batch)
                batch, equals = [], set()
            batch.append(touch.pk)
            equals.add(rank)
        deliver_touches(batch)


def database_now() -> datetime:
    with connection.cursor() as cursor:
        cursor.execute("SELECT statement_timestamp()")
        (at,) = cursor.fetchone()
        return at  # type: ignore[no-any-return]


def read_decisions() -> dict[tuple[UUID, int], Story]:
    """What really became of each touch."""
    verdicts: dict[UUID, list[tuple[str, str]]] = {}
    for touch_id, decision, rule in Verdict.objects.order_by("id").values_list("touch_id", "decision", "rule"):
        add(verdicts.setdefault(touch_id, []), decision, rule)
    return {
        (touch.event_id, touch.node_id): (
            tuple(verdicts.get(touch.pk, ())),
            "waiting" if touch.state in WAITING else touch.state,
            "" if touch.state in WAITING else touch.reason,
        )
        for touch in Touch.objects.all()
    }


def add(verdicts: list[tuple[str, str]], decision: str, rule: str) -> None:
    """Two slots that were taken milliseconds apart leave a cap milliseconds apart, so that a touch is held once more;
    where both were taken at the same simulated instant it is not. That is no other decision."""
    if verdicts[-1:] != [(decision, rule)]:
        verdicts.append((decision, rule))
