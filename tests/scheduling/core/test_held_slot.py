"""A granted quota slot moves to the instant at which its message is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

from scheduling.channels.base import CalendarQuota, Quota
from scheduling.channels.quota import HeldSlot, QuotaGate

MINUTE = Quota(20, timedelta(minutes=1))
ZERO, MOMENT = timedelta(0), timedelta(milliseconds=1)


class ScriptedGate:
    """A gate that answers `move` from a list; the last answer repeats."""

    def __init__(self, *answers: tuple[int, timedelta]) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[Sequence[Quota | CalendarQuota], str, int]] = []

    def move(self, quotas: Sequence[Quota | CalendarQuota], target_key: str, slot: int) -> tuple[int, timedelta]:
        self.calls.append((quotas, target_key, slot))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def hold(gate: ScriptedGate, *, age: float, quotas: Sequence[Quota | CalendarQuota] = (MINUTE,)) -> HeldSlot:
    return HeldSlot(cast(QuotaGate, gate), quotas, "robot:1", 100, time.monotonic() - age)


def test_renew_of_fresh_slot_or_calendar_quota_asks_no_gate() -> None:
    gate = ScriptedGate((200, ZERO))
    fresh = hold(gate, age=-60)  # so that it stays fresh on a slow machine
    daily = hold(gate, age=60, quotas=(CalendarQuota(10, "day"),))
    for held in (fresh, daily):
        asyncio.run(held.renew())
        assert (gate.calls, held.slot) == ([], 100)


def test_renew_waits_until_the_receiver_has_a_place() -> None:
    gate = ScriptedGate((0, MOMENT), (0, MOMENT), (300, ZERO))
    held = hold(gate, age=60)
    asyncio.run(held.renew())
    assert [slot for _, _, slot in gate.calls] == [100, 100, 100]
    assert held.slot == 300
