"""Small worlds that really happen: random nodes, rules and events, lived through by intake and delivery while time is
moved to each moment at which something is due."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connection

from scheduling.ids import new_id
from scheduling.models import (
    WAITING,
    Calendar,
    Customer,
    CustomerProfile,
    DelayRule,
    EventType,
    HarassmentRule,
    Holdout,
    Node,
    Touch,
)
from scheduling.planning import own_events
from scheduling.planning.ingest import NewEvent, record_events
from scheduling.policy import guards, send_times
from scheduling.policy import matrix as policy_matrix
from scheduling.policy.send_times import SendTime, parse_window_line
from tests.scheduling.core.conftest import deliver, pass_time

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
#: How far the spans of delays and of rules lie off the grid on which everything happens.
DELAY, RULE = timedelta(seconds=24), timedelta(seconds=97)
TRIGGERS = ("material.downloaded", "order.paid", "service.completed")
OTHERS = ("conversation.started", "complaint.received", "page.viewed")
USERS = ("ann", "bob", "cat")
WINDOWS = ("working 09:00-18:00", "daily 08:30-22:10")
#: Auckland changes its clocks on 27 September 2026, in the second of the weeks.
ZONES = ("", "", "Asia/Shanghai", "America/New_York", "Asia/Kathmandu", "Pacific/Auckland")
#: Windows that name a calendar of `_calendars`, or have a zone of their own.
OWN_WINDOWS = (
    "mon-fri 09:00-18:00 calendar=own", "working 10:00-20:00 calendar=own", "free 08:00-16:00 calendar=plain",
    "daily 07:00-19:00 timezone=Europe/Berlin", "mon-fri 08:00-17:00 calendar=plain timezone=Pacific/Auckland",
)  # fmt: skip

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
        self._parts_and_holdout()
        EventType.objects.create(key="page.viewed", is_activity=False)
        levels = {"vip": 3648, "normal": 7248}
        DelayRule.objects.create(
            pk=1, by_level=levels, default=5 * HOUR + 2 * DELAY, active_within=24 * HOUR + RULE, active_factor=0.5
        )  # fmt: skip
        for user in USERS:
            level, opted_out = dice.choice(["vip", "normal", ""]), dice.random() < 0.1
            row = Customer.objects.create(user_id=user, level=level, opted_out=opted_out)
            if dice.random() < 0.7:
                attributes, tags = {"age": dice.choice([20, 40])}, dice.choice([[], ["tea"]])
                CustomerProfile.objects.create(customer=row, attributes=attributes, tags=tags)
        if dice.random() < 0.3:
            Calendar.objects.create(key="china", send_window=[parse_window_line("mon-sat 08:00-23:00")])
        for number in range(5):
            self._node(number)
        self._calendars_and_zones()
        self._followers()
        if dice.random() < 0.6:  # room is kept for the first, which comes half a minute after the third
            Node.objects.filter(key="n0").update(trigger=TRIGGERS[0], delay=15.5 * MINUTE + DELAY, dynamic=False)
            Node.objects.filter(key="n2").update(trigger=TRIGGERS[0], delay=15 * MINUTE + DELAY, dynamic=False)

    def _calendars_and_zones(self) -> None:
        """Draw own calendars, windows that name them, quiet hours, and the zones of customers."""
        dice = random.Random(f"calendars {self.seed}")
        days = [f"2026-09-{day}" for day in range(18, 31)]
        drawn = dice.sample(days, 6)
        Calendar.objects.create(
            key="own", position=1, timezone=dice.choice(["Asia/Shanghai", "Europe/Berlin"]),
            country=dice.choice(["CN", "NZ", ""]), closed=sorted(drawn[:4]), open=sorted(drawn[4:]),
        )  # fmt: skip
        Calendar.objects.create(key="plain", position=2, timezone="America/New_York", country="", closed=drawn[4:])
        for node in Node.objects.order_by("key"):
            if dice.random() < 0.5:
                lines = dice.sample(OWN_WINDOWS, dice.choice([1, 2]))
                node.send_window = [parse_window_line(line) for line in lines]
                node.save()
        for user in USERS:
            Customer.objects.filter(user_id=user).update(timezone=dice.choice(ZONES))
        if dice.random() < 0.5:
            HarassmentRule.objects.create(
                kind="quiet_hours", quiet_from=time(22, 1), quiet_to=time(7, 31), timezone="Europe/Berlin"
            )

    def _parts_and_holdout(self) -> None:
        """Draw rules for a part of the messages, for communities and for levels, and a global hold-out."""
        dice = self.dice
        if dice.random() < 0.4:
            HarassmentRule.objects.create(kind="dedupe", scope="community", window=12 * HOUR + RULE)
        for part in dice.sample([{"channel": "log"}, {"category": "marketing"}, {"tag": "sale"}], 2):
            limits = dice.choice([{}, {"vip": 3}])
            HarassmentRule.objects.create(kind="cap", limit=1, window=10 * HOUR + RULE, limits=limits, **part)
        if dice.random() < 0.3:
            Holdout.objects.create(pk=1, percent=40, key=str(self.seed))

    def _followers(self) -> None:
        """Nodes that follow others in some worlds, at most three in a row."""
        dice = random.Random(self.seed)
        for number, kind in enumerate(("delivered", "suppressed", "cancelled")):
            others = [f"n{place}" for place in range(5)] + [f"f{place}" for place in range(number)]
            if dice.random() < 0.7:
                self.matrix.node(
                    f"f{number}",
                    trigger=f"touch.{kind}",
                    from_nodes=dice.sample(others, 3),
                    template=self.matrix.template(f"f{number}", f"type{number}"),
                    delay=dice.choice([15 * MINUTE, 26 * HOUR]) + DELAY + timedelta(seconds=7),
                    guard_dedupe="ignore",
                    guard_cap=dice.choice(["apply", "ignore"]),
                    cancel_on=dice.sample(["order.paid", "conversation.started"], dice.choice([0, 1])),
                )  # fmt: skip
        self._record_ends()

    def show_calendar_days(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Show send times the days that pass here: stored times move into the past, and the machine's clock
        stays. Time starts in a week with holidays, working Saturdays or nothing special, by the seed."""
        begins = datetime(2026, 9, (18, 24, 29)[self.seed % 3], 0, 3, tzinfo=UTC) - database_now()

        def moved(act: Any, place: int) -> Any:
            def call(*given: Any) -> Any:
                ahead = self.shifted + begins
                found = act(*given[:place], given[place] + ahead, *given[place + 1 :])
                if isinstance(found, SendTime):
                    return SendTime(found.at - ahead)
                return found - ahead if isinstance(found, datetime) else found

            return call

        monkeypatch.setattr(policy_matrix, "find_send_time", moved(send_times.find_send_time, 1))
        for name in ("is_open", "next_opening", "spread_opening"):
            monkeypatch.setattr(guards, name, moved(getattr(send_times, name), 2))
        monkeypatch.setattr(guards, "quiet_until", moved(guards.quiet_until, 2))

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
            guard_holdout=dice.choice(["apply", "ignore"]),
            tags=dice.choice([[], ["sale"]]),
            **self._conditions_and_times(),
        )

    def _conditions_and_times(self) -> dict[str, Any]:
        """Draw conditions, variants and times for some of the nodes, each kind by itself."""
        dice = self.dice
        rows: list[dict[str, Any]] = [
            {"field": "event.data.order_no", "op": "exists"},
            {"field": "event.data.order_no", "op": "ne", "value": "A1"},
            {"field": "customer.level", "op": "in", "value": ["vip", "normal"]},
            {"field": "customer.tags", "op": "contains", "value": "tea"},
            {"field": "customer.attributes.age", "op": "gte", "value": 30},
            {"field": "chat_id", "op": "eq", "value": "c1"},
            {"field": "customer.events.order.paid.count", "op": "lte", "value": dice.randrange(4)},
            {"field": "customer.events.page.viewed.count", "op": "gt", "value": 1},
        ]

        def condition() -> dict[str, Any]:
            parts = dice.sample(rows, 2)
            if dice.random() < 0.4:
                parts.append({dice.choice(["all", "any"]): dice.sample(rows, 2)})
            return {dice.choice(["all", "any", "any"]): parts}

        times: dict[str, Any] = {
            "send_window": dice.choice([None, None, [], *([parse_window_line(line)] for line in WINDOWS)])
        }
        if dice.random() < 0.3:
            times |= {"at": time(10, 7), "at_day": dice.choice(["any", "next", "working", "next_working"])}
        elif dice.random() < 0.3:
            times |= {"not_before": time(9, 11)}
        return {
            "when": condition() if dice.random() < 0.5 else None,
            "variants": [
                {"key": f"v{number}", "template": f"t{number}", "when": condition()}
                for number in range(dice.choice([0, 0, 1]))
            ],
            **times,
        }  # fmt: skip

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
        """Let time pass and deliver each touch when due. `instant` is by a clock that is not moved."""
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
        """Deliver together, except touches of one customer with equal rank and time.

        Their order is undefined, and a replay takes them as planned.
        """
        due = Touch.objects.filter(state__in=WAITING, due_at__lte=database_now())
        batch: list[UUID] = []
        equals: set[Any] = set()
        for touch in due.order_by("priority", "due_at", "task_id"):
            rank = (touch.customer_id, touch.priority, touch.due_at)
            if rank in equals:
                deliver(batch)
                batch, equals = [], set()
            batch.append(touch.pk)
            equals.add(rank)
        deliver(batch)
        self._record_ends()

    def _record_ends(self) -> None:
        for _ in range(2):  # the second pass moves the ceiling
            own_events.record_ends()


def database_now() -> datetime:
    with connection.cursor() as cursor:
        cursor.execute("SELECT statement_timestamp()")
        (at,) = cursor.fetchone()
        return at


def read_decisions() -> dict[tuple[Any, int], Story]:
    """What really became of each touch."""
    verdicts: dict[UUID, list[tuple[str, str]]] = {}
    for touch in Touch.objects.all():
        for verdict in touch.verdicts:
            add(verdicts.setdefault(touch.pk, []), verdict.decision, verdict.rule)
    return {
        (identify(touch.event), touch.node_id): (
            tuple(verdicts.get(touch.pk, ())),
            "waiting" if touch.state in WAITING else touch.state,
            "" if touch.state in WAITING else touch.reason,
        )
        for touch in Touch.objects.select_related("event")
    }


def identify(event: Any) -> Any:
    """Return what names an event in a replay too: that of an end names its touch, whose id a replay does not know."""
    if not event.type.startswith("touch."):
        return event.id
    touch = Touch.objects.select_related("event").get(pk=event.event_id.partition(":")[2])
    return event.type, identify(touch.event), touch.node_id


def add(verdicts: list[tuple[str, str]], decision: str, rule: str) -> None:
    """Two slots that were taken milliseconds apart leave a cap milliseconds apart, so that a touch is held once more;
    where both were taken at the same simulated instant it is not. That is no other decision."""
    if verdicts[-1:] != [(decision, rule)]:
        verdicts.append((decision, rule))
