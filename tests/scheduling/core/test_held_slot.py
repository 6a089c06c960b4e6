"""A granted quota slot moves to the instant at which its message is sent."""

import asyncio
import time
from datetime import timedelta

from scheduling.channels.base import CalendarQuota, Quota
from scheduling.channels.quota import HeldSlot

MINUTE = Quota(20, timedelta(minutes=1))
ZERO, MOMENT = timedelta(0), timedelta(milliseconds=1)


class ScriptedGate:
    """A gate that answers `move` from a list; the last answer repeats."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []

    def move(self, quotas, target_key, slot):
        self.calls.append((quotas, target_key, slot))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def hold(gate, *, age, quotas=(MINUTE,)):
    return HeldSlot(gate, quotas, "robot:1", 100, time.monotonic() - age)


def test_renew_of_fresh_slot_or_calendar_quota_asks_no_gate():
    gate = ScriptedGate((200, ZERO))
    fresh = hold(gate, age=-60)  # so that it stays fresh on a slow machine
    daily = hold(gate, age=60, quotas=(CalendarQuota(10, "day"),))
    for held in (fresh, daily):
        asyncio.run(held.renew())
        assert (gate.calls, held.slot) == ([], 100)


def test_renew_waits_until_the_receiver_has_a_place():
    gate = ScriptedGate((0, MOMENT), (0, MOMENT), (300, ZERO))
    held = hold(gate, age=60)
    asyncio.run(held.renew())
    assert [slot for _, _, slot in gate.calls] == [100, 100, 100]
    assert held.slot == 300
